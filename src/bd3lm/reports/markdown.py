"""A report as Markdown, with its plots as separate files."""

import re
from collections.abc import Iterator
from itertools import groupby, islice

from markupsafe import Markup

from bd3lm.reports.animation import Draft, Film, Frame
from bd3lm.reports.document import Document, Piece, code, fence, kind, pieces
from bd3lm.reports.readable import readable
from bd3lm.reports.rendering import environment

_MASK_SIGN = "░"
_WIDTH = 72  # characters in a line of a film
_SPECIAL = re.compile(r"([\\`*_<>\[\]|#&~$])")
_LIST = re.compile(r"^([-+]|\d{1,9}[.)])(?=[-\s]|$)")  # characters that start a heading, a list or a rule


def render_markdown(document: Document, plot_folder: str) -> str:
    """The text of report.md; its plots are in `plot_folder`, next to it."""
    return _REPORT.render(document=document, plot_folder=plot_folder, mask=_MASK_SIGN)


def _prose(text: str) -> Markup:
    """Prose on one line; only `code` is markup."""
    escaped = "".join(code(piece.text) if piece.is_code else _escaped(piece.text) for piece in _line(text))
    return Markup(_LIST.sub(lambda begun: f"{begun[1][:-1]}\\{begun[1][-1]}", escaped))


def _cell(text: str) -> Markup:
    """Prose in a table. A bar ends a cell, even in code, unless a backslash precedes it."""
    return Markup(
        "".join(
            code(piece.text).replace("|", "\\|")
            if piece.is_code and "\\|" not in piece.text
            else _escaped(piece.text)
            for piece in _line(text)
        )
    )


def _line(text: str) -> Iterator[Piece]:
    """The pieces of prose on one line, since a second line might become a heading or a list."""
    return pieces(" ".join(readable(text).split()))


def _escaped(text: str) -> str:
    """Text with everything escaped that Markdown would interpret."""
    return _SPECIAL.sub(r"\\\1", text)


def _fenced(text: str) -> Markup:
    """Text unchanged, inside a fence longer than any in it."""
    text = readable(text)
    around = fence(text, 3)
    return Markup(f"{around}text\n{text}\n{around}")


def _frames(film: Film, blocks: int = 3, passes: int = 8) -> str:
    """The end of the text after each step of the first blocks, or after each of the first passes, one per
    line."""
    starts = [place for place, step in enumerate(film.steps) if step[0] == "block"]
    last = starts[blocks] if len(starts) > blocks else len(film.steps)
    frames = islice(film.readable().frames(), (passes if film.has_drafts else last) + 1)
    lines = [" ".join(_written(frame).split()) for frame in frames]
    return "\n".join(line if len(line) <= _WIDTH else f"…{line[1 - _WIDTH :]}" for line in lines)


def _written(frame: Frame) -> str:
    """What is shown at a moment, with drafts in brackets."""
    written = []
    for is_draft, run in groupby(frame, lambda seen: isinstance(seen, Draft)):
        text = "".join(
            _MASK_SIGN if seen is None else seen.piece if isinstance(seen, Draft) else seen for seen in run
        )
        written.append(f"⟨{text}⟩" if is_draft else text)
    return "".join(written)


_REPORT = environment(_prose, kind=kind, cell=_cell, fenced=_fenced, frames=_frames).get_template(
    "report.md.j2"
)
