"""What a report is made of, as plain values: runs with their recipes, training logs and measurements."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bd3lm.reports.numbers import leaning

COMMANDS = {
    "perplexity": "bd3lm eval {folders}",
    "variance": "bd3lm variance {folders}",
    "lengths": "bd3lm lengths {folders}",
    "judgement": "bd3lm judge {folders}",
    "samples": "bd3lm report {folders}",
    "denoising": "bd3lm report {folders}",
}
"""The kinds of records that a report asks for, and what measures each."""
KINDS = (*COMMANDS, "unigram", "long_text")
"""All that it shows; the last two are the demo's, and not missed elsewhere."""
OWN = "own"
"""What a record says of data that is the run's own."""
HELD_OUT = ("valid", "test")
"""The splits of it that a run does not train on."""

Record = Mapping[str, Any]
"""A measurement as it is kept beside its run: kind, settings, result, and what it was measured on."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and what is known about it."""

    folder: str
    """As a command names it."""
    title: str
    """The method, as a table names it."""
    recipe: Mapping[str, Any]
    parameters: int
    steps: tuple[int, ...]
    """The steps of each run it started from, and then its own; `tokens` likewise."""
    tokens: tuple[int, ...]
    log: Sequence[Mapping[str, float]]
    """The rows of metrics.csv."""
    train_is_bound: bool
    """Whether the logged training loss is exact or a bound, so that it may be compared with others."""
    train_lean: float = 0.0
    """How much the order leans that the masks of training are drawn for."""
    valid_lean: float = 0.0
    """How much the order leans that the held-out loss is measured in."""
    start: str | None = None
    """What the first of them started from, if that is not a run whose log could be read."""
    records: Sequence[Record] = ()
    """In the order in which they were measured."""

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def held_out(self) -> list[Record]:
        """Perplexities of its own held-out data, in its own order."""
        settings = [
            (record, record["settings"])
            for record in self.of_kind("perplexity")
            if self.lean_of(record) == self.lean
        ]
        return [record for record, of in settings if of["data"] == OWN and of["split"] in HELD_OUT]

    @property
    def lean(self) -> float:
        """How much the order leans in which it writes."""
        return float(self.recipe["method"].get("lean", 0.0))

    def lean_of(self, record: Record) -> float:
        """How much the order of a measurement leans.

        Records without one are from before there was a choice: perplexities were then measured at lean 0,
        everything else in the run's own order.
        """
        lean = record["settings"].get("lean")
        if lean is None:
            return 0.0 if record["kind"] == "perplexity" else self.lean
        return float(lean)

    def other_order(self, record: Record) -> str:
        """The lean of a measurement, to follow the label of the run, if it is not the run's own."""
        lean = self.lean_of(record)
        if lean == self.lean:
            return ""
        return f", at lean {lean:g}" if self.lean else leaning(lean)

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """Tokens seen and the value of a logged figure, where it was logged."""
        rows = [row for row in self.log if name in row]
        return [row["tokens"] for row in rows], [row[name] for row in rows]

    @property
    def stopped_before(self) -> int | None:
        """The steps that its recipe asks for, if it has made fewer."""
        planned: int = self.recipe["train"]["steps"]
        return planned if self.steps[-1] < planned else None

    @property
    def method(self) -> str:
        """Which kind of model it is."""
        kind: str = self.recipe["method"]["kind"]
        return kind


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs side by side.

    `unmeasured` says why something was not measured, by (folder, kind). `unfinished` are the folders of runs
    that have no model yet.
    """

    runs: tuple[Run, ...]
    unmeasured: Mapping[tuple[str, str], str] = field(default_factory=dict)
    unfinished: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("runs must hold at least one run to report on, got none")
        for folder, count in Counter(run.folder.rstrip("/") for run in self.runs).items():
            if count > 1:
                raise ValueError(f"runs must be different ones, got {folder} {count} times")
        for run in self.runs:
            if not run.log:
                raise ValueError(f"{run.folder}/metrics.csv must hold rows of a training log, got none")

    @property
    def has_stages(self) -> bool:
        """Whether a run started from another model."""
        return any(len(run.steps) > 1 or run.start is not None for run in self.runs)

    def of_kind(self, kind: str) -> list[tuple[Run, Record]]:
        return [(run, record) for run in self.runs for record in run.of_kind(kind)]

    @property
    def unknown_starts(self) -> str:
        """A sentence that explains the "?" among the tokens seen; empty where there is none."""
        starts = dict.fromkeys(f"`{run.start}`" for run in self.runs if run.start is not None)
        return (
            f" ? stands for the training of {' or '.join(starts)}, which is not known here." if starts else ""
        )

    @cached_property
    def labels(self) -> dict[str, str]:
        """The name of each run, by folder: its method, and as much more as is needed to tell runs apart."""
        methods = [run.title + _variant(run.recipe) for run in self.runs]
        names = _short_names([run.folder for run in self.runs])
        return {
            run.folder: method if methods.count(method) == 1 else f"{method}, {names[run.folder]}"
            for run, method in zip(self.runs, methods, strict=True)
        }


def largest(records: Sequence[Record], size: Callable[[Record], Any]) -> Record:
    """The largest measurement, the newest of several equally large ones."""
    return max(reversed(records), key=size)


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that are not the same in all recipes, by dotted name; None for a recipe without it."""
    flat = [_flat(recipe) for recipe in recipes]
    names = list(dict.fromkeys(name for each in flat for name in each))
    table = {name: [each.get(name) for each in flat] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def _variant(recipe: Mapping[str, Any]) -> str:
    """What the title of a method leaves out: the variants of the paper's case study, and a trained lean."""
    method = recipe["method"]
    masking = method.get("masking") or {}
    if method.get("random_batch"):
        return ", random batch size"
    if masking.get("kind") == "clipped" and masking.get("low") == masking.get("high") == 1.0:
        return ", fully masked"
    if masking.get("lean"):
        return f", trained for lean {masking['lean']:g}"
    return ""


def _short_names(folders: Sequence[str]) -> dict[str, str]:
    """The last parts of each path, as many as are needed to tell them apart."""
    parts = {folder: folder.rstrip("/").split("/") for folder in folders}
    depth = 1
    while len({tuple(path[-depth:]) for path in parts.values()}) < len(parts):
        depth += 1
    return {folder: "/".join(path[-depth:]) for folder, path in parts.items()}


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
