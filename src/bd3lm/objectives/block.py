"""Block diffusion (eq. 8), for any block size: 1 is autoregression over masks, L is MDLM."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bd3lm.diffusion import Counts, Draws, LevelSampler, MaskingRule
from bd3lm.models import Denoiser
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss
from bd3lm.objectives.denoising import Algorithm, BlockDenoiser

_LEAST_ALPHA = 1e-3  # the reference's networks never saw a noise level above −log 1e-3


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionLoss(Objective):
    """−log p(x^b | x_t^b, x^{<b}) at hidden tokens, weighted as the masking rule says."""

    block_size: int
    mask_id: int
    masking: MaskingRule = field(default_factory=Counts)
    levels: LevelSampler = field(default_factory=LevelSampler)
    algorithm: Algorithm = "single_pass"
    causal_clean: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be a token id, got {self.mask_id}")
        if self.algorithm not in ("single_pass", "two_pass"):
            raise ValueError(f"algorithm must be 'single_pass' or 'two_pass', got {self.algorithm!r}")

    @property
    def is_bound(self) -> bool:
        return self.masking.is_unbiased(self.block_size)

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws:
        return self.levels.draw(rows, length, self.block_size, generator=generator, device=device)

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        if draws is None:
            raise ValueError("draws must be given: block diffusion masks at random")
        masks = self.masking(draws, batch.scored)
        noise = None
        if model.uses_noise:
            if masks.mask_rate is None:
                raise ValueError(
                    f"masking {self.masking} draws no time, which a network conditioned on the noise level "
                    "needs; use Times, DiscreteTimes or ClippedTimes"
                )
            noise = conditioning_noise(masks.mask_rate).repeat_interleave(self.block_size, dim=1)
        denoiser = BlockDenoiser(
            model,
            batch,
            block_size=self.block_size,
            mask_id=self.mask_id,
            causal_clean=self.causal_clean,
            algorithm=self.algorithm,
        )
        nats = (denoiser.nats(masks.hidden, noise=noise) * masks.weight).sum(1)
        return TokenLoss(nats=nats, weight=batch.scored.to(nats.dtype))


def conditioning_noise(mask_rate: Tensor) -> Tensor:
    """σ = −log α, what time-conditioned networks are told, kept finite at full masking."""
    return -torch.log((1.0 - mask_rate).clamp_min(_LEAST_ALPHA)).float()
