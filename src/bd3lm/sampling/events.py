"""Events of texts being written, and the sample that each text ends with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from bd3lm.sampling.request import Request, equal_values
from bd3lm.sampling.stopping import StoppedBy


@dataclass(frozen=True)
class Sample:
    """A finished text and its cost."""

    index: int  # of its request
    tokens: Tensor = field(hash=False)  # (length,) given and written, on the CPU
    given: int  # how many tokens were given
    prompt: int  # how many given tokens come before the first written one
    written_from: int  # no token from here on was given; only a template has gaps before it
    seed: int  # after a redraw, the last redraw's
    evaluations: int  # passes that wrote this text, including tokens dropped at its end
    fill_passes: int  # passes that only read given tokens
    stopped_by: StoppedBy
    stop_string: str | None = None  # the tokens hold it; the text ends before it
    redraws: int = 0  # how often it fell below the entropy floor and was drawn again
    redrawn_passes: int = 0  # passes of both kinds for those attempts
    drafted: tuple[int, ...] = ()  # verified drafts, by place ahead; empty without speculation
    accepted: tuple[int, ...] = ()  # correct drafts among them
    fills: int = 1  # fills of its gaps to choose from; all costs except those of redraws include them
    effective_fills: float = 1.0  # how many fills of equal weight would be worth as much
    log_p: tuple[float | None, ...] | None = None  # of each token, None for given ones; see `TokenRevealed`
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()  # for each token

    def __eq__(self, other: object) -> bool:
        return equal_values(self, other)

    @property
    def written(self) -> int:
        """How many tokens were written, without those dropped at the end."""
        return len(self.tokens) - self.given


@dataclass(frozen=True)
class TextEvent:
    """Something that happened to a text while it was written."""

    index: int
    """The index of the text's request."""
    tell: Callable[[], str] | None = field(default=None, kw_only=True, repr=False, compare=False)
    """Returns the text so far, for events from a model with a tokenizer."""

    @property
    def text(self) -> str | None:
        """The text so far, given and written, with a sign in place of each mask."""
        return None if self.tell is None else self.tell()


@dataclass(frozen=True)
class Started(TextEvent):
    """A text begins, or begins again."""

    request: Request


@dataclass(frozen=True)
class BlockStarted(TextEvent):
    """The next piece of a text is positions start..stop − 1. Some of them may be given."""

    start: int
    stop: int


@dataclass(frozen=True)
class TokenRevealed(TextEvent):
    """A token was written at a position of a text.

    Under uniform noise a position is written many times, and may hold the mask, which is an ordinary token
    there.
    """

    position: int
    token: int
    log_p: float | None = field(default=None, kw_only=True, compare=False)
    """The model's log-probability of the token in the pass that revealed it, if `alternatives` is set."""
    alternatives: tuple[tuple[int, float], ...] = field(default=(), kw_only=True, compare=False)
    """The likeliest tokens there with their log-probabilities, the likeliest first."""


@dataclass(frozen=True)
class Drafted(TextEvent):
    """Tokens that a pass guessed and a later pass will verify. They replace all earlier guesses, and are not
    part of the text."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TokenHidden(TextEvent):
    """A written token was masked again."""

    position: int


@dataclass(frozen=True)
class BlockFinished(TextEvent):
    """Positions start..stop − 1 of a text are written. They may still be dropped or drawn again."""

    start: int
    stop: int


@dataclass(frozen=True)
class Extended(TextEvent):
    """Tokens from position `start` on are written, and the text continues. Its last piece comes in
    `Stopped`."""

    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Redrawn(TextEvent):
    """A text fell below the entropy floor, and begins again with a new seed."""


@dataclass(frozen=True)
class Stopped(TextEvent):
    """A text is finished."""

    sample: Sample


@dataclass(frozen=True)
class Failed(TextEvent):
    """A text cannot be written. Other texts continue."""

    reason: str


Tell = Literal["end", "pieces", "passes"]
"""Which events of a text to report: only its end and redraws, also each piece, or everything a pass does."""

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
