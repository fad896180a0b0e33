"""Files whose bytes are what a sha256 says: checked when they are opened, and again when they have changed.

Reading a file to check it takes seconds for each gigabyte, so what was found whole is remembered: by an empty
file, called after the digest and the file's stamp, in the user's cache (XDG_CACHE_HOME, else ~/.cache), since
the data may lie where nothing can be written. Where the cache cannot be written either, files are checked at
every start. A stamp is size, times and inode: damage that changes none of them, such as of the disk itself,
is found only by a check that is `anew`.

A file is not mapped: where a mapped file is cut short, its reader is killed by SIGBUS.
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
_WORTH_REMEMBERING = 1 << 20  # bytes; fewer are checked about as fast as they are remembered
_SETTLED = 2.0  # seconds, after which a further write is sure to change the times of a file
_FORGOTTEN = 90 * 24 * 3600  # seconds, after which a memory that nobody asked for is removed

_seen: set[str] = set()  # by this process


Stamp = tuple[int, int, int, int]
"""The size of a file, when it was written to and changed, and its inode: what is new when somebody writes."""


class VerifiedFile:
    """A file of so many bytes and of this sha256, to read from at any place.

    What is read was in the file when it was found whole, or since then its stamp has stayed the same.
    `inspect` is shown all bytes when they are checked, a megabyte at a time, and raises a ValueError for what
    cannot be used although the digest is right.
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
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe is to wait for its writer
            raise ValueError(f"{path} is no regular file")
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
        """The bytes start..stop, which must lie in the file; a ValueError if it is no longer whole."""
        while True:
            found = self._read(start, stop)
            # After reading: what was there to be read has changed the stamp before.
            if _stamp(self._handle) == self._stamp and len(found) == stop - start:
                return found
            try:
                self._stamp = self._check()
            except ValueError as error:
                raise ValueError(f"{error}; it was whole when it was opened") from None

    def _check(self) -> Stamp:
        """Read the file, and raise a ValueError unless all of it is as it should be; its stamp."""
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
                except ValueError as error:  # of less interest than a wrong digest
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
        """As many of the bytes start..stop as there are; the system may give them in parts."""
        parts = []
        while start < stop and (part := _read_at(self._handle, stop - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _stamp(handle: int) -> Stamp:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _read_at(handle: int, count: int, place: int) -> bytes:
    if os.name == "nt":  # which cannot do both at once
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
    """Where the user's cache is; None where there is no telling."""
    cached = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cached / "bd3lm" / "verified" if cached.is_absolute() else None
