"""Block diffusion (eq. 8), for any block size: 1 is autoregression over masks, L is MDLM."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from bd3lm.diffusion import ClipSearch, Counts, Draws, LevelSampler, MaskingRule, conditioning_noise
from bd3lm.models import BlockReading, Denoiser, send
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss
from bd3lm.objectives.denoising import Algorithm, BlockDenoiser


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionLoss(Objective):
    """−log p(x^b | x_t^b, x^{<b}) at masked tokens, with the masking rule's weights.

    `next_token` adds the autoregressive loss of the clean text as an auxiliary loss with that weight. The
    attention of the clean text must then be causal. The clean half is computed anyway, and each of its tokens
    contributes.

    If the masking rule learns (`LearnedCounts`, the range of `ClippedTimes`), the objective learns too.
    """

    reading: BlockReading
    masking: MaskingRule = field(default_factory=Counts)
    levels: LevelSampler = field(default_factory=LevelSampler)
    algorithm: Algorithm = "single_pass"
    next_token: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.next_token < math.inf:
            raise ValueError(f"next_token must be finite and not negative, got {self.next_token}")
        if self.next_token and not self.reading.causal_clean:
            raise ValueError(
                "next_token needs causal_clean=True: a clean token that sees its block sees the next token"
            )
        self.masking.check_blocks(self.reading.block_size)
        if self.algorithm not in ("single_pass", "two_pass"):
            raise ValueError(f"algorithm must be 'single_pass' or 'two_pass', got {self.algorithm!r}")

    @property
    def is_bound(self) -> bool:
        return self.masking.is_unbiased(self.reading.block_size) and self.levels.is_uniform

    @property
    def order_lean(self) -> float:
        return self.masking.order_lean

    def bounds(self, model: Denoiser) -> bool:
        """Clipping changes the noise levels that a time-conditioned network sees."""
        return self.is_bound and (self.masking.covers_all_levels or not model.uses_noise)

    @property
    def search(self) -> ClipSearch | None:
        return self.masking.search

    def in_range(self, low: float, high: float, *, to_compare: bool = False) -> Self:
        masking = self.masking.in_range(low, high, to_compare=to_compare)
        return replace(self, masking=masking, next_token=0.0 if to_compare else self.next_token)

    def block_of(self, context: int) -> int:
        return self.reading.block_size

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws:
        return self.levels.draw(rows, length, self.reading.block_size, generator=generator, device=device)

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        if draws is None:
            raise ValueError("draws must be given: block diffusion masks at random")
        if draws.block_size != self.reading.block_size:
            raise ValueError(
                f"draws must be for blocks of {self.reading.block_size}, got blocks of {draws.block_size}"
            )
        masks = self.masking(draws, batch.scored)
        noise = None
        if model.uses_noise:
            if masks.mask_rate is None:
                raise ValueError(
                    f"masking {self.masking} draws no time, which a network conditioned on the noise level "
                    "needs; use Times, DiscreteTimes or ClippedTimes"
                )
            noise = conditioning_noise(masks.mask_rate).repeat_interleave(self.reading.block_size, dim=1)
        denoiser = BlockDenoiser(
            model,
            batch,
            self.reading,
            algorithm=self.algorithm,
            next_token=self.next_token > 0.0,
        )
        total, masked_nats = denoiser.weighted_nats(masks, noise=noise)
        weight = send(masks.weight, model.device)
        nats = (masked_nats * weight).sum(1)
        auxiliary = None
        if self.next_token:
            more, auxiliary = denoiser.next_token_nats(self.next_token)
            total = total + more
        return TokenLoss(
            nats=nats,
            weight=send(batch.scored, model.device).to(nats.dtype),
            auxiliary=auxiliary,
            total=total,
            statistics=self.masking.statistics(masked_nats, weight, self.reading.block_size),
        )

    def adapt(self, statistics: Mapping[str, Tensor]) -> Self:
        return replace(self, masking=self.masking.adapt(statistics))

    def state(self) -> dict[str, Any]:
        return self.masking.state()

    def restore(self, state: Mapping[str, Any]) -> Self:
        return replace(self, masking=self.masking.restore(state))
