"""Files that a command writes line by line over hours: OUT.partial until complete, then OUT."""

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
    """The file that becomes `out` when it is complete."""
    return out.with_name(out.name + ".partial")


class Partial:
    """OUT.partial: the lines written so far, open for more.

    `take_up` continues the lines of an earlier command; lines that do not fit are moved to another file.
    """

    def __init__(self, out: Path, file: BinaryIO) -> None:
        self.out, self.path = out, partial_of(out)
        self._file = file

    @classmethod
    @contextmanager
    def open(cls, out: Path) -> Iterator["Partial"]:
        """Lock OUT.partial against a second writer. At the end an empty file is removed."""
        check_new_file(out)
        path = partial_of(out)
        with path.open("a+b") as file:
            try:
                with only_writer(path):
                    check_new_file(out)  # another process may have finished it by now
                    try:
                        yield cls(out, file)
                    finally:
                        if path.exists() and not path.stat().st_size:
                            path.unlink()
            except BlockingIOError:
                raise ValueError(f"--out {out} is being written by another process") from None

    def take_up(self, is_next: Callable[[dict[str, Any]], bool]) -> int:
        """Keep the lines up to the first one that this command would not write next; return how many.

        If other lines follow, the whole file is copied first, so nothing is lost. A torn last line is
        dropped.
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
                f"{self.path} is kept as {kept}: {which} come from other texts, weights or settings",
                to=sys.stderr,
            )
        if count:
            say(f"continuing after {count:,} lines of {self.path}", to=sys.stderr)
        self._file.truncate(end)
        return count

    def write(self, line: str) -> None:
        """Append a line and flush it to the file at once."""
        with full_disk_explained(self.path.parent):
            self._file.write(as_utf8(line) + b"\n")
            self._file.flush()

    def discard(self) -> None:
        """Remove all lines."""
        self._file.truncate(0)

    def finish(self) -> None:
        """Rename the file to its final name."""
        os.fsync(self._file.fileno())
        self.path.replace(self.out)

    def _copy(self) -> Path:
        number = 1
        while (kept := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        kept.write_bytes(self.path.read_bytes())
        return kept


def _record(line: bytes) -> dict[str, Any]:
    """A line as a record; empty if it is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
