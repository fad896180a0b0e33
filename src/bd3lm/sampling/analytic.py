"""SEDD's analytic sampler: Tweedie τ-leaping (Lou et al. 2024, Theorem 4.2)."""

import torch
from torch import Tensor

from bd3lm.diffusion import (
    Absorbing,
    ForwardProcess,
    Linear,
    NoiseSchedule,
    sedd,
    sedd_at_masks,
    tweedie_at_masks,
    uniform_tweedie,
)
from bd3lm.models import Denoiser
from bd3lm.sampling.drawing import RowSharpening
from bd3lm.sampling.stepwise import StepwiseWriter, split


class AnalyticWriter(StepwiseWriter):
    """T Tweedie steps from the prior, and a last step that removes the remaining noise.

    With a `block_size` the steps apply to each block, after the clean text before it.

    Times are equally spaced and the last step is as long as the others, so there are at most T + 1 passes. A
    network that ignores time skips passes in which nothing changed. With the true scores each step draws
    every token from its own p(x_s | x_t), as if independent of the others: exact as T → ∞.

    The last step never leaves a mask. Under the absorbing process a mask certainly becomes a token. Under
    uniform noise, where the mask is an ordinary token, the last step excludes it.

    Sharpening (the block diffusion paper finds a nucleus of 0.99 best, Suppl. C.5) applies to what a token
    becomes once it is known to change, and in the last step to what it is. Whether a token changes is not
    sharpened: with many steps each changes few tokens, and a nucleus over a whole step would let none change.
    """

    def __init__(
        self,
        model: Denoiser,
        *,
        process: ForwardProcess,
        mask_id: int,
        context: int,
        steps: int = 1000,
        schedule: NoiseSchedule | None = None,
        block_size: int | None = None,
        cache: bool = True,
    ) -> None:
        schedule = schedule or Linear()
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        absorbing = isinstance(process, Absorbing)
        if isinstance(process, Absorbing) and process.mask_id != mask_id:
            raise ValueError(f"mask_id must be the process's, {process.mask_id}, got {mask_id}")
        if absorbing != (schedule.last_alpha == 0.0):
            raise ValueError(
                "schedule must end at α = 0 under the absorbing process and above it (Floored) under the "
                f"uniform one, as in training, got {schedule}"
            )
        super().__init__(
            model,
            process=process,
            mask_id=mask_id,
            context=context,
            steps=steps + 1,
            schedule=schedule,
            block_size=block_size,
            cache=cache,
        )

    def moves(
        self, logits: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor, sharpening: RowSharpening
    ) -> tuple[Tensor, Tensor]:
        last = alpha_s == 1.0
        if isinstance(self.process, Absorbing):
            log_s = sedd_at_masks(logits, self.mask_id)
            chance, log_p = tweedie_at_masks(log_s, alpha_s, alpha_t)
            return torch.where(last, 1.0, chance), log_p
        log_score = sedd(logits, x_t, alpha_t, scale_by_noise=False)
        p = uniform_tweedie(log_score, x_t, alpha_s, alpha_t)
        if not last.all():
            return split(p, x_t)
        # If only the mask is likely, all other tokens are equally likely.
        log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
        log_p[..., self.mask_id] = -torch.inf
        return torch.ones_like(alpha_s), torch.log_softmax(log_p, dim=-1)
