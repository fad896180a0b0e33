"""`bd3lm variance RUN`: how noisy each way of drawing masks is on a trained model."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bd3lm.build import held_out_batches
from bd3lm.commands.subjects import Subject
from bd3lm.config import BlockDiffusionMethod
from bd3lm.diffusion import (
    ClippedTimes,
    Cosine,
    Counts,
    Logarithmic,
    MaskingRule,
    Square,
    SquareRoot,
    Times,
)
from bd3lm.evaluation import gradient_variance, nelbo_variance
from bd3lm.objectives import BlockDiffusionLoss, TokenBatch

# The rows of the paper's tables of mask ranges and of noise schedules, and ours.
RULES: dict[str, MaskingRule] = {
    "counts": Counts(),
    "clipped U[0.45, 0.95]": ClippedTimes(low=0.45, high=0.95),
    "clipped U[0.5, 1]": ClippedTimes(low=0.5, high=1.0),
    "clipped U[0.3, 0.8]": ClippedTimes(low=0.3, high=0.8),
    "clipped U[0, 0.5]": ClippedTimes(low=0.0, high=0.5),
    "linear U[0, 1]": Times(),
    "logarithmic": Times(Logarithmic()),
    "square root": Times(SquareRoot()),
    "square": Times(Square()),
    "cosine": Times(Cosine()),
}


def report_variances(
    folder: Path, *, batches: int = 20, gradients: int = 0, seed: int = 0, console: Console | None = None
) -> dict[str, tuple[float, float | None]]:
    """Print and return the variance of the loss over blocks, and of the gradient over batches (eq. 10)."""
    console = console or Console()
    if batches < 1 or gradients < 0 or gradients == 1:
        raise ValueError(
            f"batches must be at least 1 and gradients 0 or at least 2, got {batches}, {gradients}"
        )
    subject = Subject.open(folder, device="cpu")
    recipe, model = subject.recipe, subject.model
    if recipe is None:
        raise ValueError(f"{folder} must be the folder of a run, with its recipe.yaml, got none")
    method = model.config.method
    if not isinstance(method, BlockDiffusionMethod):
        raise ValueError(f"{folder} must hold a block diffusion model, got {method.kind}")
    held_out = held_out_batches(recipe.data, subject.shards())
    if not len(held_out):
        raise ValueError(f"the data of {folder} has no sequence held out to measure on")
    some = [
        TokenBatch.of(held_out[index], score_first=method.score_first)
        for index in range(min(max(batches, gradients), len(held_out)))
    ]
    plain = BlockDiffusionLoss(
        block_size=method.block_size, mask_id=method.mask_id, causal_clean=method.causal_clean
    )
    table = Table(
        title=f"Variance at block size {method.block_size}, {len(some[:batches])} batches, seed {seed}"
    )
    table.add_column("masks", no_wrap=True)
    for heading in ("of the loss", *(("of the gradient",) if gradients else ()), "unbiased"):
        table.add_column(heading, justify="right")
    found: dict[str, tuple[float, float | None]] = {}
    for name, rule in track(RULES.items(), "measuring", console=console, transient=True):
        objective = replace(plain, masking=rule)
        loss = nelbo_variance(
            model.network, objective, some[:batches], block_size=method.block_size, seed=seed
        )
        gradient = (
            gradient_variance(model.network, objective, some[:gradients], seed=seed) if gradients else None
        )
        found[name] = loss, gradient
        figures = [f"{loss:.3f}", *((f"{gradient:.4g}",) if gradient is not None else ())]
        table.add_row(name, *figures, "yes" if objective.bounds(model.network) else "no")
    console.print(table)
    console.print(
        "Over blocks for the loss, over batches for the gradient; lower is quieter. Schedules that draw "
        "rates near 0 have no finite variance: theirs is that of this sample.",
        soft_wrap=True,
    )
    return found
