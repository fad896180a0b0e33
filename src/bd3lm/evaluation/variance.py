"""How noisy an objective is: the variance of its loss over blocks, and of its gradient over batches."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bd3lm.diffusion import Draws
from bd3lm.models import Denoiser, Transformer
from bd3lm.objectives import Objective, TokenBatch


@torch.no_grad()
def block_moments(
    model: Denoiser, objective: Objective, batch: TokenBatch, draws: Draws | None, *, block_size: int
) -> Tensor:
    """(number, sum, sum of squares) over blocks of the block's mean nats per token, float64.

    Moments add over batches and ranks; `variance` turns them into the paper's Var[L].
    """
    loss = objective.loss(model, batch, draws)
    nats = loss.nats.double().unflatten(1, (-1, block_size)).sum(-1)
    tokens = loss.weight.double().unflatten(1, (-1, block_size)).sum(-1)
    mean = torch.where(tokens > 0, nats / tokens.clamp_min(1.0), 0.0)
    counted = (tokens > 0).double()
    return torch.stack((counted.sum(), mean.sum(), mean.square().sum()))


def variance(moments: Tensor) -> float:
    """The sample variance that (number, sum, sum of squares) describe."""
    number, total, squares = moments.tolist()
    if number < 2:
        raise ValueError(f"a variance needs at least 2 blocks, got {number:g}")
    value = (squares - total * total / number) / (number - 1)
    return max(0.0, value) if math.isfinite(value) else math.inf


def nelbo_variance(
    model: Denoiser, objective: Objective, batches: Iterable[TokenBatch], *, block_size: int, seed: int = 0
) -> float:
    """Var over blocks and masks of the mean nats per token of a block (the paper's Var. NELBO)."""
    moments = torch.zeros(3, dtype=torch.float64)
    for index, batch in enumerate(batches):
        draws = objective.seeded_draws(batch, seed, index)
        if draws is None:
            raise ValueError(f"{type(objective).__name__} draws nothing, so it has no variance over masks")
        moments += block_moments(model, objective, batch, draws, block_size=block_size).cpu()
    return variance(moments)


def gradient_variance(
    model: Transformer, objective: Objective, batches: Sequence[TokenBatch], *, seed: int = 0
) -> float:
    """Σ over batches of ‖g_m − mean g‖² / (M − 1), the variance of the gradient estimator (eq. 10).

    Computed in one pass with Welford's update, so that it holds two gradients at a time, not M.
    """
    if len(batches) < 2:
        raise ValueError(f"batches must hold at least 2 batches, got {len(batches)}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    mean = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    scatter = torch.zeros((), dtype=torch.float64, device=mean[0].device)
    for index, batch in enumerate(batches):
        loss = objective.loss(model, batch, objective.seeded_draws(batch, seed, index)).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for average, gradient in zip(mean, gradients, strict=True):
            new = torch.zeros_like(average) if gradient is None else gradient.double()
            delta = new - average
            average += delta / (index + 1)
            scatter += (delta * (new - average)).sum()
    return scatter.item() / (len(batches) - 1)
