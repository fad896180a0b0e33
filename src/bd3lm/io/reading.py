"""Reads text files, plain or compressed, piece by piece, with a limit on the size of a document.

A few kilobytes can unpack to gigabytes on one line. All reading by line goes through this file: a line that
is too long is refused before more than the limit is in memory.
"""

import gzip
import io
import lzma
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any

from bd3lm.io.extras import require

COMPRESSIONS = (".gz", ".xz", ".zst")
MAX_DOCUMENT = 10_000_000
"""Characters: several novels, and about 1.5 GB while they are tokenized."""
ENCODING = "utf-8-sig"  # a byte order mark is not part of the text

_HALVES = re.compile("[\ud800-\udfff]")
_PACKED_BYTES = 512  # 4 bytes of zstd can hold a block of 128 KiB, so that these hold at most 16 MiB


class DocumentTooLong(ValueError):
    """A document is longer than the limit."""

    def __init__(self, where: str, most: int, hint: str = "--max-document can allow more") -> None:
        self.where, self.most = where, most
        super().__init__(f"{where}, is longer than {most:,} characters, the limit for a document: {hint}")


def max_document_of(given: int | None) -> int:
    """The limit for a document: the given number of characters, or the default."""
    if given is not None and given < 1:
        raise ValueError(f"max_document must be at least 1 character, got {given}")
    return MAX_DOCUMENT if given is None else given


def compression_of(name: str) -> str | None:
    """The compression that the name of a file indicates."""
    return next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), None)


def open_text(path: Path) -> IO[str]:
    """The text of a file, decompressed if its name says so."""
    compression = compression_of(path.name)
    if compression == ".gz":
        return gzip.open(path, "rt", encoding=ENCODING)
    if compression == ".xz":
        return lzma.open(path, "rt", encoding=ENCODING)
    if compression == ".zst":
        unpacked = _ZstdStream(path, require("zstandard", "data", f"reading {path.name}"))
        return io.TextIOWrapper(io.BufferedReader(unpacked), encoding=ENCODING)
    return open(path, encoding=ENCODING)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Add the name of the file to errors of decompressing and decoding."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error


def numbered_lines(text: IO[str], name: str | Path, most: int) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text with their ends and numbers; none is longer than `most` characters."""
    for number in count(1):
        line = text.readline(most + 1)
        if not line:
            return
        if len(line) > most and not line.endswith("\n"):
            raise DocumentTooLong(f"{name}, line {number}", most)
        yield number, line


def whole_text(text: IO[str], name: str | Path, most: int) -> str:
    """All of a text, if it has at most this many characters."""
    found = text.read(most + 1)
    if len(found) > most:
        hint = "--max-document can allow more, and --text-unit paragraph or line makes smaller documents"
        raise DocumentTooLong(f"{name}, as one document", most, hint)
    return found


def whole_characters(text: str) -> str:
    """Text that UTF-8 can hold: JSON can escape half of a surrogate pair."""
    return (
        text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _HALVES.search(text) else text
    )


class _ZstdStream(io.RawIOBase):
    """A decompressed .zst file: the package's reader stops after one frame and takes a truncated one for the
    end."""

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
            while packed := file.read(_PACKED_BYTES):
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
            raise EOFError("its last frame is incomplete")
