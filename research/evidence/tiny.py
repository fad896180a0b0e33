"""Every run at a toy size, to see that everything works: about half a minute on a CPU, and no data needed."""

from dataclasses import replace
from typing import Any

from bd3lm.runs.merging import merge
from research.evidence.measures import Documents, Measure, Perplexity, Texts, Variance
from research.evidence.runs import Run


def tiny(run: Run) -> Run:
    """The same at a size that two cores train in a second, to see that everything works."""
    small: dict[str, Any] = {
        "data": {"context": 32, "validation_batch": 4, "validation_sequences": 8},
        "network": {"layers": 1, "hidden": 64, "heads": 2},
        "optimizer": {"warmup_steps": 1},
        "train": {"global_batch": 4, "log_every": 2, "steps": max(4, run.steps // 250)},
    }
    if run.settings["train"]["micro_batch"]:
        small["train"]["micro_batch"] = 2
    if "search" in run.changes["method"].get("masking", {}):
        small["train"]["validate_every"] = 2
        small["method"] = {"masking": {"search": {"every": 2, "batches": 1, "widths": [0.5]}}}
    return replace(
        run,
        changes=merge(run.changes, small),
        parent=None if run.parent is None else tiny(run.parent),
        same_time_as=None if run.same_time_as is None else tiny(run.same_time_as),
        measures=tuple(map(_tiny_measure, run.measures)),
    )


def _tiny_measure(measure: Measure) -> Measure:
    match measure:
        case Perplexity():
            return replace(measure, sequences=4)
        case Variance():
            return replace(measure, batches=2)
        case Texts():
            return replace(measure, count=2, floor=measure.floor and 1.0, steps=measure.steps and 4)
        case Documents():
            return replace(measure, count=2, contexts=2, floor=1.0)
