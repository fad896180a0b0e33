"""D3PM: diffusion in T discrete steps with any transition matrix (Austin et al. 2021)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import Absorbing, DiscreteTimes, Draws, d3pm
from bd3lm.models import Denoiser, send
from bd3lm.objectives.base import TokenBatch, TokenLoss, token_nats
from bd3lm.objectives.corruption import CorruptionObjective, per_token
from bd3lm.objectives.places import Places


@dataclass(frozen=True, kw_only=True)
class D3PM(CorruptionObjective):
    """L_vb (eq. 1), which bounds −log p of the T-step sampler, plus λ times a cross-entropy (eq. 5).

    A step j, uniform on 1..T, is drawn for each block, and its term is multiplied by T: −log p(x_0 | x_1) for
    j = 1, else KL(q(x_{t−1} | x_t, x_0) ‖ Σ_x q(x_{t−1} | x_t, x) p(x | x_t)). The prior KL(q(x_T | x_0) ‖ π)
    is added to every draw; it is 0 for a schedule that ends at α = 0.

    The reverse step averages posteriors over the network's guess p(x | x_t), as in eq. 2 of the block
    diffusion paper. Eq. 4 of Austin et al. also weighs the guess by q(x_t | x). At a mask the two are equal.
    Under uniform noise only the average makes the true p(x_0 | x_t) the best guess.

    Absorbing process: only masks have a loss, −log p(x_0 | x_t) times the probability (α_s − α_t)/(1 − α_t)
    of being revealed; a clean token can only have come from itself. The mask is never predicted, under either
    process.

    `auxiliary` is λ, the weight of −log p(x_0 | x_t) as an auxiliary loss outside of the bound. Under the
    absorbing process it too applies to masks only.
    """

    steps: int
    auxiliary: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not 0.0 <= self.auxiliary < math.inf:
            raise ValueError(f"auxiliary must be finite and not negative, got {self.auxiliary}")

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        draws = self.checked(batch, draws)
        absorbing = isinstance(self.process, Absorbing)
        terms = self._absorbing(model, batch, draws) if absorbing else self._uniform(model, batch, draws)
        nats, cross_entropy = terms
        auxiliary = self.auxiliary * cross_entropy if self.auxiliary else None
        counted = send(batch.scored, model.device).to(nats.dtype)
        return TokenLoss(nats=nats, weight=counted, auxiliary=auxiliary)

    def _absorbing(self, model: Denoiser, batch: TokenBatch, draws: Draws) -> tuple[Tensor, Tensor]:
        masks = DiscreteTimes(steps=self.steps, schedule=self.schedule)(draws, batch.scored)
        logits, places = self.logits_at_masks(model, batch, masks)
        cross_entropy = places.spread(token_nats(logits, places.pick(batch.tokens), self.mask_id))
        return cross_entropy * send(masks.weight[:, 0], model.device), cross_entropy

    def _uniform(self, model: Denoiser, batch: TokenBatch, draws: Draws) -> tuple[Tensor, Tensor]:
        length = batch.tokens.shape[1]
        j = (draws.levels * self.steps).ceil().clamp(1, self.steps)
        rate_t, rate_s = (self.schedule.mask_rate(step / self.steps) for step in (j, j - 1))
        corrupted = self.process.corrupt_at(batch.tokens, per_token(rate_t, length), draws.tokens)
        noisy = torch.where(batch.scored, corrupted, batch.tokens)
        scored = Places.of(batch.scored, model.device)
        log_p = d3pm(self.logits(model, batch, noisy, rate_t, scored), self.mask_id)
        x_t, x_0 = scored.pick(noisy), scored.pick(batch.tokens)
        alpha_s, alpha_t, first = (
            scored.pick(per_token(each, length)) for each in (1.0 - rate_s, 1.0 - rate_t, j == 1)
        )
        # In double precision, since this is T times the difference of two nearly equal distributions.
        truth, guess = (
            self.process.posterior(p.double(), x_t, alpha_s, alpha_t)
            for p in (F.one_hot(x_0, self.process.vocab_size), log_p.exp())
        )
        cross_entropy = -log_p.gather(-1, x_0.unsqueeze(-1)).squeeze(-1)
        # At j = 1 the posteriors are p itself; logarithms avoid underflow.
        term = torch.where(first, cross_entropy, _divergence(truth, guess).to(log_p.dtype))
        prior = self.process.prior_divergence(self.schedule.last_alpha)
        return scored.spread(self.steps * term + prior), scored.spread(cross_entropy)


def _divergence(truth: Tensor, guess: Tensor) -> Tensor:
    """KL(truth ‖ guess) over the last dimension. Entries where the truth is 0 count as 0, whatever the guess
    is."""
    guess = guess.clamp_min(torch.finfo(guess.dtype).tiny)
    return (torch.xlogy(truth, truth) - torch.xlogy(truth, guess)).sum(-1)
