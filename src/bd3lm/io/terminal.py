"""What people read of a program: every line goes through here, so that nothing in it steers a terminal.

Paths, keys and fields of files, and texts of models can hold anything: a sequence that clears the screen,
writes to the clipboard or turns a line around. It is shown as it would be typed in Python, such as \\x1b.
"""

import re
import sys
import unicodedata
from typing import TextIO

_KEPT = "\n\t\u200c\u200d"  # joiners too: some scripts, and some emoji, need them
_SHOWN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


class _Shown(dict[int, str]):
    """What is shown for each code point, found when it is first met."""

    def __missing__(self, code: int) -> str:
        sign = chr(code)
        hidden = sign not in _KEPT and unicodedata.category(sign) in _SHOWN_CATEGORIES
        self[code] = sign.encode("unicode_escape").decode("ascii") if hidden else sign
        return self[code]


_SHOWN = _Shown()


def printable(text: str) -> str:
    """The text with control characters, invisible ones that turn it around, and what UTF-8 cannot hold shown
    as text. Line ends become "\\n"."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


def one_entry(text: str) -> str:
    """The same of an error: one line, and a list under it at most, whose lines are indented by two."""
    return printable(re.sub(r"\r?\n(?!  )", r"\\n", text.strip()))


def as_utf8(json: str) -> bytes:
    """JSON as bytes; halves of surrogate pairs, of which names of files can be made, are escaped as JSON has
    it."""
    return json.encode(errors="backslashreplace")


def say(line: object, *, to: TextIO | None = None) -> None:
    """A line for people, on standard output unless it says where."""
    print(printable(str(line)), file=to)


def give(line: str) -> None:
    """A line of JSON on standard output, for other programs: as it is, but not to a terminal."""
    whole = as_utf8(line).decode()
    print(printable(whole) if sys.stdout.isatty() else whole, flush=True)
