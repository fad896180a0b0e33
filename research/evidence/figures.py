"""What was measured, by the names of runs: likelihoods over seeds, how they differ, texts with verdicts."""

import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from research.evidence.measures import TRAINED_ON, Measure, Texts, describe
from research.evidence.noise import (
    NOT_MEASURED,
    Difference,
    Estimate,
    Nats,
    Spread,
    comparable,
    error_of_pairs,
    error_of_seeds,
    left_over,
    most_start_from,
    pooled,
)
from research.evidence.real import REAL, real_name
from research.evidence.records import Line
from research.evidence.results import PATTERN, Results
from research.evidence.runs import LEANS, LONG, TIED_AR, Run, all_runs
from research.evidence.samples import JUDGED, in_order, read_verdicts, text_name

DIVERGED, NONE = "diverged", "–"
"""The second where there is no such figure, as of a bound of an exact likelihood, or in the paper."""


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
        results = Results(folder / "none", in_order(folder, PATTERN))
        real = folder / REAL
        return cls(
            results,
            all_runs(),
            read_verdicts(in_order(folder, JUDGED)),
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
        trainings: dict[int, str] = {}
        is_bound = False
        for line in self.measured(name, "perplexity"):
            asked = line["measure"]
            where = asked["data"], asked["split"], asked["part"], asked["lean"]
            if asked["estimator"] != estimator or where != (data, split, part, lean):
                continue
            for each in line["result"]["figures"]:
                if each["name"] == (figure or estimator) and each["nats"] is not None:
                    found[line["seed"]] = each["nats"]
                    draws[line["seed"]] = each["monte_carlo_error"]
                    trainings[line["seed"]] = line.get("training_id") or line["digest"]
                    is_bound = each["name"] != "exact"
        known = [each for each in draws.values() if each is not None]
        of_draws = statistics.mean(known or [0.0]) if len(known) == len(draws) else None
        runs = {run.seed: run for run in self.named(name)}
        parents = {seed: run.parent for seed, run in runs.items() if run.parent}
        return Nats(
            tuple(found.values()),
            is_bound,
            of_draws,
            seeds=tuple(found),
            family=family(self.named(name)[0]),
            start=next((parent.name for parent in parents.values()), ""),
            trainings=tuple(trainings.values()),
            starts=tuple(
                self._starts.get(trainings[seed]) or parents[seed].digest for seed in found if parents
            ),
        )

    @cached_property
    def _starts(self) -> dict[str, str]:
        """Which training another one started from."""
        lines = (line for line in self.results.lines if line.get("started_from"))
        return {line["training_id"]: line["started_from"] for line in lines}

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
        groups: dict[str, dict[str, list[tuple[float, ...]]]] = {}
        for name, nats in self.several_seeds.items():
            alike = groups.setdefault(nats.family, {})
            alike.setdefault(_beginning(self.named(name)[0]), []).append(nats.values)
        return {family: pooled(each.values()) for family, each in groups.items()}

    @cached_property
    def several_seeds(self) -> dict[str, Nats]:
        """The models of which the test split was measured for more than one."""
        found = {name: self.best(name) for name in dict.fromkeys(run.name for run in self.runs)}
        return {name: nats for name, nats in found.items() if len(nats.values) > 1}

    @cached_property
    def paired_spreads(self) -> dict[str, Spread]:
        """Of what starts from one checkpoint, by the name of that, beyond what the checkpoint gives to all.

        A table of models and seeds has a mean for each of both; what is left over is the noise of a second
        stage, and how much the worth of a variant depends on the checkpoint.
        """
        found = {}
        for start in dict.fromkeys(run.parent.name for run in self.runs if run.parent):
            names = dict.fromkeys(run.name for run in self.runs if run.parent and run.parent.name == start)
            models = [nats for name in names if (nats := self.best(name))]
            begun = most_start_from(models)
            table = [
                [nats.of_seed(seed) for seed in begun]
                for nats in models
                if all(seed in nats.seeds and nats.start_of(seed) == begun[seed] for seed in begun)
            ]
            if len(table) > 1 and len(begun) > 1:
                found[start] = left_over(table)
        return found

    def difference(self, nats: Nats, other: Nats, *, with_noise: bool = True) -> Difference | None:
        """By how much one perplexity lies above another, with the noise of seeds and of draws.

        Over the seeds that both have, where there are any: a seed is also a data order. Of these over the
        ones alone in which both start from the same weights, once the noise of such pairs is known.
        """
        if not nats or not other:
            return None
        common = set(nats.seeds) & set(other.seeds)
        paired = self.paired_spreads.get(nats.start) if nats.start == other.start else None
        pairs = comparable([nats, other], strictly=True) if paired and paired.errors else set()
        if common:
            nats, other = (each.of_seeds(pairs or common) for each in (nats, other))
        of_seeds = error_of_pairs(nats, other, paired) if pairs and paired else self._of_seeds(nats, other)
        log, draws = nats.mean - other.mean, (nats.draws, other.draws)
        if not with_noise or of_seeds is None or None in draws:
            return Difference(log)
        error, errors = of_seeds
        return Difference(log, math.hypot(error, *filter(None, draws)), errors)

    def _of_seeds(self, nats: Nats, other: Nats) -> tuple[float, float] | None:
        """The standard error of a difference by seeds, and how many make one; None where it is not known."""
        spreads = [self.spreads.get(each.family) for each in (nats, other)]
        known = [each for each in spreads if each is not None and each.errors is not None]
        if len(known) < 2:
            return None
        each = (error_of_seeds(one.values, spread) for one, spread in zip((nats, other), known, strict=True))
        return math.hypot(*each), max(spread.errors or 0.0 for spread in known)

    def above_ar(self, nats: Nats, *, part: bool = False, ar: str = "ar") -> Difference | None:
        """Above the likelihood of AR on the same text."""
        return self.difference(nats, self.exact(ar, part=part))

    def ar_beside(self, name: str) -> str:
        """The autoregressive run that another is held against: of as many steps, and tied where it is."""
        run = self.named(name)[0]
        if run.table == "long":
            return f"{LONG}ar"
        return TIED_AR if run.is_tied else "ar"

    def variances(self, name: str, seeds: Collection[int] | None = None) -> dict[str, Estimate]:
        """Of the loss, by rule, the mean over seeds, or over some of them, and that of their errors."""
        found: dict[str, list[dict[str, float]]] = {}
        for line in self.measured(name, "variance"):
            if seeds is not None and line["seed"] not in seeds:
                continue
            for rule, each in line["result"]["rules"].items():
                found.setdefault(rule, []).append(each)
        return {
            rule: Estimate(*(statistics.mean(each[part] for each in own) for part in ("variance", "error")))
            for rule, own in found.items()
        }

    def in_orders(self, name: str) -> dict[float, Nats]:
        """Likelihoods by lean, of the trainings that were measured in all of these orders, if any were."""
        found = {lean: nats for lean in (0.0, *LEANS) if (nats := self.best(name, lean=lean))}
        if found and (common := set.intersection(*(set(nats.trainings) for nats in found.values()))):
            return {lean: nats.of_trainings(common) for lean, nats in found.items()}
        return found

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


def family(run: Run) -> str:
    """Whose spread over seeds it shares: one seed of diffusion of whole contexts may lag another by hundreds
    of steps, and with it what starts from it, while those of the others keep pace. What is trained for longer
    would have a spread of its own, if it had more than one seed."""
    whole = run.lineage[0].kind in ("mdlm", "score_entropy", "d3pm")
    return ("longer trainings of " if run.table == "long" else "") + (WHOLE if whole else OTHERS)


def _beginning(run: Run) -> str:
    """What runs have in common that begin alike, however long: their seeds are not new ones."""
    settings = run.lineage[0].settings
    return f"{settings['method']} {settings['network']}"


def is_decoding(asked: Texts) -> bool:
    """Whether it is a point of the decoding curves, of which nothing is drawn again."""
    return asked.floor is None and asked.steps is None


def shown(value: object) -> str:
    """A figure, or that it is not measured."""
    return NOT_MEASURED if value is None else str(value)


def number(value: float | None, form: str = ".2f", *, missing: str = NOT_MEASURED) -> str:
    return missing if value is None else format(value, form)
