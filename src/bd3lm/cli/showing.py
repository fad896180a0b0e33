"""`bd3lm demo` and `bd3lm prove`: the system at work on something small."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg


@dataclass(frozen=True)
class Demo:
    """Train a small model on text that every Python carries, measure it exactly, and sample from it."""

    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/demo")
    """Where to write the run."""

    def run(self) -> int:
        from bd3lm.commands.demo import run_demo

        return run_demo(self.out)


@dataclass(frozen=True)
class Prove:
    """Enumerate every text of a tiny model: its likelihood sums to one, and its sampler agrees."""

    seed: int = 0
    """Seed of the random weights."""
    samples: int = 20_000
    """How many texts to draw for the comparison."""

    def run(self) -> int:
        from bd3lm.commands.proof import run_proof

        return 0 if run_proof(seed=self.seed, samples=self.samples) else 1
