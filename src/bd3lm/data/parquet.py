"""The rows of a .parquet file, a few at a time, none larger than a limit."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from bd3lm.io.extras import require
from bd3lm.io.reading import DocumentTooLong

_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 28
_BATCH_VALUES = 64
_CHARACTER_BYTES = 8  # in parquet, at most: 4 of UTF-8, and 4 for the length of its text
_PAGE_BYTES = 1 << 20  # per group of rows besides its texts, generously


def _open_parquet(path: Path, **options: Any) -> Any:
    parquet = require("pyarrow.parquet", "data", f"reading {path.name}")
    with _damage_named(path):
        return parquet.ParquetFile(path, **options)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Name the file in errors of pyarrow, in one line. Errors of the system already name it."""
    arrow = require("pyarrow", "data", f"reading {path.name}")
    try:
        yield
    except (arrow.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is damaged or cut off: {why:.300}") from error


def count_parquet(path: Path) -> int:
    """How many rows a file has."""
    return cast(int, _open_parquet(path).metadata.num_rows)


def parquet_texts(path: Path, field: str, max_document: int) -> Iterator[str]:
    """The texts in a column, a few at a time; null becomes a blank text."""
    file = _open_parquet(path)
    schema = file.schema_arrow
    if field not in schema.names:
        raise ValueError(f"{path} has no column {field!r}: it has {', '.join(schema.names)}")
    kind = schema.field(field).type
    if not _is_text(kind):
        raise ValueError(f"{path} has no text in its column {field!r}: its type is {kind}, not string")
    _check_sizes(path, file.metadata, max_document)
    for number, text in enumerate(_column(path, file, field), start=1):
        if len(text) > max_document:
            raise DocumentTooLong(f"{path}, row {number}", max_document)
        yield text


def parquet_values(path: Path, fields: Collection[str], max_document: int) -> Iterator[dict[str, Any]]:
    """The rows of a file as plain values, restricted to these fields. Other fields are
    present with the value None, and are not read.

    A text is stored once for all rows that use it. It is unpacked only once the total number of characters is
    known.
    """
    file = _open_parquet(path)
    names = list(file.schema_arrow.names)
    leaves = [file.schema.column(place).path for place in range(len(file.schema))]
    wanted = [leaf for leaf in leaves if leaf.split(".")[0] in fields]
    _check_sizes(path, file.metadata, max_document)
    stored_once = _open_parquet(path, read_dictionary=wanted)
    first = 1
    with _damage_named(path):
        if not wanted:
            yield from (dict.fromkeys(names) for _ in range(file.metadata.num_rows))
            return
        for group in range(file.num_row_groups):
            where = {"row_groups": [group], "columns": wanted}
            for batch in stored_once.iter_batches(batch_size=_BATCH_VALUES, **where):
                if _characters(batch) <= max_document:  # then no row has more
                    rows = batch.to_pylist()
                else:
                    rows = _one_by_one(path, batch, first, max_document)
                yield from (dict.fromkeys(names) | row for row in rows)
                first += batch.num_rows


def _one_by_one(path: Path, batch: Any, first: int, max_document: int) -> Iterator[dict[str, Any]]:
    for place in range(batch.num_rows):
        row = batch.slice(place, 1)
        if _characters(row) > max_document * _CHARACTER_BYTES:
            raise DocumentTooLong(f"{path}, row {first + place}", max_document)
        yield row.to_pylist()[0]


def _characters(array: Any) -> int:
    """The bytes of all texts in an array of any depth, counting repeated ones each time."""
    arrow, compute = (require(name, "data", "reading parquet") for name in ("pyarrow", "pyarrow.compute"))
    types = arrow.types
    if isinstance(array, arrow.RecordBatch):
        return sum(map(_characters, array.columns))
    if types.is_dictionary(array.type):
        lengths = compute.binary_length(array.dictionary)
        return compute.sum(lengths.take(array.indices)).as_py() or 0
    if types.is_struct(array.type):
        return sum(map(_characters, array.flatten()))
    if types.is_nested(array.type):
        return _characters(array.flatten())
    return 8 * len(array)


def _column(path: Path, file: Any, field: str) -> Iterator[str]:
    stored_once = _open_parquet(path, read_dictionary=[field])
    with _damage_named(path):
        for group in range(file.num_row_groups):
            where = {"row_groups": [group], "columns": [field]}
            longest = _longest_named(next(stored_once.iter_batches(batch_size=1, **where), None))
            rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // longest))
            for batch in file.iter_batches(batch_size=rows, **where):
                yield from (row or "" for row in batch.column(0).to_pylist())


def _longest_named(batch: Any) -> int:
    """The bytes of the longest text that is stored once for several rows, or 1.

    A batch holds it once per row that uses it, so little on disk could become much in memory.
    """
    if batch is None or not hasattr(batch.column(0), "dictionary"):
        return 1
    compute = require("pyarrow.compute", "data", "reading parquet")
    return max(1, compute.max(compute.binary_length(batch.column(0).dictionary)).as_py() or 1)


def _check_sizes(path: Path, metadata: Any, max_document: int) -> None:
    """Refuse rows that must be too long, before unpacking them, however their size is divided.

    The check uses all columns together: asking for one ends the process if its metadata is damaged.
    """
    first = 1
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        if group.total_byte_size > group.num_rows * max_document * _CHARACTER_BYTES + _PAGE_BYTES:
            raise DocumentTooLong(f"{path}, one of the rows from {first} on", max_document)
        first += group.num_rows


def _is_text(kind: Any) -> bool:
    """Whether a column holds strings. A column of nulls alone has a type of its own."""
    types = require("pyarrow", "data", "reading parquet").types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))
