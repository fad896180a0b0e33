"""`bd3lm harness`: other people's tasks, by lm-evaluation-harness."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from rich.console import Console
from rich.text import Text

from bd3lm.config import did_you_mean
from bd3lm.interop.harness import HarnessLM

_MEANINGS = {
    "exact": "exact",
    "bound": "lower bounds in expectation",
    "neither": "neither exact nor bounds",
}


def run_harness(
    model: HarnessLM,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run tasks, print the harness's table and what its likelihoods are, and return all it reports.

    `include_path` is a folder with task files of one's own; `limit` takes the first examples of each task.
    """
    console = console or Console()
    for name, value, least in (("limit", limit, 1), ("num_fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"include_path must be a folder of task files, and {include_path} is none")
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    results: dict[str, Any] = simple_evaluate(
        model=model,
        tasks=_matching(tasks, manager),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    for column in ("results", "groups"):
        if results.get(column):
            console.print(Text(make_table(results, column)), soft_wrap=True)
    if model.figure is not None:
        meaning = _MEANINGS[model.figure.meaning]
        console.print(f"Likelihoods are {meaning} (estimator {model.figure.name}).", soft_wrap=True)
    return results


def _matching(tasks: Sequence[str], manager: TaskManager) -> list[str]:
    """The tasks and groups that are named, by patterns such as "arc_*" too."""
    if not tasks:
        raise ValueError("tasks must name at least one task, got none; `lm_eval ls tasks` lists them")
    found: list[str] = []
    for task in tasks:
        names = manager.match_tasks([task])
        if not names:
            hint = did_you_mean(task, manager.all_tasks)
            raise ValueError(f"there is no task {task!r}{hint or '; `lm_eval ls tasks` lists them'}")
        found += names
    return found
