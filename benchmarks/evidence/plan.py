"""What is still to be done, in which order, and about how long it takes."""

from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.evidence.results import Results
from benchmarks.evidence.runs import Documents, Measure, Perplexity, Run, Texts
from benchmarks.evidence.train import Place, run_steps

# Guesses for one H200, in seconds, until something was timed.
_STEP = {
    "autoregressive": 0.022,
    "mdlm": 0.022,
    "block": 0.038,
    "block+copies": 0.056,
    "block+next": 0.048,
    "block+copies+next": 0.066,
    "score_entropy": 0.028,
    "d3pm": 0.028,
    "simplex": 0.150,
}
_COMPILE = 45.0
_START = 3.0  # to build a run, and what is done around it


@dataclass(frozen=True)
class Job:
    """A run with the parents that must be trained before it, again or for the first time."""

    run: Run
    parents: tuple[Run, ...]
    missing: tuple[Measure, ...]


def jobs(runs: Collection[Run], results: Results, place: Place | None = None) -> list[Job]:
    """The runs of which something is missing; without a place no weights are there to start from."""
    found = []
    made: set[str] = set()  # by a job before, which leaves its weights behind
    for run in runs:
        if not (missing := results.missing(run)):
            continue
        parents = [
            parent
            for parent in run.lineage[:-1]
            if parent.digest not in made and (place is None or not place.model_of(parent).is_dir())
        ]
        made |= {each.digest for each in (*parents, run)}
        found.append(Job(run, tuple(parents), tuple(missing)))
    return found


def is_ready(run: Run, results: Results) -> bool:
    """Whether it is known how long it is to be trained."""
    try:
        run_steps(run, results)
    except ValueError:
        return False
    return True


def seconds(job: Job, results: Results, compiled: Collection[str]) -> float:
    """An estimate; a shape that is not among the `compiled` ones is compiled first."""
    new = {run.shape for run in (*job.parents, job.run)} - set(compiled)
    compiling = len(new) * (results.overhead_seconds() or _COMPILE)
    training = sum(_training(run, results) for run in (*job.parents, job.run))
    measuring = sum(
        results.measure_seconds(measure, job.run) or _guess(measure, job.run) for measure in job.missing
    )
    return compiling + training + measuring


def _training(run: Run, results: Results) -> float:
    other = run.same_time_as
    if other is not None:  # whatever its steps are
        return _training(other, results)
    step = results.step_seconds(shape=run.shape) or results.step_seconds(kind=run.kind) or _STEP[run.kind]
    search = 1.5 * 5 if run.recipe.train.validate_every < 1000 else 0.0
    return run.recipe.train.steps * step + search + _START


def _guess(measure: Measure, run: Run) -> float:
    match measure:
        case Perplexity(estimator="exact"):
            size = getattr(run.recipe.method, "block_size", 1) or 1
            return 0.5 + measure.sequences / 768 * 2**size * 0.2
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
