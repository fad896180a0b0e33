"""What measures a model: `bd3lm variance` and its like."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Variance:
    """How noisy each way of drawing masks is on a trained block diffusion model."""

    run_folder: Positional[Path]
    """The folder of a run (of one stage)."""
    batches: int = 20
    """Held-out batches to measure the loss on."""
    gradients: int = 0
    """Held-out batches to measure the gradient on; 0 does not."""
    seed: int = 0

    def run(self) -> int:
        from bd3lm.commands.variances import report_variances

        report_variances(self.run_folder, batches=self.batches, gradients=self.gradients, seed=self.seed)
        return 0
