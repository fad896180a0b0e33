"""Limits on what one client, or all clients together, may ask of a server."""

import math
from dataclasses import dataclass, fields

_CHARACTERS = 64  # for each token, on average, at most
PATIENCE = 60.0
"""Seconds to wait for the next part of a request, or for a client to take the next part of an answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A request beyond any of these is refused with an error that names the limit."""

    seats: int = 32
    """Texts written at the same time."""
    queue: int = 256
    """Texts that may wait for a seat."""
    texts: int = 32
    """Texts of one request: the number of prompts times n."""
    tokens: int = 4096
    """Tokens of a text, including its prompt."""
    body: int = 1 << 20
    """Bytes of a request."""
    seconds: float = 600.0
    """Seconds from a request to its last token."""
    grace: float = 30.0
    """Seconds that running requests get when the server stops."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "grace":
                raise ValueError(f"{field.name} must be more than 0, got {value}")
        if not (self.grace >= 0 and math.isfinite(self.grace)):
            raise ValueError(f"grace must be a number of seconds, at least 0, got {self.grace}")

    @property
    def characters(self) -> int:
        """Characters of a text: a text that is far too long is refused before anything reads it."""
        return _CHARACTERS * self.tokens
