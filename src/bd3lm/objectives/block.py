"""Block diffusion (eq. 8), for any block size: 1 is autoregression over masks, L is MDLM."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from bd3lm.diffusion import (
    ClippedTimes,
    Counts,
    Draws,
    LevelSampler,
    MaskingRule,
    Masks,
    conditioning_noise,
    learned_proposal,
)
from bd3lm.models import Denoiser, send
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss
from bd3lm.objectives.denoising import Algorithm, BlockDenoiser

_MOMENT_MEMORY = 0.9  # share of the old second moments that an update keeps


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionLoss(Objective):
    """−log p(x^b | x_t^b, x^{<b}) at hidden tokens, weighted as the masking rule says.

    `next_token` adds, as an auxiliary loss with that weight, the autoregressive loss of the clean text, whose
    attention must then be causal: the clean half is computed anyway, and every one of its tokens teaches.

    `previous_token` shows a hidden token together with the token before it (`BlockDenoiser`).

    `learn_proposal` makes the proposal of `Counts` follow the second moments of the loss (`adapt`).
    """

    block_size: int
    mask_id: int
    masking: MaskingRule = field(default_factory=Counts)
    levels: LevelSampler = field(default_factory=LevelSampler)
    algorithm: Algorithm = "single_pass"
    causal_clean: bool = False
    previous_token: bool = False
    next_token: float = 0.0
    learn_proposal: bool = False
    second_moments: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.next_token < math.inf:
            raise ValueError(f"next_token must be finite and not negative, got {self.next_token}")
        if self.next_token and not self.causal_clean:
            raise ValueError(
                "next_token needs causal_clean=True: a clean token that sees its block sees the next"
            )
        if self.learn_proposal and not (
            isinstance(self.masking, Counts)
            and not self.masking.complementary
            and not self.masking.lean
            and self.masking.weight == "nelbo"
        ):
            raise ValueError(
                "learn_proposal needs masking=Counts() with one copy, no lean and the weights of the bound, "
                f"got {self.masking}"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be a token id, got {self.mask_id}")
        if self.algorithm not in ("single_pass", "two_pass"):
            raise ValueError(f"algorithm must be 'single_pass' or 'two_pass', got {self.algorithm!r}")

    @property
    def is_bound(self) -> bool:
        return self.masking.is_unbiased(self.block_size) and self.levels.is_uniform

    def bounds(self, model: Denoiser) -> bool:
        """Clipping changes the noise levels that a time-conditioned network is asked about."""
        whole = not isinstance(self.masking, ClippedTimes) or (self.masking.low, self.masking.high) == (0, 1)
        return self.is_bound and (whole or not model.uses_noise)

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws:
        return self.levels.draw(rows, length, self.block_size, generator=generator, device=device)

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None) -> TokenLoss:
        if draws is None:
            raise ValueError("draws must be given: block diffusion masks at random")
        if draws.block_size != self.block_size:
            raise ValueError(
                f"draws must be for blocks of {self.block_size}, got blocks of {draws.block_size}"
            )
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
            previous_token=self.previous_token,
            algorithm=self.algorithm,
            next_token=self.next_token > 0.0,
        )
        total, hidden_nats = denoiser.weighted_nats(masks, noise=noise)
        nats = (hidden_nats * send(masks.weight, model.device)).sum(1)
        auxiliary = None
        if self.next_token:
            more, auxiliary = denoiser.next_token_nats(self.next_token)
            total = total + more
        return TokenLoss(
            nats=nats,
            weight=send(batch.scored, model.device).to(nats.dtype),
            auxiliary=auxiliary,
            total=total,
            statistics=self._count_moments(hidden_nats, masks) if self.learn_proposal else {},
        )

    def _count_moments(self, nats: Tensor, masks: Masks) -> dict[str, Tensor]:
        """For each count k, the sum of S² over the blocks that hide k tokens, and how many there were."""
        blocks = (-1, self.block_size)
        k = send(masks.hidden, nats.device).unflatten(-1, blocks).sum(-1).flatten()
        squares = nats.detach().double().unflatten(-1, blocks).sum(-1).square().flatten()
        sums = torch.zeros(2, self.block_size + 1, dtype=torch.float64, device=nats.device)
        sums[0].index_add_(0, k, squares)
        sums[1].index_add_(0, k, torch.ones_like(squares))
        return {"count_moments": sums[:, 1:]}

    def adapt(self, statistics: Mapping[str, Tensor]) -> Self:
        """Blend the new second moments in, and let the proposal follow them."""
        if not self.learn_proposal or not isinstance(self.masking, Counts):
            return self
        squares, seen = statistics["count_moments"].tolist()
        fresh = [square / times if times else None for square, times in zip(squares, seen, strict=True)]
        known = [moment / k**2 for k, moment in enumerate(fresh, 1) if moment is not None]
        if not known:
            return self
        typical = sum(known) / len(known)  # of S²/k²: what a count not met yet is taken to have
        old = self.second_moments or tuple(typical * k**2 for k in range(1, self.block_size + 1))
        keep = _MOMENT_MEMORY if self.second_moments else 0.0
        moments = tuple(
            before if moment is None else keep * before + (1.0 - keep) * moment
            for before, moment in zip(old, fresh, strict=True)
        )
        masking = replace(self.masking, proposal=learned_proposal(moments))
        return replace(self, masking=masking, second_moments=moments)

    def state(self) -> dict[str, Any]:
        if self.learn_proposal and isinstance(self.masking, Counts) and self.second_moments:
            return {"second_moments": list(self.second_moments)}
        if isinstance(self.masking, ClippedTimes):
            return {"low": self.masking.low, "high": self.masking.high}
        return {}

    def restore(self, state: Mapping[str, Any]) -> Self:
        if self.learn_proposal and isinstance(self.masking, Counts) and "second_moments" in state:
            moments = tuple(state["second_moments"])
            masking = replace(self.masking, proposal=learned_proposal(moments))
            return replace(self, masking=masking, second_moments=moments)
        if isinstance(self.masking, ClippedTimes) and {"low", "high"} == set(state):
            return self.clipped(state["low"], state["high"])
        return super().restore(state)

    def clipped(self, low: float, high: float) -> Self:
        """The objective with another clip range."""
        if not isinstance(self.masking, ClippedTimes):
            raise ValueError(f"only ClippedTimes has a range to change, got {self.masking}")
        return replace(self, masking=replace(self.masking, low=low, high=high))
