"""A report as one self-contained HTML page, with styles, plots and the player inside."""

from collections.abc import Iterator
from typing import NamedTuple

from markupsafe import Markup

from bd3lm.reports.animation import Film
from bd3lm.reports.colours import dark_rules
from bd3lm.reports.document import Document, Plot, Screening, kind, looks_like_code, pieces
from bd3lm.reports.rendering import environment
from bd3lm.reports.svg import inline_svg


def render_page(document: Document) -> str:
    """The whole page."""
    has_film = any(isinstance(part, Screening) for part in document.parts)
    return _PAGE.render(document=document, has_film=has_film, dark_plots=Markup(dark_rules()))


class _Token(NamedTuple):
    piece: str
    look: str


class _Group(NamedTuple):
    """The tokens of a block that starts here; text before the first block has no start."""

    start: int | None
    tokens: list[_Token]


def _stage(film: Film) -> Iterator[_Group]:
    """The finished text, block by block."""
    pieces = film.pieces
    tokens = [_Token(piece, _look(film, place, piece)) for place, piece in enumerate(pieces)]
    first = film.blocks[0][0] if film.blocks else len(pieces)
    yield _Group(None, tokens[:first])
    for start, stop in film.blocks:
        if start < len(pieces):
            yield _Group(start, tokens[start:stop])


def _look(film: Film, place: int, piece: str) -> str:
    """The class of a token: given, or thin, which is too narrow to be seen while it is a mask."""
    if place < len(film.given) and film.given[place] is not None:
        return "given"
    return "thin" if not piece.strip(" ") or piece.startswith("\n") else ""


def _inline_svg(plot: Plot) -> Markup:
    return Markup(inline_svg(plot.svg, plot.alt))


_PAGE = environment(
    kind=kind, pieces=pieces, stage=_stage, inline_svg=_inline_svg, looks_like_code=looks_like_code
).get_template("page.html.j2")
