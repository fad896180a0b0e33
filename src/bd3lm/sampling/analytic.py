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
    """T Tweedie steps from the prior, and a last one that takes away what noise is left.

    With a `block_size` they are of each block, after the clean text before it.

    The times are equally spaced, the last step as long as the others, so there are T + 1 passes at most (for
    a network that ignores time only those before which something changed). With the true scores each step
    draws every token from its own p(x_s | x_t), as if independent of the others: exact as T → ∞.

    The last step never leaves a mask: under the absorbing process a mask becomes a token for certain; under
    uniform noise, where the mask is a token like others, it is left out.

    Sharpening (the block diffusion paper finds a nucleus of 0.99 best, Suppl. C.5) is of what a token
    becomes once it is known to change, and in the last step of what it is. Whether it changes is left alone:
    of many steps each changes few tokens, and a nucleus over all of a step would let none change.
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
        # Should nothing but the mask be likely, all other tokens are equally so.
        log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
        log_p[..., self.mask_id] = -torch.inf
        return torch.ones_like(alpha_s), torch.log_softmax(log_p, dim=-1)
