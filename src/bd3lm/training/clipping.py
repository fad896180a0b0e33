"""The paper's search for the clip range (section 5.3): the (β, ω) with the smallest variance over blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Draws
from bd3lm.evaluation import block_moments
from bd3lm.models import Denoiser
from bd3lm.objectives import Objective, TokenBatch

Range = tuple[float, float]


@dataclass(frozen=True)
class ClipChoice:
    """The range that was chosen, and the variance of every range tried."""

    low: float
    high: float
    variances: dict[Range, float]


def choose_range(ranges: Sequence[Range], measure: Callable[[Range], float]) -> ClipChoice:
    """The range of least variance. Ties go to the widest range, then to the first."""
    variances = {candidate: measure(candidate) for candidate in ranges}
    low, high = min(variances, key=lambda r: (variances[r], -(r[1] - r[0]), r))
    return ClipChoice(low=low, high=high, variances=variances)


def range_moments(
    model: Denoiser, objective: Objective, ranges: Sequence[Range], batch: TokenBatch, draws: Draws | None
) -> Tensor:
    """(ranges, 3): the moments of each range on one batch, all with the same draws."""
    block_size = objective.block_of(batch.tokens.shape[1])
    candidates = (objective.in_range(low, high, to_compare=True) for low, high in ranges)
    return torch.stack(
        [block_moments(model, each, batch, draws, block_size=block_size) for each in candidates]
    )
