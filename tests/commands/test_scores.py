"""`bd3lm score`: documents as if alone, each token scored once however long a document is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bd3lm.cli import main
from bd3lm.commands import scores
from bd3lm.commands.scores import score_document, score_documents, windows
from bd3lm.commands.subjects import Subject
from bd3lm.diffusion import derive_seed
from bd3lm.lm import LanguageModel
from tests.lm import BYTES, CONTEXT, END, of_bytes

LONG = "It was not the longest of texts, and yet it was longer than a context."


def saved(folder: Path, *words: Any, **options: Any) -> str:
    of_bytes(*words, **options).save_pretrained(folder)
    return str(folder)


def scored(*words: str) -> list[dict[str, Any]]:
    assert main(["score", *words, "--device", "cpu"]) == 0
    out = Path(words[words.index("--out") + 1])
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    out.unlink()
    return lines


@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize("stride", [1, 3, 5, 7])
@pytest.mark.parametrize("length", [2, 8, 9, 15, 40])
def test_windows_score_every_token_once_after_enough_others(length, stride, given):
    context = 8
    found = windows(length, context=context, stride=stride, given=given)
    places = [place for start, end, known in found for place in range(start + known, end)]
    assert places == list(range(given, length))
    assert all(end - start <= context for start, end, _ in found)
    assert all(known == context - stride for _, _, known in found[1:])
    assert all(end - start - known == stride for start, end, known in found[1:-1])


@pytest.mark.parametrize(
    ("block_size", "stride", "score_first"),
    [
        (None, None, False),
        (None, 3, True),
        (4, None, True),
        (4, 4, False),
        (CONTEXT, 6, False),
        (CONTEXT, 6, True),
    ],
)
def test_a_long_text_is_its_first_context_and_then_what_follows_given_tokens(
    block_size, stride, score_first, tmp_path
):
    estimator = "iw:3" if block_size == CONTEXT else "exact"
    subject = Subject.open(saved(tmp_path / "m", block_size, score_first=score_first), device="cpu")
    found = score_document(subject, LONG, stride=stride, estimator=estimator)
    tokens = [*([] if score_first else [END]), *LONG.encode()]
    step = stride or CONTEXT // 2
    if estimator == "exact":
        lm = subject.model
        total = lm.log_likelihood([tokens[:CONTEXT]])[0].log_p
        for start in range(step, len(tokens) - CONTEXT + step, step):
            (rest,) = lm.log_likelihood([tokens[start : start + CONTEXT]], given=[CONTEXT - step])
            total += rest.log_p
        assert found["log_p"] == pytest.approx(total, abs=1e-9)
        assert found["error"] == 0.0
    assert found["tokens"] == len(LONG.encode())
    assert found["windows"] == 1 + -(-(len(tokens) - CONTEXT) // step)
    assert found["meaning"] == ("exact" if estimator == "exact" else "bound")


def test_a_line_for_each_document(tmp_path, capsys):
    model, file = saved(tmp_path / "model", 4), tmp_path / "texts.jsonl"
    texts = ["naïve", "hello there", LONG]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    records = scored(model, str(file), "--out", str(tmp_path / "scores.jsonl"))
    assert capsys.readouterr().err == f"wrote {tmp_path / 'scores.jsonl'}: 3 documents\n"
    assert [(each["file"], each["index"], each["text"]) for each in records] == [
        (str(file), index, text) for index, text in enumerate(texts)
    ]
    lm = Subject.open(model, device="cpu").model
    for record, text in zip(records[:2], texts, strict=False):
        (found,) = lm.log_likelihood(text)
        assert record["log_p"] == pytest.approx(found.log_p, abs=1e-9)
        assert (record["tokens"], record["windows"], record["error"]) == (found.tokens, 1, 0.0)
        assert record["perplexity"] == pytest.approx(found.perplexity)
        assert record["nats_per_token"] == pytest.approx(-found.log_p / found.tokens)
        bits = -found.log_p / math.log(2)
        assert record["bits_per_byte"] == pytest.approx(bits / len(text.encode()))
        assert record["bits_per_character"] == pytest.approx(bits / len(text))
        assert (record["estimator"], record["meaning"]) == ("exact", "exact")
    assert records[2]["windows"] > 1
    assert main(["score", model, str(file), "--device", "cpu"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == records


def test_drawn_estimates_have_their_seed_order_and_error(tmp_path):
    model, file = saved(tmp_path / "model", 4), tmp_path / "text.txt"
    file.write_text(f"short\n\n{LONG}", "utf-8")
    flags = ["--estimator", "counts", "--samples", "8", "--lean", "1", "--out", str(tmp_path / "out.jsonl")]
    short, long = scored(model, str(file), *flags)
    (found,) = Subject.open(model, device="cpu", lean=1.0).model.log_likelihood(
        "short", estimator="counts", samples=8
    )
    assert (short["log_p"], short["error"]) == pytest.approx((found.log_p, found.error))
    assert (short["meaning"], short["lean"]) == ("bound", 1.0)
    other = scored(model, str(file), *flags, "--seed", "1")
    assert other[1]["log_p"] != long["log_p"]
    assert scored(model, str(file), *flags[:2], "--samples", "1", *flags[-2:])[0]["error"] is None


def test_the_errors_of_windows_are_independent_and_add_up_so(tmp_path):
    subject = Subject.open(saved(tmp_path / "model", 4), device="cpu")
    half, options = CONTEXT // 2, {"estimator": "counts", "samples": 4}
    one, two, three = (
        score_document(subject, "a" * (CONTEXT - 1 + more), **options) for more in (0, half, 2 * half)
    )
    lm, seed = subject.model, derive_seed(0, "window", 1)
    (first,) = lm.log_likelihood("a" * (CONTEXT - 1), **options)
    (second,) = lm.log_likelihood([[97] * CONTEXT], given=[half], seed=seed, **options)
    assert (one["log_p"], one["error"]) == pytest.approx((first.log_p, first.error))
    assert two["log_p"] == pytest.approx(first.log_p + second.log_p)
    assert two["error"] == pytest.approx(math.hypot(first.error, second.error))
    # The second and third windows are alike; the same draws would make them equal.
    assert three["log_p"] - two["log_p"] != pytest.approx(second.log_p, abs=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "files must name at least one file or folder of text, got none"),
        (["nowhere.txt"], "there is no file or folder nowhere.txt"),
        (["EMPTY"], "files must hold at least one document that is not blank, got"),
        (["TEXT", "--stride", "0"], "stride must be 1 to 15 tokens"),
        (["TEXT", "--stride", "16"], "stride must be 1 to 15 tokens"),
        (["TEXT", "--estimator", "best"], "estimator must be auto, exact, nelbo, counts or iw:K"),
        (["TEXT", "--samples", "2"], "samples is for an estimate that is drawn, and 'exact' is not, got 2"),
        (["TEXT", "--seed", "-1"], "--seed must be at least 0, got -1"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(words, said, tmp_path, capsys):
    files = {"EMPTY": tmp_path / "empty.txt", "TEXT": tmp_path / "text.txt"}
    files["EMPTY"].write_text("")
    files["TEXT"].write_text(LONG)
    model = saved(tmp_path / "model", 4)
    assert main(["score", model, *(str(files.get(word, word)) for word in words), "--device", "cpu"]) == 1
    printed, error = capsys.readouterr()
    assert said in error
    assert error.count("\n") == 1
    assert not printed


def test_a_model_without_a_tokenizer_needs_one(tmp_path, capsys):
    model, file = saved(tmp_path / "model", 4, tokenizer=None), tmp_path / "text.txt"
    file.write_text("hello")
    assert main(["score", model, str(file), "--device", "cpu"]) == 1
    assert "was saved without a tokenizer; name one with --tokenizer" in capsys.readouterr().err
    BYTES.save(tmp_path / "bytes")
    words = ["score", model, str(file), "--tokenizer", str(tmp_path / "bytes"), "--device", "cpu"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 5


def test_what_was_scored_before_an_interruption_is_kept(tmp_path, monkeypatch):
    """The lines so far are in OUT.partial, as those of `bd3lm sample` are."""
    plain, done = LanguageModel.log_likelihood, []

    def interrupted(*given, **options):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(plain(*given, **options))
        return done[-1]

    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"some text {number}"}) + "\n" for number in range(8)))
    out = tmp_path / "scores.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(LanguageModel, "log_likelihood", interrupted)
        patch.setattr(scores, "_BATCHES_TOGETHER", 1)
        words = ["score", saved(tmp_path / "m", 4), str(texts), "--out", str(out), "--batch", "3"]
        assert main(words) == 130
    assert not out.exists()
    lines = (tmp_path / "scores.jsonl.partial").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [f"some text {number}" for number in range(6)]


@pytest.mark.parametrize("estimator", ["exact", "counts"])
def test_documents_are_scored_as_if_alone(estimator, tmp_path, monkeypatch):
    subject = Subject.open(saved(tmp_path / "model", 4), device="cpu")
    texts = [LONG, "a", LONG[7:], "short", LONG + LONG, "b", "of some length"]
    options = {"estimator": estimator, "batch_size": 2}
    calls = []
    plain = LanguageModel.log_likelihood

    def counted(model, pieces, **others):
        calls.append([len(piece) for piece in pieces])
        return plain(model, pieces, **others)

    monkeypatch.setattr(LanguageModel, "log_likelihood", counted)
    monkeypatch.setattr(scores, "_BATCHES_TOGETHER", 4)
    found = list(score_documents(subject, named(texts), **options))
    if estimator == "exact":
        assert len(calls) < len(texts)
        assert all(lengths == sorted(lengths, reverse=True) for lengths in calls)
    alone = [score_document(subject, text, **options) for text in texts]
    assert [each["text"] for each in found] == texts
    for each, other in zip(found, alone, strict=True):
        assert each.keys() == other.keys()
        for name, value in other.items():
            assert each[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def named(texts: list[str]) -> list[tuple[str, str]]:
    return [(f"text {index}", text) for index, text in enumerate(texts)]


def test_which_document_is_wrong_is_said_after_those_before_it(tmp_path, monkeypatch):
    subject = Subject.open(saved(tmp_path / "model", 4), device="cpu")
    found = score_documents(subject, named(["some", "text", "", "more"]))
    assert [next(found)["text"] for _ in range(2)] == ["some", "text"]
    with pytest.raises(ValueError, match="text 2 must have at least one token to score, got ''"):
        next(found)
    plain = LanguageModel.log_likelihood

    def refusing(model, pieces, **options):
        if any(BYTES.decode(list(piece)[1:]) == "bad" for piece in pieces):
            raise ValueError("text 1 must be better")
        return plain(model, pieces, **options)

    monkeypatch.setattr(LanguageModel, "log_likelihood", refusing)
    found = score_documents(subject, named(["some", "text", "bad", "more"]))
    assert [next(found)["text"] for _ in range(2)] == ["some", "text"]
    with pytest.raises(ValueError, match="text 2: text 1 must be better"):
        next(found)


def test_what_comes_before_a_broken_line_is_kept(tmp_path, capsys):
    texts, out = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    texts.write_text('{"text": "one"}\n{"text": "two"}\n{"text": ')
    assert main(["score", saved(tmp_path / "m", 4), str(texts), "--out", str(out)]) == 1
    assert "line 3" in capsys.readouterr().err
    lines = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one", "two"]


def test_documents_of_several_files_share_batches(tmp_path, monkeypatch):
    calls = []
    plain = LanguageModel.log_likelihood

    def counted(model, pieces, **options):
        calls.append(len(pieces))
        return plain(model, pieces, **options)

    files = [tmp_path / f"{name}.txt" for name in "abc"]
    for file in files:
        file.write_text(f"{file.stem} is one\n\n{file.stem} is another")
    monkeypatch.setattr(LanguageModel, "log_likelihood", counted)
    out = str(tmp_path / "out.jsonl")
    found = scored(saved(tmp_path / "m", 4), *map(str, files), "--out", out)
    assert calls == [6]
    assert [(line["file"], line["index"], line["text"]) for line in found] == [
        (str(file), index, f"{file.stem} is {word}")
        for file in files
        for index, word in enumerate(("one", "another"))
    ]
