"""A film of a text as one animated SVG, for a README, a slide or a page without scripts.

Every token has its place in the finished text from the start, so nothing moves: its block is masked first,
then the token is revealed. A draft is pale, in the place of the future token, and a wrong draft is struck
through before it disappears. Readers who prefer reduced motion, and printouts, get the finished text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bd3lm.reports.animation import Draft, Film, Frame
from bd3lm.reports.colours import COLOURS, DRAFT, INK, SOFT

_CHARACTER, _LINE, _MARGIN = 8.4, 22, 14  # pixels: of a character, of a line, around the text
_COLUMNS = 72  # characters per line, at most
_FIRST_HOLD, _LAST_HOLD = 1.0, 3.0  # seconds before the first block and after the last token
_TOKEN = 0.125  # seconds per token, or per pass if a pass writes several tokens
_VERDICT = 0.05  # seconds for which a wrong draft is struck through


class _Place(NamedTuple):
    """Where a piece of text is drawn, by line and column, and the part that is drawn."""

    line: int
    column: int
    shown: str


@dataclass(frozen=True)
class _Wrong(Draft):
    """A draft that is neither accepted nor drafted again."""


class _Span(NamedTuple):
    """What a position shows from one frame until another; None is the end of the film."""

    seen: str | Draft | None  # None is a mask
    first: int
    end: int | None


class _Sign(NamedTuple):
    """A token, a draft or a mask for the template, shown between two shares of the film's time."""

    name: str
    x: float
    y: float
    width: float
    text: str | None  # None is a mask
    look: str  # given, draft, wrong, or none of these
    start: float
    end: float | None  # None stays to the end

    @property
    def is_timed(self) -> bool:
        return self.start > 0.0 or self.end is not None


def film_svg(film: Film) -> str:
    """The film as an SVG that plays in a loop."""
    from bd3lm.reports.rendering import environment  # importing Jinja would slow down every start

    film = film.readable()
    frames, times = list(film.frames()), _times(film)
    if film.has_drafts:
        frames, times = _with_verdicts(frames, times)
    places = _places(film.pieces)
    template = environment(share=lambda share: f"{share:.2%}").get_template("film.svg.j2")
    return template.render(
        film=film,
        signs=list(_signs(film.pieces, places, frames, times)),
        width=2 * _MARGIN + _COLUMNS * _CHARACTER,
        height=2 * _MARGIN + (1 + max((place.line for place in places), default=0)) * _LINE,
        duration=times[-1] + _LAST_HOLD,
        ink=INK,
        soft=SOFT,
        draft=DRAFT,
        accent=COLOURS[0],
        wrong=COLOURS[1],
    )


def _signs(
    pieces: Sequence[str], places: Sequence[_Place], frames: Sequence[Frame], times: Sequence[float]
) -> Iterator[_Sign]:
    """Everything that is shown at some time, position by position."""
    duration = times[-1] + _LAST_HOLD
    for position, (piece, place) in enumerate(zip(pieces, places, strict=True)):
        if not place.shown:
            continue  # a line break, or a character that a later token completes
        seen = [frame[position : position + 1] for frame in frames]
        for number, span in enumerate(_spans(seen)):
            text = _drawn(span.seen, place.shown, piece)
            # A draft shorter than the final token is not stretched to its width.
            most = len(text) if text and isinstance(span.seen, Draft) else len(place.shown)
            yield _Sign(
                name=f"k{position}_{number}",
                x=_MARGIN + place.column * _CHARACTER,
                y=_MARGIN + place.line * _LINE,
                width=min(len(place.shown), most) * _CHARACTER,
                text=text,
                look=_look(span),
                start=times[span.first] / duration,
                end=None if span.end is None else times[span.end] / duration,
            )


def _times(film: Film) -> list[float]:
    """The time of each frame: a new block appears at once; a token or a pass comes after the one before."""
    times, now = [0.0], _FIRST_HOLD
    for done in film.moments[1:]:
        if film.steps[done - 1][0] != "block":
            now += _TOKEN
        times.append(now)
    return times


def _with_verdicts(frames: list[Frame], times: list[float]) -> tuple[list[Frame], list[float]]:
    """Insert frames that show wrong drafts as wrong, before each frame that drops them."""
    found, begins = [frames[0]], [times[0]]
    for frame, after, begin in zip(frames, frames[1:], times[1:], strict=False):
        judged: Frame = [
            _Wrong(seen.piece)
            if isinstance(seen, Draft) and after[place : place + 1] not in ([seen], [seen.piece])
            else seen
            for place, seen in enumerate(frame)
        ]
        if judged != frame:
            found.append(judged)
            begins.append(begin - _VERDICT)
        found.append(after)
        begins.append(begin)
    return found, begins


def _spans(seen: Sequence[Sequence[str | Draft | None]]) -> Iterator[_Span]:
    """What a position shows, and when; `seen` has its content in each frame."""
    first = 0
    for frame in range(1, len(seen) + 1):
        if frame == len(seen) or seen[frame] != seen[first]:
            if seen[first] not in ([], [""]):
                yield _Span(seen[first][0], first, None if frame == len(seen) else frame)
            first = frame


def _places(pieces: Sequence[str]) -> list[_Place]:
    """Lay out a text in lines. A piece that does not fit starts the next line; a piece longer than a line is
    cut."""
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


def _look(span: _Span) -> str:
    match span.seen:
        case _Wrong():
            return "wrong"
        case Draft():
            return "draft"
        case str() if span.first == 0:
            return "given"
        case _:
            return ""


def _drawn(seen: str | Draft | None, shown: str, final: str) -> str | None:
    """A token that did not stay is squeezed into the width of the token that did."""
    match seen:
        case None:
            return None
        case Draft(piece=piece):
            return shown if piece == final else piece.strip("\n")
        case _:
            return shown if shown.strip() in seen else seen.strip("\n")
