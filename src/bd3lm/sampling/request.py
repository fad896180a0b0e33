"""A request: one text to write."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bd3lm.diffusion import is_whole
from bd3lm.sampling.drawing import Sharpening
from bd3lm.sampling.stopping import Stopping

if TYPE_CHECKING:  # both import this module
    from bd3lm.sampling.fills import Fills
    from bd3lm.sampling.guided import Guide


def equal_values(one: Any, other: object) -> bool:
    """Whether both are the same dataclass type with equal fields, comparing tensors by value."""
    names = [each.name for each in fields(one)]
    if type(one) is not type(other):
        return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) else a == b for a, b in pairs)


@dataclass(frozen=True)
class Request:
    """A text to write: its given tokens, seed, largest length, sharpening and stopping.

    `given` (tokens,) holds the mask where a token is to be written. A prompt is a run of tokens without
    masks; a template has gaps. Tokens given in a later block do not affect the blocks before it.
    """

    given: Tensor = field(hash=False)
    seed: int
    length: int
    sharpening: Sharpening = field(default=Sharpening(), kw_only=True)
    stopping: Stopping = field(default=Stopping(), kw_only=True)
    fills: "Fills | None" = field(default=None, kw_only=True)
    """For a template with text after its gaps: draw several fills, and choose one."""
    guide: "Guide | None" = field(default=None, kw_only=True, compare=False)
    """A guide that constrains the text."""
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), kw_only=True)
    """Pairs of a token and the number to add to its logit before a token is drawn."""

    def __eq__(self, other: object) -> bool:
        return equal_values(self, other)

    def __post_init__(self) -> None:
        given: object = self.given
        if not isinstance(given, Tensor):
            raise ValueError(f"given must be a tensor of int64 token ids (tokens,), got {given!r:.80}")
        if given.ndim != 1 or given.dtype != torch.long:
            raise ValueError(
                f"given must be int64 token ids (tokens,), got {given.dtype} of shape {tuple(given.shape)}"
            )
        if not is_whole(self.seed) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number in 0..2^63 − 1, got {self.seed!r}")
        if not is_whole(self.length) or self.length < max(len(self.given), 1):
            raise ValueError(
                f"length must be a whole number from 1 on and at least the {len(self.given)} given tokens, "
                f"got {self.length!r}"
            )

    def prompt_length(self, mask_id: int) -> int:
        """The number of given tokens before the first one to write."""
        gaps = (self.given == mask_id).nonzero()
        return int(gaps[0]) if len(gaps) else len(self.given)

    def is_full(self, mask_id: int) -> bool:
        """Whether there is nothing to write."""
        return len(self.given) == self.length and not bool((self.given == mask_id).any())
