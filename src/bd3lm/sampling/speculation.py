"""The options of speculation: guess the next tokens, and verify several in a pass, without changing the
law."""

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from bd3lm.diffusion import is_whole

Scheme = Literal["rejection", "coupled"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
_BY_NAME: dict[str, int | None] = {"off": 0, "auto": None}


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How many tokens to draft and verify at a time, and how."""

    drafts: int | None = None
    """Tokens to guess after the one that is certain; 0 turns speculation off. None chooses the number while
    texts are written, from the cost of a pass and how often guesses are right."""
    scheme: Scheme = "coupled"
    """How guesses are verified. "coupled" draws guess and token with the same noise, so the text is the one
    that the seed gives without speculation. "rejection" accepts more guesses, but the seed gives another text
    of the same law."""
    candidates: int = 1
    """Guesses for each token. Only the first has guesses behind it; a round ends if another one is right."""
    passes: int = 1
    """Passes in a round: 1 verifies and drafts together; 2 does them separately, with fewer positions
    each."""

    def __post_init__(self) -> None:
        if self.drafts is not None and (not is_whole(self.drafts) or self.drafts < 0):
            raise ValueError(f"speculation.drafts must be a whole number from 0 on, got {self.drafts!r}")
        if not is_whole(self.candidates) or self.candidates < 1:
            raise ValueError(
                f"speculation.candidates must be a whole number from 1 on, got {self.candidates!r}"
            )
        if self.scheme not in SCHEMES:
            raise ValueError(f"speculation.scheme must be {' or '.join(SCHEMES)}, got {self.scheme!r}")
        if self.passes not in (1, 2):
            raise ValueError(f"speculation.passes must be 1 or 2, got {self.passes!r}")
        if self.drafts is None and self.scheme == "rejection":
            raise ValueError(
                "speculation.drafts must be a number with the scheme rejection: a number chosen by timing "
                "would make texts depend on it"
            )

    @property
    def is_on(self) -> bool:
        """Whether any tokens are drafted."""
        return self.drafts != 0

    @classmethod
    def of(cls, value: Any) -> Self:
        """A `Speculation` from a number of drafts, "auto", "off" or a `Speculation`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in _BY_NAME:
            return cls(drafts=_BY_NAME[value])
        if is_whole(value) and value >= 0:
            return cls(drafts=int(value))
        raise ValueError(
            f"speculation must be a number of drafts, 'auto', 'off' or a Speculation, got {value!r}"
        )
