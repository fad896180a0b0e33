"""Reads messages, typed or piped; a message can span several lines."""

import sys
from collections.abc import Generator
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

from bd3lm.io.files import local_path, read_text, write_atomically
from bd3lm.io.reading import ENCODING, MAX_DOCUMENT, numbered_lines
from bd3lm.io.terminal import as_utf8

PASTE_END = "/end"
_PROMPT, _NEXT = "> ", "| "
_MOST_HISTORY, _MOST_BYTES = 1000, 10_000_000


class Lines(Protocol):
    """A source of lines."""

    is_live: bool
    """Whether a person types, who can correct a mistake."""

    def read(self, prompt: str) -> str:
        """The next line without its line end; EOFError at the end."""

    def close(self) -> None:
        """Called when no more lines are read."""


class PipedLines:
    """Lines of standard input, each as long as a document may be."""

    is_live = False

    def __init__(self) -> None:
        if sys.stdin is None:
            raise ValueError("standard input must be open, got none: there is nothing to read messages from")
        text = TextIOWrapper(sys.stdin.buffer, encoding=ENCODING, newline="\n")
        self._lines = self._each(text)

    def _each(self, text: TextIOWrapper) -> Generator[str]:
        try:
            for _, line in numbered_lines(text, "standard input", MAX_DOCUMENT):
                yield line.removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input must be UTF-8 text, and is not: {error}") from None
        finally:
            text.detach()  # closing it would close standard input

    def read(self, prompt: str) -> str:
        line = next(self._lines, None)
        if line is None:
            raise EOFError
        return line

    def close(self) -> None:
        self._lines.close()


class TypedLines:
    """Lines typed in a terminal, with editing and history as in a shell; saved only to a named file."""

    is_live = True

    def __init__(self, history: Path | None = None) -> None:
        self._readline: Any = None
        with suppress(ImportError):  # Windows has no readline
            import readline

            self._readline = readline
        self._history = None if history is None else local_path(history)
        if self._history is None or self._readline is None:
            return
        for line in read_history(self._history):
            self._readline.add_history(line)

    def read(self, prompt: str) -> str:
        sys.stdout.flush()
        return input(prompt)

    def close(self) -> None:
        """Save the history, if requested."""
        if self._history is None or self._readline is None:
            return
        number = self._readline.get_current_history_length()
        first = max(number - _MOST_HISTORY, 0)
        lines = [self._readline.get_history_item(place + 1) or "" for place in range(first, number)]
        kept = "".join(f"{' '.join(line.splitlines())}\n" for line in lines)
        write_atomically(self._history, as_utf8(kept))
        self._history.chmod(0o600)  # as shells protect theirs


def read_history(path: Path) -> list[str]:
    """Load the last lines of a history file, which may not exist yet."""
    if not path.exists():
        if not path.parent.is_dir():
            raise ValueError(f"--history must be in an existing folder, and {path.parent} is not one")
        return []
    return read_text(path, most=_MOST_BYTES).split("\n")[:-1][-_MOST_HISTORY:]


def read_first(lines: Lines) -> str:
    """The first line of the next message."""
    return lines.read(_PROMPT)


def read_rest(first: str, lines: Lines) -> str:
    """The whole message or command: one line, or several, if each but the last ends in a backslash."""
    found = [first]
    while _goes_on(found[-1]):
        found[-1] = found[-1][:-1]
        try:
            found.append(lines.read(_NEXT))
        except EOFError:  # the input has ended, so the message is dropped
            break
    return "\n".join(found)


def read_pasted(lines: Lines) -> str:
    """All lines unchanged, up to /end or the end of input."""
    found = []
    with suppress(EOFError):
        while (line := lines.read(_NEXT)) != PASTE_END:
            found.append(line)
    return "\n".join(found)


def _goes_on(line: str) -> bool:
    """Two backslashes at the end are literal."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1
