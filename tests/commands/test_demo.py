"""The demo, shrunk: every line it prints, and that what it suggests can be done."""

import html
import io
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands import demo
from bd3lm.commands.demo import results
from bd3lm.commands.report import Report, make_report, measuring
from bd3lm.commands.shared.records import kept
from bd3lm.commands.shared.subjects import Subject
from bd3lm.evaluation import Sampled, corpus_likelihood
from bd3lm.interop import load
from bd3lm.objectives import Autoregressive
from bd3lm.reports.numbers import plain, with_error
from bd3lm.reports.readable import readable
from bd3lm.runs import presets
from bd3lm.runs.merging import merge
from bd3lm.runs.plan import Run
from bd3lm.runs.recipe import recipe_to_dict
from bd3lm.runs.stages import read_recipe, resolve_stages
from bd3lm.runs.train import train_stages
from bd3lm.training import Trainer, callbacks

SMALL = {
    "data": {"context": 32, "builtin_vocabulary": 300, "validation_sequences": 8, "validation_batch": 4},
    "network": {"layers": 1, "hidden": 32, "heads": 2},
    "train": {"steps": 12, "global_batch": 8, "checkpoint_every": 4, "log_every": 4},
    "optimizer": {"warmup_steps": 2},
}


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """The demo's presets with fewer steps of a smaller network."""
    shrunk = {
        name: replace(
            found,
            stages=tuple(presets.Stage(stage.name, merge(stage.recipe, SMALL)) for stage in found.stages),
        )
        for name, found in presets.PRESETS.items()
        if name.startswith("demo")
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "PRESETS", {**presets.PRESETS, **shrunk})
        yield


def screen() -> Console:
    return Console(file=io.StringIO(), width=160)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, _small) -> tuple[Path, str]:
    console, folder = screen(), tmp_path_factory.mktemp("runs") / "demo"
    demo.run_demo(folder, console=console)
    return folder, console.file.getvalue()


@pytest.fixture(scope="module")
def autoregressive(finished) -> Run:
    """The longer trained of its autoregressive stages, opened again."""
    return train_stages(resolve_stages("demo"), finished[0], resume=True, console=screen(), device="cpu")[1]


def table(printed: str) -> dict[str, list[str]]:
    """The cells of each row after its name; of two of one name, those of the later one."""
    lines = [line for line in printed.splitlines() if line.startswith("│") and line.count("│") == 5]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return {name: cells for name, *cells in rows}


def plain_recipe(run: Path) -> dict[str, Any]:
    return recipe_to_dict(read_recipe(run))


def text_of(page: Path) -> str:
    text = page.read_text("utf-8")
    return html.unescape(re.sub(r"<[^>]*>", "", text)) if page.suffix == ".html" else text


def value(cell: str) -> float:
    """Without the ≤ of a bound and the ± of an error."""
    return float(cell.removeprefix("≤ ").partition(" ±")[0])


def test_off_a_terminal_training_says_now_and_then_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(callbacks, "_SILENCE", (0.0, 0.0))
    assert main(["train", "demo-ar", "--out", str(tmp_path / "ar"), "--device", "cpu"]) == 0
    lines = re.findall(r"^run: step (\d+)/12, \d+ s, loss .* tok/s$", capsys.readouterr().out, re.M)
    assert lines == ["4", "8", "12"]


def test_off_a_terminal_lines_come_soon_and_then_more_rarely(monkeypatch):
    now = 0.0
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now)
    console = screen()
    trainer = SimpleNamespace(engine=SimpleNamespace(is_main=True), settings=SimpleNamespace(steps=10**6))
    bar = callbacks.ProgressBar(console)
    monkeypatch.setattr(callbacks, "describe", lambda *_: "figures")
    bar.on_start(trainer)
    for second in range(1, 30_000):
        now, trainer.step = float(second), second
        bar.on_log(trainer, {"train_nats": 1.0})
    said = [int(found) for found in re.findall(r"step (\d+)/", console.file.getvalue())]
    assert said[:3] == [10, 20, 30]
    pauses = [after - before for before, after in pairwise(said)]
    assert pauses == sorted(pauses)
    assert len(said) < 80


def test_off_a_terminal_it_says_what_it_does_after_training(finished):
    _, printed = finished
    assert "measuring on held-out text: autoregressive and block diffusion" in printed
    assert "\nwriting the report ...\n" in printed


def test_the_table(finished):
    _, printed = finished
    rows = table(printed)
    assert list(rows) == ["unigram frequencies", "autoregressive", "block diffusion, blocks of 4, lean 2"]
    unigram, ar, block = rows.values()
    assert unigram[0] == unigram[2] == ""
    assert float(unigram[1]) > 20
    assert (ar[0], ar[2]) == ("12 + 12", "")
    assert block[0] == "12 + 12"
    assert "│ autoregressive                       │      12 │" in printed
    assert "A sum of steps: training continued from the first of these models" in printed
    assert block[2].startswith("≤ ")
    assert 1.0 < value(block[1]) <= value(block[2])  # exact, then its bound


def test_the_figures_are_those_of_the_averaged_weights(finished, autoregressive):
    folder, printed = finished
    batches = list(autoregressive.held_out.batches)
    network, config = load(folder / "ar_longer" / "model")
    judge = Autoregressive(mask_id=config.mask_id)
    (found,) = corpus_likelihood(network, Sampled("exact", judge), batches)
    assert f"{found.perplexity:.1f} ± {found.perplexity_error:.1f}" == table(printed)["autoregressive"][1]
    counted, _ = results.unigram_perplexity(autoregressive)
    assert f"{counted:.1f}" == table(printed)["unigram frequencies"][1]


def test_the_unigram_by_hand(autoregressive):
    ar = autoregressive
    vocabulary = ar.config.network.vocab_size
    train = ar.shards.read("train", 0, ar.shards.split("train").tokens).tolist()
    tally = [train.count(token) + 1 for token in range(vocabulary)]
    tally[ar.config.mask_id] = 0
    scored = [int(token) for batch in ar.held_out.batches for row in batch.tokens for token in row[1:]]
    product = 1.0
    for token in scored:
        product *= (sum(tally) / tally[token]) ** (1 / len(scored))
    assert results.unigram_perplexity(ar) == (pytest.approx(product, rel=1e-9), len(scored))


def test_a_sample_past_the_training_context(finished):
    _, printed = finished
    assert "64 tokens, 2 contexts" in printed


def test_the_two_that_are_compared_differ_in_nothing_but_the_method(finished):
    longer, block = (plain_recipe(finished[0] / name) for name in ("ar_longer", "block"))
    assert longer["start_from"] == block["start_from"] == str(finished[0] / "ar" / "model")
    for part in ("method", "objective"):
        del longer[part], block[part]
    assert longer == block


def test_its_page_begins_with_a_verdict_and_the_plot_and_shows_the_model_in_the_box(finished):
    page = (finished[0] / "report.html").read_text("utf-8")
    places = [
        page.index(each)
        for each in ('<p class="verdict">After the same number of training tokens', "<svg", "<nav", "<h2>")
    ]
    assert places == sorted(places)
    drawn = page[places[1] : places[2]]
    assert "autoregressive, 12 steps" in drawn
    assert "autoregressive, 24 steps" in drawn
    film = page.partition("<h2>A text being written</h2>")[2].partition("<h2>")[0]
    assert 'class="token given"> city</span>' in film
    assert "<code>box</code>" in film


def test_it_writes_a_report_of_both_models_with_what_the_table_has(finished):
    folder, printed = finished
    assert f"{folder / 'report.html'} has the measurements" in printed
    page = (folder / "report.html").read_text("utf-8")
    assert "<h2>A text being written</h2>" in page
    (measured,) = (folder / "block" / "measured").glob("perplexity*")  # by the demo, and not again
    for figure in json.loads(measured.read_text("utf-8"))["result"]["figures"]:
        assert with_error(figure["perplexity"], figure["perplexity_error"]) in page


def test_the_report_has_the_unigram_and_the_long_text_that_were_printed(finished, autoregressive):
    folder, printed = finished
    for page in map(text_of, (folder / "report.html", folder / "report.md")):
        assert f"have a perplexity of {plain(results.unigram_perplexity(autoregressive)[0])}." in page
        assert "A text longer than the context" in page
        assert "This one has 64 tokens" in page
        (record,) = kept(Subject.open(folder / "block", device="cpu"), "long_text")
        (text,) = record["result"]["texts"]
        assert readable(text["written"]) in page
        assert text["tokens"] == 64 - 32 // 8
    assert text["written"].split()[0] in printed


def test_a_report_of_its_own_has_them_too(finished, tmp_path):
    report = Report(runs=(finished[0],), out=tmp_path, measure=False, device="cpu")
    make_report(report, console=Console(quiet=True))
    page = text_of(tmp_path / "report.html")
    assert "To compare: token frequencies of the training text alone" in page
    assert "A text longer than the context" in page


def test_it_ends_with_where_everything_is_and_three_commands_that_work(finished, capsys):
    folder, printed = finished
    assert f"Everything is in {folder}: recipes, metrics.csv, checkpoints" in printed
    assert (folder / "block" / "model" / "config.json").is_file()
    commands = [shlex.split(found) for found in re.findall(r"^  [^:]+: +(bd3lm .*)$", printed, re.M)]
    assert [command[:2] for command in commands] == [["bd3lm", "train"]] * 3
    for command in commands:
        assert main([*command[1:], "--show"]) == 0, command
    shown = capsys.readouterr().out
    assert "complementary: true" in shown
    assert "block_size: 8" in shown
    assert f"start_from: {folder / 'ar'}" in shown


@pytest.mark.slow
def test_the_second_suggestion_trains(finished, tmp_path, capsys):
    """Blocks of 8 from the autoregressive model; what it says at the end is about its own folder."""
    folder, _ = finished
    out = tmp_path / "runs" / "block8"
    words = ["train", "demo", "--out", str(out), "--from", str(folder / "ar"), "--method.block_size", "8"]
    assert main([*words, "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Try next" not in printed
    assert "block diffusion, blocks of 8" in printed
    assert f"Everything is in {out}:" in printed


def test_what_is_there_already_is_not_suggested(autoregressive, finished, tmp_path, monkeypatch):
    runs = train_stages(resolve_stages("demo"), finished[0], resume=True, console=screen(), device="cpu")
    monkeypatch.chdir(tmp_path)
    for name in ("pairs", "block8", "demo-paper"):
        assert f"--out runs/{name}" in results._to_try(runs)[0]
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").touch()
    assert results._to_try(runs) == []


@pytest.mark.slow
def test_with_flags_of_ones_own_nothing_is_suggested(finished, autoregressive, tmp_path, capsys):
    assert results._to_try([autoregressive]) == []
    words = ["--out", str(tmp_path / "demo"), "--device", "cpu", "--optimizer.warmup_steps", "3"]
    assert main(["train", "demo", *words]) == 0
    assert "Try next" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_second_demo_finds_the_first_done(finished, monkeypatch):
    folder, printed = finished
    monkeypatch.setattr(Trainer, "train_step", lambda trainer: pytest.fail("trained again"))
    monkeypatch.setattr(measuring, "record_film", lambda *_, **__: pytest.fail("filmed again"))
    console = screen()
    demo.run_demo(folder, console=console)
    assert table(console.file.getvalue()) == table(printed)
    assert "Try next" in printed
    assert "Try next" not in console.file.getvalue()


@pytest.mark.parametrize("words", [["demo"], ["train", "demo", "--device", "cpu"]], ids=" ".join)
def test_stopped_it_says_how_to_go_on_and_measures_nothing(words, tmp_path, monkeypatch, capsys):
    step = Trainer.train_step

    def interrupted(trainer):
        step(trainer)
        if trainer.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    code = main([*words, "--out", str(tmp_path / "demo")])
    printed = capsys.readouterr().out
    assert "stopped at step 5 of 12" in printed
    assert "Perplexity of held-out text" not in printed
    assert code == 130


def test_without_held_out_text_it_trains_and_says_that_nothing_is_measured(tmp_path, capsys):
    text, data, out = tmp_path / "text.jsonl", tmp_path / "data", tmp_path / "demo"
    text.write_text("".join(json.dumps({"text": f"Once upon a time {n}. " * 40}) + "\n" for n in range(20)))
    assert main(["data", "prepare", str(text), str(data), "--tokenizer", "bytes", "--held-out", "0"]) == 0
    assert main(["train", "demo", "--out", str(out), "--device", "cpu", "--data.path", str(data)]) == 0
    printed = capsys.readouterr().out
    assert f"{data} has no valid or test split: nothing will be validated" in printed
    assert "split, so nothing is measured: prepare the data with --held-out" in printed
    assert "Perplexity of held-out text" not in printed
    assert (out / "report.html").is_file()
    assert (out / "block" / "model" / "config.json").is_file()


@pytest.mark.slow
def test_the_papers_recipe_reports_both_stages(tmp_path, capsys):
    """One block of 32 has no exact likelihood; blocks of 4 have, after a clip search."""
    words = ["train", "demo-paper", "--out", str(tmp_path / "paper"), "--device", "cpu"]
    assert (
        main(
            [*words, "--finetune.train.validate_every", "6", "--finetune.objective.masking.search.every", "6"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "train demo-paper" not in printed
    rows = table(printed)
    assert list(rows) == [
        "unigram frequencies",
        "diffusion, one block (MDLM)",
        "block diffusion, blocks of 4",
    ]
    assert rows["diffusion, one block (MDLM)"][1] == ""
    exact, bound = map(value, rows["block diffusion, blocks of 4"][1:])
    assert exact <= bound
    assert "clip_low" in (tmp_path / "paper" / "finetune" / "metrics.csv").read_text().splitlines()[0]
