"""What a report is made of, as plain values: runs with their recipes, training logs and measurements."""

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
"""The kinds of records that a report asks for, and what measures each."""
KINDS = (*COMMANDS, "unigram", "long_text", "box_film")
"""All that it shows; the last three are the demo's, and not missed elsewhere."""
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
    """As `recipe.yaml` has it. A report compares recipes, and knows no method by its name."""
    parameters: int
    steps: tuple[int, ...]
    """The steps of each run it started from, and then its own; `tokens` likewise."""
    tokens: tuple[int, ...]
    log: Sequence[Mapping[str, float]]
    """The rows of metrics.csv."""
    train_is_bound: bool
    """Whether the logged training loss is exact or a bound, so that it may be compared with others."""
    validation_is_exact: bool
    """Whether the logged held-out loss is exact, not an estimate from one draw of masks or noise."""
    has_likelihood: bool
    """Whether its perplexity can be measured, so that it is missed where it was not."""
    masks_by_rule: bool
    """Whether its masks could be drawn by another rule, so that variances are missed where there are none."""
    writes_in_order: bool
    """Whether it writes token after token, which is then all that a table says of its sampler."""
    writes_blocks: bool
    """Whether it writes block after block by an unmasking rule, which tables name; its film goes first."""
    uncovers: bool
    """Whether it turns masks into tokens, so that a film shows them, and is missed where there is none."""
    variant: str = ""
    """What the title leaves out of the method, to follow it in a label, such as ", fully masked"."""
    clip_range: tuple[float, float] | None = None
    """The range of mask rates that training began with, where better ones are searched for."""
    law: str = ""
    """The law that it writes and is measured in."""
    lean: float = 0.0
    """How much the order leans in which it writes."""
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
        """Perplexities of its own held-out data, under its own law and in its own order."""
        return [
            record
            for record in self.of_kind("perplexity")
            if self.is_own_way(record)
            and record["settings"]["data"] == OWN
            and record["settings"]["split"] in HELD_OUT
        ]

    def lean_of(self, record: Record) -> float:
        """How much the order of a measurement leans: as the run's own, unless it says something else."""
        lean = record["settings"].get("lean")
        return self.lean if lean is None else float(lean)

    def law_of(self, record: Record) -> str:
        """The law that was measured: the run's own, unless the record says something else."""
        return record["settings"].get("law") or self.law

    def is_own_way(self, record: Record) -> bool:
        """Whether it is a measurement under the run's own law and in its own order."""
        return self.law_of(record) == self.law and self.lean_of(record) == self.lean

    def other_order(self, record: Record) -> str:
        """The law and the lean of a measurement, to follow the label of the run, if they are not its own."""
        law, lean = self.law_of(record), self.lean_of(record)
        if law != self.law:
            return f", {law} law{leaning(lean)}"
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


Measured = tuple[Run, Record]
"""A measurement and what was measured."""


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

    def of_kind(self, kind: str) -> list[Measured]:
        return [(run, record) for run in self.runs for record in run.of_kind(kind)]

    @property
    def unknown_starts(self) -> str:
        """A sentence that explains the "?" among the tokens seen; empty where there is none."""
        starts = dict.fromkeys(code(run.start) for run in self.runs if run.start is not None)
        known = " or ".join(starts)
        return f" ? stands for the training of {known}, which is not known here." if starts else ""

    def label(self, run: Run) -> str:
        """What a run is called: its method, and as much more as is needed to tell it from the others."""
        return self._labels[run.folder]

    @property
    def labels(self) -> list[str]:
        """The labels of all runs: by their order things look the same in every plot."""
        return list(self._labels.values())

    @cached_property
    def _labels(self) -> dict[str, str]:
        """By folder. Runs of one method have their steps in their names where one of them went on from
        another, and then all runs have; otherwise they have their folders."""
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
        """Whether a run is here, and another of its method that went on from it; both from known starts."""
        chains = [(run.title + run.variant, run.steps) for run in self.runs if run.start is None]
        return any((method, steps[:-1]) in chains for method, steps in chains)


def largest(
    records: Iterable[Record], size: Callable[[Record], Any], alike: Callable[[Record], Any] = lambda _: None
) -> list[Record]:
    """The largest of those measurements that are `alike`; of several equally large ones the newest."""
    found: dict[Any, Record] = {}
    for record in records:
        key = alike(record)
        if key not in found or size(record) >= size(found[key]):
            found[key] = record
    return list(found.values())


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that are not the same in all recipes, by dotted name; None for a recipe without it."""
    flat = [_flat(recipe) for recipe in recipes]
    names = list(dict.fromkeys(name for each in flat for name in each))
    table = {name: [each.get(name) for each in flat] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


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
