"""Files that match a sha256: checked when they are opened, and again when they have changed.

Checking takes seconds per gigabyte, so the result is remembered: as an empty file, named after the digest and
the file's stamp, in the user's cache (XDG_CACHE_HOME, else ~/.cache), since the data itself may be read-only.
If the cache cannot be written either, files are checked at every start.

A stamp is size, times and inode. Damage that changes none of them, such as a failing disk, is found only by a
check that is `anew`. Files are not mapped: if a mapped file is cut short, SIGBUS kills its reader.
"""

import os
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

_PIECE = 1 << 20
_WORTH_REMEMBERING = 1 << 20  # bytes; checking smaller files is about as fast as remembering the result
_SETTLED = 2.0  # seconds, after which another write certainly changes the file's times
_FORGOTTEN = 90 * 24 * 3600  # seconds, after which an unused result is removed

_seen: set[str] = set()  # by this process


Stamp = tuple[int, int, int, int]
"""Size, times and inode of a file, which change when it is written."""


class VerifiedFile:
    """A file of this size and sha256, readable at any place.

    The bytes read were in the file when it was checked; since then its stamp has not changed. `inspect` gets
    all bytes during a check, a megabyte at a time, and raises a ValueError for unusable content with the
    right digest.
    """

    def __init__(
        self,
        path: Path,
        *,
        size: int,
        digest: str,
        inspect: Callable[[bytes], None] = lambda piece: None,
        anew: bool = False,
    ) -> None:
        self.path, self._size, self._digest, self._inspect = path, size, digest, inspect
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            raise ValueError(f"{path} is not a regular file")
        self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._handle)
        self._stamp = _stamp(self._handle)
        self._check_size(self._stamp)
        if anew or not _is_remembered(digest, self._stamp):
            try:
                self._stamp = self._check()
            except ValueError:
                _forget(digest, self._stamp)
                raise
            _remember(digest, self._stamp)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes start..stop, which must be in the file; a ValueError if it is damaged."""
        while True:
            found = self._read(start, stop)
            # After reading: an earlier change of these bytes has changed the stamp by now.
            if _stamp(self._handle) == self._stamp and len(found) == stop - start:
                return found
            try:
                self._stamp = self._check()
            except ValueError as error:
                raise ValueError(f"{error}; it was intact when it was opened") from None

    def _check(self) -> Stamp:
        """Read the whole file and return its stamp; raise a ValueError if anything is wrong."""
        before = _stamp(self._handle)
        self._check_size(before)
        found, place = sha256(), 0
        unusable: ValueError | None = None
        while piece := self._read(place, min(place + _PIECE, self._size)):
            found.update(piece)
            place += len(piece)
            if unusable is None:
                try:
                    self._inspect(piece)
                except ValueError as error:  # less important than a wrong digest
                    unusable = error
        if _stamp(self._handle) != before:
            raise ValueError(f"{self.path} is being written to")
        if found.hexdigest() != self._digest:
            raise ValueError(
                f"{self.path} is damaged: its sha256 is {found.hexdigest()[:12]}…, not {self._digest[:12]}…"
            )
        if unusable is not None:
            raise unusable
        return before

    def _check_size(self, stamp: Stamp) -> None:
        if stamp[0] != self._size:
            raise ValueError(f"{self.path} is damaged: it has {stamp[0]} bytes, not {self._size}")

    def _read(self, start: int, stop: int) -> bytes:
        """As many of the bytes start..stop as there are; the system may return them in parts."""
        parts = []
        while start < stop and (part := _read_at(self._handle, stop - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _stamp(handle: int) -> Stamp:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _read_at(handle: int, count: int, place: int) -> bytes:
    if os.name == "nt":  # it cannot do both at once
        os.lseek(handle, place, os.SEEK_SET)
        return os.read(handle, count)
    return os.pread(handle, count, place)


def _is_remembered(digest: str, stamp: Stamp) -> bool:
    name, folder = _name(digest, stamp), _folder()
    if name in _seen:
        return True
    if folder is None or not os.path.exists(folder / name):
        return False
    with suppress(OSError):
        os.utime(folder / name)
    return True


def _remember(digest: str, stamp: Stamp) -> None:
    size, modified, changed, _ = stamp
    written = max(modified, changed) / 1e9
    if size < _WORTH_REMEMBERING or time.time() - written < _SETTLED:
        return
    name, folder = _name(digest, stamp), _folder()
    _seen.add(name)
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
            _forget_old(folder)


def _forget(digest: str, stamp: Stamp) -> None:
    name, folder = _name(digest, stamp), _folder()
    _seen.discard(name)
    if folder is not None:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)


@cache  # once is enough
def _forget_old(folder: Path) -> None:
    for each in os.scandir(folder):
        if time.time() - each.stat().st_mtime > _FORGOTTEN:
            os.unlink(each)


def _name(digest: str, stamp: Stamp) -> str:
    return sha256(repr((digest, *stamp)).encode()).hexdigest()


def _folder() -> Path | None:
    """The user's cache folder; None if it is unknown."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cached / "bd3lm" / "verified" if cached.is_absolute() else None
