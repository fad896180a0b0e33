"""A file of a user's own: a noise schedule, a masking rule and an unmasking rule."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Draws, MaskingRule, Masks, NoiseSchedule
from bd3lm.sampling import Pass, Planned


@dataclass(frozen=True)
class Cubic(NoiseSchedule):
    """Mask rate t³: lighter masking than the square schedule's."""

    kind = "cubic"

    def mask_rate(self, t: Tensor) -> Tensor:
        return t**3

    def mask_rate_prime(self, t: Tensor) -> Tensor:
        return 3.0 * t**2

    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        return mask_rate ** (1.0 / 3.0)


@dataclass(frozen=True)
class Tails(MaskingRule):
    """Mask the last k tokens of a block, k uniform from `least` on: what writing from left to right meets."""

    kind = "tails"
    least: int = 1

    def is_unbiased(self, block_size: int) -> bool:
        return block_size == 1  # a bound in no uniform order, so never printed as one

    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        size = draws.block_size
        count = self.least + (draws.levels * (size + 1 - self.least)).ceil() - 1  # (rows, blocks)
        place = torch.arange(size, device=maskable.device)
        masked = (place >= size - count[..., None]).flatten(1) & maskable
        return Masks(masked=masked[:, None], weight=masked[:, None].float(), mask_rate=None)


@dataclass(frozen=True)
class LeftFirst(Planned):
    """The leftmost masked tokens of a block, `tokens` a pass."""

    kind = "left_first"
    tokens: int = 1

    @property
    def has_noise_level(self) -> bool:
        return False

    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        order = masked.int().sort(dim=1, descending=True, stable=True).indices
        left = masked.gather(1, order)
        for first in range(0, int(masked.sum(1).max()), self.tokens):
            together = slice(first, first + self.tokens)
            rate = torch.ones(len(masked), dtype=torch.float64, device=masked.device)
            yield Pass(places=order[:, together], active=left[:, together], mask_rate=rate)
