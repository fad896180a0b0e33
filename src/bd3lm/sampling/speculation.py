"""What is asked of speculation: guesses of tokens to come, verified several a pass, which change no law."""

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from bd3lm.diffusion import is_whole

Scheme = Literal["rejection", "coupled"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
_BY_NAME: dict[str, int | None] = {"off": 0, "auto": None}


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How many tokens are drafted and verified at a time, and how."""

    drafts: int | None = None
    """Tokens that are guessed ahead, behind the one that is sure; 0 speculates not at all. None chooses as
    texts are written, by what a pass costs and how often guesses are right."""
    scheme: Scheme = "coupled"
    """How guesses are verified. Coupled: guess and token are drawn with the same noise, and the text is that
    of its seed without speculation. Rejection: more guesses are right, and the text is another one of the
    same law."""
    candidates: int = 1
    """Guesses of each token. The first has guesses behind it; another that is right ends a round."""
    passes: int = 1
    """In a round: one that verifies and drafts, or one of each, which have fewer positions."""

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
                "speculation.drafts must be a number with the scheme rejection: a number chosen by the clock "
                "would make texts depend on it"
            )

    @property
    def is_on(self) -> bool:
        return self.drafts != 0

    @classmethod
    def of(cls, value: Any) -> Self:
        """It by a number of drafts, by "auto" or "off", or as it is."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in _BY_NAME:
            return cls(drafts=_BY_NAME[value])
        if is_whole(value) and value >= 0:
            return cls(drafts=int(value))
        raise ValueError(
            f"speculation must be a number of drafts, 'auto', 'off' or a Speculation, got {value!r}"
        )
