"""A film of a text being uncovered, as one animated SVG: for a README, a slide or a page without scripts.

Every token has its place in the finished text from the beginning on, so nothing moves: first its block is
masked, then it is uncovered. Whoever asks for reduced motion, or prints it, sees the finished text.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bd3lm.reports.animation import Film
from bd3lm.reports.colours import COLOURS, INK, SOFT

_CHARACTER, _LINE, _MARGIN = 8.4, 22, 14  # pixels: of a character, of a line, around the text
_COLUMNS = 72  # characters of a line, at most
_FIRST_HOLD, _LAST_HOLD = 1.0, 3.0  # seconds before the first block and after the last token
_TOKEN = 0.125  # seconds from one token to the next


class _Place(NamedTuple):
    """Where a piece of the text is drawn: line and column, and what of it is drawn there."""

    line: int
    column: int
    shown: str


class _Span(NamedTuple):
    """What is to be seen at a position from one frame on and until another; None is the last frame's end."""

    piece: str | None  # None is a mask
    first: int
    end: int | None


class _Sign(NamedTuple):
    """A token or a mask as the template draws it, seen between two shares of the film's time."""

    name: str
    x: float
    y: float
    width: float
    text: str | None  # None is a mask
    is_given: bool
    start: float
    end: float | None  # None stays to the end

    @property
    def is_timed(self) -> bool:
        return self.start > 0.0 or self.end is not None


def film_svg(film: Film) -> str:
    """The film as an SVG that plays by itself, over and over."""
    from bd3lm.reports.rendering import environment  # Jinja would slow down every start

    film = film.readable()
    places, times = _places(film.pieces), _times(film)
    template = environment(share=lambda share: f"{share:.2%}").get_template("film.svg.j2")
    return template.render(
        film=film,
        signs=list(_signs(film, places, times)),
        width=2 * _MARGIN + _COLUMNS * _CHARACTER,
        height=2 * _MARGIN + (1 + max((place.line for place in places), default=0)) * _LINE,
        duration=times[-1] + _LAST_HOLD,
        ink=INK,
        soft=SOFT,
        accent=COLOURS[0],
    )


def _signs(film: Film, places: Sequence[_Place], times: Sequence[float]) -> Iterator[_Sign]:
    """All that is ever seen, position by position."""
    states = list(film.states())
    duration = times[-1] + _LAST_HOLD
    for position, place in enumerate(places):
        if not place.shown:
            continue  # a line break, or a character that a later token completes
        for number, span in enumerate(_spans([state[position : position + 1] for state in states])):
            yield _Sign(
                name=f"k{position}_{number}",
                x=_MARGIN + place.column * _CHARACTER,
                y=_MARGIN + place.line * _LINE,
                width=len(place.shown) * _CHARACTER,
                text=None if span.piece is None else _drawn(place.shown, span.piece),
                is_given=span.piece is not None and span.first == 0,
                start=times[span.first] / duration,
                end=None if span.end is None else times[span.end] / duration,
            )


def _times(film: Film) -> list[float]:
    """When each state of a film begins: a block at once, a token after the one before."""
    times, now = [0.0], _FIRST_HOLD
    for kind, *_ in film.steps:
        if kind != "block":
            now += _TOKEN
        times.append(now)
    return times


def _spans(seen: Sequence[Sequence[str | None]]) -> Iterator[_Span]:
    """What is seen at a position, and when; `seen` has what is there in each frame, if anything is."""
    first = 0
    for frame in range(1, len(seen) + 1):
        if frame == len(seen) or seen[frame] != seen[first]:
            if seen[first] not in ([], [""]):
                yield _Span(seen[first][0], first, None if frame == len(seen) else frame)
            first = frame


def _places(pieces: Sequence[str]) -> list[_Place]:
    """Lay a text out in lines: a piece that does not fit begins the next; one too long for any is cut."""
    places = []
    line = column = 0
    for piece in pieces:
        shown = piece.replace("\t", " ").split("\n")[0]
        if shown.strip() and column + len(shown) > _COLUMNS:
            line, column = line + 1, 0
            shown = shown.lstrip(" ")
        shown = shown[: _COLUMNS - column]
        places.append(_Place(line, column, shown))
        column += len(shown)
        if breaks := piece.count("\n"):
            line, column = line + min(breaks, 2), 0
    return places


def _drawn(shown: str, piece: str) -> str:
    """A token that did not stay is squeezed into the place of the one that did."""
    return shown if shown.strip() in piece else piece.strip("\n")
