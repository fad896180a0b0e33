"""SEDD: scores trained by denoising score entropy (Lou et al. 2024)."""

from dataclasses import dataclass

import torch

from bd3lm.diffusion import (
    Absorbing,
    Draws,
    Times,
    score_entropy_at_masks,
    sedd,
    sedd_at_masks,
    uniform_score_entropy,
)
from bd3lm.models import Denoiser, send
from bd3lm.objectives.base import TokenBatch, TokenLoss
from bd3lm.objectives.corruption import CorruptionObjective, per_token
from bd3lm.objectives.places import Places


@dataclass(frozen=True, kw_only=True)
class ScoreEntropy(CorruptionObjective):
    """The diffusion-weighted denoising score entropy and the prior term: a bound on −log p (Theorem 3.6).

    t ~ U(0, 1] for each block, without a floor: a figure that leaves out (0, ε) can lie below the entropy.
    SEDD's log-linear noise is the linear schedule, α = 1 − t.

    Absorbing: a masked token has the loss −α'/(1 − α) · (Σ ŝ − log ŝ_{x_0} − 1), any other token none. ŝ is
    the score without its factor α/(1 − α), so everything is finite up to t = 1, where α is 0 and there is no
    prior term. The loss is the NELBO of p̂ = ŝ/Σ ŝ plus a remainder that is never negative
    (`score_entropy_at_masks`).

    Uniform: every token has a loss, with a term for every token it might have been. The rate −α'/α diverges
    as α → 0, so the schedule must be `Floored`. The text that this leaves at t = 1 adds KL(q(x_1 | x_0) ‖
    uniform).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.process, Absorbing) and self.schedule.last_alpha == 0.0:
            raise ValueError(
                "schedule must end above α = 0 under the uniform process, whose rate −α'/α diverges there; "
                f"use Floored(schedule), got {self.schedule}"
            )

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        draws = self.checked(batch, draws)
        absorbing = isinstance(self.process, Absorbing)
        return self._absorbing(model, batch, draws) if absorbing else self._uniform(model, batch, draws)

    def _absorbing(self, model: Denoiser, batch: TokenBatch, draws: Draws) -> TokenLoss:
        masks = Times(self.schedule)(draws, batch.scored)
        logits, places = self.logits_at_masks(model, batch, masks)
        entropy = score_entropy_at_masks(sedd_at_masks(logits, self.mask_id), places.pick(batch.tokens))
        nats = places.spread(entropy) * send(masks.weight[:, 0], model.device)
        return TokenLoss(nats=nats, weight=send(batch.scored, model.device).to(nats.dtype))

    def _uniform(self, model: Denoiser, batch: TokenBatch, draws: Draws) -> TokenLoss:
        t, length = draws.levels, batch.tokens.shape[1]
        mask_rate = self.schedule.mask_rate(t)
        rate_of_token = per_token(mask_rate, length)
        corrupted = self.process.corrupt_at(batch.tokens, rate_of_token, draws.tokens)
        noisy = torch.where(batch.scored, corrupted, batch.tokens)
        scored = Places.of(batch.scored, model.device)
        logits = self.logits(model, batch, noisy, mask_rate, scored)
        x_t, x_0, rate = map(scored.pick, (noisy, batch.tokens, rate_of_token))
        log_score = sedd(logits, x_t, 1.0 - rate, scale_by_noise=False)
        entropy = scored.spread(uniform_score_entropy(log_score, x_t, x_0, rate))
        speed = self.schedule.mask_rate_prime(t) / self.schedule.alpha(t)  # −α'/α
        counted = send(batch.scored, model.device).to(entropy.dtype)
        prior = self.process.prior_divergence(self.schedule.last_alpha)
        nats = send(per_token(speed, length).to(entropy.dtype), model.device) * entropy + prior * counted
        return TokenLoss(nats=nats, weight=counted)
