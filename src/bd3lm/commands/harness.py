"""`bd3lm harness`: run tasks of lm-evaluation-harness on a model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    DTypeFlag,
    EstimatorFlag,
    LawFlag,
    LeanFlag,
    Model,
    OptionalFile,
    OptionalFolder,
    OptionalInt,
    SeedFlag,
    TokenizerFlag,
    named,
)
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from bd3lm.interop.harness import HarnessLM
    from bd3lm.io.console import Console

_MEANINGS = {
    "exact": "exact",
    "bound": "lower bounds in expectation",
    "neither": "neither exact nor bounds",
}


@dataclass(frozen=True)
class Harness(Command):
    """Run tasks of lm-evaluation-harness on a model.

    Needs pip install "bd3lm[harness]". The tasks that come with the harness download their data from the hub.
    """

    kind = "harness"

    model: Model
    tasks: Annotated[tuple[str, ...], named("TASK ...")]
    """Names of tasks or groups, or patterns such as "arc_*"."""
    include_path: OptionalFolder = None
    """Folder with your own task files (YAML)."""
    num_fewshot: OptionalInt = None
    """Examples in each context. Default: what the task says."""
    limit: OptionalInt = None
    """Run only the first examples of each task, this many, to try it out."""
    estimator: EstimatorFlag = "auto"
    samples: OptionalInt = None
    """Draws of a random estimate for each text. Default: 16, for iw:K 1 (of K orders)."""
    law: LawFlag = None
    lean: LeanFlag = None
    steps: OptionalInt = None
    """Steps of the sampler: per text for SEDD and D3PM, per block for the others."""
    seed: SeedFlag = 0
    batch_size: int = 8
    """Texts per batch."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: DTypeFlag = None
    out: OptionalFile = None
    """Write the full report of the harness to this new JSON file."""

    def run(self) -> int:
        from bd3lm.commands.shared.models import check_models, one_model
        from bd3lm.commands.shared.records import check_new_file
        from bd3lm.io.extras import require

        check_new_file(self.out)
        check_models([self.model], device=self.device, lean=self.lean)
        require("lm_eval", "harness", "bd3lm harness")

        from bd3lm.interop.harness import HarnessLM  # this import loads torch, as the package does

        model = HarnessLM(
            one_model(self.model),
            estimator=self.estimator,
            samples=self.samples,
            law=self.law,
            lean=self.lean,
            steps=self.steps,
            seed=self.seed,
            batch_size=self.batch_size,
            device=self.device,
            dtype=self.dtype,
            tokenizer=self.tokenizer,
        )
        results = run_harness(model, self)
        if self.out is not None:
            text = json.dumps(results, indent=2, ensure_ascii=False, default=str)
            self.out.write_text(text + "\n", encoding="utf-8")
            say(f"wrote {self.out}")
        return 0


def run_harness(model: "HarnessLM", flags: Harness, *, console: "Console | None" = None) -> dict[str, Any]:
    """Run the tasks, print the harness's table and the meaning of its likelihoods, and return its report."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
    from rich.text import Text

    from bd3lm.io.console import Console

    console = console or Console()
    include_path = flags.include_path
    for name, value, least in (("--limit", flags.limit, 1), ("--num-fewshot", flags.num_fewshot, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"--include-path must be a folder of task files, and {include_path} is not one")
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    results: dict[str, Any] = simple_evaluate(
        model=model,
        tasks=_matching(flags.tasks, manager),
        num_fewshot=flags.num_fewshot,
        limit=flags.limit,
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


def _matching(tasks: Sequence[str], manager: "TaskManager") -> list[str]:
    """The names of the requested tasks and groups; patterns such as "arc_*" are expanded."""
    from bd3lm.parsing import did_you_mean

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
