"""Files and folders: typed paths, files that are either complete or absent, one writer per folder.

A file gets its name only when all of it is on disk (temporary name, fsync, rename, fsync of the folder). A
reader therefore never sees half a file, however the writer ended.
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
_PART = 2**20  # bytes per read
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # errors of file systems that cannot fsync a folder


def local_path(typed: str | Path) -> Path:
    """A path as typed, with ~ for a home folder.

    The ~ of an unknown user stays as it is; Path.expanduser would raise.
    """
    return Path(os.path.expanduser(typed))


def make_folder(path: Path, argument: str = "out") -> None:
    """Create a folder and its parents if they do not exist; an error names the argument."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # `full_disk_explained` explains this one
            raise
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"{argument} must be a folder that can be created, got {path}: {why}") from None


def read_text(path: Path, *, most: int, piped: bool = False) -> str:
    """The text of a file from a stranger.

    A ValueError names the file if it is not UTF-8 or longer than `most` bytes; nothing beyond them is read. A
    pipe, whose writer may never come, or a device is read only if it may be `piped`: when a user names it.
    """
    mode = path.stat().st_mode
    if not piped and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder says so itself
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    data = bytearray()
    with path.open("rb") as file:  # in parts, since a single large read would allocate memory for its maximum
        while part := file.read(min(_PART, most + 1 - len(data))):
            data += part
    if len(data) > most:
        size = path.stat().st_size  # the size of a pipe or a device is unknown
        raise ValueError(
            f"{path} must have at most {most:,} bytes, got {f'{size:,}' if size > most else 'more'}"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text: {error}") from error


class AtomicFile:
    """A file that is written under a temporary name; `commit` renames it, `discard` removes it.

    The temporary name is always the same, so the next writer overwrites what a killed writer left. Use it in
    folders with one writer at a time (`only_writer`), elsewhere `replacing`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._file: BinaryIO = open(self._temporary, "wb")  # noqa: SIM115 - it stays open after this call

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def commit(self) -> None:
        self._file.close()
        _put_in_place(self._temporary, self.path)

    def discard(self) -> None:
        # Closing flushes, which fails again if the disk is full.
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; at the end it replaces `path`. An error leaves `path` as it was.

    The temporary name belongs to this process, so two processes that write the same file do not mix.
    Temporary files of killed processes are removed.
    """
    _sweep_up(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # as in _OWN_TEMPORARY
    try:
        with temporary.open("wb") as held:
            _lock(held.fileno())  # held while this process writes
            mode = os.fstat(held.fileno()).st_mode
            yield temporary
            temporary.chmod(mode)  # some libraries create files that only their owner can read
            _put_in_place(temporary, path)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # of a write, for example to a full disk
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _sweep_up(path: Path) -> None:
    """Remove temporary files of `path` whose writers have ended, which their locks show."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError), left.open("rb") as file:
            if _lock(file.fileno()):
                left.unlink()


def _lock(handle: int) -> bool | None:
    """Lock an open file or folder until it is closed.

    Returns False if another process holds it, and None where locks do not exist, as on some file systems and
    on Windows.
    """
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` contain `data`, or leave it as it was."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the system can."""
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
    """Hold a folder or a file against a second writer; the lock ends with this process, however it ends.

    Yields whether it is held; on a file system without locks it is not.
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
    """Remove half-written files of killed processes, in a folder that `only_writer` holds.

    If others write there without holding the folder, `of` names the files that only its holder writes.
    """
    for path in folder.iterdir():
        found = _OWN_TEMPORARY.fullmatch(path.name)
        if found and (of is None or found[1] in of):
            path.unlink(missing_ok=True)


@contextmanager
def full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn "no space left" into a line that says where, and that finished files are safe."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            "the disk is full; finished files are safe: free some space and run the same command again",
            str(folder),
        ) from error


def _put_in_place(temporary: Path, path: Path) -> None:
    with temporary.open("r+b") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)
