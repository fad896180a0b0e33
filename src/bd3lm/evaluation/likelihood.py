"""Monte-Carlo likelihoods: an objective averaged over a corpus."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Draws
from bd3lm.models import Denoiser
from bd3lm.objectives import Objective, TokenBatch


@dataclass(frozen=True)
class Likelihood:
    """Nats per token over a corpus, and whether their expectation bounds the negative log-likelihood."""

    nats: float
    tokens: float
    is_bound: bool

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats) if self.nats < 700 else math.inf


@torch.no_grad()
def loss_sums(model: Denoiser, objective: Objective, batch: TokenBatch, draws: Draws | None) -> Tensor:
    """(nats, tokens) of a batch, float64."""
    loss = objective.loss(model, batch, draws)
    return torch.stack((loss.nats.double().sum(), loss.weight.double().sum()))


def monte_carlo_likelihood(
    model: Denoiser, objective: Objective, batches: Iterable[TokenBatch], *, seed: int = 0, draws: int = 1
) -> Likelihood:
    """The objective's average over a corpus, with one draw a block (Suppl. C.4) or the mean of several."""
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    nats = tokens = 0.0
    for index, batch in enumerate(batches):
        for turn in range(draws):
            seeds = (seed, index) if not turn else (seed, index, turn)
            sums = loss_sums(model, objective, batch, objective.seeded_draws(batch, *seeds)).tolist()
            nats, tokens = nats + sums[0] / draws, tokens + sums[1] / draws
    if not tokens:
        raise ValueError("batches must hold at least one scored token, got none")
    return Likelihood(nats=nats / tokens, tokens=tokens, is_bound=objective.bounds(model))
