"""How an answer is shown while it is written: only settled text, or drafts too."""

import re
from typing import Protocol

from rich.cells import cell_len
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from bd3lm.commands.sample.display import Animation
from bd3lm.data import Tokenizer
from bd3lm.io.console import Console
from bd3lm.io.terminal import printable
from bd3lm.sampling import Event

_PIECE = re.compile(r"\n|[^\S\n]+|\S+")
_TAB = 8


class Show(Protocol):
    """Shows one answer."""

    watches: bool
    """Whether it needs the events of each pass."""

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def more(self, text: str) -> None:
        """Called with settled text."""

    def event(self, event: Event) -> None:
        """Called with every event, if it `watches`."""


class Piped:
    """Writes the answer unchanged, for a file or a program, with a line end."""

    watches = False

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> "Piped":
        return self

    def __exit__(self, *_: object) -> None:
        self.more("\n")

    def more(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()

    def event(self, event: Event) -> None:
        raise RuntimeError("plain output watches no events")


class Typed:
    """Writes the answer to a terminal as it comes, wrapped at words.

    A word is written as far as it is known. If it grows past the end of the line, it is erased and written on
    the next line.
    """

    watches = False

    def __init__(self, console: Console) -> None:
        self.console = console
        self.column = 0
        self.word = ""  # the part of the last word that is on this line
        self.has_begun = False

    def __enter__(self) -> "Typed":
        return self

    def __exit__(self, *_: object) -> None:
        self._write("\n" if self.column else "")

    def event(self, event: Event) -> None:
        raise RuntimeError("wrapped output watches no events")

    def more(self, text: str) -> None:
        if not self.has_begun:
            text = text.lstrip()
            self.has_begun = bool(text)
        for piece in _PIECE.findall(printable(text)):
            if piece == "\n":
                self._write("\n")
                self.column, self.word = 0, ""
            elif piece.isspace():
                self._space(piece)
            else:
                self._more_of_word(piece)

    def _space(self, blank: str) -> None:
        """A space at the end of a line is not needed."""
        for sign in blank:
            wide = _TAB - self.column % _TAB if sign == "\t" else cell_len(sign)
            fits = min(wide, self.console.width - self.column)
            self._write(" " * fits if sign == "\t" or fits < wide else sign)
            self.column += fits
        self.word = ""

    def _more_of_word(self, piece: str) -> None:
        start = self.column - cell_len(self.word)  # below 0 if the word is longer than a line
        more = piece
        if start > 0 and self.column + cell_len(piece) > self.console.width:
            if self.word:
                self._take_back_to(start)
            self._write("\n")
            more, self.column = self.word + piece, 0
        self._write(more)
        self.word += piece
        for sign in more:  # as a terminal breaks a word that is too long
            wide = cell_len(sign)
            self.column = wide if self.column + wide > self.console.width else self.column + wide

    def _take_back_to(self, column: int) -> None:
        self.console.control(
            Control(
                ControlType.CARRIAGE_RETURN,
                (ControlType.CURSOR_FORWARD, column),
                (ControlType.ERASE_IN_LINE, 0),
            )
        )

    def _write(self, text: str) -> None:
        if text:
            self.console.print(Text(text), end="", soft_wrap=True)


class Watched(Animation):
    """Redraws the answer with its drafts as it comes, and at last shows the settled text."""

    def __init__(self, console: Console, tokenizer: Tokenizer, mask_id: int, *, given: int) -> None:
        super().__init__(console, tokenizer, mask_id, shown_from=given)
        self.settled = ""

    def __exit__(self, *_: object) -> None:
        self.live.stop()
        text = printable(self.settled).strip()
        if text:
            self.console.print(Text(text))

    def more(self, text: str) -> None:
        self.settled += text
