"""What was measured, as JSON lines: appended as it goes, read again to know what is still to do.

Every line names its run and the digest of what decides its weights, so that lines of other settings are not
taken for these. Samples go into a compressed file of their own beside it.
"""

import gzip
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from research.evidence.measures import Measure, describe
from research.evidence.records import Line, read_lines
from research.evidence.runs import Run

PATTERN = "evidence*.jsonl"


class Results:
    """The lines of earlier sessions, and the file of this one."""

    def __init__(self, file: Path, earlier: Iterable[Path] = ()) -> None:
        self.file = file
        self.samples = file.with_name(file.name.replace(".jsonl", "-samples.jsonl.gz"))
        files = dict.fromkeys([*earlier, *([file] if file.exists() else [])])
        self.lines: list[Line] = []
        # By digest and kind: a page asks thousands of times.
        self._found: dict[tuple[str, str], list[Line]] = {}
        for line in read_lines(files):
            self._keep(line)

    def add(self, kind: str, run: Run, **fields: Any) -> None:
        line = plain({"kind": kind, "run": run.name, "seed": run.seed, "digest": run.digest, **fields})
        self._keep(line)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")

    def _keep(self, line: Line) -> None:
        self.lines.append(line)
        if not line.get("superseded"):
            self._found.setdefault((line["digest"], line["kind"]), []).append(line)

    def add_samples(self, run: Run, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Texts once, not also as tokens: `documents` is what is judged."""
        with gzip.open(self.samples, "at", encoding="utf-8") as file:
            for record in records:
                kept = {key: value for key, value in record.items() if key not in ("text", "tokens")}
                line = {"run": run.name, "seed": run.seed, "digest": run.digest, "set": name, "sample": kept}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def of(self, run: Run, kind: str) -> list[Line]:
        return list(self._found.get((run.digest, kind), ()))

    def failed(self, run: Run) -> bool:
        """Whether it, or what it starts from, was trained in vain: it is not tried again."""
        return any(self.of(each, "failed") for each in run.lineage)

    def missing(self, run: Run) -> list[Measure]:
        """What is still to be measured."""
        if self.failed(run):
            return []
        done = [line["measure"] for line in self.of(run, "measured")]
        return [measure for measure in run.measures if describe(measure) not in done]

    def step_seconds(self, cost: str, kind: str | None = None) -> float | None:
        """A training step of some cost, or else of some kind, as far as any was timed."""
        timed = [line for line in self.lines if line.get("step_seconds") is not None]
        alike = [line for line in timed if line.get("cost") == cost]
        alike = alike or [line for line in timed if line["training"] == kind]
        return _median(line["step_seconds"] for line in alike)

    def overhead_seconds(self) -> float | None:
        """What a run took besides its steps when it had to compile."""
        return _median(
            line["seconds"] - line["steps"] * line["step_seconds"]
            for line in self.lines
            if line["kind"] == "trained" and line["graphs"] and line["step_seconds"] is not None
        )

    def measure_seconds(self, measure: Measure, run: Run) -> float | None:
        """A measure of the same settings on a run of the same kind."""
        return _median(
            line["seconds"]
            for line in self.lines
            if line["kind"] == "measured"
            and not line.get("others")
            and line["training"] == run.kind
            and line["measure"] == describe(measure)
        )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def plain(value: Any) -> Any:
    """As JSON has it: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
