"""The paper's search for the clip range (section 5.3): the (β, ω) whose loss varies least over blocks.

Variances are compared under the weight 1/rate whatever weight training uses, since a weight that shrinks
with the range would make narrow ranges look quiet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bd3lm.diffusion import ClippedTimes, Draws
from bd3lm.evaluation import block_moments
from bd3lm.models import Denoiser
from bd3lm.objectives import BlockDiffusionLoss, TokenBatch

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ClipSearch:
    """Which ranges are tried, on how many batches, and how often (at validation)."""

    every: int = 5000
    batches: int = 100
    widths: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    step: float = 0.05
    full_range: bool = True

    def __post_init__(self) -> None:
        if self.every < 1 or self.batches < 1:
            raise ValueError(f"every and batches must be at least 1, got {self.every} and {self.batches}")
        if not 0.0 < self.step <= 1.0:
            raise ValueError(f"step must lie in (0, 1], got {self.step}")
        if not all(0.0 < width <= 1.0 for width in self.widths):
            raise ValueError(f"widths must lie in (0, 1], got {self.widths}")
        if not self.ranges():
            raise ValueError("widths and full_range leave no range to try")

    def ranges(self) -> list[Range]:
        """Every (β, ω) tried: each width at each multiple of `step` that fits, and [0, 1]."""
        found = []
        for width in self.widths:
            places = int(round((1.0 - width) / self.step, 9))
            found += [(round(i * self.step, 9), round(i * self.step + width, 9)) for i in range(places + 1)]
        if self.full_range:
            found.append((0.0, 1.0))
        return sorted(set(found))


@dataclass(frozen=True)
class ClipChoice:
    """The range chosen, and the variance of every range tried."""

    low: float
    high: float
    variances: dict[Range, float]


def choose_range(ranges: Sequence[Range], measure: Callable[[Range], float]) -> ClipChoice:
    """The range of least variance; of equal ones, the widest, then the first."""
    variances = {candidate: measure(candidate) for candidate in ranges}
    low, high = min(variances, key=lambda r: (variances[r], -(r[1] - r[0]), r))
    return ClipChoice(low=low, high=high, variances=variances)


def range_moments(
    model: Denoiser,
    objective: BlockDiffusionLoss,
    ranges: Sequence[Range],
    batch: TokenBatch,
    draws: Draws | None,
) -> Tensor:
    """(ranges, 3): the moments of every range on one batch, all with the same draws."""
    if not isinstance(objective.masking, ClippedTimes):
        raise ValueError(f"only ClippedTimes has a range to search, got {objective.masking}")
    plain = replace(objective, next_token=0.0)
    moments = []
    for low, high in ranges:
        masking = ClippedTimes(low=low, high=high, weight="reference", redraw=objective.masking.redraw)
        candidate = replace(plain, masking=masking)
        moments.append(block_moments(model, candidate, batch, draws, block_size=objective.reading.block_size))
    return torch.stack(moments)
