"""A checkpoint's index, state.json: which file holds which rows of which tensor, with digests to check them.

It has the size and SHA-256 of every file, and its own digest. A digest detects damage, but not a deliberate
change that recomputes it. So every field is checked too, and that the rows of all tensors are there exactly
once.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from bd3lm.io.files import read_text
from bd3lm.parsing import SettingsError, parse, shown

FORMAT = 1
INDEX = "state.json"
_MOST_BYTES = 10**8  # a thousand tensors of a thousand processes each take a twentieth
_FILE_NAME = re.compile(r"[\w-]+\.safetensors", re.ASCII)
_LISTED = 3  # how many tensors an error names


T = TypeVar("T")


class Damaged(ValueError):
    """A checkpoint is not what was written. The message says why."""


@dataclass(frozen=True)
class File:
    """The size and digest of a file when it was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Stored:
    """A tensor and its pieces: file, first row, row after the last. A scalar counts as one row."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, int, int], ...]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def piece_shape(self, start: int, stop: int) -> tuple[int, ...]:
        """The shape of a piece in its file."""
        return (stop - start, *self.shape[1:]) if self.shape else ()

    @property
    def is_whole(self) -> bool:
        """Whether the pieces hold every row exactly once.

        A file holds one piece of a tensor. Two pieces in one file would therefore be the same rows twice.
        """
        if any(size < 0 for size in self.shape) or len({file for file, *_ in self.pieces}) < len(self.pieces):
            return False
        pieces = sorted((start, stop) for _, start, stop in self.pieces)
        edges = [(0, 0), *pieces, (self.rows, self.rows)]
        return all(start < stop for start, stop in pieces) and all(
            before == start for (_, before), (start, _) in pairwise(edges)
        )


@dataclass(frozen=True)
class Index:
    """The contents of state.json, without its own digest."""

    format: int
    step: int
    score: float | None
    state: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, Stored]

    def __post_init__(self) -> None:
        if strange := [name for name in self.files if not _FILE_NAME.fullmatch(name)]:
            raise ValueError(
                f"files must have names without a folder that end in .safetensors, got {shown(strange[0])}"
            )
        torn = [name for name, stored in self.tensors.items() if not stored.is_whole]
        if torn:
            raise ValueError(f"pieces must hold every row of a tensor once, but do not for {_some(torn)}")
        lost = [
            name
            for name, stored in self.tensors.items()
            if any(file not in self.files for file, _, _ in stored.pieces)
        ]
        if lost:
            raise ValueError(f"pieces must be in one of the files, but are not for {_some(lost)}")

    def in_file(self, file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each piece in a file, by the name of its tensor."""
        return {
            name: (stored.dtype, stored.piece_shape(start, stop))
            for name, stored in self.tensors.items()
            for its, start, stop in stored.pieces
            if its == file
        }


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in a folder. Raises `Damaged` if it is not what was written."""
    try:
        data = json.loads(read_text(folder / INDEX, most=_MOST_BYTES))
        intact = isinstance(data, dict) and data.pop("sha256", None) == digest(data)
    except OSError as error:
        raise Damaged(f"{INDEX} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Damaged(f"{INDEX} is not JSON") from None
    if not intact:
        raise Damaged(f"{INDEX} is not what was written: its SHA-256 differs")
    if isinstance(data.get("format"), int) and data["format"] > FORMAT:
        raise ValueError(
            f"{folder} has format {shown(data['format'])}; this version of bd3lm reads format {FORMAT}"
        )
    index = parsed(Index, data, where=INDEX)
    number = folder.name.rpartition("-")[2]
    if index.format != FORMAT or not number.isdecimal() or index.step != int(number):
        raise Damaged(
            f"{INDEX} must have format {FORMAT} and the step that {folder.name} names, got format "
            f"{index.format} and step {index.step}"
        )
    return index


def parsed(kind: type[T], data: Any, *, where: str) -> T:
    """`parse` for a part of a checkpoint. The error lists all problems in one line."""
    try:
        return parse(kind, data, where=where)
    except (SettingsError, RecursionError) as error:
        raise Damaged(" ".join(str(error).split())) from None


def digest(data: Mapping[str, Any]) -> str:
    """The SHA-256 of an index without its digest."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _some(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(map(shown, names[:_LISTED])) + (f" and {more} more" if more > 0 else "")
