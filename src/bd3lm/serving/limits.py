"""What one client, or all of them together, may ask of a server."""

import math
from dataclasses import dataclass, fields

_CHARACTERS = 64  # of a token, on average, at most
PATIENCE = 60.0
"""Seconds for the next part of a request, or until a client takes the next part of an answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Beyond any of these a request is refused, with what is allowed."""

    seats: int = 32
    """Texts written side by side."""
    queue: int = 256
    """Texts that wait for a seat."""
    texts: int = 32
    """Texts of one request: its prompts, times n."""
    tokens: int = 4096
    """Tokens of a text, its prompt included."""
    body: int = 1 << 20
    """Bytes of a request."""
    seconds: float = 600.0
    """From a request to its last token."""
    grace: float = 30.0
    """Seconds that running requests have when the server is stopped."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "grace":
                raise ValueError(f"{field.name} must be more than 0, got {value}")
        if not (self.grace >= 0 and math.isfinite(self.grace)):
            raise ValueError(f"grace must be a number of seconds from 0 on, got {self.grace}")

    @property
    def characters(self) -> int:
        """Of a text, so that what is far too long is refused before anybody reads it."""
        return _CHARACTERS * self.tokens
