"""A report as a sequence of parts, before it becomes HTML or Markdown.

Prose may contain `code` between backticks, as in Markdown, and no other markup.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bd3lm.reports.animation import Film


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A title for the parts after it."""

    text: str


@dataclass(frozen=True)
class Listing:
    """Short items, one per line."""

    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings. The first column and `text_columns` hold words, the others numbers."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headings):
                raise ValueError(f"a row must have {len(self.headings)} cells, got {list(row)}")

    @property
    def words(self) -> set[int]:
        """The columns that hold words."""
        return {0, *self.text_columns}


@dataclass(frozen=True)
class Plot:
    """A picture; `name` is its file name, `alt` describes it in words."""

    name: str
    svg: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Quotation:
    """A text that a model wrote, after what it was given; code is shown as code."""

    given: str
    written: str
    note: str
    is_code: bool = False


@dataclass(frozen=True)
class Screening:
    """An animation of a text being written."""

    film: Film
    caption: str


Part = Prose | Heading | Listing | Table | Plot | Quotation | Screening


@dataclass(frozen=True)
class Section:
    """Parts under a title."""

    title: str
    parts: Sequence[Part]

    @property
    def anchor(self) -> str:
        return "-".join(self.title.lower().split())


@dataclass(frozen=True)
class Document:
    """The whole report."""

    title: str
    lead: str
    sections: Sequence[Section]
    colophon: str
    verdict: str = ""
    """The main result in a sentence; `shown_first` are the parts that belong to it."""
    shown_first: Sequence[Part] = ()

    @property
    def parts(self) -> list[Part]:
        """All of them, in their order."""
        return [*self.shown_first, *(part for section in self.sections for part in section.parts)]


def looks_like_code(text: str) -> bool:
    """Whether a text has indented lines or Python prompts, so it needs a monospaced font."""
    return re.search(r"^(  +|\t)\S|^>>> ", text, re.MULTILINE) is not None


def kind(part: Part) -> str:
    """What templates call it."""
    return type(part).__name__.lower()


def fence(text: str, least: int = 1) -> str:
    """A run of backticks longer than any in the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def code(text: str) -> str:
    """Any text as `code` in prose."""
    around = fence(text)
    space = " " if text.strip(" ") and {text[0], text[-1]} & {"`", " "} else ""
    return f"{around}{space}{text}{space}{around}"


class Piece(NamedTuple):
    """A piece of prose."""

    text: str
    is_code: bool


_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


def pieces(prose: str) -> Iterator[Piece]:
    """The code and the other text in prose. As in Markdown, code ends with as many backticks as it began
    with."""
    place = 0
    for found in _CODE.finditer(prose):
        yield Piece(prose[place : found.start()], False)
        inside = found[2]
        is_spaced = inside.strip(" ") and inside[0] == inside[-1] == " "
        yield Piece(inside[1:-1] if is_spaced else inside, True)
        place = found.end()
    yield Piece(prose[place:], False)
