"""`bd3lm eval`, and what `bd3lm zeroshot` shares with it: the right figure of the right text."""

import io
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from bd3lm.cli import main
from bd3lm.commands.eval import Eval, measure_perplexity, report_perplexities
from bd3lm.commands.shared.corpora import open_sequences
from bd3lm.commands.shared.records import FOLDER, kept
from bd3lm.commands.shared.subjects import Subject
from bd3lm.data import Tokenizer, byte_tokenizer, train_bpe
from bd3lm.lm import LanguageModel, load
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.reports import perplexity_text
from bd3lm.reports.content import OWN
from bd3lm.runs.stages import resolve_stages
from bd3lm.runs.train import train_stages
from tests.commands import documents, saved
from tests.data_room.documents import random_texts
from tests.lm import BYTES, CONTEXT, D3PM, END, SEDD, SSD, baseline, of_bytes, of_method
from tests.tiny_recipes import BLOCK, plain, prepared

pytestmark = pytest.mark.sweep(3)

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    """A trained run, blocks of 4, of a context of 16 bytes."""
    out = tmp_path_factory.mktemp("run") / "block"
    stages = resolve_stages(None, overrides=plain(data, BLOCK))
    train_stages(stages, out, console=QUIET, device="cpu")
    return out


def by_hand(model, texts: list[str], *, eos: bool) -> tuple[float, int, int]:
    """(nats, tokens, bytes) of documents end to end, cut every CONTEXT bytes, the first of each given."""
    stream = [token for text in texts for token in (*text.encode(), *([END] if eos else []))]
    rows = [stream[i : i + CONTEXT] for i in range(0, len(stream) - CONTEXT + 1, CONTEXT)]
    scores = model.log_likelihood(rows, batch_size=64)
    size = sum(token != END for row in rows for token in row[1:])
    return -sum(score.log_p for score in scores), sum(score.tokens for score in scores), size


@pytest.mark.parametrize(("block_size", "eos"), [(None, True), (None, False), (1, True), (4, False)])
def test_text_is_wrapped_and_scored_as_by_hand(block_size, eos, tmp_path):
    model = of_bytes(block_size)
    subject = Subject.open(saved(model, tmp_path / "model"), device="cpu")
    record = measure_perplexity(
        subject, Eval(batch_size=7), str(documents(tmp_path)), eos_between_documents=eos, console=QUIET
    )
    nats, tokens, size = by_hand(load(tmp_path / "model"), random_texts(12), eos=eos)
    result, figure = record["result"], record["result"]["figures"][0]
    assert (result["tokens"], result["bytes"]) == (tokens, size)
    assert result["sequences"] == tokens // (CONTEXT - 1)
    assert figure["nats"] == pytest.approx(nats / tokens, rel=1e-5)
    assert figure["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert figure["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert figure["meaning"] == "exact"
    assert record["settings"]["eos_between_documents"] is eos


@pytest.mark.parametrize("context", [8, 12])
def test_sequences_may_be_shorter_than_the_context(context, tmp_path):
    """Of a network that reads 128,000 tokens few texts are as long."""
    subject = Subject.open(saved(of_bytes(4), tmp_path / "model"), device="cpu")
    file = str(documents(tmp_path))
    record = measure_perplexity(subject, Eval(context=context), file, console=QUIET)
    with open_sequences(subject, file) as text:
        stream = text.rows.shards.read(text.split, 0, record["result"]["sequences"] * context)
    rows = torch.from_numpy(np.array(stream, np.int64)).view(-1, context)
    scores = subject.model.log_likelihood(rows, batch_size=64)
    tokens = sum(each.tokens for each in scores)
    assert record["settings"]["context"] == context
    assert record["result"]["tokens"] == tokens == len(rows) * (context - 1)
    nats = -sum(each.log_p for each in scores) / tokens
    assert record["result"]["figures"][0]["nats"] == pytest.approx(nats, rel=1e-5)


def test_batches_change_nothing_and_a_limit_takes_the_first(tmp_path):
    subject = Subject.open(saved(of_bytes(4), tmp_path / "model"), device="cpu")
    file = str(documents(tmp_path))
    whole, other, part = (
        measure_perplexity(subject, Eval(**options), file, console=QUIET)["result"]
        for options in ({"batch_size": 5}, {"batch_size": 64}, {"sequences": 3})
    )
    assert whole["figures"][0]["nats"] == pytest.approx(other["figures"][0]["nats"], rel=1e-6)
    assert part["sequences"] == 3
    with open_sequences(subject, file, limit=3) as text:
        (batch,) = text.batches(subject, 8)
    scores = subject.model.log_likelihood(batch.tokens)
    mean = -sum(each.log_p for each in scores) / sum(each.tokens for each in scores)
    assert part["figures"][0]["nats"] == pytest.approx(mean, rel=1e-5)


def test_a_run_is_measured_on_what_it_held_out_and_the_record_is_kept(run, capsys):
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    subject = Subject.open(run, device="cpu")
    (record,) = kept(subject, "perplexity")
    assert record["settings"]["split"] == "valid"
    exact, bound = record["result"]["figures"]
    assert (exact["meaning"], bound["meaning"]) == ("exact", "bound")
    assert exact["nats"] < bound["nats"]
    assert perplexity_text(exact) in printed
    assert perplexity_text(bound) in printed
    assert "≤" in printed
    shards = subject.shards()
    assert record["result"]["sequences"] == shards.split("valid").tokens // 16
    assert record["weights"] == subject.weights


def test_records_of_other_weights_do_not_count(run, tmp_path):
    subject = Subject.open(run, device="cpu")
    measure_perplexity(subject, Eval(), console=QUIET)
    file = next((run / FOLDER).glob("*.json"))
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "weights": "others"}))
    assert kept(subject, "perplexity") == []
    file.write_text(json.dumps(record))
    assert kept(subject, "perplexity") == [record]


def test_replicates_tell_what_the_draws_add(run, capsys):
    words = ["eval", str(run), "--estimator", "counts", "--device", "cpu"]
    assert main(words) == 0
    assert "--replicates 4 measures how much of it comes from the draws" in capsys.readouterr().out
    assert main([*words, "--replicates", "3"]) == 0
    printed = capsys.readouterr().out
    assert "of draws" in printed
    assert "--replicates" not in printed


def test_replicates_are_for_the_models_that_draw(tmp_path, capsys):
    """What the legend advises does not fail for the exact figures beside it."""
    models = [
        str(saved(of_bytes(size, context=16), tmp_path / name)) for name, size in (("ar", None), ("one", 16))
    ]
    words = [*models, "--data", str(documents(tmp_path)), "--sequences", "3", "--device", "cpu"]
    out = tmp_path / "records.json"
    for command in ("eval", "zeroshot"):
        assert main([command, *words, "--replicates", "4", "--out", str(out)]) == 0
        exact, drawn = json.loads(out.read_text())
        out.unlink()
        assert (exact["settings"]["estimator"], exact["settings"]["replicates"]) == ("exact", 1)
        assert (drawn["settings"]["estimator"], drawn["settings"]["replicates"]) == ("counts", 4)
        assert drawn["result"]["figures"][0]["monte_carlo_error"] > 0
        capsys.readouterr()
        assert main([command, models[0], *words[2:], "--replicates", "4"]) == 1
        error = capsys.readouterr().err
        assert error == "bd3lm: replicates must be 1 for exact, which draws nothing, got 4\n"


def test_the_legend_says_what_the_table_has_and_no_more(run, tmp_path, capsys):
    def legend(*words: str) -> str:
        assert main(["eval", *words, "--sequences", "4", "--device", "cpu"]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    plain = "± is one standard error (neighboring sequences treated as dependent)."
    assert legend(str(run)) == f"{plain} ≤ upper bound."
    ar = str(saved(of_bytes(None), tmp_path / "ar"))
    assert legend(ar, "--data", str(documents(tmp_path))) == plain
    assert legend(str(run), "--estimator", "counts", "--replicates", "2") == (
        "± is one standard error (neighboring sequences treated as dependent, including the noise of the "
        "draws). ≤ upper bound, or an estimate of one."
    )


def test_the_papers_estimator_is_named_with_its_weakness(run, capsys):
    assert main(["eval", str(run), "--estimator", "nelbo", "--sequences", "4", "--device", "cpu"]) == 0
    assert "no finite variance" in (printed := capsys.readouterr().out)
    assert "; counts is the same bound with less noise." in printed


@pytest.mark.parametrize("command", ["eval", "zeroshot"])
def test_only_rates_near_0_have_no_finite_variance_and_steps_do_not_come_near(command, tmp_path, capsys):
    models = {"sedd": baseline(SEDD), "d3pm": baseline(D3PM)}
    folders = {name: str(saved(model, tmp_path / name)) for name, model in models.items()}
    words = ["--data", str(documents(tmp_path)), "--sequences", "3", "--device", "cpu"]
    for which, warned in (("sedd", True), ("d3pm", False)):
        assert main([command, folders[which], *words]) == 0
        printed = capsys.readouterr().out
        assert "nelbo" in printed
        assert ("nelbo has no finite variance" in printed) == warned


@pytest.mark.parametrize("command", ["eval", "zeroshot"])
def test_counts_is_advised_only_to_models_that_may_be_measured_by_it(command, tmp_path, capsys):
    told = BlockDiffusionMethod(block_size=4)
    models = {"sedd": baseline(SEDD), "told": baseline(told), "block": of_bytes(4)}
    folders = {name: str(saved(model, tmp_path / name)) for name, model in models.items()}
    flags = ["--estimator", "nelbo", "--sequences", "3", "--device", "cpu"]
    words = ["--data", str(documents(tmp_path)), *flags]
    assert main([command, folders["sedd"], folders["told"], *words]) == 0
    printed = capsys.readouterr().out
    assert "no finite variance" in printed
    assert "counts is" not in printed
    assert main([command, *folders.values(), *words]) == 0
    assert f"; counts is the same bound with less noise for {folders['block']}." in capsys.readouterr().out


def test_models_on_the_same_text_share_a_table(data, tmp_path):
    subjects = [
        Subject.open(saved(of_bytes(block_size), tmp_path / str(block_size)), device="cpu")
        for block_size in (None, 2)
    ]
    console = Console(file=io.StringIO(), width=400)
    records = report_perplexities(subjects, Eval(data=(str(data),)), console=console)
    printed = console.file.getvalue()
    assert " ".join(printed.split()).count("tokens scored") == 1
    assert len(records) == 2
    assert all(subject.name.rpartition("/")[2] in printed for subject in subjects)
    assert not list(tmp_path.glob(f"*/{FOLDER}"))  # no run, so nothing is kept beside it


OTHERS = {
    "context": lambda: of_bytes(2, context=8),
    "tokenizer": lambda: merged(2),
    "first token": lambda: of_bytes(2, score_first=True),
}


def merged(block_size: int) -> LanguageModel:
    """A model of text whose tokens are not bytes."""
    tokenizer = train_bpe(random_texts(40), 300)
    method = BlockDiffusionMethod(block_size=block_size)
    return of_method(method, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("other", "limit"), [("context", None), ("context", 3), ("tokenizer", 3), ("first token", 3)]
)
def test_models_on_other_sequences_of_a_text_have_tables_of_their_own(other, limit, tmp_path):
    """The name of the text is the same, and none takes the place of another."""
    models = {"one": of_bytes(2), "two": OTHERS[other](), "three": of_bytes(4)}
    subjects = [Subject.open(saved(model, tmp_path / name), device="cpu") for name, model in models.items()]
    console = Console(file=io.StringIO(), width=400)
    records = report_perplexities(
        subjects, Eval(data=(str(documents(tmp_path)),), sequences=limit), console=console
    )
    tables = console.file.getvalue().split("tokens scored")
    assert len(tables) == 3
    for record in records:
        index = 2 if record["model"].endswith("two") else 1
        assert record["model"] in tables[index]
        result, context = record["result"], record["settings"]["context"]
        scored = f"text.jsonl: {result['sequences']:,} sequences of {context}, {result['tokens']:,} "
        assert tables[index - 1].endswith(scored)
        assert all(perplexity_text(figure) in tables[index] for figure in result["figures"])


@pytest.mark.parametrize("method", [SEDD, D3PM], ids=lambda method: method.kind)
def test_baselines_have_a_bound(method, data, tmp_path):
    subject = Subject.open(saved(baseline(method), tmp_path), device="cpu")
    record = measure_perplexity(subject, Eval(replicates=2, sequences=10), str(data), console=QUIET)
    (figure,) = record["result"]["figures"]
    assert (figure["name"], figure["meaning"]) == ("nelbo", "bound")
    assert figure["monte_carlo_error"] > 0
    assert perplexity_text(figure).startswith("≤ ")


@pytest.mark.parametrize("command", ["eval", "zeroshot"])
def test_a_field_of_another_name_holds_the_text(command, tmp_path, capsys):
    model, named = str(saved(of_bytes(2), tmp_path / "model")), tmp_path / "bodies.jsonl"
    usual = documents(tmp_path)
    named.write_text(usual.read_text("utf-8").replace('"text"', '"body"'), "utf-8")
    assert main([command, model, "--data", str(named), "--device", "cpu"]) == 1
    assert "has no text in a field 'text': it has body" in capsys.readouterr().err
    found = {}
    for file, words in ((usual, []), (named, ["--field", "body"])):
        out = tmp_path / f"{file.stem}.json"
        assert main([command, model, "--data", str(file), *words, "--out", str(out), "--device", "cpu"]) == 0
        (found[file],) = json.loads(out.read_text())
    assert found[named]["result"] == found[usual]["result"]
    assert (found[named]["settings"]["field"], "field" in found[usual]["settings"]) == ("body", False)


def test_a_folder_without_splits_is_measured_whole_and_one_with_them_by_its_held_out_split(tmp_path):
    subject = Subject.open(saved(of_bytes(2), tmp_path / "model"), device="cpu")
    plain, split = tmp_path / "plain", tmp_path / "split"
    for folder, names in ((plain, ("a.txt", "b.txt")), (split, ("train.txt", "valid.txt"))):
        folder.mkdir()
        for name in names:
            (folder / name).write_text("\n\n".join(random_texts(20)), encoding="utf-8")
    with open_sequences(subject, str(plain)) as whole, open_sequences(subject, str(plain / "a.txt")) as part:
        assert whole.number >= 2 * part.number
    with open_sequences(subject, str(split)) as held_out:
        assert held_out.split == "valid"


def test_training_text_is_not_called_held_out(run, capsys):
    assert main(["eval", str(run), "--split", "train", "--sequences", "4", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "training text, split train" in printed
    assert "held-out" not in printed


# --- orders that lean ---


def test_a_lean_is_measured_kept_and_named(run, tmp_path, capsys):
    out = tmp_path / "records.json"
    words = ["eval", str(run), "--device", "cpu", "--sequences", "5", "--out", str(out)]
    figures = {}
    for lean, flags in ((0.0, []), (2.0, ["--lean", "2"])):
        assert main([*words, *flags]) == 0
        printed = capsys.readouterr().out
        (record,) = json.loads(out.read_text())
        out.unlink()
        assert record["settings"]["lean"] == lean
        assert record["title"] == "block diffusion, blocks of 4" + (", lean 2" if lean else "")
        exact, bound = figures[lean] = record["result"]["figures"]
        assert exact["nats"] < bound["nats"]
        assert perplexity_text(exact) in printed
        assert ("exact, lean 2" in printed, "nelbo, lean 2" in printed) == (bool(lean), bool(lean))
        assert ("lean: docs/sampling.md" in printed) == bool(lean)
    subject = Subject.open(run, device="cpu", lean=2.0)
    with open_sequences(subject, None, limit=5) as text:
        (batch,) = text.batches(subject, 8)
    scores = subject.model.log_likelihood(batch.tokens)
    mean = -sum(each.log_p for each in scores) / sum(each.tokens for each in scores)
    assert figures[2.0][0]["nats"] == pytest.approx(mean, rel=1e-5)
    assert figures[2.0][0]["nats"] != pytest.approx(figures[0.0][0]["nats"], rel=1e-6)
    both = [each["settings"] for each in kept(subject, "perplexity") if each["settings"]["limit"] == 5]
    assert sorted(each["lean"] for each in both) == [0.0, 2.0]  # neither takes the other's place


def test_a_lean_is_for_the_models_that_have_an_order(data, tmp_path, capsys):
    """An autoregressive model beside them is measured as it is."""
    models = {"ar": of_bytes(None), "block": of_bytes(2), "leaning": of_bytes(2).with_lean(1.0)}
    for name, model in models.items():
        saved(model, tmp_path / name)
    out = tmp_path / "records.json"
    words = ["eval", *(str(tmp_path / name) for name in models), "--data", str(data), "--sequences", "4"]
    found = {}
    for flags in ([], ["--lean", "2"], ["--lean", "0"]):
        assert main([*words, *flags, "--out", str(out), "--device", "cpu"]) == 0
        found[" ".join(flags)] = json.loads(out.read_text())
        out.unlink()
    leans = {flags: [each["settings"]["lean"] for each in records] for flags, records in found.items()}
    assert leans == {"": [0.0, 0.0, 1.0], "--lean 2": [0.0, 2.0, 2.0], "--lean 0": [0.0, 0.0, 0.0]}
    own, two, none = (
        [each["result"]["figures"][0]["nats"] for each in records] for records in found.values()
    )
    assert own[0] == two[0] == none[0]
    assert two[1] == two[2]
    assert none[1] == none[2] == own[1]
    assert len({own[1], own[2], two[1]}) == 3
    capsys.readouterr()


@pytest.mark.parametrize("command", ["eval", "zeroshot"])
def test_a_lean_that_no_model_would_obey_is_refused(command, tmp_path, capsys):
    models = [
        str(saved(model, tmp_path / name))
        for name, model in {"ar": of_bytes(None), "sedd": baseline(SEDD)}.items()
    ]
    assert main([command, *models, "--data", str(documents(tmp_path)), "--lean", "2", "--device", "cpu"]) == 1
    assert (
        "--lean sets the order within a block, and no model here is a block diffusion model, got 2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("estimator", ["counts", "iw:2"])
def test_bounds_of_a_lean_are_drawn_in_its_order(estimator, run, tmp_path):
    measured = [
        measure_perplexity(
            Subject.open(run, device="cpu", lean=lean), Eval(estimator=estimator, sequences=2), console=QUIET
        )
        for lean in (0.0, 3.0)
    ]
    without, leans = (record["result"]["figures"][0] for record in measured)
    assert leans["meaning"] == "bound"
    assert leans["nats"] != without["nats"]


# --- what is refused ---


@pytest.mark.parametrize("words", [["eval", "--no-eos"], ["zeroshot"]], ids=" ".join)
def test_shards_with_end_tokens_are_not_measured_as_if_without(words, run, data, capsys):
    assert main([words[0], str(run), "--data", str(data), *words[1:], "--device", "cpu"]) == 1
    assert (
        "was prepared with an end token after each document, and the measurement needs"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["eval", "zeroshot"])
def test_no_model_is_refused(command, capsys):
    assert main([command]) == 1
    assert (
        "models must name at least one run, model folder, GGUF file or hub id, got none"
        in capsys.readouterr().err
    )


def refused(capsys, *words: str) -> str:
    assert main(["eval", *words, "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("bd3lm: ")
    assert error.count("\n") == 1
    return error


def test_another_tokenizer_is_refused(run, tmp_path, capsys):
    other = train_bpe(random_texts(40), 300)
    shards = prepared(tmp_path / "other", other)
    error = refused(capsys, str(run), "--data", str(shards))
    assert f"{run} cannot be measured on {shards}" in error
    assert "another tokenizer" in error


def test_a_model_without_a_tokenizer_is_held_to_its_vocabulary(tmp_path, capsys):
    folder = saved(of_bytes(4, tokenizer=None), tmp_path / "model")
    same, other = prepared(tmp_path / "same"), prepared(tmp_path / "other", train_bpe(random_texts(40), 300))
    assert main(["eval", str(folder), "--data", str(same), "--device", "cpu"]) == 0
    capsys.readouterr()
    assert "258 tokens (mask 257) are not the" in refused(capsys, str(folder), "--data", str(other))
    text = documents(tmp_path)
    assert "without a tokenizer; name one with --tokenizer" in refused(
        capsys, str(folder), "--data", str(text)
    )
    byte_tokenizer().save(tmp_path / "bytes")
    words = ["eval", str(folder), "--data", str(text), "--tokenizer", str(tmp_path / "bytes")]
    assert main([*words, "--device", "cpu"]) == 0


def test_too_little_text_is_refused(tmp_path, capsys):
    folder = saved(of_bytes(4), tmp_path / "model")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    error = refused(capsys, str(folder), "--data", str(short))
    assert (
        "must hold at least one sequence of 16 tokens, the network's context (or give --context), got 10"
        in error
    )
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "has no documents" in refused(capsys, str(folder), "--data", str(empty))


def test_exact_figures_of_large_blocks_are_refused_with_their_cost(tmp_path, capsys):
    folder = saved(of_bytes(64, context=64), tmp_path / "model")
    error = refused(capsys, str(folder), "--data", str(documents(tmp_path)), "--estimator", "exact")
    assert "2^64 − 1" in error
    assert "Use 'counts', a bound in one pass, or 'iw:K', a tighter one in 64·K passes" in error


def test_ssd_lm_has_no_likelihood(tmp_path, capsys):
    folder = saved(baseline(SSD), tmp_path / "model")
    assert "has neither a likelihood nor a bound" in refused(
        capsys, str(folder), "--data", str(documents(tmp_path))
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--estimator", "best"],
            "estimator must be auto, paper, exact, nelbo, nelbo:ordered, nelbo:reference, counts or iw:K",
        ),
        (["--sequences", "0"], "sequences must be at least 1, got 0"),
        (["--lean", "-1"], "lean must be a number from 0 to 1e6, got -1.0"),
        (["--lean", "2", "--estimator", "nelbo"], "for an order that leans (lean 2), got 'nelbo'"),
        (["--context", "0"], "--context must be at least 1, got 0"),
        (["--context", "10"], "--context must lie in 4..16, the context of "),
        (["--context", "20"], "--context must lie in 4..16, the context of "),
        (["--replicates", "0"], "replicates must be at least 1, got 0"),
        (["--replicates", "2"], "replicates must be 1 for exact, which draws nothing, got 2"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--split", "dev"], "split must be one of train, valid"),
        (["--field", "body"], "--field is for text files, and no text to measure on is one, got 'body'"),
        (["--data", "nowhere"], "nowhere is neither a file or folder nor one of"),
    ],
    ids=" ".join,
)
def test_bad_options(words, said, run, capsys):
    assert said in refused(capsys, str(run), *words)


def test_a_model_of_no_run_needs_data(tmp_path, capsys):
    folder = saved(of_bytes(4), tmp_path / "model")
    assert "is not a training run, so its data is unknown: name the data with --data" in refused(
        capsys, str(folder)
    )


# --- the bytes of a text ---


def test_bytes_are_counted_also_where_a_row_cuts_a_character():
    text = "naïve ☂ 語"
    ids = torch.tensor(BYTES.encode(text)).numpy()
    assert BYTES.text_bytes(ids) == len(text.encode())
    assert sum(BYTES.text_bytes(ids[[i]]) for i in range(len(ids))) == len(text.encode())
    assert BYTES.text_bytes(torch.tensor([END, BYTES.mask_id]).numpy()) == 0


def test_bytes_of_merged_tokens():
    tokenizer = train_bpe(random_texts(40), 400)
    for text in random_texts(10):
        ids = torch.tensor(tokenizer.encode(text)).numpy()
        assert tokenizer.text_bytes(ids) == len(text.encode())


WORDS = {"[UNK]": 0, "un": 1, "##fold": 2, "the": 3, "na": 4, "##ïve": 5, "[MASK]": 6}
SPACED = {"<unk>": 0, "▁un": 1, "fold": 2, "▁the": 3, "▁na": 4, "ïve": 5, "[MASK]": 6}


@pytest.mark.parametrize(
    ("model", "decoder"),
    [
        (models.WordPiece(WORDS, unk_token="[UNK]"), decoders.WordPiece()),
        (models.WordLevel(SPACED, unk_token="<unk>"), decoders.Metaspace()),
    ],
    ids=["WordPiece", "Metaspace"],
)
def test_bytes_of_words_are_those_by_which_the_text_grows(model, decoder):
    """Of "unfold the naïve" the first row has 6 bytes, and the second " the naïve", with its space; where
    the first token of each is given, "fold" has 4 and " naïve" 7."""
    tokenizer = Tokenizer(_spec(model, decoder), mask_id=6, eos_id=None, bos_id=None)
    first, second = np.array([1, 2]), np.array([3, 4, 5])
    assert tokenizer.decode([*first, *second]) == "unfold the naïve"
    assert tokenizer.text_bytes(first) == 6
    assert tokenizer.text_bytes(second, before=first) == len(" the naïve".encode()) == 11
    assert tokenizer.text_bytes(first[1:], before=first[:1]) == 4
    assert tokenizer.text_bytes(second[1:], before=[*first, *second[:1]]) == len(" naïve".encode())


def test_a_sequence_that_begins_inside_a_text_has_the_space_of_its_first_word(tmp_path):
    """40 words of 3 letters are 2 sequences of 16, of which 15 words are scored, each with its space."""
    words = {"▁cat": 0, "▁the": 1, "[MASK]": 2}
    spec = _spec(models.WordLevel(words, unk_token="▁cat"), decoders.Metaspace(), pre_tokenizers.Metaspace())
    tokenizer = Tokenizer(spec, mask_id=2, eos_id=None, bos_id=None)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(["the", "cat"] * 20), encoding="utf-8")
    model = of_bytes(None, tokenizer=tokenizer, vocab_size=3)
    subject = Subject.open(saved(model, tmp_path / "model"), device="cpu")
    result = measure_perplexity(subject, Eval(), str(text), eos_between_documents=False, console=QUIET)[
        "result"
    ]
    assert (result["tokens"], result["bytes"]) == (30, 30 * len(" the"))


def _spec(
    model: models.Model, decoder: decoders.Decoder, splitter: pre_tokenizers.PreTokenizer | None = None
) -> str:
    backend = Backend(model)
    backend.decoder = decoder
    if splitter is not None:
        backend.pre_tokenizer = splitter
    return backend.to_str()


@pytest.mark.parametrize("command", ["eval", "zeroshot"])
def test_a_path_without_text_is_refused_before_anything_is_measured(command, tmp_path, capsys, monkeypatch):
    folder, good = saved(of_bytes(2), tmp_path / "model"), documents(tmp_path)
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.setattr("bd3lm.evaluation.corpus_likelihood", lambda *_, **__: pytest.fail("measured"))
    for wrong, said in (
        (tmp_path / "txet.jsonl", "is neither a file or folder nor one of"),
        (empty, "holds no file that can be read"),
    ):
        assert main([command, str(folder), "--data", str(good), str(wrong), "--device", "cpu"]) == 1
        printed, error = capsys.readouterr()
        assert error.startswith(f"bd3lm: {wrong} {said}")
        assert not printed


# --- weights that are no numbers ---


def test_nan_weights_are_named(tmp_path, capsys):
    broken = of_bytes(2)
    with torch.no_grad():
        broken.network.output.weight[0, 0] = torch.nan
    models = [str(saved(broken, tmp_path / "broken")), str(saved(of_bytes(2), tmp_path / "sound"))]
    file = str(documents(tmp_path))
    said = "nats by exact must be numbers, got NaN for 16 of the 16 sequences of batch 0"
    assert said in refused(capsys, *models, "--data", file)
    assert main(["zeroshot", *models, "--data", file, "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert f"– {models[0]} on {file}: {said}" in printed
    assert "∞" not in printed


def test_text_that_cannot_be_has_an_infinite_perplexity(tmp_path):
    """Which a record has as null."""
    model = of_bytes(None)
    with torch.no_grad():
        model.network.output.bias[ord("e")] = -torch.inf
    subject = Subject.open(saved(model, tmp_path / "model"), device="cpu")
    console = Console(file=io.StringIO(), width=200)
    (record,) = report_perplexities([subject], Eval(data=(str(documents(tmp_path)),)), console=console)
    assert record["result"]["figures"][0]["nats"] is None
    assert "∞" in console.file.getvalue()


# --- nothing that was measured is lost ---


def test_a_run_that_cannot_be_written_to_is_measured_all_the_same(run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "measured", ignore_errors=True)
    (folder / "measured").write_text("")
    assert main(["eval", str(folder), "--device", "cpu", "--sequences", "2"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"exact.* \d+\.\d", printed.out)
    assert printed.err.startswith(
        f"bd3lm: warning: measurements of {folder} are shown but not stored, because "
    )
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("command", ["eval", "zeroshot"])
def test_what_was_measured_is_printed_when_the_rest_is_interrupted(command, tmp_path, capsys, monkeypatch):
    from bd3lm.commands import eval as module
    from bd3lm.commands import zeroshot

    real, calls = module.measure_perplexity, itertools.count()

    def interrupted(*what: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*what, **options)

    for each in (module, zeroshot):
        monkeypatch.setattr(each, "measure_perplexity", interrupted)
    models = [str(saved(of_bytes(size), tmp_path / f"of-{size}")) for size in (2, 4)]
    files = [str(documents(tmp_path)), str(tmp_path / "copy.txt")]
    shutil.copy(*files)
    words = [command, *models, "--data", *files, "--sequences", "2", "--estimator", "exact"]
    monkeypatch.setenv("COLUMNS", "300")
    assert main(words) == 130
    printed = capsys.readouterr()
    figures = {"eval": 4, "zeroshot": 2}[command]  # eval also prints the bound that exact passes give
    assert len(re.findall(r"\d ± \d", printed.out)) == figures
    assert printed.err == "bd3lm: interrupted\n"


# --- a folder of a name that means something ---


def test_a_folder_called_own_is_not_the_data_of_a_run(run, tmp_path, monkeypatch):
    (tmp_path / OWN).mkdir()
    documents(tmp_path / OWN)
    monkeypatch.chdir(tmp_path)
    subject = Subject.open(run, device="cpu")
    console = Console(file=io.StringIO(), width=200)
    (record,) = report_perplexities([subject], Eval(data=(OWN,), sequences=2), console=console)
    assert record["settings"]["data"] == "./own"
    assert "./own, split train" in console.file.getvalue()
    assert measure_perplexity(subject, Eval(sequences=2), console=QUIET)["settings"]["data"] == OWN


# --- sequences between BOS and EOS ---


def test_a_run_on_framed_sequences_is_measured_on_such_whatever_the_text(data, tmp_path, capsys):
    out = tmp_path / "framed"
    stages = resolve_stages(None, overrides=plain(data, BLOCK, {"data": {"bos_eos": True}}))
    train_stages(stages, out, console=QUIET, device="cpu")
    subject = Subject.open(out, device="cpu")
    for source in (None, str(data), str(documents(tmp_path))):
        with open_sequences(subject, source, limit=5) as text:
            (batch,) = text.batches(subject, 8)
            whole = len(text.rows)
            tokens = text.rows.shards.split(text.split).tokens
        assert (batch.tokens[:, [0, -1]] == END).all()
        assert whole == tokens // 14  # of a context of 16
        record = measure_perplexity(subject, Eval(sequences=5), source, console=QUIET)
        assert record["settings"]["bos_eos"] is True
    other = Subject.open(saved(of_bytes(2), tmp_path / "other"), device="cpu")
    console = Console(file=io.StringIO(), width=400)
    report_perplexities([subject, other], Eval(data=(str(data),), sequences=5), console=console)
    printed = console.file.getvalue()
    assert "5 sequences of 16 with BOS and EOS, 75 tokens scored" in printed
    assert "5 sequences of 16, 75 tokens scored" in printed
    (tmp_path / "short.txt").write_text("too short")
    error = refused(capsys, str(out), "--data", str(tmp_path / "short.txt"))
    assert (
        "one sequence of 14 tokens, the network's context less BOS and EOS (or give --context), got 10"
        in error
    )
