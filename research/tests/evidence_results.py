"""Results of the experiments that nobody measured, to see what is made of them."""

import math
import re
from typing import Any

from bd3lm.reports.document import Table
from research.evidence.measures import Documents, Measure, Perplexity, Texts, Variance, describe
from research.evidence.results import Results
from research.evidence.runs import Run, all_runs
from research.evidence.samples import text_name

ALL = all_runs()
RUNS = {run.key: run for run in ALL}
EXACT = Perplexity(estimator="exact")
TRAINED = {"steps": 10, "step_seconds": 0.1, "seconds": 30.0, "graphs": 1, "commit": "abc"}
REAL = {
    "vocabulary": 300,
    "tokens": 10**7,
    "number": 4,
    "median": 5,
    "p90": 8,
    "max": 8,
    "lengths": [3, 5, 5, 8],
}


def add(
    results: Results, key: str, measure: Measure = EXACT, draws: float | None = 0.0, **perplexities: float
) -> None:
    figures = [
        {"name": name, "meaning": name, "nats": math.log(value), "monte_carlo_error": draws}
        for name, value in perplexities.items()
    ]
    add_result(results, RUNS[key], measure, {"figures": figures})


def add_result(results: Results, run: Run, measure: Measure, result: dict[str, Any]) -> None:
    fields = {"measure": describe(measure), "training": run.kind, "seconds": 1.0, "result": result}
    results.add("measured", run, **fields)


def judged(perplexity: float, entropy: float = 4.7, error: float = 0.03) -> dict[str, Any]:
    return {
        "settings": {"judge": "a judge", "judge_dtype": "float32"},
        "result": {
            "nats": math.log(perplexity),
            "standard_error": error,
            "perplexity": perplexity,
            "perplexity_error": perplexity * error,
            "bits_per_character": 1.25,
            "entropy": entropy,
            "entropy_error": error,
        },
    }


def set_name(measure: Texts) -> str:
    return re.sub(r"\W+", "-", repr(measure))


def row(table: Table, name: str) -> list[str]:
    return next(list(cells) for cells in table.rows if cells[0] == name)


def fill(results: Results, verdicts: dict[str, Any]) -> None:
    """A result for everything that any run is to measure; the figures mean nothing."""
    known = {each.digest: each for run in ALL for each in run.lineage}
    for trained in known.values():
        results.add("step", trained, step=50, train_nats=5.0)
        results.add("step", trained, step=100, train_nats=4.5)
        learned = {"low": 0.4, "high": 0.9}
        described = {"device": "a GPU", "torch": "2", "precision": "bf16", "data": "0"}
        described |= {"training": trained.kind, "cost": trained.cost}
        results.add("trained", trained, learned=learned, **TRAINED, **described)
    for place, run in enumerate(ALL):
        for measure in run.measures:
            add_result(results, run, measure, _invented(measure, place))
            if isinstance(measure, Texts):
                name = text_name(run.name, run.seed, run.digest, set_name(measure))
                verdicts[name] = judged(100.0 + place)


def _invented(measure: Measure, place: int) -> dict[str, Any]:
    match measure:
        case Perplexity():
            names = ("exact", "nelbo", measure.estimator)
            known = {"nats": 4.0 + place / 100, "meaning": "exact", "monte_carlo_error": 0.001}
            return {"figures": [{"name": name, **known} for name in names]}
        case Variance():
            return {"rules": {rule: {"variance": 2.0 + place, "error": 0.1} for rule in measure.rules}}
        case Texts():
            cost = {"evaluations_per_token": 0.5 + place / 200, "entropy": 4.7, "redraws": 0}
            return {"set": set_name(measure), **cost}
        case Documents():
            lengths = {"number": 3, "median": 5, "p90": 9, "max": 9, "lengths": [3, 5, 9]}
            return {**lengths, "stopped_by": {"eos": 3}}
