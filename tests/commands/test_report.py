"""`bd3lm report` on small runs that were really trained: what it measures, keeps, shows and refuses."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.eval import Eval, measure_perplexity
from bd3lm.commands.report import Report, make_report, measuring, runs
from bd3lm.commands.shared.records import kept
from bd3lm.commands.shared.subjects import Subject
from bd3lm.reports import Film
from bd3lm.reports.numbers import with_error
from bd3lm.runs.merging import merge
from bd3lm.runs.presets import Preset, Stage
from bd3lm.runs.recipe import recipe_from_dict
from bd3lm.runs.stages import run_stages
from bd3lm.runs.train import train_stages
from bd3lm.training import Trainer
from tests.lm import of_bytes, of_method
from tests.tiny_recipes import BLOCK, plain, prepared, tiny_recipe, two_stages

pytestmark = pytest.mark.sweep(3)

QUIET = Console(quiet=True)
TIMED = {"network": {"adaln": True, "time_conditioning": True}}


def report(*runs: Path, console: Console = QUIET, **flags: Any) -> Path:
    return make_report(Report(runs=runs, **flags), console=console)


def trained(preset: Preset, out: Path) -> Path:
    stages = [(stage.name, recipe_from_dict(stage.recipe, where=stage.name)) for stage in preset.stages]
    train_stages(stages, out, console=QUIET, device="cpu")
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def reported(tmp_path_factory, data) -> Path:
    """A run of two stages with its report in it."""
    out = trained(two_stages(data), tmp_path_factory.mktemp("runs") / "demo")
    report(out, samples=2, device="cpu", console=QUIET)
    return out


@pytest.fixture
def run(reported, tmp_path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(reported, tmp_path / "demo"))


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]*>", "", page.read_text("utf-8"))


def test_the_page_has_every_section_that_can_be_measured_cheaply(reported):
    page = (reported / "report.html").read_text("utf-8")
    titles = re.findall(r"<h2>([^<]*)</h2>", page)
    assert titles == [
        "A text being written",
        "Models",
        "Perplexity",
        "Training",
        "Noise in training",
        "Samples",
        "Recipes",
        "Not measured",
    ]
    assert page.count("<svg") == 3
    for words in ("autoregressive", "block diffusion, blocks of 4", "6 + 6", f"bd3lm judge {reported}/ar"):
        assert words in page
    assert (reported / "report.md").is_file()
    assert (reported / "report" / "curves.svg").is_file()


def test_what_was_measured_is_kept_beside_the_runs(reported):
    for stage, kinds in {
        "ar": ["denoising", "perplexity", "samples"],
        "block": ["denoising", "perplexity", "samples", "variance"],
    }.items():
        subject = Subject.open(reported / stage, device="cpu")
        every = ("denoising", "judgement", "lengths", "perplexity", "samples", "variance")
        assert [kind for kind in every if kept(subject, kind)] == kinds


def test_the_figures_are_those_of_the_records(reported):
    (record,) = kept(Subject.open(reported / "block", device="cpu"), "perplexity")
    exact, bound = record["result"]["figures"]
    page = text_of(reported / "report.html")
    for figure, sign in ((exact, ""), (bound, "≤ ")):
        assert with_error(figure["perplexity"], figure["perplexity_error"], sign=sign) in page


def test_samples_go_on_from_held_out_documents_and_films_end_in_their_text(reported):
    subject = Subject.open(reported / "block", device="cpu")
    (record,) = kept(subject, "samples")
    texts = record["result"]["texts"]
    assert len(texts) == 2
    shards, tokenizer = subject.shards(), subject.model.tokenizer
    held_out = shards.read("valid", 0, shards.split("valid").tokens)
    documents = tokenizer.decode(held_out, skip_special=False).split("<|endoftext|>")
    for text in texts:
        assert text["given"]
        assert any(document.startswith(text["given"]) for document in documents), text
    (filmed,) = kept(subject, "denoising")
    film = Film.from_json(filmed["result"])
    settings = filmed["settings"]
    assert settings["stop_at_eos"] is False  # a film of two words would show little
    (again,) = subject.model.generate(
        ["".join(film.given)], length=settings["length"], stop_at_eos=False, seed=settings["seed"]
    )
    assert film.text == again.text


def test_a_second_report_measures_nothing_and_is_the_same(run, monkeypatch):
    before = {file: file.read_bytes() for file in run.rglob("*.*") if file.is_file()}
    for name in ("measure_perplexity", "measure_variances", "record_film"):
        monkeypatch.setattr(measuring, name, lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.chdir(run.parent)
    report(run, samples=2, device="cpu", console=QUIET)
    after = {file: file.read_bytes() for file in run.rglob("*.*") if file.is_file()}
    changed = [file.name for file in before if before[file] != after[file]]
    assert sorted(changed) == ["report.html", "report.md"]  # they name the folder, which was copied


def test_records_of_other_weights_are_measured_again(run):
    file = next((run / "block" / "measured").glob("perplexity*.json"))
    record = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**record, "weights": "others"}), encoding="utf-8")
    report(run, samples=2, device="cpu", console=QUIET)
    weights = Subject.open(run / "block", device="cpu").weights
    assert json.loads(file.read_text("utf-8"))["weights"] == weights


def test_a_record_in_another_order_is_not_the_runs_own_perplexity(run):
    """Measured at a lean that is not the run's, its own order has still to be measured; both are shown."""
    block = run / "block"
    for file in (block / "measured").glob("perplexity*.json"):
        file.unlink()
    measure_perplexity(Subject.open(block, device="cpu", lean=2.0), Eval(), console=QUIET)
    report(block, samples=2, device="cpu", console=QUIET)
    records = kept(Subject.open(block, device="cpu"), "perplexity")
    assert sorted(record["settings"]["lean"] for record in records) == [0.0, 2.0]
    assert "exact, lean 2" in text_of(block / "report.html")


def test_a_run_that_leans_is_measured_in_its_own_order(data, tmp_path):
    leaning = {"method": {"kind": "block_diffusion", "lean": 2.0}}
    run = trained(Preset("one", (Stage("leans", plain(data, BLOCK, leaning)),)), tmp_path / "run")
    page = text_of(report(run, samples=2, device="cpu", console=QUIET))
    (folder,) = run_stages(run)
    subject = Subject.open(folder, device="cpu")
    (record,) = kept(subject, "perplexity")
    assert (record["settings"]["lean"], record["title"]) == (2.0, "block diffusion, blocks of 4, lean 2")
    exact = record["result"]["figures"][0]
    assert with_error(exact["perplexity"], exact["perplexity_error"]) in page
    for kind in ("variance", "samples", "denoising"):
        assert kept(subject, kind), kind
    assert "Perplexity of held-out text (" not in page
    assert "block diffusion, blocks of 4, lean 2 (line at lean 0, marks at lean 2)." in page


def clipped(low: float, high: float, **more) -> dict:
    return {"objective": {"masking": {"kind": "clipped", "low": low, "high": high, **more}}}


def blocks(size: int = 4, **method: Any) -> dict[str, Any]:
    return {"method": {"kind": "block_diffusion", "block_size": size, **method}}


def counts(**options: Any) -> dict[str, Any]:
    return {"objective": {"masking": {"kind": "counts", **options}}}


@pytest.mark.parametrize(
    ("changes", "log", "is_bound"),
    [
        ({"method": "autoregressive"}, [], True),
        ({"method": "autoregressive", "objective": {"random_batch": True}}, [], False),
        ({"method": "score_entropy"}, [], True),
        ({"method": {"kind": "simplex", "block_size": 4}}, [], False),
        (blocks(), [], True),
        (blocks() | counts(weight="flat"), [], False),
        (blocks(1) | counts(weight="flat"), [], True),
        (blocks() | clipped(0.0, 1.0), [], True),
        (blocks() | clipped(0.0, 1.0, weight="flat"), [], False),
        (blocks() | clipped(0.3, 0.8), [], False),
        (blocks(1) | clipped(0.3, 0.8), [], True),
        # What a search found is trained on too, from then on.
        (blocks() | clipped(0.0, 1.0), [{"clip_low": 0.3, "clip_high": 0.8}], False),
        (blocks() | clipped(0.0, 1.0), [{"clip_low": 0.0, "clip_high": 1.0}], True),
        (blocks(1) | clipped(0.0, 1.0), [{"clip_low": 0.3, "clip_high": 0.8}], True),
    ],
)
def test_whether_a_training_loss_is_a_bound_is_asked_of_the_objective(changes, log, is_bound, data):
    found = runs.losses(tiny_recipe(data, changes), of_bytes(4), [{"step": 1.0}, *log])
    assert found["train_is_bound"] == is_bound


def test_clipped_rates_bound_nothing_for_a_network_that_is_told_the_noise(data):
    recipe = tiny_recipe(data, blocks(1) | clipped(0.3, 0.8))
    told = of_bytes(1, adaln=True, time_conditioning=True)
    assert not runs.losses(recipe, told, [])["train_is_bound"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "validation_is_exact has_likelihood writes_in_order uncovers"),
        (BLOCK, "has_likelihood masks_by_rule writes_blocks uncovers"),
        ({"method": {"kind": "block_diffusion"}}, "has_likelihood masks_by_rule writes_blocks uncovers"),
        ({"method": {"kind": "score_entropy"}}, "has_likelihood uncovers"),
        ({"method": {"kind": "d3pm", "process": "uniform"}}, "has_likelihood"),
        ({"method": {"kind": "simplex", "block_size": 4}}, ""),
    ],
    ids=["AR", "blocks", "MDLM", "SEDD", "D3PM uniform", "SSD-LM"],
)
def test_what_is_shown_of_a_model_is_asked_of_its_method(changes, said, data):
    recipe = tiny_recipe(data, changes)
    found = runs.shown(recipe, of_method(recipe.method))
    assert {name for name, value in found.items() if value is True} == {*said.split()}
    assert (found["variant"], found["clip_range"], found["lean"]) == ("", None, 0.0)


def test_variants_ranges_and_leans_are_those_of_the_recipe(data):
    def found(masking: object = "counts", lean: float = 0.0) -> list[object]:
        changes = {"method": {"lean": lean}, "objective": {"masking": masking}}
        recipe = tiny_recipe(data, BLOCK, changes)
        shown = runs.shown(recipe, of_method(recipe.method))
        return [shown["variant"], shown["clip_range"], shown["lean"]]

    assert found() == ["", None, 0.0]
    assert found({"kind": "counts", "lean": 0.5}, lean=2.0) == [", trained for lean 0.5", None, 2.0]
    assert found({"kind": "clipped", "low": 1.0, "high": 1.0}) == [", fully masked", None, 0.0]
    searched = {"kind": "clipped", "low": 0.25, "high": 0.75, "search": {"every": 3}}
    assert found(searched) == ["", (0.25, 0.75), 0.0]
    recipe = tiny_recipe(data, {"objective": {"random_batch": True}})
    assert runs.shown(recipe, of_method(recipe.method))["variant"] == ", random batch size"


@pytest.mark.parametrize(
    ("changes", "leans"),
    [
        (blocks(lean=2.0), (0.0, 2.0)),
        (blocks() | counts(lean=0.5), (0.5, 0.0)),
        (blocks(lean=2.0) | counts(lean=2.0), (2.0, 2.0)),
        # In discrete steps a network is judged in them, and they have no lean.
        (blocks(lean=2.0) | {"objective": {"masking": {"kind": "discrete", "steps": 8}}}, (0.0, 0.0)),
        ({"method": "autoregressive"}, (0.0, 0.0)),
    ],
)
def test_the_orders_of_training_and_of_validation(changes, leans, data):
    found = runs.losses(tiny_recipe(data, changes), of_bytes(4), [])
    assert (found["train_lean"], found["valid_lean"]) == leans


@pytest.mark.parametrize(
    ("kind", "change", "estimator"),
    [
        ("autoregressive", {}, "auto"),
        ("block_diffusion", {}, "counts"),
        ("block_diffusion", merge(TIMED, {"objective": {"masking": {"kind": "times"}}}), "nelbo"),
        ("score_entropy", {}, "auto"),
    ],
    ids=["AR", "blocks", "told the noise level", "SEDD"],
)
def test_speed_is_that_of_one_pass(kind, change, estimator, data, tmp_path, monkeypatch):
    method = {"kind": kind, **({"block_size": 4} if kind == "block_diffusion" else {})}
    run = trained(
        Preset("one", (Stage("only", plain(data, {"method": method, "train": {"steps": 1}}, change)),)),
        tmp_path / "run",
    )
    asked, build = [], measuring.build_estimator
    monkeypatch.setattr(measuring, "build_estimator", lambda *words: asked.append(words[1]) or build(*words))
    (folder,) = run_stages(run)
    assert measuring._Speed.measure(Subject.open(folder, device="cpu")).perplexity > 0
    assert asked == [estimator, "auto"]


def test_without_measuring_it_shows_what_there_is(run, capsys):
    shutil.rmtree(run / "ar" / "measured")
    assert main(["report", str(run), "--no-measure", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    page = text_of(run / "report.html")
    assert f"Perplexity of held-out text (autoregressive): bd3lm eval {run}/ar" in page
    assert "Variance of the loss (" not in page
    assert not (run / "ar" / "measured").exists()


def test_runs_side_by_side_in_a_folder_of_their_own(run, reported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = report(run, reported / "ar", samples=2, device="cpu", console=QUIET)
    assert page == Path("report/report.html")
    names = text_of(page)
    assert f"autoregressive, {run.parent.name}/demo/ar" in names
    assert f"autoregressive, {reported.parent.name}/demo/ar" in names
    assert "Three language models, measured" in names
    assert not (tmp_path / "report.html").exists()
    page = report(run, out=Path("report/v1.2"), measure=False, console=QUIET)
    assert page == Path("report/v1.2/report.html")


def test_what_would_take_too_long_is_left_to_its_command(run, monkeypatch):
    for file in (run / "block" / "measured").glob("[pv]*.json"):
        file.unlink()
    monkeypatch.setattr(measuring, "_AFFORDABLE", 1e-9)
    page = text_of(report(run, samples=2, device="cpu", console=QUIET))
    assert re.search(
        r"held-out text \(block diffusion, blocks of 4\), about \d+ seconds here: bd3lm eval", page
    )
    assert re.search(r"Variance of the loss \(block .*\), about \d+ \w+ here: bd3lm variance", page)


@pytest.mark.parametrize(
    ("sequences", "settings", "asked"),
    [
        (4, {}, [20]),  # a trial does not stand in for a measurement
        (20, {}, []),
        (18, {}, []),  # the machine was a little slower then
        (100, {"split": "train"}, [20]),
        (100, {"data": "a.txt"}, [20]),
    ],
)
def test_as_many_sequences_as_there_is_time_for(sequences, settings, asked, run, monkeypatch):
    (file,) = (run / "block" / "measured").glob("perplexity*.json")
    record = json.loads(file.read_text("utf-8"))
    record["result"]["sequences"] = sequences
    record["settings"] |= settings
    file.write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(measuring._Speed, "measure", lambda subject: measuring._Speed(1.0, 1.0))
    monkeypatch.setattr(measuring, "_held_out_sequences", lambda subject: 100)
    monkeypatch.setattr(measuring, "_AFFORDABLE", 20.0)
    limits = []
    monkeypatch.setattr(
        measuring, "measure_perplexity", lambda _, flags, **__: limits.append(flags.sequences)
    )
    report(run / "block", samples=2, device="cpu", console=QUIET)
    assert limits == asked


def test_all_that_was_held_out_where_there_is_time(run):
    for file in (run / "ar" / "measured").glob("perplexity*.json"):
        file.unlink()
    report(run / "ar", samples=2, device="cpu", console=QUIET)
    (record,) = kept(Subject.open(run / "ar", device="cpu"), "perplexity")
    assert (record["result"]["sequences"], record["settings"]["split"]) == (8, "valid")


def test_nothing_is_held_out(run, monkeypatch):
    for file in (run / "ar" / "measured").glob("perplexity*.json"):
        file.unlink()
    monkeypatch.setattr(measuring, "HELD_OUT", ("test",))
    page = text_of(report(run / "ar", samples=2, device="cpu", console=QUIET))
    assert "has no split test with held-out text: bd3lm eval" in page


def seen(page: Path) -> str:
    """The cell of tokens seen, of the last model."""
    row = page.with_suffix(".md").read_text("utf-8").partition("## Models")[2].partition("\n\n## ")[0]
    return row.strip().splitlines()[-1].split("|")[5].strip()


def test_tokens_of_all_that_a_run_started_from(reported, data, tmp_path, monkeypatch):
    """Whether or not that is in the report, and wherever the run was moved to."""
    monkeypatch.setattr(measuring, "measure_missing", lambda *_: {})
    recipe = tiny_recipe(data, BLOCK, {"start_from": str(reported / "block" / "model")})
    train_stages([("train", recipe)], tmp_path / "more", console=QUIET, device="cpu")
    page = report(tmp_path / "more", device="cpu", console=QUIET)
    once = seen(report(reported / "ar", out=tmp_path, device="cpu", console=QUIET))
    assert seen(page) == " + ".join([once] * 3)
    moved = Path(shutil.copytree(reported, tmp_path / "moved"))
    for stage, start in {"ar": "owner/name", "block": "gone/ar/model"}.items():
        file = moved / stage / "recipe.yaml"
        lines = [line for line in file.read_text("utf-8").splitlines() if "start_from" not in line]
        file.write_text("\n".join([*lines, f"start_from: {start}"]), encoding="utf-8")
    page = report(moved, device="cpu", console=QUIET)
    assert seen(page) == f"? + {once} + {once}"
    assert "? stands for the training of owner/name" in text_of(page)
    page = report(moved / "block", device="cpu", console=QUIET)
    assert seen(page) == f"? + {once}"


def test_a_folder_of_runs_stands_for_all_of_them(run, tmp_path, monkeypatch):
    """Of one stage and of two; without a run of two they are all children, like stages."""
    monkeypatch.setattr(measuring, "measure_missing", lambda *_: {})
    shutil.copytree(run / "ar", tmp_path / "alone")
    page = report(tmp_path, device="cpu", console=QUIET)
    assert page == tmp_path / "report.html"
    assert "Three language models, measured" in text_of(page)
    for folder in (run / "ar", run / "block", tmp_path / "alone"):
        assert f"<code>{folder}</code></td>" in page.read_text("utf-8")


def test_a_stopped_run_has_the_steps_it_made_and_says_so(data, tmp_path, monkeypatch):
    step = Trainer.train_step

    def stopped(trainer: Trainer) -> None:
        step(trainer)
        if trainer.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(measuring, "measure_missing", lambda *_: {})
    recipe = tiny_recipe(data, {"train": {"log_every": 3}})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stopped)
        train_stages([("train", recipe)], tmp_path / "run", console=QUIET, device="cpu")
    page = report(tmp_path / "run", device="cpu", console=QUIET)
    assert "| 5 of 6 (stopped) | 320 |" in page.with_suffix(".md").read_text("utf-8")
    # Before the first entry of its log there is nothing to show of it.
    (tmp_path / "run" / "metrics.csv").write_text("step,tokens\n", encoding="utf-8")
    with pytest.raises(ValueError, match="runs must hold a trained model"):
        report(tmp_path / "run", device="cpu", console=QUIET)


def test_a_stage_without_a_model_is_left_out_and_named(run, capsys, monkeypatch):
    shutil.rmtree(run / "block" / "model")
    (run / "block" / "metrics.csv").unlink()
    monkeypatch.setattr(measuring, "measure_missing", lambda *_: {})
    assert main(["report", str(run)]) == 0
    assert f"{run}/block: training has not finished, so it is left out" in capsys.readouterr().err
    page = text_of(run / "report.html")
    assert f"have not trained a model yet: {run}/block." in page
    assert "block diffusion, blocks of 4" not in page


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (45, "about 45 seconds here"),
        (600, "about 10 minutes here"),
        (9000, "about 2 hours here"),
        (1e6, "about 12 days here"),
    ],
)
def test_how_long(seconds, words):
    assert measuring._too_long(seconds) == words


def test_a_run_whose_data_is_gone_writes_from_nothing_and_says_why_it_is_not_measured(data, tmp_path):
    lost = Path(shutil.copytree(data, tmp_path / "lost"))
    out = trained(Preset("", (Stage("run", plain(lost, BLOCK)),)), tmp_path / "run")
    shutil.rmtree(lost)
    page = report(out, samples=1, device="cpu", console=QUIET)
    assert f"data.path must be a folder of token shards, got {lost}" in text_of(page)
    (record,) = kept(Subject.open(out, device="cpu"), "samples")
    assert record["result"]["texts"][0]["given"] == ""


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        ({"kind": "score_entropy"}, {"judgement", "lengths"}),
        ({"kind": "d3pm", "steps": 9}, {"judgement", "lengths"}),
        ({"kind": "d3pm", "steps": 9, "process": "uniform"}, {"judgement", "lengths"}),
        ({"kind": "simplex", "block_size": 4}, {"judgement", "lengths"}),
    ],
    ids=["SEDD", "D3PM", "D3PM uniform", "SSD-LM"],
)
def test_the_baselines(method, missing, data, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_STEPS", 3)
    short = {"train": {"steps": 2, "validate_every": 2}}
    out = trained(
        Preset("", (Stage("run", plain(data, {"method": method}, TIMED, short)),)), tmp_path / "run"
    )
    page = report(out, samples=1, device="cpu", console=QUIET)
    listed = re.findall(r"<li>([A-Z][^(]*) \(", page.read_text("utf-8"))
    names = {"judgement": "Generative perplexity", "lengths": "Lengths of texts"}
    assert set(listed) == {names[kind] for kind in missing}


def test_a_network_that_is_told_the_noise_level(data, tmp_path):
    timed = merge(BLOCK, TIMED, {"objective": {"masking": {"kind": "times"}}, "train": {"steps": 2}})
    out = trained(Preset("", (Stage("run", plain(data, timed)),)), tmp_path / "run")
    report(out, samples=1, device="cpu", console=QUIET)
    (record,) = kept(Subject.open(out, device="cpu"), "variance")
    masks = [row["masks"] for row in record["result"]["rows"]]
    assert "linear U[0, 1]" in masks
    assert "counts" not in masks


def test_one_measurement_that_fails_does_not_cost_the_page(run, monkeypatch):
    shutil.rmtree(run / "block" / "measured")

    def fail(*_, **__):
        raise ValueError("too dark\nto see")

    for name in ("measure_perplexity", "measure_variances", "record_film"):
        monkeypatch.setattr(measuring, name, fail)
    page = text_of(report(run, samples=2, device="cpu", console=QUIET))
    for kind in ("Perplexity of held-out text", "Variance of the loss", "A film of a text being written"):
        assert f"{kind} (block diffusion, blocks of 4), too dark to see: bd3lm" in page
    assert kept(Subject.open(run / "block", device="cpu"), "samples")


def test_progress_is_said_line_by_line(run, capsys):
    shutil.rmtree(run / "block" / "measured")
    assert main(["report", str(run), "--samples", "2", "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    for words in ("perplexity of held-out text", "variance of the loss", "2 samples", "an animation"):
        assert re.search(
            rf"^{re.escape(str(run))}/block \(block diffusion, blocks of 4\): {words}", said, re.M
        )
    assert f"{run}/ar" not in said  # nothing of it was missing


def test_bad_input_is_one_line(run, tmp_path, capsys, monkeypatch):
    started = time.perf_counter()
    (tmp_path / "empty").mkdir()
    torn = Path(shutil.copytree(run, tmp_path / "torn"))
    (torn / "ar" / "metrics.csv").write_text("step,tokens\n", encoding="utf-8")
    untrained = Path(shutil.copytree(run, tmp_path / "untrained"))
    for stage in ("ar", "block"):
        shutil.rmtree(untrained / stage / "model")
    monkeypatch.setattr(
        measuring, "measure_missing", lambda *_: pytest.fail("measured before all was looked at")
    )
    for words, message in (
        ([], "runs must name at least one run"),
        (
            [str(tmp_path / "empty")],
            "must be the folder of a run, with its recipe.yaml or stages.yaml, got neither",
        ),
        ([str(tmp_path / "nowhere")], "nowhere' here. It must be an existing folder"),
        ([str(run.with_name("dmo"))], f"no folder '{run.with_name('dmo')}' here, did you mean '{run}'? It"),
        ([str(torn)], "metrics.csv must hold the log of a training run, got no rows"),
        ([str(run), str(run / "ar")], "runs must be different"),
        ([str(run / "ar"), f"{run}/block/../ar"], f"got {run}/ar and {run}/block/../ar"),
        ([str(run), "--samples", "0"], "samples must be at least 1, got 0"),
        ([str(untrained)], f"runs must hold a trained model, and these have none yet: {untrained}/ar, "),
        ([str(run), "--out", str(run / "ar" / "metrics.csv")], f"a file name, {run}/ar/metrics.csv"),
        (
            [str(run), "--out", "page.pdf"],
            "the folder for report.html and report.md, got a file na",
        ),
        ([str(run), "--out", str(torn / "report.html")], f"got a file name, {torn}/report.html"),
        ([str(run), "--out", "nowhere/page"], "--out must be in an existing folder, and nowhere is not one"),
    ):
        assert main(["report", *words]) == 1, words
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1, said
    assert time.perf_counter() - started < 60


def test_recipes_are_shown_where_they_differ(reported, data):
    page = text_of(reported / "report.html")
    assert "method.block_size" in page
    assert "data.context" not in page
    assert tiny_recipe(data, merge(BLOCK)).method.block_size == 4
