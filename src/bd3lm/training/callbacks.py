"""The callbacks that every run has: a CSV file, and a progress bar on a terminal."""

import csv
import io
import itertools
import re
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from bd3lm.io.console import Console
from bd3lm.io.files import write_atomically
from bd3lm.training.validation import LikelihoodValidator

if TYPE_CHECKING:
    from bd3lm.training.log_window import Metrics
    from bd3lm.training.trainer import Trainer

# Dense bf16 matrix rates from the vendors' data sheets, for model FLOP utilization.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "A6000": 155e12,
    "A5000": 111e12,
    "L40S": 362e12,
    "4090": 165e12,
    "3090": 71e12,
}

_STEP = re.compile(r"[0-9]{1,18}")
_SILENCE = (10.0, 3600.0)  # seconds between lines without a terminal: least, most


class CsvLog:
    """One row per log entry; columns are added as they appear. A resumed run drops the rows after its
    checkpoint. What cannot be read is kept in a file of its own, with a warning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []

    def on_start(self, trainer: "Trainer") -> None:
        if trainer.engine.is_main:
            # A step with a pending validation is logged after the validation, perhaps for the second time.
            last = trainer.step - trainer.validation_due
            kept, unreadable = self._read() if self._path.exists() else ([], 0)
            if unreadable:
                self._set_aside(unreadable)
            self._rewrite([row for row in kept if int(row["step"]) <= last])

    def on_log(self, trainer: "Trainer", metrics: "Metrics") -> None:
        if not trainer.engine.is_main:
            return
        row = {"step": str(trainer.step), "tokens": str(trainer.tokens_seen)}
        row |= {name: format(value, ".9g") for name, value in metrics.items()}
        if not set(row) <= set(self._columns):  # the first row, or the first row with a validation
            self._rewrite([*self.rows(), row])
            return
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def on_end(self, trainer: "Trainer") -> None:
        pass

    def rows(self) -> list[dict[str, str]]:
        """The rows of the file. A last row that a crash cut short is left out."""
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, str]], int]:
        """The rows of the file, and the number of whole rows that are not rows of a log."""
        if not self._path.is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"{self._path} must be the log of a training run, but is not a regular file")
        text = self._path.read_bytes().decode("utf-8", errors="replace").replace("\0", "")
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        try:
            found = list(csv.DictReader(lines))
        except csv.Error as error:
            raise ValueError(f"{self._path} must be the log of a training run, as CSV: {error}") from None
        whole = [row for row in found if None not in row and None not in row.values()]
        rows = [{name: value for name, value in row.items() if value} for row in whole]
        rows = [row for row in rows if _STEP.fullmatch(row.get("step", ""))]
        return rows, len(found) - len(rows)

    def _set_aside(self, unreadable: int) -> None:
        """Keep a copy of a damaged file, whose unreadable rows would be lost when it is rewritten."""
        names = (
            f"{self._path.stem}.damaged{number or ''}{self._path.suffix}" for number in itertools.count()
        )
        copy = next(path for path in map(self._path.with_name, names) if not path.exists())
        write_atomically(copy, self._path.read_bytes())
        warnings.warn(
            f"{self._path} is damaged, and its unreadable rows are left out ({unreadable}); the file as it "
            f"was is kept as {copy.name}",
            stacklevel=3,
        )

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Rewrite the whole file; a crash leaves the old one."""
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._path, text.getvalue().encode())


class _Steps(Progress):
    """A bar that shows each step as soon as it is done, however rarely the figures change."""

    def __init__(self, trainer: "Trainer", *columns: ProgressColumn, **options: Any) -> None:
        self.trainer = trainer
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.task_ids:
            self.update(task, completed=self.trainer.step)
        yield from super().get_renderables()


class ProgressBar:
    """Steps, loss, speed and remaining time on a terminal. Elsewhere it prints a line at validations and from
    time to time."""

    def __init__(self, console: Console | None = None, *, description: str = "training") -> None:
        self._console = console or Console()
        self._description = description
        self._progress: _Steps | None = None
        self._task: Any = None
        self._began = self._said = time.perf_counter()

    def on_start(self, trainer: "Trainer") -> None:
        if not trainer.engine.is_main:
            return
        self._began = self._said = time.perf_counter()
        if not self._console.is_terminal:
            return
        self._progress = _Steps(
            trainer,
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._progress.start()
        self._task = self._progress.add_task(
            self._description, total=trainer.settings.steps, completed=trainer.step, figures=""
        )

    def on_log(self, trainer: "Trainer", metrics: "Metrics") -> None:
        if not trainer.engine.is_main:
            return
        figures = describe(trainer, metrics)
        if self._progress is not None:
            self._progress.trainer = trainer
            self._progress.update(self._task, figures=figures)
        elif "valid_nats" in metrics or self._is_silent():
            self._said = time.perf_counter()
            where = f"step {trainer.step}/{trainer.settings.steps}, {self._said - self._began:.0f} s"
            self._console.print(f"{self._description}: {where}, {figures}", soft_wrap=True)

    def _is_silent(self) -> bool:
        """Whether it is time to print a line: often at first, less and less often later."""
        now = time.perf_counter()
        shortest, longest = _SILENCE
        return now - self._said >= min(max((now - self._began) / 10, shortest), longest)

    def on_end(self, trainer: "Trainer") -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe(trainer: "Trainer", metrics: "Metrics") -> str:
    """A log entry as one line. It marks a training loss that is not a bound."""
    parts = []
    if "train_nats" in metrics:
        label = "loss" if trainer.objective.bounds(trainer.network) else "loss (no bound)"
        parts.append(f"{label} {metrics['train_nats']:.3f}")
    if "valid_perplexity" in metrics:
        value = f"{metrics['valid_perplexity']:.1f}"
        drawn = f"≤ about {value} (one random draw)"
        parts.append(f"valid perplexity {value if _validates_exactly(trainer) else drawn}")
    elif "valid_nats" in metrics:
        parts.append(f"valid loss (no bound) {metrics['valid_nats']:.3f}")
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:,.0f} tok/s")
        utilisation = model_flop_utilisation(trainer, metrics["tokens_per_second"])
        if utilisation is not None:
            parts.append(f"{utilisation:.0%} MFU")
    return ", ".join(parts)


def _validates_exactly(trainer: "Trainer") -> bool:
    """Whether the perplexity of the held-out text is exact, with nothing drawn at random."""
    judges = [each.objective for each in trainer.validators if isinstance(each, LikelihoodValidator)]
    return all(judge.is_exact(trainer.network) for judge in judges) and bool(judges)


def model_flop_utilisation(trainer: "Trainer", tokens_per_second: float) -> float | None:
    """Model FLOP utilization (MFU): 6 FLOPs per parameter and text token, relative to the devices' data
    sheets.

    Embeddings that are only looked up do not count, because no product uses them; embeddings that are also
    the head do count. Work on the clean half and in attention does not count: this is the rate at which the
    run learns from text. None on devices without a known rate.
    """
    if trainer.engine.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(trainer.engine.device)
    peak = next((flops for key, flops in _PEAK_FLOPS.items() if key in name), None)
    if peak is None:
        return None
    network = trainer.network
    parameters = sum(p.numel() for p in network.parameters())
    return 6 * (parameters - network.idle_parameters) * tokens_per_second / (peak * trainer.engine.world)
