"""Files: all formats give the same documents; splits by name or held out; errors name the file."""

import gzip
import json
import lzma
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from bd3lm.data import FileCorpus
from bd3lm.data.files import TextUnit, count_rows, read_rows
from bd3lm.data.folders import find_files, split_by_name

TEXTS = ["The first.\nIt has two lines.", "Zweites Dokument: ünïcode 🙂", '"quoted" \\ and \t tabs', "last"]


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".xz":
        return lzma.compress(data)
    if suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return data


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))
    path.write_bytes(compress(lines.encode(), path.suffix))
    return path


def write_txt(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress("\n\n\n".join(texts).encode(), path.suffix))
    return path


def write_parquet(path: Path, texts: list[str | None], field: str = "text", row_group_size: int = 2) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), field: texts})
    pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=row_group_size)
    return path


def all_documents(corpus: FileCorpus) -> dict[str, list[str]]:
    return {split: list(corpus.documents(split)) for split in corpus.splits}


# --- documents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize(("write", "suffix"), [(write_jsonl, ".jsonl"), (write_txt, ".txt")])
def test_every_text_format_and_compression_gives_the_same_documents(
    tmp_path: Path, write: Callable[[Path, list[str]], Path], suffix: str, compression: str
) -> None:
    path = write(tmp_path / f"corpus{suffix}{compression}", TEXTS)
    assert all_documents(FileCorpus(path, held_out=1)) == {"train": TEXTS[:3], "valid": TEXTS[3:]}


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed_files_may_be_joined(tmp_path: Path, suffix: str) -> None:
    first, second = (write_jsonl(tmp_path / f"{i}.jsonl{suffix}", TEXTS[i::2] * 5000) for i in range(2))
    joined = tmp_path / f"train.jsonl{suffix}"
    joined.write_bytes(first.read_bytes() + second.read_bytes())
    assert list(read_rows(joined)) == TEXTS[0::2] * 5000 + TEXTS[1::2] * 5000


def test_parquet_gives_the_same_documents_and_knows_their_number(tmp_path: Path) -> None:
    corpus = FileCorpus(write_parquet(tmp_path / "corpus.parquet", [*TEXTS]), held_out=1)
    assert all_documents(corpus) == {"train": TEXTS[:3], "valid": TEXTS[3:]}
    assert (corpus.count("train"), corpus.count("valid")) == (3, 1)


def test_another_field_can_hold_the_text(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", TEXTS, field="body")
    write_parquet(tmp_path / "valid.parquet", [*TEXTS], field="body")
    assert all_documents(FileCorpus(tmp_path, field="body")) == {"train": TEXTS, "valid": TEXTS}


@pytest.mark.parametrize(
    ("unit", "documents"),
    [("file", ["a\nb\n\n \nc\n"]), ("line", ["a", "b", "c"]), ("paragraph", ["a\nb", "c"])],
)
def test_a_text_file_is_a_document_or_lines_or_paragraphs(
    tmp_path: Path, unit: TextUnit, documents: list[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\r\n\n \nc\n")
    assert list(FileCorpus(path, text_unit=unit, held_out=0).documents("train")) == documents


def test_text_files_of_a_folder_are_one_document_each(tmp_path: Path) -> None:
    for name, text in zip(("b", "a", "sub/c", "d"), TEXTS, strict=True):
        write_txt(tmp_path / f"{name}.txt", [text])
    corpus = FileCorpus(tmp_path, held_out=1)
    assert all_documents(corpus) == {"train": [TEXTS[1], TEXTS[0], TEXTS[3]], "valid": [TEXTS[2]]}


def test_a_text_file_that_is_a_split_has_paragraphs(tmp_path: Path) -> None:
    write_txt(tmp_path / "train.txt", TEXTS)
    write_txt(tmp_path / "valid.txt", TEXTS[:2])
    assert all_documents(FileCorpus(tmp_path)) == {"train": TEXTS, "valid": TEXTS[:2]}


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    jsonl = write_jsonl(tmp_path / "a.jsonl", ["", " \n", "x", "y"])
    jsonl.write_text("\n" + jsonl.read_text() + "\n\n" + '{"text": null}\n')
    write_parquet(tmp_path / "b.parquet", [None, "z", ""])
    corpus = FileCorpus(tmp_path, held_out=0)
    assert list(corpus.documents("train")) == ["x", "y", "z"]
    assert list(corpus.rows("train")) == ["", " \n", "x", "y", "", "", "z", ""]  # a blank line is not a row


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d b \\ud83d\\ude42 \\uDC00"}\n')
    assert list(read_rows(path)) == ["a\ufffd b 🙂 \ufffd"]


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_counting_agrees_with_reading(tmp_path: Path, unit: TextUnit) -> None:
    paths = [
        write_txt(tmp_path / "a.txt.gz", TEXTS),
        write_jsonl(tmp_path / "b.jsonl.xz", TEXTS),
        write_parquet(tmp_path / "c.parquet", [*TEXTS]),
    ]
    for path in paths:
        assert count_rows(path, unit) == len(list(read_rows(path, "text", unit)))


# --- splits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train.jsonl", "train"),
        ("train-00003-of-00080.jsonl.xz", "train"),
        ("wiki.valid.jsonl", "valid"),
        ("validation.jsonl.gz", "valid"),
        ("val/part_2.jsonl", "valid"),
        ("dev.jsonl", "valid"),
        ("my_test_set.jsonl", "test"),
        ("train/test.jsonl", "test"),
    ],
)
def test_names_say_splits(tmp_path: Path, file: str, split: str) -> None:
    write_jsonl(tmp_path / file, TEXTS)
    other = "test" if split == "valid" else "valid"
    write_jsonl(tmp_path / f"{other}.jsonl", TEXTS[:1])
    corpus = FileCorpus(tmp_path)
    assert all_documents(corpus) == {split: TEXTS, other: TEXTS[:1]}
    assert corpus.count(split) is None


def test_a_folder_of_text_to_measure_on_needs_no_training_text(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", TEXTS)
    assert all_documents(FileCorpus(tmp_path)) == {"test": TEXTS}


@pytest.mark.parametrize(("held_out", "kept"), [(None, 38), (7, 33), (0, 40)])
def test_folders_with_only_train_files_hold_out_like_unnamed_ones(
    tmp_path: Path, held_out: float | None, kept: int
) -> None:
    """And their documents do not depend on how many are held out."""
    texts = [str(i) for i in range(40)]
    write_txt(tmp_path / "train-aa.txt", texts[:15])
    write_txt(tmp_path / "train-ab.txt", texts[15:])
    expected = {"train": texts[:kept]} | ({"valid": texts[kept:]} if kept < 40 else {})
    assert all_documents(FileCorpus(tmp_path, held_out=held_out)) == expected
    assert split_by_name(tmp_path, find_files(tmp_path)) == {}


def test_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("train/2", "train/10", "train/1/b", "valid/x", "train/1/a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    assert all_documents(FileCorpus(tmp_path)) == {
        "train": ["train/1/a", "train/1/b", "train/10", "train/2"],
        "valid": ["valid/x"],
    }


def test_hidden_and_foreign_files_are_skipped_and_reported(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    write_jsonl(folder / "test.jsonl", TEXTS)
    write_jsonl(folder / ".cache" / "other.jsonl", ["hidden"])
    (folder / ".notes.txt").write_text("hidden")
    (folder / "sub").mkdir()
    (folder / "sub" / "table.csv.gz").write_text("foreign")
    corpus = FileCorpus(folder)
    assert all_documents(corpus) == {"test": TEXTS}
    assert corpus.skipped == (
        f"skipped 3 of the 4 files in {folder}; hidden: 1 without a suffix (.cache), 1 .txt (.notes.txt); "
        "format is not one of .txt, .md, .jsonl, .parquet: 1 .csv.gz (sub/table.csv.gz)"
    )


def test_many_skipped_files_are_reported_as_numbers(tmp_path: Path) -> None:
    write_txt(tmp_path / "a.txt", TEXTS)
    for number, suffix in enumerate("abbcccddddeeeeeffffff"):
        (tmp_path / f"{number}.{suffix}").touch()
    assert FileCorpus(tmp_path).skipped == (
        f"skipped 21 of the 22 files in {tmp_path}; format is not one of .txt, .md, .jsonl, .parquet: 6 "
        ".f, 5 .e, 4 .d, 3 .c, 2 .b, 1 with other suffixes"
    )


def test_special_files_and_links_to_folders_are_reported(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    write_txt(folder / "a.txt", TEXTS)
    write_txt(elsewhere / "b.txt", TEXTS)
    (folder / "linked").symlink_to(elsewhere)
    (folder / "c.txt").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "d.txt")
    corpus = FileCorpus(folder, held_out=0)
    assert list(corpus.documents("train")) == ["\n\n\n".join(TEXTS)]
    assert corpus.skipped is not None
    assert "not regular files: 2 .txt (c.txt, d.txt)" in corpus.skipped
    assert "links to folders: 1 without a suffix (linked)" in corpus.skipped


def test_nothing_is_reported_if_all_files_are_read(tmp_path: Path) -> None:
    path = write_txt(tmp_path / "a.txt", TEXTS)
    (tmp_path / "b.MD").write_text("# A heading")
    assert FileCorpus(tmp_path).skipped is None
    assert FileCorpus(path).skipped is None


@pytest.mark.parametrize("name", ["a.md", "README.md", "a.md.gz", "A.MD"])
def test_markdown_is_text(tmp_path: Path, name: str) -> None:
    path = write_txt(tmp_path / name, TEXTS)
    assert list(FileCorpus(path, held_out=0).documents("train")) == TEXTS
    write_txt(tmp_path / "z.txt", ["other"])
    assert list(FileCorpus(tmp_path, held_out=0).documents("train")) == ["\n\n\n".join(TEXTS), "other"]


@pytest.mark.parametrize("data", ["a.jsonl", "train.txt"])
def test_markdown_next_to_data_is_skipped(tmp_path: Path, data: str) -> None:
    """The card of a data set from the hub is not one of its documents."""
    (write_jsonl if data.endswith("jsonl") else write_txt)(tmp_path / data, TEXTS)
    write_txt(tmp_path / "README.md", ["about"])
    corpus = FileCorpus(tmp_path, held_out=0)
    assert list(corpus.documents("train")) == TEXTS
    assert corpus.skipped is not None
    assert ".md notes next to data files: 1 .md (README.md)" in corpus.skipped


@pytest.mark.parametrize(("held_out", "kept"), [(None, 38), (0.5, 20), (7, 33), (0.001, 39), (0, 40)])
def test_the_last_documents_are_held_out(tmp_path: Path, held_out: float | None, kept: int) -> None:
    texts = [str(i) for i in range(40)]
    write_jsonl(tmp_path / "a.jsonl", texts[:15])
    write_jsonl(tmp_path / "b.jsonl", texts[15:])
    expected = {"train": texts[:kept]} | ({"valid": texts[kept:]} if kept < 40 else {})
    assert all_documents(FileCorpus(tmp_path, held_out=held_out)) == expected


def test_giving_held_out_overrides_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", TEXTS[:2])
    write_jsonl(tmp_path / "train.jsonl", TEXTS[2:])
    assert all_documents(FileCorpus(tmp_path, held_out=1)) == {"train": TEXTS[:3], "valid": TEXTS[3:]}


def test_reading_is_lazy(tmp_path: Path) -> None:
    """A damaged line is reported when it is reached, not before: nothing reads ahead."""
    path = write_jsonl(tmp_path / "train.jsonl", TEXTS)
    path.write_text(path.read_text() + "damaged\n")
    documents = FileCorpus(path, held_out=0).documents("train")
    assert [next(documents) for _ in TEXTS] == TEXTS
    with pytest.raises(ValueError, match="line 5"):
        next(documents)


# --- fingerprint ------------------------------------------------------------------------------------


def test_the_fingerprint_follows_contents_and_options_and_not_the_place(tmp_path: Path) -> None:
    for place in ("here", "there"):
        write_jsonl(tmp_path / place / "train.jsonl", TEXTS)
        write_jsonl(tmp_path / place / "valid.jsonl", TEXTS)
    fingerprint = FileCorpus(tmp_path / "here").fingerprint
    assert FileCorpus(tmp_path / "there").fingerprint == fingerprint
    changed = [
        FileCorpus(tmp_path / "there", held_out=1).fingerprint,
        FileCorpus(tmp_path / "there", field="id").fingerprint,
        FileCorpus(tmp_path / "there", text_unit="line").fingerprint,
    ]
    text = (tmp_path / "there" / "valid.jsonl").read_text()
    (tmp_path / "there" / "valid.jsonl").write_text(text.replace("last", "lost"))  # the same size
    changed.append(FileCorpus(tmp_path / "there").fingerprint)
    (tmp_path / "here" / "valid.jsonl").rename(tmp_path / "here" / "test.jsonl")
    changed.append(FileCorpus(tmp_path / "here").fingerprint)
    assert len({fingerprint, *changed}) == 6


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [-1, 1.0, 1.5, 2.0, 4, 100, math.inf, math.nan])
def test_held_out_must_make_sense(tmp_path: Path, held_out: float) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"^held_out must"):
        list(FileCorpus(path, held_out=held_out).documents("train"))


def test_an_empty_corpus_is_not_blamed_on_held_out(tmp_path: Path) -> None:
    for unit in get_args(TextUnit):
        with pytest.raises(ValueError, match=r"^a.txt is empty, so it has no documents$"):
            FileCorpus(write_txt(tmp_path / "a.txt", []), text_unit=unit).documents("train")
    with pytest.raises(ValueError, match=r"^b.jsonl has no documents$"):
        FileCorpus(write_jsonl(tmp_path / "b.jsonl", [" "])).documents("train")


def test_a_single_line_without_text_is_not_blamed_on_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"txt": "a"}\n')
    with pytest.raises(ValueError, match=r"line 1, has no text in a field 'text': it has txt$"):
        FileCorpus(tmp_path / "a.jsonl").documents("train")


def test_text_unit_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text_unit must be one of file, line, paragraph, got 'word'"):
        FileCorpus(write_txt(tmp_path / "a.txt", TEXTS), text_unit="word")  # type: ignore[arg-type]


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    corpus = FileCorpus(write_jsonl(tmp_path / "a.jsonl", TEXTS))
    with pytest.raises(
        ValueError, match=r"split must be one of train, valid for corpus 'a.jsonl', got 'test'"
    ):
        corpus.documents("test")


def test_half_named_folders_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", TEXTS)
    write_jsonl(tmp_path / "more.jsonl", TEXTS)
    with pytest.raises(ValueError, match=r"files whose names do not, such as more.jsonl"):
        FileCorpus(tmp_path)


def test_missing_empty_and_foreign_paths(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        FileCorpus(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"holds no file that can be read: allowed are .txt, .md, .jsonl, .parquet"
    ):
        FileCorpus(tmp_path)
    for name in ("a.csv", "b.parquet.gz", "c.gz"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match="has no known format in its name"):
            FileCorpus(tmp_path / name)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "scrambled"])
def test_a_damaged_file_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = write_jsonl(tmp_path / f"train.jsonl{suffix}", [str(i) for i in range(5000)])
    data = bytearray(path.read_bytes())
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"no such format" + data)
    with pytest.raises(ValueError, match=rf"train.jsonl{suffix}.*(damaged or cut off|is not JSON)"):
        list(FileCorpus(tmp_path).documents("train"))


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "train.parquet", [*TEXTS])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train.parquet is damaged or cut off"):
        list(FileCorpus(tmp_path).documents("train"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": 1', "line 2, is not JSON"),
        ('{"body": "x"}', "line 2, has no text in a field 'text': it has body"),
        ('{"text": 3}', "line 2, has no text in its field 'text': it holds int"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2, is JSON nested too deeply to be read"),
        ('{"id": ' + "1" * 5000 + ', "text": "x"}', "line 2, is not JSON"),
        ('["x"]', "line 2, has no text in a field 'text': it has list"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(FileCorpus(path, held_out=0).documents("train"))


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [*TEXTS])
    with pytest.raises(ValueError, match="has no column 'body': it has id, text"):
        list(FileCorpus(path, field="body", held_out=0).documents("train"))


@pytest.mark.parametrize(
    ("rows", "kind"), [([1, 2], "int64"), ([["a"]], "list<.*string>"), ([b"a"], "binary"), ([1.5], "double")]
)
def test_a_column_of_no_text_is_named_with_its_type(tmp_path: Path, rows: list[Any], kind: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(
        ValueError, match=f"a.parquet has no text in its column 'text': its type is {kind}, not"
    ):
        list(read_rows(path))


@pytest.mark.parametrize("kind", ["string", "large_string", "null", "dictionary"])
def test_a_column_of_any_kind_of_text_can_be_read(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    texts = [None, None] if kind == "null" else ["a", None]
    column = pyarrow.array(texts, pyarrow.string() if kind == "dictionary" else getattr(pyarrow, kind)())
    table = pyarrow.table({"text": column.dictionary_encode() if kind == "dictionary" else column})
    assert str(table.schema.field("text").type).startswith(kind)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert list(read_rows(tmp_path / "a.parquet")) == [text or "" for text in texts]


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.txt is not UTF-8 text"):
        list(FileCorpus(tmp_path / "a.txt", held_out=0).documents("train"))


@pytest.mark.parametrize(
    ("file", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")], ids=["zstd", "parquet"]
)
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, package: str
) -> None:
    (tmp_path / file).touch()
    for module in [name for name in sys.modules if name.partition(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, module, None)
    corpus = FileCorpus(tmp_path / file, held_out=0)
    with pytest.raises(
        ImportError, match=rf"reading {file} needs the package {package}: pip install 'bd3lm\[data\]'"
    ):
        list(corpus.documents("train"))
