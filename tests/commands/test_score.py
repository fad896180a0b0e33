"""`bd3lm score`: documents as if alone, each token scored once however long a document is."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bd3lm.cli import main
from bd3lm.commands import score
from bd3lm.commands.score import Score, score_documents, windows
from bd3lm.commands.shared.partials import Partial
from bd3lm.commands.shared.subjects import Subject
from bd3lm.diffusion import derive_seed
from bd3lm.lm import LanguageModel, prompts
from tests.lm import BYTES, CONTEXT, END, of_bytes

pytestmark = pytest.mark.sweep(3)

LONG = "It was not the longest of texts, and yet it was longer than a context."


def saved(folder: Path, *words: Any, **options: Any) -> str:
    of_bytes(*words, **options).save_pretrained(folder)
    return str(folder)


def documents_of(subject: Subject, texts: list[tuple[str, str]], **flags: Any) -> Iterator[dict[str, Any]]:
    return score_documents(subject, texts, Score(subject.name, (), **flags))


def document_of(subject: Subject, text: str, **flags: Any) -> dict[str, Any]:
    (found,) = documents_of(subject, [("the text", text)], **flags)
    return found


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
    found = document_of(subject, LONG, stride=stride, estimator=estimator)
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
        document_of(subject, "a" * (CONTEXT - 1 + more), **options) for more in (0, half, 2 * half)
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
        (["TEXT", "--stride", "0"], "stride must be at least 1, got 0"),
        (["TEXT", "--stride", "16"], "stride must be 1 to 15 tokens"),
        (
            ["TEXT", "--estimator", "best"],
            "estimator must be auto, paper, exact, nelbo, nelbo:ordered, nelbo:reference, counts or iw:K",
        ),
        (
            ["TEXT", "--samples", "2"],
            "samples is for an estimate that draws, and 'exact' draws nothing, got 2",
        ),
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


def texts_in(file: Path, texts: list[str | None], field: str = "text") -> str:
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), "utf-8")
    return str(file)


def test_a_field_of_another_name_holds_the_text(tmp_path, capsys):
    model, file = saved(tmp_path / "model", 4), texts_in(tmp_path / "texts.jsonl", ["some text"], "body")
    assert main(["score", model, file, "--device", "cpu"]) == 1
    assert "has no text in a field 'text': it has body" in capsys.readouterr().err
    (found,) = scored(model, file, "--field", "body", "--out", str(tmp_path / "out.jsonl"))
    assert found["text"] == "some text"


@pytest.mark.parametrize("estimator", ["exact", "counts"])
def test_a_blank_document_keeps_its_index_and_has_no_figures(estimator, tmp_path, capsys):
    model, out = saved(tmp_path / "model", 4), tmp_path / "out.jsonl"
    texts: list[str | None] = ["", "some text", " \n", None, "more text", "\t"]
    file = texts_in(tmp_path / "texts.jsonl", texts)
    found = scored(model, file, "--estimator", estimator, "--out", str(out))
    assert f"wrote {out}: 6 documents, 4 of them blank" in capsys.readouterr().err
    assert [(each["index"], each["text"]) for each in found] == list(enumerate(text or "" for text in texts))
    blank, full = found[0], found[1]
    assert blank.keys() == full.keys()
    assert (blank["tokens"], blank["windows"], blank["meaning"]) == (0, 0, "blank")
    assert blank["log_p"] is blank["perplexity"] is blank["error"] is None
    assert [each["meaning"] == "blank" for each in found] == [not (text or "").strip() for text in texts]
    (alone,) = documents_of(Subject.open(model, device="cpu"), [("it", "more text")], estimator=estimator)
    assert found[4]["log_p"] == pytest.approx(alone["log_p"], rel=1e-5)


def test_blank_documents_alone_are_refused_and_leave_nothing(tmp_path, capsys):
    file = texts_in(tmp_path / "texts.jsonl", ["", None])
    words = ["score", saved(tmp_path / "model", 4), file, "--out", str(tmp_path / "out.jsonl")]
    assert main([*words, "--device", "cpu"]) == 1
    assert "files must hold at least one document that is not blank" in capsys.readouterr().err
    assert not list(tmp_path.glob("out.jsonl*"))


def interrupted_after(calls: int, patch: pytest.MonkeyPatch) -> None:
    """Scoring that goes on for some calls of the network, three short documents each, and is then stopped."""
    plain, done = LanguageModel.log_likelihood, []

    def interrupted(*given, **options):
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(plain(*given, **options))
        return done[-1]

    patch.setattr(LanguageModel, "log_likelihood", interrupted)
    patch.setattr(score, "_BATCHES_TOGETHER", 1)


@pytest.fixture
def begun(tmp_path, monkeypatch) -> list[str]:
    """A command that was interrupted after 6 of 8 documents."""
    file = texts_in(tmp_path / "texts.jsonl", [f"some text {number}" for number in range(8)])
    words = [
        "score",
        saved(tmp_path / "m", 4),
        file,
        "--out",
        str(tmp_path / "out.jsonl"),
        "--batch-size",
        "3",
    ]
    with monkeypatch.context() as patch:
        interrupted_after(2, patch)
        assert main([*words, "--device", "cpu"]) == 130
    assert not (tmp_path / "out.jsonl").exists()
    return [*words, "--device", "cpu"]


def texts_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]


def test_what_was_scored_before_an_interruption_is_kept(begun, tmp_path):
    """The lines so far are in OUT.partial, as those of `bd3lm sample` are."""
    assert texts_of(tmp_path / "out.jsonl.partial") == [f"some text {number}" for number in range(6)]


def test_the_same_command_goes_on_where_it_was_interrupted(begun, tmp_path, monkeypatch, capsys):
    partial, out = tmp_path / "out.jsonl.partial", tmp_path / "out.jsonl"
    before = partial.read_bytes()
    partial.write_bytes(before + b'{"file": "torn')
    calls = []
    plain = LanguageModel.log_likelihood

    def counted(model, pieces, **options):
        calls.append(len(pieces))
        return plain(model, pieces, **options)

    monkeypatch.setattr(LanguageModel, "log_likelihood", counted)
    capsys.readouterr()
    assert main(begun) == 0
    said = capsys.readouterr().err
    assert said == f"continuing after 6 lines of {partial}\nwrote {out}: 8 documents\n"
    assert calls == [2]
    assert out.read_bytes().startswith(before)
    assert texts_of(out) == [f"some text {number}" for number in range(8)]
    assert not list(tmp_path.glob("out.jsonl.*"))


@pytest.mark.parametrize("change", ["settings", "weights", "texts", "no lines of it"])
def test_lines_of_another_command_are_kept_and_nothing_is_mixed(change, begun, tmp_path, capsys):
    partial, words = tmp_path / "out.jsonl.partial", begun
    if change == "settings":
        words = [*begun, "--lean", "1"]
    elif change == "weights":
        saved(tmp_path / "m", 4, seed=1)
    elif change == "texts":
        texts_in(tmp_path / "texts.jsonl", ["some text 0", "some text 1", "other", "some text 3"])
    else:
        partial.write_text("[]\nnothing\n")
    before = partial.read_bytes()
    capsys.readouterr()
    assert main(words) == 0
    said, kept = capsys.readouterr().err, tmp_path / "out.jsonl.partial.1"
    which = "its lines after the first 2" if change == "texts" else "its lines"
    assert f"{partial} is kept as {kept}: {which} come from other texts, weights or settings\n" in said
    assert ("continuing after 2 lines" in said) == (change == "texts")
    assert kept.read_bytes() == before
    assert not partial.exists()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len({json.dumps([line["weights"], line["settings"]]) for line in lines}) == 1
    assert [line["index"] for line in lines] == list(range(len(lines)))
    assert lines[2]["text"] == ("other" if change == "texts" else "some text 2")


def test_an_error_before_the_first_line_leaves_no_partial_file(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("no JSON\n")
    words = ["score", saved(tmp_path / "m", 4), str(file), "--out", str(tmp_path / "out.jsonl")]
    assert main([*words, "--device", "cpu"]) == 1
    assert not list(tmp_path.glob("out.jsonl*"))


def test_a_second_command_does_not_write_into_the_first_ones_file(begun, tmp_path, capsys):
    with Partial.open(tmp_path / "out.jsonl"):
        assert main(begun) == 1
    assert f"--out {tmp_path / 'out.jsonl'} is being written by another process" in capsys.readouterr().err
    assert len(texts_of(tmp_path / "out.jsonl.partial")) == 6


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
    monkeypatch.setattr(score, "_BATCHES_TOGETHER", 4)
    found = list(documents_of(subject, named(texts), **options))
    if estimator == "exact":
        assert len(calls) < len(texts)
        assert all(lengths == sorted(lengths, reverse=True) for lengths in calls)
    alone = [document_of(subject, text, **options) for text in texts]
    assert [each["text"] for each in found] == texts
    for each, other in zip(found, alone, strict=True):
        assert each.keys() == other.keys()
        for name, value in other.items():
            assert each[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)


def named(texts: list[str]) -> list[tuple[str, str]]:
    return [(f"text {index}", text) for index, text in enumerate(texts)]


def test_which_document_is_wrong_is_said_after_those_before_it(tmp_path, monkeypatch):
    subject = Subject.open(saved(tmp_path / "model", 4), device="cpu")
    plain_tokens = prompts.text_tokens
    with monkeypatch.context() as patch:  # a tokenizer may leave out all that a text has
        patch.setattr(
            prompts,
            "text_tokens",
            lambda texts, *_: [[END]] if texts == ["\u200b"] else plain_tokens(texts, *_),
        )
        found = documents_of(subject, named(["some", "text", "\u200b", "more"]))
        assert [next(found)["text"] for _ in range(2)] == ["some", "text"]
        with pytest.raises(ValueError, match="text 2 must have at least one token to score, got"):
            next(found)
    plain = LanguageModel.log_likelihood

    def refusing(model, pieces, **options):
        if any(BYTES.decode(list(piece)[1:]) == "bad" for piece in pieces):
            raise ValueError("text 1 must be better")
        return plain(model, pieces, **options)

    monkeypatch.setattr(LanguageModel, "log_likelihood", refusing)
    found = documents_of(subject, named(["some", "text", "bad", "more"]))
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
    texts.write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    assert main(["score", str(tmp_path / "m"), str(texts), "--out", str(out)]) == 0
    assert "continuing after 2 lines of" in capsys.readouterr().err
    assert texts_of(out) == ["one", "two", "three"]


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
