"""What is still to be done, in which order, and about how long it takes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from research.evidence.measures import Documents, Measure, Perplexity, Texts
from research.evidence.results import Results
from research.evidence.runs import Run
from research.evidence.train import run_steps

# Guesses for one H200, in seconds, until something was timed.
_STEP = {
    "autoregressive": 0.032,
    "mdlm": 0.032,
    "block": 0.050,
    "block+copies": 0.070,
    "block+next": 0.065,
    "block+copies+next": 0.085,
    "score_entropy": 0.040,
    "d3pm": 0.040,
    "simplex": 0.150,
}
_COMPILE = 32.0
_START = 3.0  # to build a run, and what is done around it


@dataclass(frozen=True)
class Job:
    """A run with the parents that must be trained before it, again or for the first time."""

    run: Run
    parents: tuple[Run, ...]
    missing: tuple[Measure, ...]


def job(run: Run, results: Results, there: Callable[[Run], bool]) -> Job | None:
    """What is missing of a run, if anything; `there` says whose weights can be started from."""
    missing = results.missing(run)
    if not missing:
        return None
    return Job(run, tuple(each for each in run.lineage[:-1] if not there(each)), tuple(missing))


def is_ready(run: Run, results: Results) -> bool:
    """Whether it is known how long it is to be trained."""
    try:
        run_steps(run, results)
    except ValueError:
        return False
    return True


def seconds(job: Job, results: Results, compiled: Collection[str], *, others: int = 0) -> float:
    """An estimate; a shape that is not among the `compiled` ones is compiled first.

    Where `others` use the GPU at the same time, training takes its share of it; the rest leaves it idle.
    """
    new = {run.shape for run in (*job.parents, job.run)} - set(compiled)
    compiling = len(new) * (results.overhead_seconds() or _COMPILE)
    training = sum(_training(run, results) for run in (*job.parents, job.run))
    measuring = sum(
        results.measure_seconds(measure, job.run) or _guess(measure, job.run) for measure in job.missing
    )
    return compiling + training * (1 + others) + measuring


def _training(run: Run, results: Results) -> float:
    other = run.same_time_as
    if other is not None:  # whatever its steps are
        return _training(other, results)
    step = results.step_seconds(run.cost, run.kind) or _STEP[run.kind]
    search = 1.5 * 5 if run.method.get("masking", {}).get("search") else 0.0
    return run.steps * step + search + _START


def _guess(measure: Measure, run: Run) -> float:
    match measure:
        case Perplexity(estimator="exact"):
            return 0.5 + measure.sequences / 768 * 2 ** (run.block_size or 1) * 0.2
        case Perplexity(estimator="iw:8"):
            return 4.0
        case Perplexity():
            return 0.5 + measure.sequences / 768 * measure.replicates * 0.4
        case Texts(steps=int(number)):
            passes = number * (11 if run.kind == "simplex" else 1)
            return measure.contexts * passes * 0.006
        case Texts():
            return measure.contexts * (4.0 if run.kind in ("mdlm", "d3pm") else 1.5)
        case Documents():
            return 20.0
    return 1.0
