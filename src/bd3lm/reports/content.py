"""The content of a report as plain values: runs with their recipes, training logs and measurements."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bd3lm.reports.document import code
from bd3lm.reports.numbers import leaning

COMMANDS = {
    "perplexity": "bd3lm eval {folders}",
    "variance": "bd3lm variance {folders}",
    "lengths": "bd3lm lengths {folders}",
    "judgement": "bd3lm judge {folders}",
    "samples": "bd3lm report {folders}",
    "denoising": "bd3lm report {folders}",
}
"""The kinds of records that a report needs, and the command that measures each."""
KINDS = (*COMMANDS, "unigram", "long_text", "box_film")
"""All kinds that it shows. The last three are the demo's, and not missed in other reports."""
OWN = "own"
"""The value in a record for the run's own data."""
HELD_OUT = ("valid", "test")
"""The splits that a run does not train on."""

Record = Mapping[str, Any]
"""A measurement as stored with its run: kind, settings, result, and the weights it was measured on."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and everything known about it."""

    folder: str
    """The folder, as commands name it."""
    title: str
    """The method, as tables name it."""
    recipe: Mapping[str, Any]
    """The contents of `recipe.yaml`. A report compares recipes and treats no method specially."""
    parameters: int
    steps: tuple[int, ...]
    """The steps of each run it started from, then its own; `tokens` likewise."""
    tokens: tuple[int, ...]
    log: Sequence[Mapping[str, float]]
    """The rows of metrics.csv."""
    train_is_bound: bool
    """Whether the logged training loss is exact or a bound, so it may be compared with others."""
    validation_is_exact: bool
    """Whether the logged held-out loss is exact, not an estimate from one draw of masks or noise."""
    has_likelihood: bool
    """Whether its perplexity can be measured, so a missing measurement is reported."""
    masks_by_rule: bool
    """Whether its masks could be drawn by another rule, so missing variances are reported."""
    writes_in_order: bool
    """Whether it writes token by token; tables then say nothing more about its sampler."""
    writes_blocks: bool
    """Whether it writes block by block with an unmasking rule, which tables name; its film comes first."""
    uncovers: bool
    """Whether it turns masks into tokens, so it can have a film, and a missing one is reported."""
    variant: str = ""
    """The part of the method that labels add to the title, such as ", fully masked"."""
    clip_range: tuple[float, float] | None = None
    """The initial range of mask rates, if training searches for better ones."""
    law: str = ""
    """The law that it writes and is measured under."""
    lean: float = 0.0
    """The lean of the order in which it writes."""
    train_lean: float = 0.0
    """The lean of the order for which training draws masks."""
    valid_lean: float = 0.0
    """The lean of the order in which the held-out loss is measured."""
    start: str | None = None
    """What the first run started from, if that is not a run with a readable log."""
    records: Sequence[Record] = ()
    """In the order of measurement."""

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    @property
    def held_out(self) -> list[Record]:
        """Perplexities of its own held-out data, under its own law and in its own order."""
        return [
            record
            for record in self.of_kind("perplexity")
            if self.is_own_way(record)
            and record["settings"]["data"] == OWN
            and record["settings"]["split"] in HELD_OUT
        ]

    def lean_of(self, record: Record) -> float:
        """The lean of a measurement; the run's own unless the record has one."""
        lean = record["settings"].get("lean")
        return self.lean if lean is None else float(lean)

    def law_of(self, record: Record) -> str:
        """The law of a measurement; the run's own unless the record has one."""
        return record["settings"].get("law") or self.law

    def is_own_way(self, record: Record) -> bool:
        """Whether a measurement is under the run's own law and in its own order."""
        return self.law_of(record) == self.law and self.lean_of(record) == self.lean

    def other_order(self, record: Record) -> str:
        """The law and lean of a measurement for its label, if they are not the run's own."""
        law, lean = self.law_of(record), self.lean_of(record)
        if law != self.law:
            return f", {law} law{leaning(lean)}"
        if lean == self.lean:
            return ""
        return f", at lean {lean:g}" if self.lean else leaning(lean)

    def column(self, name: str) -> tuple[list[float], list[float]]:
        """Tokens seen and the value of a logged figure, for each row that has it."""
        rows = [row for row in self.log if name in row]
        return [row["tokens"] for row in rows], [row[name] for row in rows]

    @property
    def stopped_before(self) -> int | None:
        """The steps in its recipe, if it stopped before them."""
        planned: int = self.recipe["train"]["steps"]
        return planned if self.steps[-1] < planned else None


Measured = tuple[Run, Record]
"""A measurement and its run."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Runs to compare.

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
                raise ValueError(f"runs must be different, got {folder} {count} times")
        for run in self.runs:
            if not run.log:
                raise ValueError(f"{run.folder}/metrics.csv must hold rows of a training log, got none")

    @property
    def has_stages(self) -> bool:
        """Whether a run started from another model."""
        return any(len(run.steps) > 1 or run.start is not None for run in self.runs)

    def of_kind(self, kind: str) -> list[Measured]:
        return [(run, record) for run in self.runs for record in run.of_kind(kind)]

    @property
    def unknown_starts(self) -> str:
        """A sentence that explains the "?" among the tokens seen; empty if there is none."""
        starts = dict.fromkeys(code(run.start) for run in self.runs if run.start is not None)
        known = " or ".join(starts)
        return f" ? stands for the training of {known}, which is not known here." if starts else ""

    def label(self, run: Run) -> str:
        """The label of a run: its method, and whatever else is needed to tell it from the others."""
        return self._labels[run.folder]

    @property
    def labels(self) -> list[str]:
        """The labels of all runs; their order fixes colors and markers in every plot."""
        return list(self._labels.values())

    @cached_property
    def _labels(self) -> dict[str, str]:
        """Labels by folder.

        If a run of a method continues another run of the same method, all labels get their steps; otherwise
        runs of one method get their folders.
        """
        methods = [run.title + run.variant for run in self.runs]
        folders = [run.folder for run in self.runs]
        with_steps = [f"{run.title}{run.variant}, {sum(run.steps):,} steps" for run in self.runs]
        if self._is_gone_on_from and len(set(with_steps)) == len(with_steps):
            return dict(zip(folders, with_steps, strict=True))
        names = _short_names(folders)
        return {
            folder: method if methods.count(method) == 1 else f"{method}, {names[folder]}"
            for folder, method in zip(folders, methods, strict=True)
        }

    @property
    def _is_gone_on_from(self) -> bool:
        """Whether a run is here, and another of its method that continues it; both from known starts."""
        chains = [(run.title + run.variant, run.steps) for run in self.runs if run.start is None]
        return any((method, steps[:-1]) in chains for method, steps in chains)


def largest(
    records: Iterable[Record], size: Callable[[Record], Any], alike: Callable[[Record], Any] = lambda _: None
) -> list[Record]:
    """The largest measurement of each group that is `alike`; among equally large ones, the newest."""
    found: dict[Any, Record] = {}
    for record in records:
        key = alike(record)
        if key not in found or size(record) >= size(found[key]):
            found[key] = record
    return list(found.values())


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that differ between recipes, by dotted name; None for a recipe without it."""
    flat = [_flat(recipe) for recipe in recipes]
    names = list(dict.fromkeys(name for each in flat for name in each))
    table = {name: [each.get(name) for each in flat] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def _short_names(folders: Sequence[str]) -> dict[str, str]:
    """The last parts of each path, as many as needed to tell them apart."""
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
