"""Optional trackers, TensorBoard and W&B. They get figures and texts, and cannot harm a run.

A failure prints one line and never stops a run: metrics.csv and samples.jsonl have everything.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bd3lm.diffusion import derive_seed
from bd3lm.io.extras import require
from bd3lm.io.terminal import one_entry, say

if TYPE_CHECKING:
    from bd3lm.training.log_window import Metrics
    from bd3lm.training.trainer import Trainer


@dataclass(frozen=True)
class SampleText:
    """A text that the averaged weights wrote at some step."""

    index: int
    seed: int
    prompt: str
    text: str
    """The given text and the written text."""
    tokens: int
    stopped_by: str


class Tracker(ABC):
    """A callback of the main process. Its failures are reported and do not stop the run."""

    title: ClassVar[str]

    def __init__(self) -> None:
        self._is_open = False
        self._is_failing = False
        self._lost = 0

    def on_start(self, trainer: "Trainer") -> None:
        if trainer.engine.is_main:
            self._is_open = self._survive(partial(self.open, trainer), "is off until the run is resumed")

    def on_log(self, trainer: "Trainer", metrics: "Metrics") -> None:
        self._take(partial(self.add_metrics, trainer.step, metrics))

    def on_texts(self, trainer: "Trainer", texts: Sequence[SampleText]) -> None:
        """Texts of this step, before its figures."""
        self._take(partial(self.add_texts, trainer.step, texts))

    def on_end(self, trainer: "Trainer") -> None:
        """Close the tracker, even if the run failed."""
        if not self._is_open:
            return
        self._is_open = False
        failed = sys.exc_info()[0] is not None
        self._survive(partial(self.close, failed=failed), "was not closed")
        if self._lost:
            say(f"{self.title} lacks {self._lost} entries of this run; the run folder has all", to=sys.stderr)

    def _take(self, add: Callable[[], None]) -> None:
        if not self._is_open:
            return
        if self._survive(add, "lacks this entry"):
            self._is_failing = False
        else:
            self._lost += 1
            self._is_failing = True

    def _survive(self, work: Callable[[], None], otherwise: str) -> bool:
        """Run work and return whether it succeeded. Of consecutive failures only the first is reported."""
        try:
            work()
        except UnfitError:
            raise
        except Exception as error:
            if not self._is_failing:
                reason = one_entry(f"{type(error).__name__}: {error}".strip().partition("\n")[0])
                say(f"{self.title} {otherwise}; training continues: {reason}", to=sys.stderr)
            return False
        return True

    @abstractmethod
    def open(self, trainer: "Trainer") -> None:
        """Called before the first step, after a checkpoint was restored."""

    @abstractmethod
    def add_metrics(self, step: int, metrics: "Metrics") -> None:
        """Add a log entry."""

    @abstractmethod
    def add_texts(self, step: int, texts: Sequence[SampleText]) -> None:
        """Add the texts of a validation."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Called after the last step, or after the step at which the run failed."""


class UnfitError(ValueError):
    """A tracker cannot work as requested. The user must know this before a run of days."""


class TensorBoardLog(Tracker):
    """Figures and texts for TensorBoard (extra `tensorboard`)."""

    title = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        require("tensorboard", "tensorboard", "trackers.tensorboard")  # torch's own module imports it
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = str(folder)
        self._writer: Any = None

    def open(self, trainer: "Trainer") -> None:
        # A step with a pending validation is logged after the validation, perhaps for the second time.
        self._writer = self._make(self._folder, purge_step=trainer.step + 1 - trainer.validation_due)

    def add_metrics(self, step: int, metrics: "Metrics") -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run leaves as many entries here as in metrics.csv

    def add_texts(self, step: int, texts: Sequence[SampleText]) -> None:
        for text in texts:
            self._writer.add_text(f"samples/{text.index}", _as_it_is(text.text), step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def _as_it_is(text: str) -> str:
    """Markdown that shows a text verbatim: a block of code."""
    return "\n".join(f"    {line}" for line in text.splitlines())


class WandbLog(Tracker):
    """Figures and texts for Weights & Biases (extra `wandb`)."""

    title = "W&B"

    def __init__(self, *, project: str, name: str, folder: Path) -> None:
        super().__init__()
        self._wandb = require("wandb", "wandb", "trackers.wandb_project")
        # The id depends only on the project and the folder, so a resumed run continues the same W&B run.
        identity = f"{derive_seed(project, str(folder.resolve())):x}"
        self._options = {
            "project": project,
            "name": name,
            "id": identity,
            "dir": str(folder),
            "resume": "allow",
        }
        self._run: Any = None

    def open(self, trainer: "Trainer") -> None:
        errors = self._wandb.errors
        config = trainer.run_state
        try:
            self._run = self._wandb.init(config=config, **self._options)
        except (errors.UsageError, errors.AuthenticationError) as error:
            raise UnfitError(
                f"trackers.wandb_project needs a login, or WANDB_MODE=offline: {one_entry(str(error))}"
            ) from None
        except errors.CommError as error:
            self._wandb.teardown()  # its service still holds the run that it could not start
            self._run = self._wandb.init(config=config, mode="offline", **self._options)
            reason = one_entry(str(error).partition("\n")[0])
            say(f"W&B cannot be reached; the run is stored locally for `wandb sync`: {reason}", to=sys.stderr)

    def add_metrics(self, step: int, metrics: "Metrics") -> None:
        self._run.log(metrics, step=step)

    def add_texts(self, step: int, texts: Sequence[SampleText]) -> None:
        columns = ["step", "index", "prompt", "text"]
        rows = [[step, each.index, each.prompt, each.text] for each in texts]
        self._run.log({"samples": self._wandb.Table(columns=columns, data=rows)}, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
