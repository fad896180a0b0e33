"""Files that a command writes line by line over hours: OUT.partial until it is whole, then OUT."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bd3lm.commands.shared.records import check_new_file
from bd3lm.io.files import full_disk_explained, only_writer
from bd3lm.io.terminal import as_utf8, say


def partial_of(out: Path) -> Path:
    """The file that becomes `out` once all is in it."""
    return out.with_name(out.name + ".partial")


class Partial:
    """The lines of OUT so far, and the file that further ones go to.

    `take_up` continues what an earlier command left; lines that do not fit are kept in another file.
    """

    def __init__(self, out: Path, file: BinaryIO) -> None:
        self.out, self.path = out, partial_of(out)
        self._file = file

    @classmethod
    @contextmanager
    def open(cls, out: Path) -> Iterator["Partial"]:
        """Lock OUT.partial against a second writer; at the end it is removed if it has no line."""
        check_new_file(out)
        path = partial_of(out)
        with path.open("a+b") as file:
            try:
                with only_writer(path):
                    check_new_file(out)  # which another may have finished until now
                    try:
                        yield cls(out, file)
                    finally:
                        if path.exists() and not path.stat().st_size:
                            path.unlink()
            except BlockingIOError:
                raise ValueError(f"--out {out} is being written by another process") from None

    def take_up(self, is_next: Callable[[dict[str, Any]], bool]) -> int:
        """Keep the lines up to the first that is not what would be written next; returns how many.

        If others follow, the whole file is copied first, so that none is lost. A torn last line is dropped.
        """
        self._file.seek(0)
        count = end = 0
        others = False
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if not is_next(_record(line)):
                others = True
                break
            count, end = count + 1, end + len(line)
        if others:
            kept = self._copy()
            which = f"its lines after the first {count:,}" if count else "its lines"
            say(
                f"{self.path} is kept as {kept}: {which} are of other texts, weights or settings",
                to=sys.stderr,
            )
        if count:
            say(f"continuing after the {count:,} lines of {self.path}", to=sys.stderr)
        self._file.truncate(end)
        return count

    def write(self, line: str) -> None:
        """Add a line; it is in the file at once, whatever comes next."""
        with full_disk_explained(self.path.parent):
            self._file.write(as_utf8(line) + b"\n")
            self._file.flush()

    def discard(self) -> None:
        """Drop all lines."""
        self._file.truncate(0)

    def finish(self) -> None:
        """Give the file its name."""
        os.fsync(self._file.fileno())
        self.path.replace(self.out)

    def _copy(self) -> Path:
        number = 1
        while (kept := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        kept.write_bytes(self.path.read_bytes())
        return kept


def _record(line: bytes) -> dict[str, Any]:
    """A line as it was written; empty if it is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
