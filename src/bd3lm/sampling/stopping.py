"""When a text ends: an end token, entropy too low, or its length."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bd3lm.models import send

StoppedBy = Literal["eos", "entropy", "length"]

_ROUNDING = 1e-9  # an entropy is a sum of logarithms; equal ones may differ by this much


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """The paper's rules (Suppl. C.5), for each row on its own. Nothing stops a text inside what was given.

    - `eos_id`: the text ends with the first such token that was sampled (not the one a text may begin with).
    - `entropy_floor`: at the end of a block, once there are `entropy_window` tokens (given ones count), the
      entropy in nats of the token frequencies of the last `entropy_window` of them must not be strictly
      below the floor (4 in the paper); otherwise those of them that were written are dropped, and the text
      ends.
    - `redraws`: so often a text that fell below the floor is thrown away and drawn again from a new seed, as
      the paper does to collect samples of one length.
    """

    eos_id: int | None = None
    entropy_floor: float | None = None
    entropy_window: int = 256
    redraws: int = 0

    def __post_init__(self) -> None:
        if self.entropy_window < 1:
            raise ValueError(f"entropy_window must be at least 1, got {self.entropy_window}")
        if self.entropy_floor is not None and not 0.0 <= self.entropy_floor < math.inf:
            raise ValueError(f"entropy_floor must be finite and not negative, got {self.entropy_floor}")
        if self.redraws < 0:
            raise ValueError(f"redraws must not be negative, got {self.redraws}")
        if self.redraws and self.entropy_floor is None:
            raise ValueError(f"redraws needs an entropy_floor, got {self.redraws} with none")
        if self.eos_id is not None and self.eos_id < 0:
            raise ValueError(f"eos_id must be a token id, got {self.eos_id}")

    def ends(
        self, text: Tensor, *, written_from: Tensor, piece_start: Tensor, piece_end: Tensor, stop: Tensor
    ) -> list[tuple[StoppedBy, int] | None]:
        """For each row, what ends its text and how long that leaves it, or None while it goes on.

        text is (rows, width); the rest (rows,), on the host. Tokens at `written_from` and later are not given
        ones; the last piece is piece_start..piece_end − 1, and the text never reaches past `stop`. Where
        nothing but its length ends a text, its device is not asked.
        """
        after_eos = self._after_eos(text, torch.maximum(written_from, piece_start), piece_end)
        low = self._low_entropy(text, written_from, piece_end)
        rows = torch.stack((after_eos, low.long(), written_from, piece_end, stop), dim=1).tolist()
        return [self._verdict(*row) for row in rows]

    def _verdict(
        self, after_eos: int, low: int, written_from: int, end: int, stop: int
    ) -> tuple[StoppedBy, int] | None:
        if after_eos:
            return "eos", after_eos
        if low:
            return "entropy", max(end - self.entropy_window, written_from)
        return ("length", stop) if end >= stop else None

    def _after_eos(self, text: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """The position after the first end token in start..end − 1, 0 where there is none."""
        if self.eos_id is None:
            return torch.zeros_like(end)
        start = start.clamp_min(1)
        size = max(int((end - start).max()), 1)
        position = start.unsqueeze(1) + torch.arange(size)
        tokens = _tokens_at(text, position)
        found = (tokens == self.eos_id) & (position < end.unsqueeze(1))
        return torch.where(found.any(1), start + found.int().argmax(1) + 1, 0)

    def _low_entropy(self, text: Tensor, written_from: Tensor, end: Tensor) -> Tensor:
        window = self.entropy_window
        enough = (end >= window) & (end > written_from)
        if self.entropy_floor is None or text.shape[1] < window or not enough.any():
            return torch.zeros_like(enough)
        last = _tokens_at(text, end.unsqueeze(1) - window + torch.arange(window))
        return enough & (token_entropy(last) < self.entropy_floor - _ROUNDING)


def _tokens_at(text: Tensor, position: Tensor) -> Tensor:
    """Tokens at positions (rows, n) of the text, on the host; past its ends, the nearest."""
    position = position.clamp(0, text.shape[1] - 1)
    return text.gather(1, send(position, text.device)).cpu()


def token_entropy(tokens: Tensor) -> Tensor:
    """Entropy, in nats, of the token frequencies along the last dimension; of no tokens, 0."""
    if not tokens.shape[-1]:
        return torch.zeros(tokens.shape[:-1], dtype=torch.float64)
    ordered = tokens.sort(dim=-1).values
    # How many tokens equal each one: the distance between the ends of its run.
    counts = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
    return math.log(tokens.shape[-1]) - counts.double().log().mean(-1)
