"""The command: trains and measures what is missing, as far as there is time, and says what is left."""

import argparse
import math
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bd3lm.training import Engine, pick_device
from research.evidence import plan
from research.evidence.measure import alike, measure_together
from research.evidence.measures import Measure, describe
from research.evidence.prepare import prepare_tiny, unpack
from research.evidence.results import PATTERN, Results
from research.evidence.runs import Run, all_runs
from research.evidence.samples import in_order
from research.evidence.tiny import tiny
from research.evidence.train import Place, time_steps, train

_RESULTS = Path(__file__).parent.parent / "results"
_SPARE = 10.0  # seconds that an estimate may be wrong by


def main(words: list[str] | None = None) -> None:
    options = _parse(words)
    runs = [tiny(run) for run in all_runs()] if options.tiny else all_runs()
    if options.only:
        runs = _chosen(runs, options.only)
    earlier = [*options.earlier, *([] if options.tiny else in_order(_RESULTS, PATTERN))]
    if options.list:
        _show(runs, Results(_RESULTS / "none", earlier))
        return
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "evidence.jsonl", earlier)
    torch.set_float32_matmul_precision("high")  # what is measured in float32 may use TF32
    with TemporaryDirectory() as scratch:
        data = options.data
        if options.tiny:
            data = Path(scratch)
            prepare_tiny(data)
        elif data.is_file():
            data = Path(scratch)
            unpack(options.data, data)
        weights = options.weights or Path(scratch) / "weights"
        place = Place(data, weights, Engine(device=pick_device(None)), options.commit, options.others)
        if options.time:
            time_all(runs, place, results)
        else:
            work(runs, place, results, deadline)


def time_all(runs: list[Run], place: Place, results: Results) -> None:
    """Steps of every cost among the runs and what they are to take as long as, once each."""
    asked = [each for run in runs for each in (*run.lineage, run.same_time_as) if each is not None]
    for cost, run in {run.cost: run for run in asked}.items():
        if results.step_seconds(cost) is None:
            time_steps(run, place, results)
        print(f"{run.key}: {1000 * (results.step_seconds(cost) or math.nan):.1f} ms a step", flush=True)


def work(runs: list[Run], place: Place, results: Results, deadline: float) -> None:
    """Every run of which something is missing and for which there seems to be time."""
    compiled: set[str] = set()
    left: list[str] = []
    for run in runs:
        job = plan.job(run, results, there=lambda parent: place.model_of(parent).is_dir())
        if job is None:
            continue
        if not plan.is_ready(run, results):
            left.append(f"{run.key} (needs the step times of others)")
            continue
        expected = plan.seconds(job, results, compiled, others=place.others)
        if time.monotonic() + expected + _SPARE > deadline:
            left.append(f"{run.key} ({expected:.0f} s)")
            continue
        parents = {each.digest for child in runs if results.missing(child) for each in child.lineage[:-1]}
        _do(job, place, results, keep=parents)
        compiled.update(each.shape for each in (*job.parents, run))
    print(f"left for another time: {', '.join(left) or 'nothing'}")


def _do(job: plan.Job, place: Place, results: Results, *, keep: set[str]) -> None:
    """Train and measure; what goes wrong is written down, and the rest goes on."""
    begun = time.monotonic()
    run = job.run
    try:
        for run in (*job.parents, job.run):
            model = train(run, place, results, keep=run.digest in keep)
    except FloatingPointError as error:  # it diverged: that is a result too, and not tried again
        results.add("failed", run, error=str(error))
        print(f"{run.key}: failed, {error}", flush=True)
        return
    except Exception:
        _broke(run, None, results)
        return
    for group in alike(job.missing):
        started = time.monotonic()
        try:
            found = measure_together(group, run, model, place, results)
        except Exception:
            _broke(run, group[0], results)
            continue
        spent = (time.monotonic() - started) / len(group)
        for what, result in zip(group, found, strict=True):
            kept = {"measure": describe(what), "training": run.kind, "seconds": spent, "result": result}
            results.add("measured", run, **kept, others=place.others)
    print(f"{run.key}: {time.monotonic() - begun:.1f} s", flush=True)


def _broke(run: Run, what: Measure | None, results: Results) -> None:
    """Something is wrong with this code or this machine: it is tried again the next time."""
    described = what and describe(what)
    results.add("broken", run, measure=described, error=traceback.format_exc(limit=-3))
    print(f"{run.key}: {described or 'training'} broke\n{traceback.format_exc()}", flush=True)


def _show(runs: list[Run], results: Results) -> None:
    """The plan: what is missing, in order, with estimates as if all of it ran in one process."""
    compiled: set[str] = set()
    made: set[str] = set()
    by_table: dict[str, float] = {}
    print("| run | table | starts from | steps | measures | seconds |\n|---|---|---|---|---|---|")
    for run in runs:
        job = plan.job(run, results, there=lambda parent: parent.digest in made)
        if job is None:
            continue
        expected = plan.seconds(job, results, compiled)
        compiled.update(each.shape for each in (*job.parents, run))
        made.update(each.digest for each in (*job.parents, run))
        by_table[run.table] = by_table.get(run.table, 0.0) + expected
        steps = f"as long as {run.same_time_as.key}" if run.same_time_as else run.steps
        start = run.parent.key if run.parent else ""
        print(f"| {run.key} | {run.table} | {start} | {steps} | {len(job.missing)} | {expected:.0f} |")
    print(", ".join(f"{table} {spent:.0f} s" for table, spent in by_table.items()))
    print(f"{sum(by_table.values()):.0f} s, with {len(compiled)} shapes to compile")


def _chosen(runs: list[Run], only: list[str]) -> list[Run]:
    """Those whose name, key or table was given, in the order of the words."""
    known = {word for run in runs for word in (run.name, run.key, run.table)}
    if wrong := [word for word in only if word not in known]:
        raise SystemExit(f"--only must name runs or tables, got {', '.join(wrong)}; known: {sorted(known)}")
    wanted = {run.key: run for word in only for run in runs if word in (run.name, run.key, run.table)}
    return list(wanted.values())


def _parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m research.evidence", description=__doc__)
    parser.add_argument(
        "--data", type=Path, help="what prepare.py wrote: the file, or the folder it unpacks to"
    )
    parser.add_argument("--out", type=Path, help="the folder for evidence.jsonl and its samples")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="how long to go on starting runs")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="runs (name or name/seed) or tables, in this order"
    )
    parser.add_argument(
        "--weights", type=Path, help="where weights that others start from stay; else dropped"
    )
    parser.add_argument(
        "--earlier", type=Path, nargs="+", default=[], metavar="FILE", help="other results that are known"
    )
    parser.add_argument("--commit", help="of the code, to be written beside what it trained")
    parser.add_argument(
        "--others", type=int, default=0, help="that use this GPU at the same time: steps are then not timed"
    )
    parser.add_argument(
        "--time", action="store_true", help="only time the steps of these runs, alone on the GPU"
    )
    parser.add_argument("--list", action="store_true", help="print what is to be done, and do nothing")
    parser.add_argument("--tiny", action="store_true", help="everything at a toy size on the built-in corpus")
    options = parser.parse_args(words)
    if not options.list and options.out is None:
        parser.error("--out is needed")
    if not options.list and not options.tiny and options.data is None:
        parser.error("--data is needed")
    for flag, paths in (("--data", [options.data] if options.data else []), ("--earlier", options.earlier)):
        if absent := [str(path) for path in paths if not path.exists()]:
            parser.error(f"{flag} must name what exists, got {', '.join(absent)}")
    if options.time and options.others:
        parser.error("--time must have the GPU for itself: leave --others")
    if options.others < 0:
        parser.error(f"--others must not be negative, got {options.others}")
    return options


if __name__ == "__main__":
    main()
