"""All output for people goes through here, so no text can control the terminal.

Paths, keys, fields of files and texts of models can hold anything, such as a sequence that clears the screen,
writes to the clipboard or reverses a line. It is shown escaped, as in Python: \\x1b.
"""

import re
import sys
import unicodedata
from typing import TextIO

_KEPT = "\n\t\u200c\u200d"  # joiners stay: some scripts and emoji need them
_SHOWN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


class _Shown(dict[int, str]):
    """The replacement for each code point, computed when it first occurs."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        hidden = sign not in _KEPT and unicodedata.category(sign) in _SHOWN_CATEGORIES
        self[code] = sign.encode("unicode_escape").decode("ascii") if hidden else sign
        return self[code]


_SHOWN = _Shown()


def printable(text: str) -> str:
    """Escape control characters, invisible characters that reorder text, and what UTF-8 cannot hold. Line
    ends become "\\n"."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


def one_entry(text: str) -> str:
    """The same for an error: one line, followed at most by a list whose lines are indented by two."""
    return printable(re.sub(r"\r?\n(?!  )", r"\\n", text.strip()))


def as_utf8(json: str) -> bytes:
    """JSON as bytes. Halves of surrogate pairs, which file names can contain, are escaped as in JSON."""
    return json.encode(errors="backslashreplace")


def say(line: object, *, to: TextIO | None = None) -> None:
    """Print a line for people, on standard output by default."""
    print(printable(str(line)), file=to)


def give(line: str) -> None:
    """Print a line of JSON on standard output for other programs: unchanged, unless it is a terminal."""
    whole = as_utf8(line).decode()
    print(printable(whole) if sys.stdout.isatty() else whole, flush=True)
