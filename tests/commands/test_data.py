"""`bd3lm data`: what it says and what it refuses; the preparation itself has tests of its own."""

import json
from pathlib import Path

import pytest

from bd3lm.cli import main
from bd3lm.data import TokenShards, byte_tokenizer, encoding, load_tokenizer
from tests.commands import fails
from tests.data_room.documents import contents, die, random_texts

Capture = pytest.CaptureFixture[str]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def data(*words: str | Path) -> int:
    return main(["data", *map(str, words)])


def prepare(*words: str | Path) -> int:
    return data("prepare", *words, "--tokenizer", "bytes")


def train_tokenizer(*words: str | Path) -> int:
    return data("train-tokenizer", *words, "--vocabulary", "270")


def refusal(capsys: Capture) -> str:
    """The one line on standard error."""
    said = capsys.readouterr().err
    assert said.startswith("bd3lm: ")
    assert said.count("\n") == 1
    return said


# --- prepare ----------------------------------------------------------------------------------------


def test_files_that_all_say_train_are_held_out_from_and_it_is_said(tmp_path: Path, capsys: Capture) -> None:
    for name in ("aa", "ab"):
        write_jsonl(tmp_path / "texts" / f"train-{name}.jsonl", random_texts(20))
    assert prepare(tmp_path / "texts", tmp_path / "shared") == 0
    assert "\nheld out: 2 documents\n" in capsys.readouterr().out
    assert prepare(tmp_path / "texts", tmp_path / "whole", "--held-out", "0") == 0
    assert "\nheld out: none\n" in capsys.readouterr().out
    assert [TokenShards(tmp_path / out).splits for out in ("shared", "whole")] == [
        ("train", "valid"),
        ("train",),
    ]


def test_a_line_can_be_corrected(tmp_path: Path, capsys: Capture) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    good = source.read_text()
    source.write_text(good.replace('"text"', '"tetx"', 20))
    assert prepare(source, tmp_path / "out") == 1
    assert "line 1, has no text in a field 'text': it has tetx" in refusal(capsys)
    source.write_text(good)
    assert prepare(source, tmp_path / "out") == 0


def test_a_worker_that_dies_is_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_encode_in_worker", die)
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    assert prepare(source, tmp_path / "out", "--workers", "2") == 1
    assert "a worker process ended before its work was done" in refusal(capsys)


@pytest.mark.parametrize("held_out", ["inf", "nan", "1.0", "2.0"])
def test_held_out_is_a_share_or_a_whole_number(tmp_path: Path, capsys: Capture, held_out: str) -> None:
    """1.0 could be meant as everything."""
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    assert prepare(source, tmp_path / "out", "--held-out", held_out) == 1
    said = refusal(capsys)
    assert "held_out must be a fraction below 1, such as 0.05, or a whole number of rows" in said
    assert f"written without a decimal point, got {held_out}" in said


@pytest.mark.parametrize(("held_out", "documents"), [("1", 1), ("3", 3), ("0.5", 20)])
def test_held_out_counts_from_1_and_shares_below(tmp_path: Path, held_out: str, documents: int) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {n}" for n in range(40)])
    assert prepare(source, tmp_path / "out", "--held-out", held_out) == 0
    assert TokenShards(tmp_path / "out").split("valid").documents == documents


def test_the_default_tokenizer_is_named_where_the_hub_is_out_of_reach(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bd3lm.data.tokenizer_files.unresolved_hub", lambda: "huggingface.co")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(4))
    assert data("prepare", source, tmp_path / "out") == 1
    said = refusal(capsys)
    assert (
        "tokenizer.json: the name huggingface.co does not resolve. gpt2 is the default tokenizer here" in said
    )
    assert "name another with --tokenizer, such as bytes" in said
    assert data("prepare", source, tmp_path / "out", "--tokenizer", "someone/else") == 1
    assert "default" not in refusal(capsys)
    assert data("prepare", source, tmp_path / "out", "--tokenizer", "bxo") == 1
    assert refusal(capsys).endswith("does not resolve, did you mean 'box'?\n")


@pytest.mark.parametrize(("unit", "documents"), [("file", 1), ("line", 3), ("paragraph", 2)])
def test_what_is_a_document_can_be_chosen(tmp_path: Path, unit: str, documents: int) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    assert prepare(tmp_path / "a.txt", tmp_path / "out", "--held-out", "0", "--text-unit", unit) == 0
    assert TokenShards(tmp_path / "out").split("train").documents == documents


def test_what_of_a_folder_is_not_read_is_said_first(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(11):
        (folder / f"{number}.md").write_text(f"# Page {number}")
        (folder / f"{number}.png").touch()
    assert prepare(folder, tmp_path / "out") == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(
        f"skipped 11 of the 22 files in {folder}; format is not one of .txt, .md, .jsonl, ."
    )
    assert printed.err.count("\n") == 1
    assert "train: 10 documents" in printed.out
    assert train_tokenizer(folder, tmp_path / "tokenizer") == 0
    assert "skipped 11 of the 22 files" in capsys.readouterr().err


# --- train-tokenizer --------------------------------------------------------------------------------


def test_a_tokenizer_is_not_written_among_shards(tmp_path: Path, capsys: Capture) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    prepare(source, tmp_path / "shards")
    before = contents(tmp_path / "shards")
    capsys.readouterr()
    assert train_tokenizer(source, tmp_path / "shards") == 1
    said = refusal(capsys)
    assert "OUT must be a new or empty folder, or hold only a tokenizer" in said
    assert f"{tmp_path / 'shards'} holds meta.json" in said
    assert contents(tmp_path / "shards") == before
    assert train_tokenizer(source, source) == 1
    assert f"OUT must be a folder, and {source} is a file" in refusal(capsys)


def test_of_a_small_text_it_is_said_why_there_are_fewer_tokens(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.txt").write_text("ab ab cd")  # of which the one pair that occurs twice is joined
    assert train_tokenizer(tmp_path / "a.txt", tmp_path / "tokenizer") == 0
    said = (
        "259 tokens of the 270 requested, because no other pair of tokens occurs twice within words of the "
        "text\n"
    )
    assert capsys.readouterr().out == f"wrote {tmp_path / 'tokenizer'}: {said}"


def test_a_tokenizer_replaces_another(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer")
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(40))
    assert train_tokenizer(source, tmp_path / "tokenizer") == 0
    assert load_tokenizer(tmp_path / "tokenizer").vocab_size == 270


@pytest.mark.parametrize("texts", [1, 2])
def test_a_single_document_is_trained_on_whole_and_of_more_the_last_is_left(
    tmp_path: Path, texts: int
) -> None:
    """What `prepare` would hold out is not learned from."""
    source = write_jsonl(tmp_path / "a.jsonl", ["banana " * 20, "xyzzy " * 20][:texts])
    assert train_tokenizer(source, tmp_path / "tokenizer") == 0
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert len(tokenizer.encode("banana banana")) == 2
    assert len(tokenizer.encode("xyzzy")) == 5


def test_a_vocabulary_too_small_is_refused_by_the_name_of_its_flag(tmp_path: Path, capsys: Capture) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", random_texts(4))
    assert data("train-tokenizer", source, tmp_path / "tokenizer", "--vocabulary", "100") == 1
    assert "--vocabulary must be at least 258" in refusal(capsys)
    assert not (tmp_path / "tokenizer").exists()


# --- both ------------------------------------------------------------------------------------------


def test_a_tokenizer_is_trained_and_then_prepared_with(tmp_path: Path, capsys: Capture) -> None:
    texts = random_texts(40)
    source = str(write_jsonl(tmp_path / "corpus.jsonl", texts))
    assert main(["data", "train-tokenizer", source, str(tmp_path / "bpe"), "--vocabulary", "300"]) == 0
    assert f"wrote {tmp_path / 'bpe'}: 300 tokens\n" in capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "bpe")
    assert tokenizer.vocab_size == 300
    words = ["data", "prepare", source, str(tmp_path / "out"), "--tokenizer", str(tmp_path / "bpe")]
    assert main([*words, "--held-out", "0.25"]) == 0
    printed = capsys.readouterr().out
    assert "train: 30 documents," in printed
    assert "valid: 10 documents," in printed
    assert f"wrote {tmp_path / 'out'}" in printed
    said = fails(capsys, *words, "--held-out", "0.5")
    assert (
        "other inputs: source 'corpus.jsonl (field text, a document a paragraph, held out 0.25)', not 'corpus"
        in said
    )
    assert "held out 0.5)'; choose another folder" in said
    shards = TokenShards(tmp_path / "out")
    first = shards.read("train", 0, int(shards.lengths("train")[0]))
    assert shards.tokenizer.decode(first) == texts[0]
