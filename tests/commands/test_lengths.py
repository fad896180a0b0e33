"""`bd3lm lengths`: documents of models and of files, counted as those of the training set are."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.lengths import Lengths, measure_lengths, report_lengths, settings_of
from bd3lm.commands.shared import sample_files
from bd3lm.commands.shared.records import kept
from bd3lm.commands.shared.sample_files import Samples
from bd3lm.commands.shared.subjects import Subject
from bd3lm.data import TokenShards, train_bpe
from bd3lm.evaluation import LengthStatistics
from bd3lm.lm import LanguageModel
from tests.lm import CONTEXT, D3PM, D3PM_UNIFORM, END, SEDD, SEDD_UNIFORM, baseline, of_bytes
from tests.tiny_recipes import plain, prepared

# Random networks end texts at all three of these.
WRITING = Lengths(count=30, length=48, entropy_floor=1.7, entropy_window=8, seed=3)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


def as_run(folder: Path, shards: Path, model: LanguageModel | None = None) -> Path:
    """The folder of a run, as far as measuring it needs one."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain(shards)))
    (model or of_bytes(4, end_logit=2.0)).save_pretrained(folder / "model")
    return folder


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_is_measured_beside_what_it_was_trained_on(shards, tmp_path):
    run = as_run(tmp_path / "run", shards)
    subject = Subject.open(run, device="cpu")
    (record,) = report_lengths([subject], WRITING, console=quiet())
    samples, training = record["result"]["samples"], record["result"]["training"]

    (documents,) = (run / "measured").glob("documents-*.jsonl")
    drawn = lines(documents)
    by_hand = [len([t for t in each["tokens"][1:] if t != END]) for each in drawn]
    assert sorted(samples["lengths"]) == sorted(by_hand)  # a file has them as they were finished
    reasons = [each["stopped_by"] for each in drawn]
    assert samples["stopped_by"] == {by: reasons.count(by) for by in ("eos", "string", "entropy", "length")}
    assert set(reasons) == {"eos", "entropy", "length"}  # otherwise this says little
    assert samples["max"] == WRITING.length - 1
    statistics = LengthStatistics.of(by_hand)
    assert all(samples[name] == getattr(statistics, name) for name in ("number", "median", "p90", "max"))

    lengths = TokenShards(shards).lengths("train")
    assert training["lengths"] == sorted(lengths.tolist())
    assert (training["documents"], training["max"]) == (len(lengths), lengths.max())
    assert record["settings"] == {
        "count": 30,
        "length": 48,
        "entropy_floor": 1.7,
        "entropy_window": 8,
        "top_p": 0.9,
        "seed": 3,
        "law": "block",
        "lean": 0.0,
        "data": str(shards),
        "split": "train",
        "dtype": "float64",
    }
    assert kept(subject, "lengths") == [record]


def test_training_documents_taken_for_samples_have_the_same_lengths(shards):
    """The very tokens of the shards, as if a model had written them from nothing up to the end token."""
    own = TokenShards(shards)
    tokens = own.read("train", 0, own.split("train").tokens).tolist()
    documents, document = [], [END]
    for token in tokens:
        document.append(token)
        if token == END:
            documents.append(document)
            document = [END]
    records = [
        {"tokens": each, "length": len(each), "given": 1, "stopped_by": "eos", "settings": {}}
        for each in documents
    ]
    found = measure_lengths(Samples("shards", records), own)["result"]
    assert found["samples"]["lengths"] == own.lengths("train").tolist()
    for name in ("median", "p90", "max", "mean"):
        assert found["samples"][name] == found["training"][name]


def test_texts_of_other_code_have_no_lengths_in_tokens(tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("A text.")
    assert main(["lengths", str(tmp_path / "texts.txt")]) == 1
    assert "must have tokens, as `bd3lm sample --out` writes them, got none" in capsys.readouterr().err


def test_the_nucleus_rule_is_the_one_asked_for(shards, tmp_path, capsys):
    run = as_run(tmp_path / "run", shards)
    words = ["--count", "2", "--length", "12", "--entropy-floor", "0", "--top-p-rule", "exclusive"]
    assert main(["lengths", str(run), *words, "--out", str(tmp_path / "model.json")]) == 0
    (record,) = json.loads((tmp_path / "model.json").read_text())
    assert record["settings"]["top_p_rule"] == "exclusive"
    (drawn,) = (run / "measured").glob("documents-*.jsonl")
    assert all(
        json.loads(line)["settings"]["top_p_rule"] == "exclusive"
        for line in drawn.read_text("utf-8").split("\n")[:-1]
    )


def test_a_file_of_samples_has_the_lengths_of_the_model_that_wrote_them(shards, tmp_path, capsys):
    run = as_run(tmp_path / "run", shards)
    words = [
        "--count",
        "12",
        "--length",
        "40",
        "--entropy-floor",
        "0",
        "--device",
        "cpu",
        "--batch-size",
        "5",
    ]
    assert main(["lengths", str(run), *words, "--out", str(tmp_path / "model.json")]) == 0
    sample = ["sample", str(run), *words[:4], *words[6:], "--out", str(tmp_path / "texts.jsonl")]
    assert main(sample) == 0
    words = [str(tmp_path / "texts.jsonl"), "--data", str(shards), "--out", str(tmp_path / "file.json")]
    assert main(["lengths", *words]) == 0
    (of_model,), (of_file,) = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("model", "file"))
    assert sorted(of_file["result"]["samples"]["lengths"]) == sorted(of_model["result"]["samples"]["lengths"])
    assert of_file["result"]["training"] == of_model["result"]["training"]
    assert of_file["settings"]["length"] == 40
    assert of_file.keys() == of_model.keys()
    assert of_file["weights"] == of_model["weights"] == Subject.open(run).weights
    assert (of_file["title"], of_model["title"]) == (None, "block diffusion, blocks of 4")


def test_a_file_of_samples_that_were_asked_for_no_length(shards, tmp_path, capsys):
    """They reach the network's context, and the file does not say what that is."""
    run, file = as_run(tmp_path / "run", shards, of_bytes(4, end_logit=-1e3)), tmp_path / "texts.jsonl"
    assert main(["sample", str(run), "--count", "3", "--device", "cpu", "--out", str(file)]) == 0
    assert main(["lengths", str(file)]) == 0
    assert f"3 documents of {file} reached the limit of {CONTEXT} tokens" in capsys.readouterr().out


def test_the_table_begins_with_the_training_set(shards, tmp_path):
    runs = [as_run(tmp_path / name, shards) for name in ("a", "b")]
    console = quiet()
    records = report_lengths([Subject.open(run, device="cpu") for run in runs], WRITING, console=console)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    (training,) = [row for row in rows if row[:2] == ["training", "set,"]]  # once, for both
    documents = records[0]["result"]["training"]["documents"]
    assert training[3] == f"{documents:,}"
    for run, record in zip(runs, records, strict=True):
        (row,) = [row for row in rows if row[:2] == [str(run), "(block"]]
        samples = record["result"]["samples"]
        assert row[-3:] == [str(samples["stopped_by"][reason]) for reason in ("eos", "entropy", "length")]
        assert row[-7:-4] == [str(samples[name]) for name in ("median", "p90", "max")]
        assert rows.index(training) < rows.index(row)
    limited = records[0]["result"]["samples"]["stopped_by"]["length"]
    assert f"{limited} documents of {runs[0]} reached the limit of 48 tokens" in console.file.getvalue()


def test_a_trial_does_not_replace_what_was_written_before(shards, tmp_path, monkeypatch):
    run = as_run(tmp_path / "run", shards)
    subject, trial = Subject.open(run, device="cpu"), Lengths(count=3, length=8, entropy_floor=0.0)
    (record,) = report_lengths([subject], WRITING, console=quiet())
    (tried,) = report_lengths([subject], trial, console=quiet())
    files = (run / "measured").glob("documents-*.jsonl")
    assert sorted(len(lines(file)) for file in files) == [3, 30]
    assert sorted(each["settings"]["count"] for each in kept(subject, "lengths")) == [3, 30]
    monkeypatch.setattr(sample_files, "write_texts", lambda *_, **__: pytest.fail("written again"))
    (again,) = report_lengths([subject], WRITING, console=quiet())
    assert again["result"] == record["result"]
    assert len(kept(subject, "lengths")) == 2
    assert tried["result"]["samples"]["number"] == 3


def test_a_lean_is_written_in_recorded_and_in_the_title(shards, tmp_path, capsys):
    run, out = as_run(tmp_path / "run", shards), tmp_path / "records.json"
    words = ["--count", "12", "--length", "40", "--entropy-floor", "0", "--device", "cpu", "--out", str(out)]
    assert main(["lengths", str(run), *words, "--lean", "2"]) == 0
    assert "lean 2)" in "".join(capsys.readouterr().out.split("\n")).replace("  ", " ")
    (record,) = json.loads(out.read_text())
    assert (record["settings"]["lean"], record["title"]) == (2.0, "block diffusion, blocks of 4, lean 2")
    (file,) = (run / "measured").glob("documents-*.jsonl")
    leans = Subject.open(run, device="cpu", lean=2.0)
    settings = settings_of(Lengths(count=12, length=40, entropy_floor=0.0), leans, quiet())
    texts = leans.model.generate([""] * 12, settings)
    drawn = sorted(lines(file), key=lambda line: line["index"])
    assert [line["tokens"] for line in drawn] == [text.tokens for text in texts]
    assert {line["settings"]["unmasking"]["lean"] for line in drawn} == {2.0}


def test_a_model_that_predicts_first_tokens(tmp_path):
    """Where it begins with the token that texts begin with, that one does not count."""
    of_bytes(4, score_first=True, end_logit=3.0).save_pretrained(tmp_path / "model")
    subject = Subject.open(tmp_path / "model", device="cpu")
    settings = settings_of(WRITING, subject, quiet())
    texts = subject.model.generate([""] * WRITING.count, settings)
    (record,) = report_lengths([subject], WRITING, console=quiet())
    expected = [len([token for token in text.tokens if token != END]) for text in texts]
    assert record["result"]["samples"]["lengths"] == expected
    assert {text.tokens[0] == END for text in texts if text.tokens} == {True, False}
    # The tokenizer knows that token also where no text ended with it.
    begun = {"tokens": [END, 1, 2], "length": 3, "given": 0, "stopped_by": "length", "settings": {}}
    assert measure_lengths(Samples("texts", [begun], subject), None)["result"]["samples"]["lengths"] == [2]


# --- what a model can write ---


@pytest.mark.parametrize("method", [SEDD, SEDD_UNIFORM, D3PM_UNIFORM], ids=lambda method: method.title)
def test_methods_of_one_context_are_held_to_it_and_that_is_said(method, tmp_path):
    baseline(method).save_pretrained(tmp_path / "model")
    subject, notes = Subject.open(tmp_path / "model", device="cpu"), quiet()
    assert settings_of(Lengths(entropy_floor=0.0), subject, notes).length == CONTEXT
    assert f"cannot write past its context of {CONTEXT} tokens" in notes.file.getvalue()
    notes = quiet()
    assert settings_of(Lengths(length=12, entropy_floor=0.0), subject, notes).length == 12
    assert notes.file.getvalue() == ""


@pytest.mark.parametrize("model", [of_bytes(None), of_bytes(4), of_bytes(CONTEXT), baseline(D3PM)])
def test_others_write_up_to_sixteen_contexts(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    subject, notes = Subject.open(tmp_path / "model", device="cpu"), quiet()
    settings = settings_of(Lengths(), subject, notes)
    assert (settings.length, settings.entropy_floor, settings.entropy_window) == (16 * CONTEXT, 4.0, 256)
    assert settings.stop_at_eos
    assert settings_of(Lengths(entropy_floor=0.0), subject, notes).entropy_floor is None
    assert notes.file.getvalue() == ""


@pytest.mark.parametrize(
    ("floor", "window", "highest"), [(5.6, 1000, "5.55"), (2.2, 8, "2.08")], ids=["vocabulary", "window"]
)
def test_a_floor_that_nothing_reaches_is_refused(floor, window, highest, tmp_path, capsys):
    of_bytes(4).save_pretrained(tmp_path / "model")
    words = ["--entropy-floor", str(floor), "--entropy-window", str(window), "--device", "cpu"]
    assert main(["lengths", str(tmp_path / "model"), *words]) == 1
    error = capsys.readouterr().err
    assert f"entropy_floor must be at most {highest}, the largest entropy that {window} tokens" in error
    assert error.rstrip().endswith(f"got {floor}")


# --- what there is to compare with ---


def test_a_model_that_is_no_run_is_measured_alone_unless_data_is_named(shards, tmp_path):
    of_bytes(4, end_logit=2.0).save_pretrained(tmp_path / "model")
    subject, notes = Subject.open(tmp_path / "model", device="cpu"), quiet()
    (record,) = report_lengths([subject], WRITING, console=quiet(), notes=notes)
    assert (record["result"]["training"], record["settings"]["data"]) == (None, None)
    assert "no training set to compare" in notes.file.getvalue()
    (record,) = report_lengths([subject], replace(WRITING, data=shards), console=quiet())
    assert record["result"]["training"]["documents"] == 40


def test_a_run_whose_data_is_gone_is_measured_alone_and_that_is_said(shards, tmp_path):
    run = as_run(tmp_path / "run", tmp_path / "gone")
    notes = quiet()
    (record,) = report_lengths([Subject.open(run, device="cpu")], WRITING, console=quiet(), notes=notes)
    assert record["result"]["training"] is None
    assert f"no training set to compare {run} with: data.path must be a folder" in notes.file.getvalue()


def test_bad_input_is_one_line(shards, tmp_path, capsys):
    run = as_run(tmp_path / "run", shards)
    other = prepared(tmp_path / "other", train_bpe(["a text of words"] * 3, 260))
    prompted, broken, endless, cut = (
        tmp_path / f"{name}.jsonl" for name in ("prompted", "broken", "endless", "cut")
    )
    options = ["--length", "20", "--device", "cpu"]
    assert main(["sample", str(run), "ab", *options, "--out", str(prompted)]) == 0
    assert main(["sample", str(run), "--no-stop-at-eos", *options, "--out", str(endless)]) == 0
    assert main(["sample", str(run), *options, "--stop", "a", "--out", str(cut)]) == 0
    broken.write_text('{"text": "no sample"}\n')
    half = tmp_path / "half.jsonl"
    half.write_text('{"text": "a part of a sample", "settings": {}}\n')
    of_bytes(None).save_pretrained(tmp_path / "ar")
    capsys.readouterr()
    for words, message in (
        ([], "a source must be given"),
        ([str(run), "--count", "0"], "count must be at least 1, got 0"),
        ([str(run), "--length", "64"], "entropy_window must be at most the length 64"),
        ([str(run), "--length", "0"], "length must be a whole number from 1 on, got 0"),
        ([str(run), "--data", str(other)], "made with another tokenizer"),
        ([str(run), "--data", str(tmp_path)], "holds no token shards"),
        ([str(run), str(prompted)], "sample 0 of"),
        ([str(prompted)], "written from scratch, without a prompt"),
        ([str(endless)], f"{endless} must hold documents, and its samples continue past their end"),
        ([str(cut)], f"{cut} must hold documents, and its samples end at the strings ['a']"),
        ([str(broken)], "must have tokens, as `bd3lm sample --out` writes them, got none"),
        ([str(half)], "line 1 must be a sample as `bd3lm sample --out` writes it"),
        ([str(tmp_path / "none.jsonl")], "there is no file"),
        ([str(prompted), "--count", "7"], "--count needs a model that writes"),
        ([str(prompted), "--lean", "2"], "--lean needs a model that writes"),
        ([str(tmp_path / "ar"), "--lean", "2"], "--lean sets the order within a block"),
        ([str(prompted), "--entropy-floor", "1"], "--entropy-floor needs a model that writes"),
        ([str(tmp_path / "nothing")], "there is no folder"),
    ):
        device = [] if not words or words[0].endswith(".jsonl") else ["--device", "cpu"]
        assert main(["lengths", *words, *device]) == 1, words
        error = capsys.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1
    assert not (run / "measured").exists()  # all of it was said before anything was written
