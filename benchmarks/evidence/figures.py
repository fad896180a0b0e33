"""What was measured, by the names of runs: likelihoods over seeds, how they differ, texts with verdicts."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.evidence.measures import TRAINED_ON, Measure, Texts, describe
from benchmarks.evidence.real import REAL, real_name
from benchmarks.evidence.results import PATTERN, Line, Results
from benchmarks.evidence.runs import Run, all_runs
from benchmarks.evidence.samples import JUDGED, read_verdicts, text_name

from bd3lm.recipe import BlockDiffusionRecipe

NOT_MEASURED, DIVERGED = "not measured", "diverged"
NONE = "–"
"""There is no such figure, as of a bound of an exact likelihood, or in the paper."""
_ERRORS = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04}
"""How many standard errors make a difference: Student's t by degrees of freedom, two-sided, five percent."""


@dataclass(frozen=True)
class Nats:
    """Nats a token of one text, a value for each seed; `is_bound` where the truth may be less.

    `draws` is the Monte-Carlo error, None where it is not known. All seeds are measured with the same draws,
    so that it is no smaller for their mean.
    """

    values: tuple[float, ...] = ()
    is_bound: bool = False
    draws: float | None = 0.0
    seeds: tuple[int, ...] = ()
    family: str = ""
    start: str = ""  # the name of what every seed of it starts from, the one of the same seed

    def __bool__(self) -> bool:
        return bool(self.values)

    def __str__(self) -> str:
        """As a perplexity: of one seed, or the geometric mean over several and their standard deviation."""
        if not self.values:
            return NOT_MEASURED
        mean = math.exp(self.mean)
        spread = f" ± {mean * statistics.stdev(self.values):.2f}" if len(self.values) > 1 else ""
        return f"{'≤ ' if self.is_bound else ''}{mean:.2f}{spread}"

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    def of_seed(self, seed: int) -> float:
        return self.values[self.seeds.index(seed)]

    def among(self, other: "Nats") -> "Nats":
        """Of the seeds alone that the other has too."""
        each = zip(self.seeds, self.values, strict=True)
        kept = {seed: value for seed, value in each if seed in other.seeds}
        return replace(self, values=tuple(kept.values()), seeds=tuple(kept))


@dataclass(frozen=True)
class Spread:
    """The standard deviation of nats over seeds, pooled over models, and its degrees of freedom."""

    value: float
    freedom: int

    @property
    def errors(self) -> float | None:
        """How many standard errors make a difference; None where too few seeds are known to say."""
        known = [freedom for freedom in _ERRORS if freedom <= self.freedom]
        return _ERRORS[max(known)] if known else None

    def __str__(self) -> str:
        needed = "too few to judge by"
        if self.errors is not None:
            needed = f"so that a difference must be {self.errors:.2f} standard errors"
        degrees = f"{self.freedom} degree{'s' * (self.freedom > 1)}"
        return f"{100 * self.value:.2f} % with {degrees} of freedom, {needed}"


@dataclass(frozen=True)
class Difference:
    """By how much one figure lies above another: the logarithm of their ratio, its standard error if known.

    Noise is judged on that scale, on which a halving is as much as a doubling. `errors` is how many standard
    errors a difference must exceed to be one.
    """

    log: float
    log_error: float | None = None
    errors: float = 2.0

    @classmethod
    def of(cls, figure: float, other: float) -> "Difference":
        """Of figures that are taken as they are printed."""
        return cls(math.log(figure / other))

    @property
    def value(self) -> float:
        """As a share of the other figure."""
        return math.expm1(self.log)

    @property
    def error(self) -> float | None:
        return None if self.log_error is None else math.exp(self.log) * self.log_error

    def __str__(self) -> str:
        error = "" if self.error is None else f" ± {100 * self.error:.1f}"
        return f"{100 * self.value:+.1f} %{error}".replace("-", "−")

    @property
    def is_noise(self) -> bool:
        """Whether it is too small for its error; never where that is not known."""
        return self.log_error is not None and abs(self.log) < self.errors * self.log_error

    def above(self, limit: float) -> "Difference":
        """The same from a limit on, which is a share too."""
        return replace(self, log=self.log - math.log1p(limit))

    def is_beyond(self, limit: float) -> bool | None:
        """Whether it lies above a limit by enough standard errors; None where these are not known."""
        return None if self.log_error is None else self.above(limit).log >= self.errors * self.log_error


@dataclass(frozen=True)
class Written:
    """A set of texts of a run: what was asked for, what it cost, and the judge's record, if there is one."""

    run: Run
    asked: Texts
    cost: Mapping[str, Any] | None
    judged: Mapping[str, Any] | None

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        """What the judge found, unless it found nothing finite."""
        found = None if self.judged is None else self.judged["result"]
        return found if found and found["perplexity"] else None

    @property
    def evaluations(self) -> float | None:
        """Of the network, a token."""
        return None if self.cost is None else self.cost["evaluations_per_token"]


@dataclass(frozen=True)
class Evidence:
    """The results of some runs, the verdicts on their texts, and what is known of real text."""

    results: Results
    runs: Sequence[Run]
    verdicts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    real: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> "Evidence":
        """All that lies in the folder of the results."""
        results = Results(folder / "none", sorted(folder.glob(PATTERN)))
        real = folder / REAL
        return cls(
            results,
            all_runs(),
            read_verdicts(sorted(folder.glob(JUDGED))),
            json.loads(real.read_text("utf-8")) if real.exists() else None,
        )

    def named(self, name: str) -> list[Run]:
        """A run with all its seeds."""
        return [run for run in self.runs if run.name == name]

    def measured(self, name: str, kind: str) -> Iterator[Line]:
        for run in self.named(name):
            lines = self.results.of(run, "measured")
            yield from (line for line in lines if line["measure"]["kind"] == kind)

    def result(self, run: Run, measure: Measure) -> Mapping[str, Any] | None:
        lines = [line for line in self.results.of(run, "measured") if line["measure"] == describe(measure)]
        return lines[-1]["result"] if lines else None

    def nats(
        self,
        name: str,
        estimator: str,
        data: str = TRAINED_ON,
        *,
        figure: str | None = None,
        part: bool = False,
        split: str = "test",
        lean: float = 0.0,
    ) -> Nats:
        """By what was asked for; `figure` names one of several that an estimator gives."""
        found: dict[int, float] = {}
        draws: dict[int, float | None] = {}
        is_bound = False
        for line in self.measured(name, "perplexity"):
            asked = line["measure"]
            # The first results are older than some fields, all of the test split and without a lean.
            where = asked["data"], asked.get("split", "test"), asked["part"], asked.get("lean", 0.0)
            if asked["estimator"] != estimator or where != (data, split, part, lean):
                continue
            for each in line["result"]["figures"]:
                if each["name"] == (figure or estimator) and each["nats"] is not None:
                    found[line["seed"]] = each["nats"]
                    draws[line["seed"]] = each["monte_carlo_error"]
                    is_bound = each["name"] != "exact"
        known = [each for each in draws.values() if each is not None]
        of_draws = statistics.mean(known or [0.0]) if len(known) == len(draws) else None
        run = self.named(name)[0]
        start = run.parent.name if run.parent else ""
        return Nats(tuple(found.values()), is_bound, of_draws, tuple(found), family(run), start)

    def exact(self, name: str, data: str = TRAINED_ON, **where: Any) -> Nats:
        return self.nats(name, "exact", data, **where)

    def bound(self, name: str, data: str = TRAINED_ON, **where: Any) -> Nats:
        """The NELBO: enumerated, by counts, or as the method has it."""
        ways = {"exact": "nelbo", "counts": "counts", "nelbo": "nelbo"}
        each = (self.nats(name, way, data, figure=figure, **where) for way, figure in ways.items())
        return next(filter(None, each), Nats())

    def best(self, name: str, data: str = TRAINED_ON, **where: Any) -> Nats:
        """The exact figure, else the bound."""
        return self.exact(name, data, **where) or self.bound(name, data, **where)

    def as_in_paper(self, name: str, data: str = TRAINED_ON, **where: Any) -> Nats:
        """What the paper prints of such a model: the bound, of AR the likelihood."""
        return self.bound(name, data, **where) or self.exact(name, data, **where)

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """Of the test split, by family, over all its models that have several seeds."""
        several: dict[str, dict[str, list[tuple[float, ...]]]] = {}
        for name in dict.fromkeys(run.name for run in self.runs):
            nats = self.best(name)
            if len(nats.values) > 1:
                alike = several.setdefault(nats.family, {})
                alike.setdefault(_beginning(self.named(name)[0]), []).append(nats.values)
        return {family: _pooled(list(groups.values())) for family, groups in several.items()}

    @cached_property
    def paired_spreads(self) -> dict[str, Spread]:
        """Of what starts from one checkpoint, by the name of that, beyond what the checkpoint gives to all.

        A table of models and seeds has a mean for each of both; what is left over is the noise of a second
        stage, and how much the worth of a variant depends on the checkpoint.
        """
        found = {}
        for start in dict.fromkeys(run.parent.name for run in self.runs if run.parent):
            names = dict.fromkeys(run.name for run in self.runs if run.parent and run.parent.name == start)
            several = [nats for name in names if len((nats := self.best(name)).values) > 1]
            seeds = set.intersection(*(set(nats.seeds) for nats in several)) if several else set()
            if len(several) > 1 and len(seeds) > 1:
                found[start] = _left_over([[nats.of_seed(seed) for seed in seeds] for nats in several])
        return found

    def difference(self, nats: Nats, other: Nats, *, with_noise: bool = True) -> Difference | None:
        """By how much one perplexity lies above another, with the noise of seeds and of draws.

        Over the seeds that both have, where there are any: a seed is also a data order.
        """
        if not nats or not other:
            return None
        if set(nats.seeds) & set(other.seeds):
            nats, other = nats.among(other), other.among(nats)
        log, draws = nats.mean - other.mean, (nats.draws, other.draws)
        of_seeds = self._of_seeds(nats, other)
        if not with_noise or of_seeds is None or None in draws:
            return Difference(log)
        error, errors = of_seeds
        return Difference(log, math.hypot(error, *filter(None, draws)), errors)

    def _of_seeds(self, nats: Nats, other: Nats) -> tuple[float, float] | None:
        """The standard error of a difference by seeds, and how many make one; None where it is not known.

        What starts from the same checkpoints is compared pair by pair, once that noise is known.
        """
        paired = self.paired_spreads.get(nats.start) if nats.start == other.start else None
        if paired is not None and paired.errors is not None and set(nats.seeds) == set(other.seeds):
            gaps = [nats.of_seed(seed) - other.of_seed(seed) for seed in nats.seeds]
            return math.sqrt(2) * _error_of_seeds(gaps, paired, scale=math.sqrt(2)), paired.errors
        spreads = [self.spreads.get(each.family) for each in (nats, other)]
        known = [each for each in spreads if each is not None and each.errors is not None]
        if len(known) < 2:
            return None
        each = (_error_of_seeds(one.values, spread) for one, spread in zip((nats, other), known, strict=True))
        return math.hypot(*each), max(spread.errors or 0.0 for spread in known)

    def above_ar(self, nats: Nats, *, part: bool = False, ar: str = "ar") -> Difference | None:
        """Above the likelihood of AR on the same text."""
        return self.difference(nats, self.exact(ar, part=part))

    def variances(self, name: str) -> dict[str, float]:
        """Of the loss, by rule, the mean over seeds."""
        found: dict[str, list[float]] = {}
        for line in self.measured(name, "variance"):
            for rule, each in line["result"]["rules"].items():
                found.setdefault(rule, []).append(each["variance"])
        return {rule: statistics.mean(values) for rule, values in found.items()}

    def texts(self) -> list[Written]:
        """Every set of texts that some run is to write, written or not."""
        return [
            self._written(run, measure)
            for run in self.runs
            for measure in run.measures
            if isinstance(measure, Texts)
        ]

    def _written(self, run: Run, asked: Texts) -> Written:
        cost = self.result(run, asked)
        name = text_name(run.name, run.seed, run.digest, cost["set"]) if cost else None
        return Written(run, asked, cost, self.verdicts.get(name) if name else None)

    def real_text(self, contexts: int) -> Mapping[str, Any] | None:
        """The verdict on held-out text of as many tokens."""
        judged = self.verdicts.get(real_name(contexts))
        return None if judged is None else judged["result"]

    def curve(self, name: str) -> dict[int, float]:
        """Training loss by step of the first seed."""
        return {line["step"]: line["train_nats"] for line in self.results.of(self.named(name)[0], "step")}

    def diverged(self, name: str) -> bool:
        """Whether no seed of a run was trained to the end, and none will be."""
        return all(self.results.failed(run) for run in self.named(name))


WHOLE, OTHERS = "what begins as diffusion of whole contexts", "all others"
_LONGER = "longer trainings"


def family(run: Run) -> str:
    """Whose spread over seeds it shares: one seed of diffusion of whole contexts may lag another by hundreds
    of steps, and with it what starts from it, while those of the others keep pace. What is trained for longer
    would have a spread of its own, if it had more than one seed."""
    if run.table == "long":
        return _LONGER
    method = run.lineage[0].recipe.method
    whole = method.kind in ("score_entropy", "d3pm") or (
        isinstance(method, BlockDiffusionRecipe) and method.block_size is None
    )
    return WHOLE if whole else OTHERS


def _beginning(run: Run) -> str:
    """What runs have in common that begin alike, however long: their seeds are not new ones."""
    recipe = run.lineage[0].recipe
    return f"{recipe.method} {recipe.network}"


def _pooled(groups: Sequence[Sequence[tuple[float, ...]]]) -> Spread:
    """Over groups of models that begin alike; a group counts as one model with the most seeds of any."""
    freedoms = [max(len(values) for values in group) - 1 for group in groups]
    variances = [statistics.mean(statistics.variance(values) for values in group) for group in groups]
    squares = sum(variance * freedom for variance, freedom in zip(variances, freedoms, strict=True))
    return Spread(math.sqrt(squares / sum(freedoms)), sum(freedoms))


def _left_over(table: Sequence[Sequence[float]]) -> Spread:
    """Of models by seeds, what the means of both do not explain."""
    all_ = statistics.mean(value for values in table for value in values)
    of_seeds = [statistics.mean(column) - all_ for column in zip(*table, strict=True)]
    squares = sum(
        (value - statistics.mean(values) - shift) ** 2
        for values in table
        for value, shift in zip(values, of_seeds, strict=True)
    )
    freedom = (len(table) - 1) * (len(of_seeds) - 1)
    return Spread(math.sqrt(squares / freedom), freedom)


def _error_of_seeds(values: Sequence[float], spread: Spread, *, scale: float = 1.0) -> float:
    """Of a mean over seeds. Two seeds may agree by chance: the pooled spread is the least there is.

    Where values are differences, `scale` is how much larger their spread is than that of one.
    """
    own = statistics.stdev(values) / scale if len(values) > 1 else 0.0
    return max(own, spread.value) / math.sqrt(len(values))


def is_decoding(asked: Texts) -> bool:
    """Whether it is a point of the decoding curves, of which nothing is drawn again."""
    return asked.floor is None and asked.steps is None


def trained_tokens(run: Run) -> int:
    """Of all stages; those of a run in the time of another are not known from its recipe."""
    recipes = [each.recipe for each in run.lineage]
    return sum(each.train.steps * each.train.global_batch * each.data.context for each in recipes)


def shown(value: object) -> str:
    """A figure, or that it is not measured."""
    return NOT_MEASURED if value is None else str(value)


def number(value: float | None, form: str = ".2f", *, missing: str = NOT_MEASURED) -> str:
    return missing if value is None else format(value, form)
