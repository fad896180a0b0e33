"""The runner of the experiments: what it declares, how it goes on where it stopped, what it writes down."""

import json
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bd3lm.commands.shared.sample_files import Samples
from bd3lm.data import TokenShards
from bd3lm.runs import plan as run_plan
from bd3lm.runs.merging import merge
from bd3lm.training import Engine
from research.evidence import paper, plan
from research.evidence.__main__ import main, time_all, work
from research.evidence.measure import alike, measure, measure_together
from research.evidence.measures import TRAINED_ON, ZERO_SHOT, Perplexity, Texts, Variance, describe
from research.evidence.prepare import pack, prepare_tiny, unpack
from research.evidence.results import Results
from research.evidence.runs import STEPS, Run, all_runs
from research.evidence.samples import unpack_samples
from research.evidence.tiny import tiny
from research.evidence.train import Place, run_steps, train

RUNS = {run.key: run for run in all_runs()}
EXACT = Perplexity(estimator="exact")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_tiny(folder)
    return folder


@pytest.fixture
def place(data: Path, tmp_path: Path) -> Place:
    return Place(data, tmp_path / "weights", Engine())


def small(key: str, *, measures: tuple = (EXACT,), changes: dict | None = None) -> Run:
    """A declared run at its toy size, with few measures."""
    run = tiny(RUNS[key])
    small_measures = tiny(Run(name="", table="", changes=run.changes, measures=measures)).measures
    return Run(
        name=run.name,
        table=run.table,
        changes=merge(run.changes, changes or {}),
        seed=run.seed,
        parent=run.parent,
        same_time_as=run.same_time_as,
        measures=small_measures,
    )


def do(runs: list[Run], place: Place, file: Path, *, seconds: float = math.inf) -> Results:
    results = Results(file)
    work(runs, place, results, time.monotonic() + seconds)
    return results


def kinds(results: Results, run: Run) -> list[str]:
    return [line["kind"] for line in results.lines if line["digest"] == run.digest and line["kind"] != "step"]


def test_runs_have_names_and_settings_of_their_own():
    assert len(RUNS) == len(all_runs())
    digests = [run.digest for run in RUNS.values()]
    assert len(set(digests)) == len(digests)


def test_runs_that_are_compared_have_seen_as_many_tokens():
    for run in RUNS.values():
        if run.table in ("main", "past", "case") and run.name != "base" and run.same_time_as is None:
            assert sum(each.steps for each in run.lineage) == STEPS, run.key
        # Later stages go on in the order of the data where the stage before them stopped.
        read = 0
        for each in run.lineage:
            assert each.settings["data"]["skip"] == read, run.key
            read += each.steps * each.settings["train"]["global_batch"]
        assert all(each.seed == run.seed for each in run.lineage)
        assert run.method["score_first"]


def test_every_row_of_the_paper_has_a_run():
    names = {run.name for run in RUNS.values()}
    rows = (paper.LM1B, paper.OPENWEBTEXT, paper.ZERO_SHOT, paper.CASE_STUDY, paper.SCHEDULES)
    rows += (paper.LENGTHS, paper.GENERATIVE)
    assert not {name for table in rows for name in table} - names
    assert all(len(row) == len(ZERO_SHOT) - 1 for row in paper.ZERO_SHOT.values())


@pytest.mark.slow
def test_a_child_starts_from_its_parent_and_nothing_is_done_twice(place: Place, tmp_path: Path):
    base, child = small("base/0", measures=()), small("range-4-0.3-0.8/0")
    file = tmp_path / "evidence.jsonl"
    results = do([child], place, file)
    assert kinds(results, base) == ["trained"]
    assert kinds(results, child) == ["trained", "measured"]
    assert place.model_of(base).is_dir()
    assert not place.model_of(child).exists()
    before = file.read_text()
    do([child], place, file)
    assert file.read_text() == before
    # A measure that is added later trains again, from the weights that are there, and measures only that.
    more = small("range-4-0.3-0.8/0", measures=(EXACT, Variance(rules=("counts",))))
    results = do([more], place, file)
    assert kinds(results, base) == ["trained"]
    assert kinds(results, more) == ["trained", "measured", "trained", "measured"]
    found = [line["measure"]["kind"] for line in results.of(more, "measured")]
    assert found == ["perplexity", "variance"]


@pytest.mark.slow
def test_weights_that_are_gone_are_trained_again(place: Place, data: Path, tmp_path: Path):
    file = tmp_path / "evidence.jsonl"
    first, second = small("range-4-0.3-0.8/0"), small("range-4-0.5-1/0")
    do([first], place, file)
    elsewhere = Place(data, tmp_path / "other", Engine())
    results = do([first, second], elsewhere, file)
    base = small("base/0")
    assert kinds(results, base) == ["trained", "trained"]
    assert kinds(results, first) == kinds(results, second) == ["trained", "measured"]
    steps = [line["step"] for line in results.of(base, "step")]
    assert len(steps) == len(set(steps))


@pytest.mark.slow
def test_training_goes_the_same_way_again(place: Place, data: Path, tmp_path: Path):
    run = small("counts-4/0")
    found = [
        do([run], Place(data, tmp_path / name, Engine()), tmp_path / f"{name}.jsonl").of(run, "measured")
        for name in ("one", "two")
    ]
    assert found[0][0]["result"] == found[1][0]["result"]


def test_a_run_that_diverges_is_a_result_and_the_rest_goes_on(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wild = small("counts-4/0", changes={"optimizer": {"lr": 1e30, "clip_norm": None}})
    file = tmp_path / "evidence.jsonl"
    results = do([wild, small("ar/0")], place, file)
    assert kinds(results, wild) == ["failed"]
    assert kinds(results, small("ar/0")) == ["trained", "measured"]
    before = file.read_text()
    do([wild], place, file)
    assert file.read_text() == before
    assert "not finite" in capsys.readouterr().out


@pytest.mark.slow
def test_a_measure_that_breaks_costs_no_other_and_is_tried_again(place: Place, tmp_path: Path):
    run = small("ar/0", measures=(Variance(rules=("counts",)), EXACT))
    file = tmp_path / "evidence.jsonl"
    results = do([run], place, file)
    assert kinds(results, run) == ["trained", "broken", "measured"]
    assert "only block diffusion" in results.of(run, "broken")[0]["error"]
    assert [describe(each)["kind"] for each in results.missing(run)] == ["variance"]
    assert kinds(do([run], place, file), run)[3:] == ["trained", "broken"]


def test_without_time_nothing_is_started(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = do([small("ar/0")], place, tmp_path / "evidence.jsonl", seconds=1.0)
    assert not results.lines
    assert "left for another time: ar/0 (" in capsys.readouterr().out


def test_estimates_follow_what_was_timed(tmp_path: Path):
    results = Results(tmp_path / "evidence.jsonl")
    run = RUNS["counts-4/0"]
    job = plan.job(run, results, there=lambda parent: False)
    guessed = plan.seconds(job, results, {run.shape})
    timed = {"training": run.kind, "shape": run.shape, "graphs": 0}
    results.add("trained", run, steps=STEPS, step_seconds=1.0, seconds=STEPS, **timed)
    assert guessed < 100 < STEPS <= plan.seconds(job, results, {run.shape}) < STEPS + 20


def test_equal_time_is_by_measured_steps(tmp_path: Path):
    results = Results(tmp_path / "evidence.jsonl")
    slow, staged = RUNS["time-both-4/0"], RUNS["time-from-ar-4/0"]
    assert not plan.is_ready(slow, results)
    with pytest.raises(ValueError, match="needs the time of a step of runs like time-both-4/0, counts-4/0"):
        run_steps(slow, results)
    # Of another size of blocks, or with other masks, a step takes another time.
    for key, spent in {
        "counts-4/0": 0.04,
        "both-4/0": 0.06,
        "next-4/0": 1.0,
        "ar/0": 0.02,
        "counts-16/0": 1.0,
        "linear-4/0": 1.0,
        "both-16/0": 1.0,
    }.items():
        run = RUNS[key]
        timed = {"training": run.kind, "shape": run.shape, "cost": run.cost, "graphs": 1, "seconds": 90.0}
        results.add("trained", run, steps=STEPS, step_seconds=spent, **timed)
    assert run_steps(slow, results) == round(STEPS * 2 / 3)
    # Half of the steps as AR take a quarter of the time.
    assert run_steps(staged, results) == round(STEPS * 0.75 * 2 / 3)


def test_steps_can_be_timed_alone(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("research.evidence.train._TIMED", 8)
    run = small("time-from-ar-4/0", measures=())
    results = Results(tmp_path / "evidence.jsonl")
    time_all([run], place, results)
    assert plan.is_ready(run, results)
    assert [line["kind"] for line in results.lines] == ["timed"] * 3
    time_all([run], place, results)  # each once
    assert len(results.lines) == 3
    assert not results.of(run, "trained")


def test_steps_are_timed_as_they_are_trained(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = []

    def build(plan: run_plan.Plan) -> run_plan.Run:
        built = build_a_run(plan)
        begun.append((plan.recipe.train.steps, built.trainer))
        return built

    build_a_run = run_plan.Plan.build
    monkeypatch.setattr(run_plan.Plan, "build", build)

    monkeypatch.setattr("research.evidence.train._TIMED", 8)
    run = small("counts-4/0", measures=(), changes={"train": {"steps": 1000}})
    time_all([run], place, Results(tmp_path / "evidence.jsonl"))
    ((steps, trainer),) = begun
    assert (steps, trainer.step) == (1000, 8)


def test_steps_that_were_timed_in_too_short_a_run_do_not_count(tmp_path: Path):
    run, results = RUNS["counts-4/0"], Results(tmp_path / "evidence.jsonl")
    timed = {"training": run.kind, "cost": run.cost}
    results.add("timed", run, step_seconds=3.0, **timed)
    assert Results(results.file).step_seconds(run.cost) is None
    results.add("timed", run, step_seconds=2.0, as_trained=True, **timed)
    assert Results(results.file).step_seconds(run.cost) == 2.0


def test_what_got_too_much_time_is_trained_again(tmp_path: Path):
    """Older lines of equal time, whose budget was of other steps, count for nothing but what they cost."""
    run, results = RUNS["time-copies-4/0"], Results(tmp_path / "evidence.jsonl")
    measured = {"training": run.kind, "measure": describe(run.measures[0]), "seconds": 1.0}
    common = {"training": run.kind, "cost": run.cost, "step_seconds": None, "parent": None}
    results.add("trained", run, steps=704, **common)
    results.add("measured", run, result={"old": True}, **measured)
    reread = Results(tmp_path / "more.jsonl", [results.file])
    assert len(reread.missing(run)) == len(run.measures)
    assert reread.of(run, "trained") == reread.of(run, "measured") == []
    assert [line["kind"] for line in reread.lines] == ["trained", "measured"]
    reread.add("trained", run, steps=650, budget={run.key: 0.1, "counts-4/0": 0.07}, **common)
    reread.add("measured", run, result={"old": False}, **measured)
    for known in (reread, Results(tmp_path / "none.jsonl", [results.file, reread.file])):
        assert [line["result"] for line in known.of(run, "measured")] == [{"old": False}]
        assert [line["steps"] for line in known.of(run, "trained")] == [650]
        assert len(known.missing(run)) == len(run.measures) - 1


@pytest.mark.slow
def test_a_second_run_of_a_shape_compiles_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # dynamo's part of it
    torch._dynamo.reset()
    compiled = {"train": {"compile": True}}
    first, second = (small(f"counts-4/{seed}", changes=compiled) for seed in (0, 1))
    searched = [small(f"bd3lm-4/{seed}", changes=compiled) for seed in (0, 1)]
    results = do([first, second, *searched], place, tmp_path / "evidence.jsonl")
    graphs = [results.of(run, "trained")[0]["graphs"] for run in (first, second, *searched)]
    assert graphs[0] > 0
    assert graphs[1:] == [0, 0, 0]  # blocks of 4 again, the clip search included


@pytest.mark.slow
def test_exact_likelihoods_of_several_orders_are_those_of_each(place: Place, tmp_path: Path):
    """Taken together from one set of passes, and one by one on the same weights."""
    orders = tuple(replace(EXACT, lean=lean) for lean in (0.0, 1.0, 4.0))
    run = small("from-ar-copies-4/0", measures=(*orders, Perplexity(estimator="next-token")))
    results = Results(tmp_path / "e.jsonl")
    for parent in run.lineage[:-1]:
        train(parent, place, results, keep=True)
    model = train(run, place, results, keep=False)
    groups = alike(run.measures)
    assert [len(group) for group in groups] == [3, 1]
    together = measure_together(groups[0], run, model, place, results)
    alone = [measure(what, run, model, place, results) for what in groups[0]]
    assert together == alone
    assert len({found["figures"][0]["nats"] for found in together}) == 3


@pytest.mark.slow
def test_texts_can_be_judged_later(place: Place, tmp_path: Path):
    run = small("bd3lm-4/0", measures=(Texts(), Texts(contexts=2)))
    results = do([run], place, tmp_path / "evidence.jsonl")
    files = unpack_samples([results.samples], tmp_path / "texts")
    assert len(files) == 2
    for file, contexts in zip(files, (1, 2), strict=True):
        samples = Samples.read(file)
        samples.require_from_nothing()
        assert samples.values("length") == [32 * contexts] * 2
    assert unpack_samples([results.samples], tmp_path / "texts", judged=[files[0].stem]) == files[1:]


def test_a_torn_line_is_left_out(tmp_path: Path):
    file = tmp_path / "evidence.jsonl"
    file.write_text(json.dumps({"kind": "step", "digest": "x"}) + '\n{"kind": "tra')
    assert [line["kind"] for line in Results(file).lines] == ["step"]


def test_data_come_back_from_their_file(data: Path, tmp_path: Path):
    pack(data, tmp_path / "data.tar.xz")
    assert [file.name for file in tmp_path.glob("data*")] == ["data.tar.xz"]
    unpack(tmp_path / "data.tar.xz", tmp_path / "again")
    for name in (TRAINED_ON, *ZERO_SHOT):
        before, after = TokenShards(data / name), TokenShards(tmp_path / "again" / name)
        assert after.fingerprint == before.fingerprint
        for split, counts in before.meta.splits.items():
            texts = (shards.read(split, 0, counts.tokens).tolist() for shards in (before, after))
            assert next(texts) == next(texts)


@pytest.mark.slow
def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]):
    main(["--tiny", "--list", "--only", "ssd-lm"])
    assert "| ssd-lm/0 | ssd-lm |" in capsys.readouterr().out
    main(["--tiny", "--list", "--only", "ssd-lm", "case", "ar-random-batch"])
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "/0 |" in line]
    assert names == ["ssd-lm/0", "ar-random-batch/0", "block-1/0", "block-1-full/0"]  # as asked, each once
    with pytest.raises(SystemExit, match="--only must name runs or tables, got nothing-like-it"):
        main(["--tiny", "--list", "--only", "nothing-like-it"])


@pytest.mark.slow
def test_everything_works_at_a_toy_size(tmp_path: Path):
    """All runs of a first seed; what a second has besides is a seed."""
    runs = [tiny(run) for run in all_runs() if run.seed == 0]
    main(["--tiny", "--out", str(tmp_path), "--only", *(run.key for run in runs)])
    results = Results(tmp_path / "evidence.jsonl")
    assert not [line for line in results.lines if line["kind"] in ("broken", "failed")]
    assert not [run.key for run in runs if results.missing(run)]


def test_a_run_that_was_over_at_once_has_no_step_time(place: Place, tmp_path: Path):
    """Its only window is that in which it was compiled."""
    run = small("ar/0", changes={"train": {"steps": 1}})
    results = do([run], place, tmp_path / "evidence.jsonl")
    assert [line["step_seconds"] for line in results.of(run, "trained")] == [None]
    assert results.step_seconds(run.cost, run.kind) is None


def test_what_shares_a_gpu_is_not_timed_and_is_expected_to_take_longer(place: Place, tmp_path: Path):
    run = small("ar/0")
    results = do([run], replace(place, others=2), tmp_path / "evidence.jsonl")
    assert [line["step_seconds"] for line in results.of(run, "trained")] == [None]
    job = plan.job(RUNS["ar/0"], results, there=lambda parent: False)
    alone, shared = (plan.seconds(job, results, [run.shape], others=others) for others in (0, 2))
    training = RUNS["ar/0"].steps * plan._STEP["autoregressive"] + plan._START
    assert shared - alone == pytest.approx(2 * training)


@pytest.mark.slow
def test_results_of_another_process_are_known(tmp_path: Path):
    main(["--tiny", "--out", str(tmp_path / "a"), "--only", "ar/0"])
    done = tmp_path / "a" / "evidence.jsonl"
    main(["--tiny", "--out", str(tmp_path / "b"), "--only", "ar/0", "--earlier", str(done)])
    assert not (tmp_path / "b" / "evidence.jsonl").exists()
