"""When a text ends: at an end token, at a string, when its entropy is too low, or at its length."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bd3lm.models import send

StoppedBy = Literal["eos", "string", "entropy", "length"]

FindEnd = Callable[[Tensor, int, int], tuple[int, str] | None]
"""Finds a string that ends a text. Returns the number of tokens after which the text holds it, and the
string; or None.

The arguments are the tokens (length,) of one text on the host, the place from which they were written (given
tokens end there), and the place from which they are new: earlier tokens were already searched.
"""


class Ending(NamedTuple):
    """What ended a text, how many tokens it keeps, and the string that ended it, if one did."""

    by: StoppedBy
    length: int
    string: str | None = None


_ROUNDING = 1e-9  # an entropy is a sum of logarithms, so equal ones may differ by this much


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """The paper's rules (Suppl. C.5), applied to each row. Nothing stops a text inside its given tokens.

    - `eos_id`: the text ends with the first such token that was sampled (not the one that a text may begin
      with).
    - `find_end`: called at the end of a block. If it finds a string, the text is cut there. If there is an
      end token too, the one that leaves fewer tokens wins, and the end token wins a tie.
    - `entropy_floor`: checked at the end of a block, once there are `entropy_window` tokens, including given
      ones. If the entropy of the last `entropy_window` tokens' frequencies, in nats, is strictly below the
      floor (4 in the paper), the written ones among them are dropped and the text ends.
    - `redraws`: how often a text below the floor is instead drawn again from a new seed, as the paper does to
      collect samples of one length.
    """

    eos_id: int | None = None
    find_end: FindEnd | None = None
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

    @property
    def is_by_token(self) -> bool:
        """Whether the end of a text does not depend on the ends of its pieces."""
        return self.find_end is None and self.entropy_floor is None

    def ends(
        self,
        text: Tensor,
        *,
        written_from: Tensor,
        piece_start: Tensor,
        piece_end: Tensor,
        stop: Tensor,
        taken: Sequence[int] | None = None,
    ) -> list[Ending | None]:
        """For each row, what ends its text and how long that leaves it, or None if it continues.

        `text` is (rows, width). The other tensors are (rows,) and on the host. Tokens from `written_from` on
        are not given. The last piece is piece_start..piece_end − 1, and no text reaches past `stop`. The
        device is not read if only the length ends a text. `taken` are the rows to check, by default all.
        """
        new_from = torch.maximum(written_from, piece_start)
        after_eos = self._after_eos(text, new_from, piece_end)
        until = torch.where(after_eos > 0, after_eos, piece_end)
        after_string, strings = self._after_string(text, written_from, new_from, until, taken)
        low = self._low_entropy(text, written_from, piece_end)
        rows = torch.stack((after_eos, after_string, low.long(), written_from, piece_end, stop), 1).tolist()
        return [self._ending(string, *row) for string, row in zip(strings, rows, strict=True)]

    def _ending(
        self,
        string: str | None,
        after_eos: int,
        after_string: int,
        low: int,
        written_from: int,
        end: int,
        stop: int,
    ) -> Ending | None:
        if after_string and not 0 < after_eos <= after_string:
            return Ending("string", after_string, string)
        if after_eos:
            return Ending("eos", after_eos)
        if low:
            return Ending("entropy", max(end - self.entropy_window, written_from))
        return Ending("length", stop) if end >= stop else None

    def _after_eos(self, text: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """The position after the first end token in start..end − 1; 0 if there is none."""
        if self.eos_id is None:
            return torch.zeros_like(end)
        start = start.clamp_min(1)
        size = max(int((end - start).max()), 1)
        position = start.unsqueeze(1) + torch.arange(size)
        tokens = _tokens_at(text, position)
        found = (tokens == self.eos_id) & (position < end.unsqueeze(1))
        return torch.where(found.any(1), start + found.int().argmax(1) + 1, 0)

    def _after_string(
        self,
        text: Tensor,
        written_from: Tensor,
        new_from: Tensor,
        end: Tensor,
        taken: Sequence[int] | None,
    ) -> tuple[Tensor, list[str | None]]:
        """After how many tokens each text holds a string that ends it, before `end`, and which string.

        Texts without one have 0 and None.
        """
        after = torch.zeros_like(end)
        strings: list[str | None] = [None] * len(end)
        if self.find_end is None:
            return after, strings
        tokens = text[:, : int(end.max())].cpu()
        for row in range(len(tokens)) if taken is None else taken:
            if new_from[row] < end[row]:
                found = self.find_end(tokens[row, : end[row]], int(written_from[row]), int(new_from[row]))
                if found is not None:
                    after[row], strings[row] = found
        return after, strings

    def _low_entropy(self, text: Tensor, written_from: Tensor, end: Tensor) -> Tensor:
        window = self.entropy_window
        enough = (end >= window) & (end > written_from)
        if self.entropy_floor is None or text.shape[1] < window or not enough.any():
            return torch.zeros_like(enough)
        last = _tokens_at(text, end.unsqueeze(1) - window + torch.arange(window))
        return enough & (token_entropy(last) < self.entropy_floor - _ROUNDING)


def _tokens_at(text: Tensor, position: Tensor) -> Tensor:
    """Tokens at positions (rows, n) of the text, on the host. Positions outside of it are clamped."""
    position = position.clamp(0, text.shape[1] - 1)
    return text.gather(1, send(position, text.device)).cpu()


def token_entropy(tokens: Tensor) -> Tensor:
    """Entropy, in nats, of the token frequencies along the last dimension; 0 without tokens."""
    if not tokens.shape[-1]:
        return torch.zeros(tokens.shape[:-1], dtype=torch.float64)
    ordered = tokens.sort(dim=-1).values
    # The number of tokens equal to each one: the length of its run in sorted order.
    counts = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
    return math.log(tokens.shape[-1]) - counts.double().log().mean(-1)
