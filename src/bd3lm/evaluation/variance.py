"""The noise of an objective: the variance of its loss over blocks, and of its gradient over batches."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Draws
from bd3lm.models import Denoiser, Network
from bd3lm.objectives import Objective, TokenBatch


@dataclass(frozen=True)
class Spread:
    """A variance and its standard error, None if too few batches were measured.

    The error is rough: for losses with heavy tails it is too small unless a rare large loss occurred.
    """

    variance: float
    error: float | None


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
    """The sample variance, from (number, sum, sum of squares)."""
    number, total, squares = moments.tolist()
    if number < 2:
        raise ValueError(f"a variance needs at least 2 blocks, got {number:g}")
    value = (squares - total * total / number) / (number - 1)
    return max(0.0, value) if math.isfinite(value) else math.inf


def nelbo_variance(
    model: Denoiser, objective: Objective, batches: Iterable[TokenBatch], *, block_size: int, seed: int = 0
) -> Spread:
    """Var over blocks and masks of the mean nats per token of a block (the paper's Var. NELBO).

    The error is a jackknife over batches, since blocks of one text, and draws of one batch, are not
    independent.
    """
    moments: list[Tensor] = []
    for index, batch in enumerate(batches):
        draws = objective.seeded_draws(batch, seed, index)
        if draws is None:
            raise ValueError(f"{type(objective).__name__} draws nothing, so it has no variance over masks")
        moments.append(block_moments(model, objective, batch, draws, block_size=block_size).cpu())
    return _jackknife(torch.stack(moments) if moments else torch.zeros(1, 3))


def _jackknife(moments: Tensor) -> Spread:
    """The variance, and an error from its change without each batch, from their moments (batches, 3)."""
    value, rest = variance(moments.sum(0)), moments.sum(0) - moments
    if not math.isfinite(value) or rest[:, 0].min() < 2:
        return Spread(value, None)
    without = torch.tensor([variance(each) for each in rest], dtype=torch.float64)
    return Spread(value, ((len(rest) - 1) * without.var(correction=0)).sqrt().item())


def gradient_variance(
    model: Network, objective: Objective, batches: Sequence[TokenBatch], *, seed: int = 0
) -> Spread:
    """Σ over batches of ‖g_m − mean g‖² / (M − 1), the variance of the gradient estimator (eq. 10).

    It depends on the batch size, which must be the same for all batches. Gradients are computed twice, first
    for their mean, so that only two are in memory instead of M. The error is a jackknife, None for 2 batches.
    """
    number = len(batches)
    if number < 2:
        raise ValueError(f"batches must hold at least 2 batches, got {number}")
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients() -> Iterator[Sequence[Tensor]]:
        for index, batch in enumerate(batches):
            loss = objective.loss(model, batch, objective.seeded_draws(batch, seed, index)).mean()
            yield torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    mean = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    for found in gradients():
        for average, gradient in zip(mean, found, strict=True):
            average += gradient.double() / number
    apart = torch.stack(
        [
            torch.stack([(g - average).square().sum() for g, average in zip(found, mean, strict=True)]).sum()
            for found in gradients()
        ]
    )
    value = apart.sum().item() / (number - 1)
    if not math.isfinite(value):
        return Spread(math.inf, None)
    if number == 2:
        return Spread(value, None)
    # Without one batch the mean moves too: Σ falls by ‖g_m − mean g‖² M / (M − 1).
    without = (apart.sum() - apart * number / (number - 1)) / (number - 2)
    return Spread(value, ((number - 1) * without.var(correction=0)).sqrt().item())
