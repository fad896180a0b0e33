"""Documents in local files: .txt, .md, .jsonl and .parquet, all but the last also as .gz, .xz or .zst.

**Documents.** Each line of a .jsonl file is an object with the document in its field `text` (or another
`field`). Rows of a .parquet file work the same way. In a folder, each .txt or .md file is one document
(`text_unit="file"`). If a single file is the corpus or a whole split, blank lines separate its documents
("paragraph"). "line" makes each line a document. Blank documents are left out; null counts as a blank
document. Text is UTF-8; line ends become "\\n". A document or a line of JSON with more than `max_document`
characters is refused before more of it is in memory.

**Skipped files.** In a folder, hidden files, other formats and anything that is not a regular file are
skipped; `skipped` reports them. A .md file is text like a .txt file. But if the other files are JSON lines or
parquet, or name a split, a .md file describes the data and is skipped too.

**Splits.** Files that have train, valid (validation, val, dev) or test in their names, such as train.jsonl.xz
or wiki.valid.txt, or in the name of a folder above them, are split by name. All other files, and folders with
only train files, form one sequence of rows, in the order of the sorted file names. The last part is the valid
split: `held_out` rows if it is a whole number, that fraction of the rows if it is less than 1. An explicit
`held_out` overrides names.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

from bd3lm.data.corpus import Corpus, digest
from bd3lm.data.folders import all_say_train, look_into, required_format, split_by_name
from bd3lm.data.parquet import count_parquet, parquet_texts
from bd3lm.data.shapes import is_conversation
from bd3lm.io.files import local_path
from bd3lm.io.reading import (
    MAX_DOCUMENT,
    DocumentTooLong,
    max_document_of,
    numbered_lines,
    open_text,
    readable,
    whole_characters,
    whole_text,
)
from bd3lm.io.terminal import printable

TextUnit = Literal["file", "line", "paragraph"]

HELD_OUT_SHARE = 0.05


class FileCorpus(Corpus):
    """The documents of a file or of a folder. The docstring of the module says which, and how they are
    split."""

    def __init__(
        self,
        path: str | Path,
        *,
        field: str = "text",
        text_unit: TextUnit | None = None,
        held_out: float | None = None,
        max_document: int | None = None,
    ) -> None:
        path = local_path(path)
        if text_unit is not None and text_unit not in get_args(TextUnit):
            raise ValueError(f"text_unit must be one of {', '.join(get_args(TextUnit))}, got {text_unit!r}")
        # 1.0 could mean all of the rows, or one row.
        if held_out is not None and not (
            0 <= held_out < 1 or (held_out >= 1 and isinstance(held_out, Integral))
        ):
            raise ValueError(
                "held_out must be a fraction below 1, such as 0.05, or a whole number of rows, written "
                f"without a decimal point, got {held_out}"
            )
        self.name = printable(path.resolve().name)  # encodable as UTF-8
        self._root = path if path.is_dir() else path.parent
        self._field = field
        self._most = max_document_of(max_document)
        found = look_into(path)
        self._files, self._skipped = found.files, found.skipped_in_words
        self._by_split = split_by_name(self._root, self._files) if path.is_dir() and held_out is None else {}
        self._held_out = 0.0 if self._by_split else HELD_OUT_SHARE if held_out is None else float(held_out)
        of_a_split = bool(self._by_split) or all_say_train(self._root, self._files)
        self._text_unit: TextUnit = text_unit or ("paragraph" if of_a_split or path.is_file() else "file")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._by_split) or (("train", "valid") if self._held_out else ("train",))

    @property
    def description(self) -> str:
        options = f"field {self._field}, a document a {self._text_unit}, held out {self._held_out:g}"
        return f"{self.name} ({options})"

    @property
    def skipped(self) -> str | None:
        return self._skipped

    @cached_property
    def fingerprint(self) -> str:
        options = [self._field, self._text_unit, self._held_out, list(self.splits)]
        return digest([options, fingerprint_files(self._root, self._files)])

    def documents(self, split: str) -> Iterator[str]:
        return (row for row in self.rows(split) if row.strip())

    def rows(self, split: str) -> Iterator[str]:
        """The documents of a split in their places, including blank ones."""
        self.check_split(split)
        return self._rows_of(split)

    def count(self, split: str) -> int | None:
        if self._held_out:
            return self._part(split)[1]  # known if rows are held out, whatever the format
        files = self._by_split.get(split, self._files)
        if any(required_format(file)[0] != ".parquet" for file in files):
            return None
        return sum(map(count_rows, files))

    @property
    def too_small_to_share(self) -> bool:
        """Whether rows should be held out of a single row, which would leave none to train on."""
        return bool(self._held_out) and self._row_count == 1

    def _rows_of(self, split: str) -> Iterator[str]:
        if self._by_split:
            return self._rows(self._by_split[split])
        rows = self._rows(self._files)
        if not self._held_out:
            return rows
        start, length = self._part(split)
        return islice(rows, start, start + length)

    def _part(self, split: str) -> tuple[int, int]:
        """Where the rows of a split start and how many there are, if the last rows are held out."""
        held_out = (
            int(self._held_out) if self._held_out >= 1 else max(1, round(self._held_out * self._row_count))
        )
        if held_out >= self._row_count:
            raise ValueError(
                f"held_out must leave rows to train on, got {self._held_out:g} of the {self._row_count} rows "
                f"(documents) of {self.name}; 0 holds out none"
            )
        kept = self._row_count - held_out
        return (0, kept) if split == "train" else (kept, held_out)

    @cached_property
    def _row_count(self) -> int:
        """Counting reads all files once more. Holding the last rows back instead would cost their memory.

        The first document is read first, so an error in it is not reported as an error of the split.
        """
        if not any(row.strip() for row in self._rows(self._files)):
            if any(file.stat().st_size for file in self._files):
                raise ValueError(f"{self.name} has no documents")
            raise ValueError(f"{self.name} is empty, so it has no documents")
        return sum(count_rows(file, self._text_unit, self._most) for file in self._files)

    def _rows(self, files: Iterable[Path]) -> Iterator[str]:
        return chain.from_iterable(
            read_rows(file, self._field, self._text_unit, self._most) for file in files
        )


def fingerprint_files(root: Path, files: Iterable[Path]) -> str:
    """sha256 over names and contents. Reading costs little next to tokenizing, and a size or date can
    mislead."""
    parts = []
    for file in files:
        with open(file, "rb") as stream:
            parts.append(
                [file.relative_to(root).as_posix(), hashlib.file_digest(stream, "sha256").hexdigest()]
            )
    return digest(parts if len(parts) > 1 else [parts[0][1]])


def read_rows(
    path: Path, field: str = "text", text_unit: TextUnit = "file", max_document: int = MAX_DOCUMENT
) -> Iterator[str]:
    """The rows of one file, blank ones included, a few at a time."""
    kind, _ = required_format(path)
    with readable(path):
        if kind == ".parquet":
            yield from parquet_texts(path, field, max_document)
            return
        with open_text(path) as text:
            if text_unit == "file" and kind != ".jsonl":
                yield whole_text(text, path, max_document)
                return
            lines = numbered_lines(text, path, max_document)
            if kind == ".jsonl":
                yield from _json_rows(path, lines, field)
            elif text_unit == "line":
                yield from (line.rstrip("\n") for _, line in lines)
            else:
                yield from _paragraphs(path, lines, max_document)


def count_rows(path: Path, text_unit: TextUnit = "file", max_document: int = MAX_DOCUMENT) -> int:
    """How many rows `read_rows` gives."""
    kind, _ = required_format(path)
    with readable(path):
        if kind == ".parquet":
            return count_parquet(path)
        if kind == ".jsonl":
            with open_text(path) as text:
                return sum(1 for _, line in numbered_lines(text, path, max_document) if line.strip())
    return sum(1 for _ in read_rows(path, text_unit=text_unit, max_document=max_document))


def json_values(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    """The JSON value of each line of a file, with its number; blank lines are skipped."""
    for number, line in lines:
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}, is JSON nested too deeply to be read") from error
        except ValueError as error:  # also raised for an integer with thousands of digits
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error


def _json_rows(path: Path, lines: Iterable[tuple[int, str]], field: str) -> Iterator[str]:
    for number, row in json_values(path, lines):
        if not isinstance(row, dict) or field not in row:
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            hint = "; use --chat to read conversations" if is_conversation(row) else ""
            raise ValueError(f"{path}, line {number}, has no text in a field {field!r}: it has {keys}{hint}")
        text = "" if row[field] is None else row[field]
        if not isinstance(text, str):
            raise ValueError(
                f"{path}, line {number}, has no text in its field {field!r}: it holds {type(text).__name__}"
            )
        yield whole_characters(text)


def _paragraphs(path: Path, lines: Iterable[tuple[int, str]], most: int) -> Iterator[str]:
    paragraph: list[str] = []
    size = 0
    for number, line in chain(lines, ((0, ""),)):
        if line.strip():
            paragraph.append(line)
            size += len(line)
            if size - line.endswith("\n") > most:
                raise DocumentTooLong(f"{path}, the paragraph at line {number}", most)
        elif paragraph:
            yield "".join(paragraph).rstrip("\n")
            paragraph, size = [], 0
