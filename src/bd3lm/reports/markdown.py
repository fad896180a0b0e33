"""A report as Markdown, with its plots as files beside it."""

import re
from collections.abc import Sequence

from bd3lm.reports.animation import Film
from bd3lm.reports.document import (
    Document,
    Heading,
    Listing,
    Part,
    Plot,
    Prose,
    Quotation,
    Screening,
    Table,
    readable,
)

_MASK_SIGN = "░"
_WIDTH = 72  # characters of a line of a film


def render_markdown(document: Document, plot_folder: str) -> str:
    """The text of report.md; its plots are looked for in `plot_folder`, beside it."""
    parts = [f"# {_safe(document.title)}", _safe(document.lead)]
    for section in document.sections:
        parts.append(f"## {_safe(section.title)}")
        parts += [_part(part, plot_folder) for part in section.parts]
    return "\n\n".join([*parts, "---", _safe(document.colophon)]) + "\n"


def _part(part: Part, plot_folder: str) -> str:
    match part:
        case Prose():
            return _safe(part.text)
        case Heading():
            return f"### {_safe(part.text)}"
        case Listing():
            return "\n".join(f"- {_safe(item)}" for item in part.items)
        case Table():
            return f"{_safe(part.caption)}\n\n{_table(part)}"
        case Plot():
            return f"![{_safe(part.alt)}]({plot_folder}/{part.name}.svg)\n\n*{_safe(part.caption)}*"
        case Quotation():
            given = f"{part.given} ▸ " if part.given else ""
            return f"{_fenced(given + part.written)}\n\n*{_safe(part.note)}*"
        case Screening():
            frames = "\n".join(_frames(part.film))
            return f"{_fenced(frames)}\n\n*{_MASK_SIGN} is a mask. {_safe(part.caption)}*"


def _table(table: Table) -> str:
    words = {0, *table.text_columns}
    rules = [":--" if column in words else "--:" for column in range(len(table.headings))]
    rows: Sequence[Sequence[str]] = [table.headings, rules, *table.rows]
    cells = [row if row is rules else [_safe(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _frames(film: Film, blocks: int = 3) -> list[str]:
    """The end of the text after each step of its first blocks."""
    starts = [place for place, step in enumerate(film.steps) if step[0] == "block"]
    last = starts[blocks] if len(starts) > blocks else len(film.steps)
    states = list(film.states())[: last + 1]
    lines = ["".join(_MASK_SIGN if piece is None else piece for piece in state) for state in states]
    lines = [" ".join(line.split()) for line in lines]
    return [line if len(line) <= _WIDTH else f"…{line[1 - _WIDTH :]}" for line in lines]


def _fenced(text: str) -> str:
    """Text as it is, inside a fence longer than any in it."""
    text = readable(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _safe(text: str) -> str:
    """Our prose, in which only `code` is marked up: what Markdown would read as more is escaped."""
    parts = re.split(r"(`[^`]+`)", readable(text))
    return "".join(
        part.replace("|", "\\|") if place % 2 else re.sub(r"([\\*_<>\[\]|#])", r"\\\1", part)
        for place, part in enumerate(parts)
    )
