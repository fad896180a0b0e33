"""Likelihoods over seeds, how they differ, and how much of a difference may be noise."""

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

NOT_MEASURED = "not measured"
_ERRORS = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04}
"""How many standard errors make a difference: Student's t by degrees of freedom, two-sided, five percent."""
_SMALL = 0.1  # an error up to which ± is as good as an interval


@dataclass(frozen=True)
class Nats:
    """Nats a token of one text, a value for each seed; `is_bound` where the truth may be less.

    `draws` is the Monte-Carlo error, None where it is not known. All seeds are measured with the same draws,
    so that it is no smaller for their mean. `start` is the name of what it starts from; `trainings` and
    `starts` say of each seed which training was measured, and which one that started from: a recipe may have
    been trained more than once.
    """

    values: tuple[float, ...] = ()
    is_bound: bool = False
    draws: float | None = 0.0
    seeds: tuple[int, ...] = ()
    family: str = ""
    start: str = ""
    trainings: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

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

    def start_of(self, seed: int) -> str:
        """Which training it started from; nothing for what starts from none."""
        return self.starts[self.seeds.index(seed)] if self.start else ""

    def of_seeds(self, seeds: Collection[int]) -> "Nats":
        """Of some of its seeds."""
        places = [place for place, seed in enumerate(self.seeds) if seed in seeds]

        def kept(each: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(each[place] for place in places) if each else ()

        parts = {name: kept(getattr(self, name)) for name in ("values", "seeds", "trainings", "starts")}
        return replace(self, **parts)

    def of_trainings(self, trainings: Collection[str]) -> "Nats":
        """Of the seeds alone whose very weights came of these."""
        pairs = zip(self.seeds, self.trainings, strict=True)
        return self.of_seeds([seed for seed, training in pairs if training in trainings])


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

    @property
    def interval(self) -> tuple[float, float] | None:
        """One standard error to both sides, as shares: of a large one no longer the same on both."""
        if self.log_error is None:
            return None
        return math.expm1(self.log - self.log_error), math.expm1(self.log + self.log_error)

    def __str__(self) -> str:
        error = ""
        if self.error is not None and self.interval is not None:
            low, high = self.interval
            is_small = self.error <= _SMALL * (1 + self.value)
            error = f" ± {100 * self.error:.1f}" if is_small else f" ({100 * low:+.1f} to {100 * high:+.1f})"
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
class Estimate:
    """A positive figure, with its standard error where that is known."""

    value: float
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")

    def over(self, other: "Estimate") -> Difference:
        errors = [each.error and each.error / each.value for each in (self, other)]
        known = None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])
        return Difference(math.log(self.value / other.value), known)


def pooled(groups: Iterable[Sequence[tuple[float, ...]]]) -> Spread:
    """Of the seeds of models, in groups that begin alike: of each the model with the most seeds, or the mean
    of several that have as many."""
    squares, freedom = 0.0, 0
    for group in groups:
        most = max(len(values) for values in group)
        variance = statistics.mean(statistics.variance(values) for values in group if len(values) == most)
        squares += variance * (most - 1)
        freedom += most - 1
    return Spread(math.sqrt(squares / freedom), freedom)


def left_over(table: Sequence[Sequence[float]]) -> Spread:
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


def error_of_seeds(values: Sequence[float], spread: Spread, *, scale: float = 1.0) -> float:
    """Of a mean over seeds. Two seeds may agree by chance: the pooled spread is the least there is.

    Where values are differences, `scale` is how much larger their spread is than that of one.
    """
    own = statistics.stdev(values) / scale if len(values) > 1 else 0.0
    return max(own, spread.value) / math.sqrt(len(values))


def error_of_pairs(nats: Nats, other: Nats, spread: Spread) -> tuple[float, float]:
    """Of the mean difference of pairs that start from the same weights, and how many make a difference."""
    gaps = [nats.of_seed(seed) - other.of_seed(seed) for seed in nats.seeds]
    return math.sqrt(2) * error_of_seeds(gaps, spread, scale=math.sqrt(2)), spread.errors or math.inf


def comparable(models: Sequence[Nats], *, strictly: bool = False) -> set[int]:
    """The seeds that all have and in which all start from the same weights; else all common ones."""
    common = set.intersection(*(set(nats.seeds) for nats in models))
    alike = {seed for seed in common if len({nats.start_of(seed) for nats in models}) == 1}
    return alike if alike or strictly else common


def most_start_from(models: Sequence[Nats]) -> dict[int, str]:
    """The training that most of some models start from, by seed, where two or more do."""
    found = {}
    for seed in dict.fromkeys(seed for nats in models for seed in nats.seeds):
        starts = Counter(nats.start_of(seed) for nats in models if seed in nats.seeds)
        start, number = starts.most_common(1)[0]
        if number > 1:
            found[seed] = start
    return found
