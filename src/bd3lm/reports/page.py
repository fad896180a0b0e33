"""A report as one HTML page that needs nothing from anywhere: styles, plots and the player are in it."""

import json
import re
from html import escape as escape_signs
from importlib.resources import files

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
    Section,
    Table,
    readable,
)


def render_page(document: Document) -> str:
    """The whole page."""
    here = files("bd3lm.reports")
    has_film = any(isinstance(part, Screening) for section in document.sections for part in section.parts)
    script = f"<script>\n{here.joinpath('film.js').read_text('utf-8')}</script>\n" if has_film else ""
    contents = "".join(
        f'<li><a href="#{section.anchor}">{escape(section.title)}</a></li>' for section in document.sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(document.title)}</title>\n"
        f"<style>\n{here.joinpath('page.css').read_text('utf-8')}</style>\n</head>\n<body>\n<main>\n"
        f'<header>\n<h1>{escape(document.title)}</h1>\n<p class="lead">{_inline(document.lead)}</p>\n'
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav>\n</header>\n'
        + "".join(map(_section, document.sections))
        + f'<footer class="colophon">{_inline(document.colophon)}</footer>\n</main>\n'
        + f"{script}</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = "".join(map(_part, section.parts))
    return f'<section id="{section.anchor}">\n<h2>{escape(section.title)}</h2>\n{parts}</section>\n'


def _part(part: Part) -> str:
    match part:
        case Prose():
            return f"<p>{_inline(part.text)}</p>\n"
        case Heading():
            return f"<h3>{escape(part.text)}</h3>\n"
        case Listing():
            items = "".join(f"<li>{_inline(item)}</li>\n" for item in part.items)
            return f'<ul class="items">\n{items}</ul>\n'
        case Table():
            return _table(part)
        case Plot():
            return (
                f'<figure class="plot">\n{_inline_svg(part)}\n'
                f"<figcaption>{_inline(part.caption)}</figcaption>\n</figure>\n"
            )
        case Quotation():
            given = f'<span class="given">{escape(part.given)}</span>' if part.given else ""
            return (
                f"<blockquote><p>{given}{escape(part.written)}</p>\n"
                f"<footer>{_inline(part.note)}</footer></blockquote>\n"
            )
        case Screening():
            return _screening(part)


def _table(table: Table) -> str:
    words = {0, *table.text_columns}

    def cell(tag: str, column: int, text: str, scope: str = "") -> str:
        kind = ' class="words"' if column in words else ""
        return f"<{tag}{scope}{kind}>{_inline(text)}</{tag}>"

    head = "".join(cell("th", i, text, ' scope="col"') for i, text in enumerate(table.headings))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", i, text) for i, text in enumerate(row[1:], 1))
        + "</tr>\n"
        for row in table.rows
    )
    return (
        f'<figure class="table">\n<figcaption>{_inline(table.caption)}</figcaption>\n'
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n'
        "</table></div>\n</figure>\n"
    )


def _screening(screening: Screening) -> str:
    film = screening.film
    # "<" could end the script element, or begin a comment in it.
    data = json.dumps(film.to_json(), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    data = readable(data)
    many = len(film.blocks) > 1 and any(stop - start > 1 for start, stop in film.blocks)
    line = '<span class="swatch">The block being written is underlined.</span> ' if many else ""
    speeds = "".join(
        f'<option value="{speed}"{" selected" if speed == 1 else ""}>{name}</option>'
        for speed, name in ((0.5, "½×"), (1, "1×"), (2, "2×"), (4, "4×"))
    )
    return (
        f'<figure class="film{" many" if many else ""}">\n<p class="stage">{_stage(film)}</p>\n'
        '<div class="controls" hidden><button type="button">Play</button>'
        '<input type="range" min="0" value="0" step="1" aria-label="Position in the film">'
        f'<label>Speed <select>{speeds}</select></label><output aria-live="off"></output></div>\n'
        "<figcaption>"
        '<span class="swatch"><span class="given">Grey</span> text was given;</span> '
        '<span class="swatch">a <span class="token mask">box</span> is a mask;</span> '
        '<span class="swatch"><span class="token fresh">yellow</span> text was just uncovered.</span> '
        f"{line}{_inline(screening.caption)} "
        '<span class="screen">Masks are drawn as wide as what they hide, so that the text stays still; the '
        "model does not know their width.</span></figcaption>\n"
        f'<script type="application/json">{data}</script>\n</figure>\n'
    )


def _stage(film: Film) -> str:
    """The finished text, with a span for each token and each block; without scripts a page shows this."""
    pieces = [piece or "" for piece in list(film.states())[-1]]
    given = {place for place, piece in enumerate(film.given) if piece is not None}

    def token(place: int) -> str:
        thin = " thin" if not pieces[place].strip(" ") or pieces[place].startswith("\n") else ""
        kind = " given" if place in given else thin
        return f'<span class="token{kind}">{escape(pieces[place])}</span>'

    def tokens(start: int, stop: int) -> str:
        return "".join(map(token, range(start, min(stop, len(pieces)))))

    first = film.blocks[0][0] if film.blocks else len(pieces)
    return tokens(0, first) + "".join(
        f'<span class="block" data-start="{start}">{tokens(start, stop)}</span>'
        for start, stop in film.blocks
        if start < len(pieces)
    )


def escape(text: str) -> str:
    """Any text as HTML."""
    return escape_signs(readable(text))


def _inline(text: str) -> str:
    """Prose with its `code`; a line is never broken inside a flag."""

    def code(found: re.Match[str]) -> str:
        words = [f"<span>{word}</span>" if word.startswith("--") else word for word in found[1].split(" ")]
        return f"<code>{' '.join(words)}</code>"

    return re.sub(r"`([^`]+)`", code, escape(text))


def _inline_svg(plot: Plot) -> str:
    """A plot for the page. HTML knows the namespaces, so they are left out."""
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", plot.svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(plot.alt)}"', 1).strip()
