"""Files and folders: paths that people type, files that are either whole or absent, one writer to a folder.

A file gets its name only when all of it is on the disk (temporary name, fsync, rename, fsync of the folder),
so whatever a reader finds under its name is complete, however the writer ended.
"""

import errno
import glob
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_OWN_TEMPORARY = re.compile(r"\.(.+)\.\d+\.tmp")
_PART = 2**20  # bytes read at once
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # what file systems say that know no fsync of a folder


def local_path(typed: str | Path) -> Path:
    """The path that somebody typed, with ~ for a home folder.

    The ~ of an unknown user stays as it is, where Path.expanduser would raise.
    """
    return Path(os.path.expanduser(typed))


def make_folder(path: Path, argument: str = "out") -> None:
    """Make a folder, and those it lies in, where it is not there; a line that names the argument where it
    cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # which `full_disk_explained` explains
            raise
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{argument} must be a folder that can be made, got {path}: {why}") from None


def read_text(path: Path, *, most: int, piped: bool = False) -> str:
    """The text of a file that somebody else may have written; a ValueError names it where it is no UTF-8, or
    longer than `most` bytes, of which no more are read. A pipe, whose writer may never come, or a device is
    read only if it may be `piped`: where a user names the file."""
    mode = path.stat().st_mode
    if not piped and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a folder says so itself
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    data = bytearray()
    with path.open("rb") as file:  # in parts: to ask for all that may be there takes the memory for it
        while part := file.read(min(_PART, most + 1 - len(data))):
            data += part
    if len(data) > most:
        size = path.stat().st_size  # which a pipe or a device does not say
        raise ValueError(
            f"{path} must have at most {most:,} bytes, got {f'{size:,}' if size > most else 'more'}"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text: {error}") from error


class AtomicFile:
    """A file being written beside its final name; `commit` gives it that name, `discard` removes it.

    The temporary name is always the same, so that the next writer overwrites what a killed one left. It is
    for folders with one writer at a time (`only_writer`); elsewhere use `replacing`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._file: BinaryIO = open(self._temporary, "wb")  # noqa: SIM115 - it outlives this call

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def commit(self) -> None:
        self._file.close()
        _put_in_place(self._temporary, self.path)

    def discard(self) -> None:
        # Closing flushes, which fails again on a full disk.
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; at the end what is there becomes `path`, which an error leaves as it was.

    The temporary name is this process's own, so that two processes that write the same file do not mix. What
    a killed one left of it is removed.
    """
    _sweep_up(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # as in _OWN_TEMPORARY
    try:
        with temporary.open("wb") as held:
            _lock(held.fileno())  # as long as this process writes
            mode = os.fstat(held.fileno()).st_mode
            yield temporary
            temporary.chmod(mode)  # some libraries make their files readable to their owner alone
            _put_in_place(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # of a write, as to a full disk
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sweep_up(path: Path) -> None:
    """Remove the temporary files of `path` whose writers are gone, which the system tells by their locks."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError), left.open("rb") as file:
            if _lock(file.fileno()):
                left.unlink()


def _lock(handle: int) -> bool | None:
    """Lock an open file or folder until it is closed. False where somebody else holds it, and None where
    there are no locks, as on some file systems and on Windows."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, or leave it as it was."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk, where the system can."""
    if os.name == "nt":  # Windows does not open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


@contextmanager
def only_writer(folder: Path) -> Iterator[bool]:
    """Hold a folder, or a file, against a second writer; the system lets go however this process ends.

    Gives whether it is held, which it is not on a file system without locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        held = _lock(handle)
        if held is False:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process is writing to this folder", str(folder))
        yield held is True
    finally:
        os.close(handle)


def remove_leftovers(folder: Path, of: Collection[str] | None = None) -> None:
    """Remove what killed processes left half written; for a folder that `only_writer` holds.

    Where others write too, without asking for the folder, `of` names the files that only its holder writes.
    """
    for path in folder.iterdir():
        found = _OWN_TEMPORARY.fullmatch(path.name)
        if found and (of is None or found[1] in of):
            path.unlink(missing_ok=True)


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


def _put_in_place(temporary: Path, path: Path) -> None:
    with temporary.open("r+b") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
