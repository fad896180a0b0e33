"""Files that are either whole or absent: atomic writes, one writer to a folder, a full disk said plainly.

Preparing a corpus takes hours and is interrupted. A file gets its name only when all of it is on the disk
(temporary name, fsync, rename, fsync of the folder), so whatever a reader finds under its name is complete.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class AtomicFile:
    """A file being written beside its final name; `commit` gives it that name, `discard` removes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._file: BinaryIO = open(self._temporary, "wb")  # noqa: SIM115 - it outlives this call

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        # Closing flushes, which fails again on a full disk.
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, or leave it as it was."""
    file = AtomicFile(path)
    try:
        file.write(data)
        file.commit()
    except BaseException:
        file.discard()
        raise


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder against a second writer; the system lets go of it however this process ends."""
    import fcntl  # not on Windows, where reading shards works all the same

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK, "another process is writing to this folder", str(folder)
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn "no space left" into a line that says where, and that nothing finished is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            "the disk is full; what is finished is kept: free some space and run the same command again",
            str(folder),
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
