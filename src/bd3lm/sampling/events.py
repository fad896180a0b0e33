"""What happens while texts are written, and what is left of each: the sample."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from bd3lm.sampling.request import Request, equal_values
from bd3lm.sampling.stopping import StoppedBy


@dataclass(frozen=True)
class Sample:
    """A finished text and what it cost."""

    index: int  # which request it answers
    tokens: Tensor = field(hash=False)  # (length,) what was given and what was written, on the CPU
    given: int  # how many of them were given
    prompt: int  # how many of these stand before the first that was written
    written_from: int  # from here on none was given; only a template has gaps before it
    seed: int  # that of the last redraw, where there was one
    evaluations: int  # passes that wrote this text, also the tokens that were dropped at its end
    fill_passes: int  # passes that only read what was given
    stopped_by: StoppedBy
    stop_string: str | None = None  # that which stopped it; its tokens hold it, its text ends before it
    redraws: int = 0  # how often it fell below the entropy floor and was drawn again
    redrawn_passes: int = 0  # what those attempts cost, both kinds of passes
    drafted: tuple[int, ...] = ()  # drafts that were verified, by place ahead; none without speculation
    accepted: tuple[int, ...] = ()  # how many of these were right
    fills: int = 1  # how many fills of its gaps it was drawn from; all costs but those of redraws count them
    effective_fills: float = 1.0  # how many of equal weight would be worth as much
    log_p: tuple[float | None, ...] | None = None  # of each token, given ones have none; see `TokenRevealed`
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()  # of each token

    def __eq__(self, other: object) -> bool:
        return equal_values(self, other)

    @property
    def written(self) -> int:
        """How many tokens were written, those of a dropped end not counted."""
        return len(self.tokens) - self.given


@dataclass(frozen=True)
class TextEvent:
    """Something that happens to a text while it is written."""

    index: int
    """Which request the text answers."""
    tell: Callable[[], str] | None = field(default=None, kw_only=True, repr=False, compare=False)
    """Tells what the text looks like by then, where the events come from a model with a tokenizer."""

    @property
    def text(self) -> str | None:
        """What was given and what is written by then, with a sign in place of each mask."""
        return None if self.tell is None else self.tell()


@dataclass(frozen=True)
class Started(TextEvent):
    """A text is begun, or begun again."""

    request: Request


@dataclass(frozen=True)
class BlockStarted(TextEvent):
    """Positions start..stop − 1 of a text are written next; some of them may be given."""

    start: int
    stop: int


@dataclass(frozen=True)
class TokenRevealed(TextEvent):
    """A token was written at a position of a text.

    Under uniform noise a position is written many times, and may hold the mask, a token like others there.
    """

    position: int
    token: int
    log_p: float | None = field(default=None, kw_only=True, compare=False)
    """What the model gave the token in the pass that revealed it, where `alternatives` is set."""
    alternatives: tuple[tuple[int, float], ...] = field(default=(), kw_only=True, compare=False)
    """The likeliest tokens there, the likeliest first, with their log-probabilities."""


@dataclass(frozen=True)
class Drafted(TextEvent):
    """Tokens that a pass guessed, and that a later one verifies: in place of all guesses before. They are no
    part of the text."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TokenHidden(TextEvent):
    """A token that had been written was masked again."""

    position: int


@dataclass(frozen=True)
class BlockFinished(TextEvent):
    """Positions start..stop − 1 of a text are written; they may yet be dropped, or all drawn again."""

    start: int
    stop: int


@dataclass(frozen=True)
class Extended(TextEvent):
    """Tokens from position `start` on are written, and the text goes on; where it ends, `Stopped` has all."""

    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Redrawn(TextEvent):
    """A text fell below the entropy floor; it is begun again, from a new seed."""


@dataclass(frozen=True)
class Stopped(TextEvent):
    """A text is finished."""

    sample: Sample


@dataclass(frozen=True)
class Failed(TextEvent):
    """A text cannot be written; others go on."""

    reason: str


Tell = Literal["end", "pieces", "passes"]
"""What is told of a text: that it was begun again or has ended; also each piece, or all that a pass did."""

Event = (
    Started
    | BlockStarted
    | TokenRevealed
    | Drafted
    | TokenHidden
    | BlockFinished
    | Extended
    | Redrawn
    | Stopped
    | Failed
)
