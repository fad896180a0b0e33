"""A film of a text being written: recorded from a sampler's events, replayed here and in the browser.

A film is a list of steps, small enough to be kept as JSON and sent with a page:

    ["block", start, stop]       positions start..stop − 1 are written next; those not given are hidden
    ["show", position, piece]    a token is uncovered, and this is its part of the text
    ["hide", position]           a token is hidden again (remasking)
    ["cut", length]              the text ends here after all
    ["draft", [[position, piece], …]]
                                 tokens are guessed, in place of all guesses before; no part of the text

The moments of a film with drafts are its passes. Each pass ends with its drafts, even if there are none;
steps after the last drafts belong to the last pass. The moments of any other film are its steps.

Pieces joined in order are the text, whatever the tokenizer: a character made of several tokens appears whole,
with the last of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from bd3lm.reports.readable import readable
from bd3lm.sampling import BlockStarted, Drafted, Event, Started, Stopped, TokenHidden, TokenRevealed

LONGEST = 2**16
"""The most tokens in a film: a player goes through all of them at every step."""
Step = Sequence[Any]
Pieces = list[str | None]
"""The content of each position; None is a mask."""


@dataclass(frozen=True)
class Draft:
    """A token that a pass drafted and none has verified yet."""

    piece: str


Frame = list[str | Draft | None]
"""What is shown at each position, in the text and ahead of it; None is a mask."""


@dataclass(frozen=True)
class Film:
    """The given text, piece by piece, and the steps after it."""

    given: Sequence[str | None]
    steps: Sequence[Step]

    @property
    def pieces(self) -> list[str]:
        """The finished text, piece by piece."""
        *_, last = self.states()
        return [piece or "" for piece in last]

    @property
    def text(self) -> str:
        """The finished text."""
        return "".join(self.pieces)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Where blocks start and stop."""
        return [(step[1], step[2]) for step in self.steps if step[0] == "block"]

    @property
    def is_in_blocks(self) -> bool:
        """Whether there are several blocks, of more than one token each."""
        return len(self.blocks) > 1 and any(stop - start > 1 for start, stop in self.blocks)

    @property
    def has_drafts(self) -> bool:
        """Whether its moments are passes, which may write several tokens each."""
        return any(step[0] == "draft" for step in self.steps)

    @property
    def moments(self) -> list[int]:
        """The number of steps done at each moment: after each step, or after each pass."""
        if not self.has_drafts:
            return list(range(len(self.steps) + 1))
        passes = [number for number, step in enumerate(self.steps, 1) if step[0] == "draft"]
        return [0, *passes[:-1], len(self.steps)]

    def frames(self) -> Iterator[Frame]:
        """What is shown at each moment; a draft is shown where no token stands."""
        moments = set(self.moments)
        for done, (pieces, drafts) in enumerate(zip(self.states(), self._drafts(), strict=True)):
            if done in moments:
                frame: Frame = [*pieces]
                for place, piece in drafts.items():
                    frame += [""] * (place + 1 - len(frame))
                    if place >= len(pieces) or pieces[place] is None:
                        frame[place] = Draft(piece)
                yield frame

    def _drafts(self) -> Iterator[dict[int, str]]:
        """The drafts before the first step and after each step."""
        drafts: dict[int, str] = {}
        yield drafts
        for kind, *rest in self.steps:
            if kind == "draft":
                drafts = dict(rest[0])
            elif kind == "cut":
                drafts = {}
            yield drafts

    def states(self) -> Iterator[Pieces]:
        """The pieces before the first step and after each step."""
        pieces = list(self.given)
        yield list(pieces)
        for kind, place, *rest in self.steps:
            if kind == "block":
                pieces += [None] * (rest[0] - len(pieces))
            elif kind == "show":
                pieces[place] = rest[0]
            elif kind == "hide":
                pieces[place] = None
            elif kind == "cut":
                del pieces[place:]
            yield list(pieces)

    def readable(self) -> "Film":
        """The same film with displayable characters only."""
        return Film(
            [None if piece is None else readable(piece) for piece in self.given],
            [_with_pieces(step, lambda _, piece: readable(piece)) for step in self.steps],
        )

    def to_json(self) -> dict[str, Any]:
        return {"given": list(self.given), "steps": [list(step) for step in self.steps]}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Film":
        """Check that a film can be played; a ValueError says what is wrong."""
        given, steps = plain.get("given"), plain.get("steps")
        if not isinstance(given, list) or not all(isinstance(each, str | None) for each in given):
            raise ValueError("given must be a list of pieces of text")
        if not isinstance(steps, list):
            raise ValueError("steps must be a list")
        length = len(given)
        for number, step in enumerate(steps):
            match step:
                case ["block", int(start), int(stop)] if 0 <= start < stop <= LONGEST:
                    length = max(length, stop)
                case ["show", int(place), str()] | ["hide", int(place)] if 0 <= place < length:
                    pass
                case ["draft", list(drafts)] if _are_drafts(drafts):
                    pass
                case ["cut", int(place)] if 0 <= place <= length:
                    length = place
                case _:
                    raise ValueError(
                        f"steps.{number} must be a step that can follow the others, got {step!r:.60}"
                    )
        return cls(given, steps)


def _are_drafts(drafts: list[Any]) -> bool:
    """Whether each is a position and a piece, in the order of the positions."""
    last = -1
    for draft in drafts:
        match draft:
            case [int(place), str()] if last < place < LONGEST:
                last = place
            case _:
                return False
    return True


def _with_pieces(step: Step, of: Callable[[int, Any], str]) -> Step:
    """A step with other pieces, each computed from its position and the previous piece there."""
    match step:
        case ["show", place, shown]:
            return ["show", place, of(place, shown)]
        case ["draft", drafts]:
            return ["draft", [[place, of(place, guess)] for place, guess in drafts]]
        case _:
            return list(step)


def record_film(events: Iterable[Event], decode: Callable[[list[int]], str], *, mask_id: int) -> Film:
    """The film of one text from the events of `LanguageModel.stream`; of a redrawn text only the last
    attempt."""
    given: list[int] = []
    happened: list[Step] = []
    for event in events:
        match event:
            case Started(request=request):
                given, happened = request.given.tolist(), []
            case BlockStarted(start=start, stop=stop):
                happened.append(("block", start, stop))
            case TokenRevealed(position=position, token=token):
                happened.append(("show", position, token))
            case TokenHidden(position=position):
                happened.append(("hide", position))
            case Drafted(positions=positions, tokens=tokens):
                happened.append(("draft", list(zip(positions, tokens, strict=True))))
            case Stopped(sample=sample):
                _end_drafts(happened)
                return _developed(given, happened, sample.tokens.tolist(), decode, mask_id)
    raise ValueError("events must include the end of the text, a Stopped event, got none")


def _end_drafts(happened: list[Step]) -> None:
    """Drop drafts after the last token, and passes without anything left to write: a GPU reports the end of a
    text a few passes late."""
    while len(happened) > 1 and happened[-1][0] == happened[-2][0] == "draft":
        happened.pop()
    if happened and happened[-1][0] == "draft":
        happened[-1] = ("draft", [])


def _developed(
    given: list[int],
    happened: list[Step],
    tokens: list[int],
    decode: Callable[[list[int]], str],
    mask_id: int,
) -> Film:
    """Token ids as pieces of text."""
    pieces = split_text(tokens, decode)

    def piece(position: int, token: int) -> str:
        if position < len(tokens) and tokens[position] == token:
            return pieces[position]
        return decode([token])  # it did not stay, so the final text has no piece for it

    first = [None if token == mask_id else piece(place, token) for place, token in enumerate(given)]
    steps = [_with_pieces(step, piece) for step in happened]
    reached = max((step[2] for step in happened if step[0] == "block"), default=len(given))
    if reached > len(tokens):
        steps.append(["cut", len(tokens)])
    return Film(first, steps)


def split_text(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """Each token's piece of the text; empty for a token that leaves a character incomplete."""
    whole = decode(list(tokens))
    ends = [0]
    for count in range(1, len(tokens)):
        so_far = zip(decode(list(tokens[:count])), whole, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], so_far))
        ends.append(max(ends[-1], agreed))
    return [whole[start:end] for start, end in pairwise([*ends, len(whole)])] if tokens else []
