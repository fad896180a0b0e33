"""A report as a sequence of parts, before it is HTML or Markdown.

Prose may hold `code` between backticks and nothing else that is marked up.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Short items, one below the other."""

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


@dataclass(frozen=True)
class Plot:
    """A picture; `name` is the name of its file, `alt` says in words what it shows."""

    name: str
    svg: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Quotation:
    """A text that a model wrote, after what it was given."""

    given: str
    written: str
    note: str


@dataclass(frozen=True)
class Screening:
    """A text being written, to be watched."""

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


def readable(text: str) -> str:
    """The text without control characters, and without invisible ones that change its direction.

    Joiners stay: some scripts, and some emoji, need them.
    """
    kept = "\n\t\u200c\u200d"
    return "".join(sign for sign in text if sign in kept or unicodedata.category(sign) not in ("Cc", "Cf"))
