"""Documents in local files: .txt, .jsonl and .parquet, the first two also as .gz, .xz or .zst.

**Documents.** A line of a .jsonl file is an object with the document in its field `text` (or another,
`field`); a row of a .parquet file likewise. A .txt file is one document in a folder of them
(`text_unit="file"`); where it is the corpus or a whole split of it, blank lines separate documents
("paragraph"). "line" makes each line one. Blank documents are left out, and a null in place of a text is a
blank document. Text is UTF-8; line ends become "\\n".

**Splits.** A folder whose files say train, valid (validation, val, dev) or test in their names, as
train.jsonl.xz or wiki.valid.txt do, or in the name of a folder above them, is split that way. Everything
else, also a folder whose files all say train, is one sequence of rows, in the order of the sorted file names,
whose last part is the valid split: `held_out` rows if it is a whole number, that fraction of the rows if it
is less than 1. Giving `held_out` overrides names.
"""

import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

from bd3lm.data.corpus import Corpus, digest
from bd3lm.io.extras import require
from bd3lm.io.files import local_path

TextUnit = Literal["file", "line", "paragraph"]

FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
SPLIT_ORDER = ("train", "valid", "test")
HELD_OUT_SHARE = 0.05


class FileCorpus(Corpus):
    """The documents of a file or of a folder; see the module for which they are and how they are split."""

    def __init__(
        self,
        path: str | Path,
        *,
        field: str = "text",
        text_unit: TextUnit | None = None,
        held_out: float | None = None,
    ) -> None:
        path = local_path(path)
        if text_unit is not None and text_unit not in get_args(TextUnit):
            raise ValueError(f"text_unit must be one of {', '.join(get_args(TextUnit))}, got {text_unit!r}")
        # 1.0 could be meant as all of the rows or as one of them.
        if held_out is not None and not (
            0 <= held_out < 1 or (held_out >= 1 and isinstance(held_out, Integral))
        ):
            raise ValueError(
                "held_out must be a fraction below 1, such as 0.05, or a whole number of rows, written "
                f"without a decimal point, got {held_out}"
            )
        self.name = path.resolve().name
        self._root = path if path.is_dir() else path.parent
        self._field = field
        self._files = find_files(path)
        self._by_split = split_by_name(self._root, self._files) if path.is_dir() and held_out is None else {}
        self._held_out = 0.0 if self._by_split else HELD_OUT_SHARE if held_out is None else float(held_out)
        of_a_split = bool(self._by_split) or _all_say_train(self._root, self._files)
        self._text_unit: TextUnit = text_unit or ("paragraph" if of_a_split or path.is_file() else "file")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._by_split) or (("train", "valid") if self._held_out else ("train",))

    @property
    def description(self) -> str:
        options = f"field {self._field}, a document a {self._text_unit}, held out {self._held_out:g}"
        return f"{self.name} ({options})"

    @cached_property
    def fingerprint(self) -> str:
        options = [self._field, self._text_unit, self._held_out, list(self.splits)]
        return digest([options, fingerprint_files(self._root, self._files)])

    def documents(self, split: str) -> Iterator[str]:
        return (row for row in self.rows(split) if row.strip())

    def rows(self, split: str) -> Iterator[str]:
        """The documents of a split with the blank ones among them, each in its place."""
        self.check_split(split)
        return self._rows_of(split)

    def count(self, split: str) -> int | None:
        if self._held_out:
            return self._part(split)[1]  # which is known where rows are held out, whatever the format
        files = self._by_split.get(split, self._files)
        if any(_format(file)[0] != ".parquet" for file in files):
            return None
        return sum(map(count_rows, files))

    @property
    def too_small_to_share(self) -> bool:
        """Whether rows are to be held out and there is only one, so that none would be left to train on."""
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
        """Where the rows of a split start, and how many they are, when the last are held out."""
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
        """Counting reads all files once more; keeping the last rows back instead would cost their memory.

        The first document is read first, so that an error in it is not reported as one of the split.
        """
        if not any(row.strip() for row in self._rows(self._files)):
            if any(file.stat().st_size for file in self._files):
                raise ValueError(f"{self.name} has no documents")
            raise ValueError(f"{self.name} is empty, so it has no documents")
        return sum(count_rows(file, self._text_unit) for file in self._files)

    def _rows(self, files: Iterable[Path]) -> Iterator[str]:
        return chain.from_iterable(read_rows(file, self._field, self._text_unit) for file in files)


def find_files(path: Path) -> list[Path]:
    """The file, or all files of a folder that can be read, sorted by name; hidden ones are left out."""
    allowed = f"{', '.join(FORMATS)}, the first two also with {', '.join(COMPRESSIONS)}"
    if path.is_file():
        if format_of(path) is None:
            raise ValueError(f"{path} has a name that says no format that can be read: allowed are {allowed}")
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no file or folder {path}")
    found = [p for p in path.rglob("*") if p.is_file() and format_of(p) is not None]
    visible = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not visible:
        raise ValueError(f"{path} holds no file that can be read: allowed are {allowed}")
    return sorted(visible, key=lambda p: p.relative_to(path).parts)


def split_by_name(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of each split where their names tell splits apart; empty where none does or all say train."""
    return {} if _all_say_train(root, files) else files_by_name(root, files)


def files_by_name(root: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """The files of each split that names say; empty where none says one."""
    named: dict[str, list[Path]] = {split: [] for split in SPLIT_ORDER}
    unnamed: list[Path] = []
    for file in files:
        split = _split_named(file.relative_to(root))
        (unnamed if split is None else named[split]).append(file)
    if unnamed and any(named.values()):
        raise ValueError(
            f"{root} has files whose names say a split and others that do not, such as "
            f"{unnamed[0].relative_to(root)}: move them, or give held_out to read all as one"
        )
    return {split: found for split, found in named.items() if found}


def fingerprint_files(root: Path, files: Iterable[Path]) -> str:
    """sha256 over names and contents: reading is little beside tokenizing, and a size or a date can lie."""
    parts = []
    for file in files:
        with open(file, "rb") as stream:
            parts.append(
                [file.relative_to(root).as_posix(), hashlib.file_digest(stream, "sha256").hexdigest()]
            )
    return digest(parts if len(parts) > 1 else [parts[0][1]])


def format_of(path: Path) -> tuple[str, str | None] | None:
    """The format and the compression that a name says; None where it says none that is read here."""
    name, compression = path.name.lower(), None
    for suffix in COMPRESSIONS:
        if name.endswith(suffix):
            name, compression = name.removesuffix(suffix), suffix
    kind = next((suffix for suffix in FORMATS if name.endswith(suffix)), None)
    # Parquet compresses its own pages and is read from its end.
    return None if kind is None or (kind == ".parquet" and compression) else (kind, compression)


def read_rows(path: Path, field: str = "text", text_unit: TextUnit = "file") -> Iterator[str]:
    """The rows of one file, blank ones included, a few at a time."""
    kind, _ = _format(path)
    with _readable(path):
        if kind == ".parquet":
            yield from _parquet_rows(path, field)
            return
        with _open_text(path) as lines:
            if kind == ".jsonl":
                yield from _json_rows(path, lines, field)
            elif text_unit == "file":
                yield lines.read()
            elif text_unit == "line":
                yield from (line.rstrip("\n") for line in lines)
            else:
                yield from _paragraphs(lines)


def count_rows(path: Path, text_unit: TextUnit = "file") -> int:
    """How many rows `read_rows` gives."""
    kind, _ = _format(path)
    with _readable(path):
        if kind == ".parquet":
            return cast(int, _open_parquet(path).metadata.num_rows)
        if kind == ".jsonl":
            with _open_text(path) as lines:
                return sum(1 for line in lines if line.strip())
    return sum(1 for _ in read_rows(path, text_unit=text_unit))


def _format(path: Path) -> tuple[str, str | None]:
    found = format_of(path)
    if found is None:
        raise ValueError(f"{path} has a name that says no format that can be read")
    return found


def _all_say_train(root: Path, files: Iterable[Path]) -> bool:
    return all(_split_named(file.relative_to(root)) == "train" for file in files)


def _split_named(relative: Path) -> str | None:
    for part in reversed(relative.parts):
        for word in re.split(r"[-_.]", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file in what goes wrong while its bytes are unpacked and decoded."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error


def _open_text(path: Path) -> IO[str]:
    _, compression = _format(path)
    encoding = "utf-8-sig"  # a byte order mark is no text
    if compression == ".gz":
        return gzip.open(path, "rt", encoding=encoding)
    if compression == ".xz":
        return lzma.open(path, "rt", encoding=encoding)
    if compression == ".zst":
        unpacked = _ZstdStream(path, require("zstandard", "data", f"reading {path.name}"))
        return io.TextIOWrapper(io.BufferedReader(unpacked), encoding=encoding)
    return open(path, encoding=encoding)


class _ZstdStream(io.RawIOBase):
    """A .zst file unpacked: the package's reader stops after one frame and takes a cut one for the end."""

    def __init__(self, path: Path, zstandard: Any) -> None:
        self._chunks = self._unpack(path, zstandard)
        self._chunk = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._chunk:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._chunk = memoryview(chunk)
        count = min(len(buffer), len(self._chunk))
        buffer[:count], self._chunk = self._chunk[:count], self._chunk[count:]
        return count

    def close(self) -> None:
        self._chunks.close()
        super().close()

    @staticmethod
    def _unpack(path: Path, zstandard: Any) -> Generator[bytes]:
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        frame = None
        with open(path, "rb") as file:
            while packed := file.read(1 << 14):
                while packed:
                    frame = frame or decompressor.decompressobj()
                    try:
                        yield frame.decompress(packed)
                    except zstandard.ZstdError as error:
                        raise EOFError(str(error)) from error
                    packed = frame.unused_data
                    if frame.eof:
                        frame = None
        if frame is not None:
            raise EOFError("its last frame does not end")


def _open_parquet(path: Path) -> Any:
    parquet = require("pyarrow.parquet", "data", f"reading {path.name}")
    try:
        return parquet.ParquetFile(path)
    except ValueError as error:  # ArrowInvalid is one
        raise ValueError(f"{path} is damaged or cut off: {error}") from error


def _parquet_rows(path: Path, field: str) -> Iterator[str]:
    file = _open_parquet(path)
    if field not in file.schema_arrow.names:
        raise ValueError(f"{path} has no column {field!r}: it has {', '.join(file.schema_arrow.names)}")
    kind = file.schema_arrow.field(field).type
    if not _is_text(kind):
        raise ValueError(f"{path} has no text in its column {field!r}: its type is {kind}, not string")
    for batch in file.iter_batches(batch_size=256, columns=[field]):
        yield from (row or "" for row in batch.column(0).to_pylist())


def _is_text(kind: Any) -> bool:
    """Whether a column gives strings; one of nulls alone has a type of its own."""
    types = require("pyarrow", "data", "reading parquet").types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))


def _json_rows(path: Path, lines: Iterable[str], field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}, is JSON nested too deeply to be read") from error
        except ValueError as error:  # also of an integer with thousands of digits
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
        if not isinstance(row, dict) or field not in row:
            keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{path}, line {number}, has no text in a field {field!r}: it has {keys}")
        text = "" if row[field] is None else row[field]
        if not isinstance(text, str):
            raise ValueError(
                f"{path}, line {number}, has no text in its field {field!r}: it holds {type(text).__name__}"
            )
        # JSON can escape half of a surrogate pair, which no UTF-8 can hold.
        yield _whole_characters(text) if "\\ud" in line or "\\uD" in line else text


def _whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in chain(lines, ("",)):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "".join(paragraph).rstrip("\n")
            paragraph = []
