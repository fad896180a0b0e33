"""Progress bars with the time left, for steps that take longer than a few seconds."""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from bd3lm.io.console import Console

T = TypeVar("T")


class TimeLeft(ProgressColumn):
    """Elapsed time, and the time left at the average speed so far.

    rich's own column uses the last half minute, and shows nothing if a step takes longer.
    """

    def render(self, task: Task) -> Text:
        """Such as 0:01:20, 0:02:40 left."""
        spent = task.elapsed or 0.0
        share = task.completed / task.total if task.total else 0.0
        left = f", {_clock(spent * (1.0 - share) / share)} left" if share > 0.0 else ""
        return Text(f"{_clock(spent)}{left}")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(max(seconds, 0.0))))


def tracked(steps: Iterable[T], description: str, *, total: int, console: Console | None) -> Iterator[T]:
    """The steps, with a progress bar on the console or, if that is no terminal, on standard error if that is
    one."""
    screen = console if console is not None and console.is_terminal else Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeLeft())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        yield from progress.track(steps, total=total, description=description)
