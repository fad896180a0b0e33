"""`bd3lm demo`: train, measure and sample a small block diffusion model on text that comes with Python.

It trains an autoregressive model first. Training then continues twice from there, for as many steps again:
once autoregressively, once as block diffusion with blocks of 4, so the two can be compared. All models are
measured exactly on held-out text, and the last also by the paper's bound.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from bd3lm.commands.shared.command import Command

if TYPE_CHECKING:
    from bd3lm.io.console import Console


@dataclass(frozen=True)
class Demo(Command):
    """Train small models on Python's documentation, measure them, and sample text."""

    kind = "demo"

    out: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/demo")
    """Folder of the run."""

    def run(self) -> int:
        return run_demo(self.out)


def run_demo(out: Path, *, console: "Console | None" = None) -> int:
    """Train the demo's models in `out`, and report; return the exit status, 130 if stopped."""
    from rich.text import Text

    from bd3lm.commands.demo.results import show_results
    from bd3lm.io.console import Console
    from bd3lm.runs.stages import resolve_stages
    from bd3lm.runs.train import train_stages

    console = console or Console()
    console.print(
        Text.assemble(
            ("Block diffusion on a laptop.", "bold"),
            " An autoregressive model writes one token after another. A block diffusion model writes a block "
            "at a time: it starts from 4 masks and reveals them in a random order that leans to the left, "
            "each time looking at everything so far. First, an autoregressive model is trained on the "
            "documentation that comes with Python. Training then continues from it twice, for as many steps "
            "again: once as before, and once with blocks.\n",
        ),
        soft_wrap=True,
    )
    runs = train_stages(resolve_stages("demo"), out, resume=True, console=console)
    if runs[-1].trainer.stopped_by == "signal":
        return 130
    show_results(runs, out, console=console)
    return 0
