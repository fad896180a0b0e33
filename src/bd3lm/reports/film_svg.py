"""A film of a text being uncovered, as one animated SVG: for a README, a slide or a page without scripts.

Every token has its place in the finished text from the beginning on, so nothing moves: first its block is
masked, then it is uncovered. Whoever asks for reduced motion, or prints it, sees the finished text.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from bd3lm.reports.animation import Film
from bd3lm.reports.colours import COLOURS, INK, SOFT

_CHARACTER, _LINE = 8.4, 22.0  # pixels, of a character and of a line
_FONT_SIZE, _MARGIN = 14, 14.0
_FIRST_HOLD, _LAST_HOLD = 1.0, 3.0  # seconds before the first block and after the last token


class _Place(NamedTuple):
    """Where a piece of the text is drawn: line and column, and what of it is drawn there."""

    line: int
    column: int
    shown: str


class _Part(NamedTuple):
    """Something drawn at a position, and the frames from which and before which it is to be seen."""

    position: int
    piece: str | None  # None is a mask
    first: int
    end: int | None  # None is the last frame's


def film_svg(film: Film, *, columns: int = 72, tokens_per_second: float = 8.0) -> str:
    """The film as an SVG that plays by itself, over and over; a line has at most `columns` characters."""
    if columns < 8:
        raise ValueError(f"columns must be at least 8, got {columns}")
    if not 0.0 < tokens_per_second < math.inf:
        raise ValueError(f"tokens_per_second must be positive and finite, got {tokens_per_second}")
    states = list(film.states())
    places = _places([piece or "" for piece in states[-1]], columns)
    times = _times(film, tokens_per_second)
    duration = times[-1] + _LAST_HOLD
    rules, drawn = [], []
    for name, part in enumerate(_parts(states, len(places))):
        place = places[part.position]
        if not place.shown:
            continue  # a line break, or a character that a later token completes
        style = ""
        if (part.first, part.end) != (0, None):
            end = duration if part.end is None else times[part.end]
            rules.append(_keyframes(f"k{name}", times[part.first] / duration, end / duration))
            style = f' style="animation-name:k{name}"'
        gone = ' class="gone"' if part.end is not None else ""
        is_given = part.piece is not None and part.first == 0
        drawn.append(f"<g{gone}{style}>{_draw(place, part.piece, is_given=is_given)}</g>")
    width = 2 * _MARGIN + columns * _CHARACTER
    height = 2 * _MARGIN + (1 + max((place.line for place in places), default=0)) * _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img"><title>{escape(film.text)}</title>'
        f"<style>{_STYLE}g{{animation:none {duration:.2f}s step-end infinite}}{''.join(rules)}"
        "@media (prefers-reduced-motion:reduce){g{animation:none!important}}</style>"
        f'<rect class="page" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>'
        f"{''.join(drawn)}</svg>\n"
    )


_STYLE = (
    ".page{fill:#fff;stroke:#d6d6d0}"
    f"text{{font:{_FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
    f"fill:{INK};white-space:pre}}"
    f".given{{fill:{SOFT}}}.mask{{fill:{COLOURS[0]};opacity:.28}}.gone{{opacity:0}}"
)


def _times(film: Film, tokens_per_second: float) -> list[float]:
    """When each state of a film begins: a block at once, a token after the one before."""
    times, now = [0.0], _FIRST_HOLD
    for kind, *_ in film.steps:
        if kind != "block":
            now += 1 / tokens_per_second
        times.append(now)
    return times


def _parts(states: Sequence[Sequence[str | None]], length: int) -> Iterator[_Part]:
    """What is seen at each position of the finished text, and when."""
    for position in range(length):
        seen = [state[position] if position < len(state) else "" for state in states]
        first = 0
        for frame in range(1, len(seen) + 1):
            if frame == len(seen) or seen[frame] != seen[first]:
                if seen[first] != "":
                    yield _Part(position, seen[first], first, None if frame == len(seen) else frame)
                first = frame


def _places(pieces: Sequence[str], columns: int) -> list[_Place]:
    """Lay a text out in lines: a piece that does not fit begins the next; one too long for any is cut."""
    places = []
    line = column = 0
    for piece in pieces:
        shown = piece.replace("\t", " ").split("\n")[0].rstrip("\r")
        if shown.strip() and column + len(shown) > columns:
            line, column = line + 1, 0
            shown = shown.lstrip(" ")
        shown = shown[: columns - column]
        places.append(_Place(line, column, shown))
        column += len(shown)
        if breaks := piece.count("\n"):
            line, column = line + min(breaks, 2), 0
    return places


def _draw(place: _Place, piece: str | None, *, is_given: bool) -> str:
    x, y = _MARGIN + place.column * _CHARACTER, _MARGIN + place.line * _LINE
    width = len(place.shown) * _CHARACTER
    if piece is None:
        return (
            f'<rect class="mask" x="{x + 1:.1f}" y="{y + 3:g}" width="{width - 2:.1f}" height="16" rx="3"/>'
        )
    given = ' class="given"' if is_given else ""
    # A token that did not stay is squeezed into the place of the one that did.
    shown = place.shown if place.shown.strip() in piece else piece.strip("\n")
    return (
        f'<text{given} x="{x:.1f}" y="{y + 16:g}" textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs">'
        f"{escape(shown)}</text>"
    )


def _keyframes(name: str, first: float, end: float) -> str:
    """Seen from one share of the film to another."""
    hidden_again = f"{100 * end:.2f}%{{opacity:0}}" if end < 1.0 else ""
    return f"@keyframes {name}{{0%{{opacity:0}}{100 * first:.2f}%{{opacity:1}}{hidden_again}}}"
