"""Which tokens a training example masks, and their weights: rules that draw a mask rate for each block.

A rule maps uniform draws to masks and loss weights. It is *unbiased* if the expected weighted cross-entropy
is the NELBO of eq. 8, for any network that ignores time. The rules in `counts` draw the number of tokens to
mask instead.

A token is *maskable* if it is neither given (the first token of a sequence, a prompt) nor absent (past the
end of a text, or behind an answer in its block). n is the number of maskable tokens of a block. A block with
n = 0 contributes nothing.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from bd3lm.diffusion.draws import Draws
from bd3lm.diffusion.orders import log_reveal_times
from bd3lm.diffusion.schedules import Linear, NoiseSchedule
from bd3lm.kinds import Kinded

_LEAST_LOW = 1e-6  # above the tolerance in comparisons of realized rates
ClipWeight = Literal["reference", "derivative", "paper", "flat"]


@dataclass(frozen=True)
class Masks:
    """The masked tokens of each noisy copy of each row, and the weight of each one's cross-entropy."""

    masked: Tensor  # (rows, copies, length) bool
    weight: Tensor  # (rows, copies, length) float32, zero where nothing is masked
    mask_rate: Tensor | None  # (rows, blocks) for networks conditioned on noise; None if no time was drawn


class MaskingRule(Kinded, ABC, family="masking rule"):
    """How many tokens of a block to mask, which ones, and with what weight.

    A rule may learn during training: `statistics` of every batch are summed, over devices too, and `adapt`
    makes the next rule from the sums. Checkpoints keep what it has learned (`state`, `restore`). By default a
    rule learns nothing.
    """

    draws_times: ClassVar[bool] = True
    """Whether it draws a noise level for each block, as a network that is told the level needs."""

    in_discrete_steps: ClassVar[bool] = False
    """Whether its noise levels are T steps, which validation then uses too."""

    @property
    def covers_all_levels(self) -> bool:
        """Whether it draws every noise level. Only then has a network that is told the level a bound."""
        return True

    @property
    def order_lean(self) -> float:
        """How much the order of reveal that its masks belong to leans to the left."""
        return 0.0

    @property
    def mask_range(self) -> tuple[float, float] | None:
        """The range of mask rates to draw from, for a rule that has one."""
        return None

    @property
    def variant(self) -> str:
        """A suffix for the title of models trained with this rule; mostly empty."""
        return ""

    def copies(self, block_size: int) -> int:
        """How many noisy copies of a sequence the rule makes."""
        return 1

    @property
    def search(self) -> "ClipSearch | None":
        """The search for the range of mask rates during training, if any."""
        return None

    def in_range(self, low: float, high: float, *, to_compare: bool = False) -> Self:
        """The rule with another range of mask rates. `to_compare` also uses the weight for comparing ranges.

        That weight is 1/rate, whatever training uses: a weight that shrinks with the range would make narrow
        ranges look quiet. For rules without a range this is an error.
        """
        raise ValueError(f"{type(self).__name__} has no range of mask rates, got low {low} and high {high}")

    def check_blocks(self, block_size: int) -> None:
        """Refuse a block size that the rule cannot use."""
        return

    @abstractmethod
    def is_unbiased(self, block_size: int) -> bool:
        """Whether the expected loss is the NELBO. Only then may its figure be called a bound."""

    @abstractmethod
    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        """Masks for every row of `draws`. `maskable` is (rows, length) bool."""

    def statistics(self, nats: Tensor, weight: Tensor, block_size: int) -> dict[str, Tensor]:
        """Sums over a batch to learn from, given the cross-entropies of masked tokens and their weights.

        Both are (rows, copies, length), zero where nothing is masked, and on the network's device.
        """
        return {}

    def adapt(self, statistics: Mapping[str, Tensor]) -> Self:
        """The rule after learning from the summed statistics of some batches."""
        return self

    def state(self) -> dict[str, Any]:
        """What the rule has learned since it was configured, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> Self:
        """The inverse of `state`."""
        if state:
            raise ValueError(f"{type(self).__name__} has nothing to restore, got {dict(state)}")
        return self


@dataclass(frozen=True)
class Times(MaskingRule):
    """t ~ U(0, 1] per block, tokens masked with probability 1 − α(t), weight −α'(t)/(1 − α(t)) (eq. 8)."""

    kind = "times"

    schedule: NoiseSchedule = field(default_factory=Linear)

    def is_unbiased(self, block_size: int) -> bool:
        """Unless the schedule ends before everything is masked: no term covers what it leaves."""
        return self.schedule.last_alpha == 0.0

    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        t = draws.levels
        return _mask_at_rate(draws, maskable, self.schedule.mask_rate(t), self.schedule.elbo_weight(t))


@dataclass(frozen=True, kw_only=True)
class DiscreteTimes(MaskingRule):
    """T discrete steps: t = j/T with j uniform on 1..T, weight T(α_s − α_t)/(1 − α_t), s = (j − 1)/T (eq. 3).

    The diffusion term of the NELBO is a sum over j = 2..T. The reconstruction term −log p(x | x_{1/T}) has
    exactly the form of the term j = 1, with the weight (α_0 − α_{1/T})/(1 − α_{1/T}) = 1, so one draw from
    1..T estimates both. (The paper's T·E over the T − 1 times 2/T..1 overcounts the sum by T/(T − 1).)
    """

    kind = "discrete"
    in_discrete_steps = True

    steps: int
    schedule: NoiseSchedule = field(default_factory=Linear)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def is_unbiased(self, block_size: int) -> bool:
        """Unbiased for the T-step NELBO, a bound on the negative log-likelihood of the T-step sampler, unless
        the schedule ends before everything is masked."""
        return self.schedule.last_alpha == 0.0

    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        j = (draws.levels * self.steps).ceil().clamp(1, self.steps)
        rate_t = self.schedule.mask_rate(j / self.steps)
        rate_s = self.schedule.mask_rate((j - 1) / self.steps)
        return _mask_at_rate(draws, maskable, rate_t, self.steps * (rate_t - rate_s) / rate_t)


@dataclass(frozen=True, kw_only=True)
class ClipSearch:
    """The paper's search for the clip range (section 5.3): the ranges to try, on how many batches, and how
    often (at validation). The range with the least variance of the loss over blocks wins."""

    every: int = 5000
    batches: int = 100
    widths: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    step: float = 0.05
    full_range: bool = True

    def __post_init__(self) -> None:
        if self.every < 1 or self.batches < 1:
            raise ValueError(f"every and batches must be at least 1, got {self.every} and {self.batches}")
        if not 0.0 < self.step <= 1.0:
            raise ValueError(f"step must lie in (0, 1], got {self.step}")
        if not all(0.0 < width <= 1.0 for width in self.widths):
            raise ValueError(f"widths must lie in (0, 1], got {self.widths}")
        if not self.ranges():
            raise ValueError("widths and full_range leave no range to try")

    def ranges(self) -> list[tuple[float, float]]:
        """Every (β, ω) to try: each width at each multiple of `step` that fits, and [0, 1]."""
        found = []
        for width in self.widths:
            places = int(round((1.0 - width) / self.step, 9))
            found += [(round(i * self.step, 9), round(i * self.step + width, 9)) for i in range(places + 1)]
        if self.full_range:
            found.append((0.0, 1.0))
        return sorted(set(found))


@dataclass(frozen=True, kw_only=True)
class ClippedTimes(MaskingRule):
    """Mask rates 1 − α ~ U[β, ω] (section 5.2), the paper's low-variance training schedules.

    `low` is β and `high` is ω; β = ω = 1 is full masking. The weight of a masked token is, by name,

    - ``reference``: 1/rate, which the reference implementation trains with, and the NLL for blocks of one
      token;
    - ``derivative``: (ω − β)/rate, the part of the NELBO's integral inside the range;
    - ``paper``: 1/((ω − β)·rate), the weight in section 5.2;
    - ``flat``: 1.

    In general none of them is the NELBO (`is_unbiased` knows the exceptions: the full range, blocks of one
    token, and a symmetric range for blocks of two), so a clipped loss is never called a bound.

    `redraw` conditions a block's mask on a realized rate k/n in [β, ω], as the reference trains. The
    reference draws again until it fits. The count in the end follows a truncated binomial, which is drawn
    here directly, so this always terminates. A block that no count fits keeps its first mask.

    With `search`, training moves to the range with the least variance as it runs.
    """

    kind = "clipped"

    low: float = 0.0
    high: float = 1.0
    weight: ClipWeight = "reference"
    redraw: bool = False
    search: ClipSearch | None = None

    def __post_init__(self) -> None:
        if not (0.0 <= self.low <= self.high <= 1.0):
            raise ValueError(
                f"low and high must satisfy 0 <= low <= high <= 1, got low {self.low} and high {self.high}"
            )
        if 0.0 < self.low < _LEAST_LOW:
            raise ValueError(f"low must be 0 or at least {_LEAST_LOW}, got {self.low}")
        if self.low == self.high != 1.0:
            raise ValueError(
                f"low and high may be equal only at 1 (full masking), got low {self.low} and high {self.high}"
            )
        if self.weight not in ("reference", "derivative", "paper", "flat"):
            raise ValueError(
                f"weight must be 'reference', 'derivative', 'paper' or 'flat', got {self.weight!r}"
            )
        if self.low == self.high and self.weight in ("derivative", "paper"):
            raise ValueError(
                f"weight {self.weight!r} needs a range of positive width, got low = high = {self.low}; "
                "use 'reference' or 'flat'"
            )

    def is_unbiased(self, block_size: int) -> bool:
        if self.low == 0.0 and self.high == 1.0:
            return self.weight != "flat"
        if block_size == 1 and self.weight == "flat":  # right if the one token is always masked
            return self.low == 1.0 or (self.redraw and self.low > 0.0 and self.high == 1.0)
        if block_size == 1 and self.weight == "reference":  # a redraw keeps the mask if no count fits
            return self.low == 1.0 or not self.redraw or (self.low > 0.0 and self.high < 1.0)
        symmetric = math.isclose(self.low + self.high, 1.0)  # two tokens only need E[rate] = ½
        return block_size == 2 and self.weight == "reference" and symmetric and not self.redraw

    @property
    def covers_all_levels(self) -> bool:
        return (self.low, self.high) == (0.0, 1.0)

    @property
    def mask_range(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def variant(self) -> str:
        return ", fully masked" if self.low == self.high == 1.0 else ""

    def in_range(self, low: float, high: float, *, to_compare: bool = False) -> Self:
        return replace(self, low=low, high=high, weight="reference" if to_compare else self.weight)

    def state(self) -> dict[str, Any]:
        """The range, which a search may have changed."""
        return {"low": self.low, "high": self.high}

    def restore(self, state: Mapping[str, Any]) -> Self:
        return replace(self, **state) if state.keys() == {"low", "high"} else super().restore(state)

    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        width = self.high - self.low
        rate = self.low + width * draws.levels
        match self.weight:
            case "reference":
                weight = 1.0 / rate
            case "derivative":
                weight = width / rate
            case "paper":
                weight = 1.0 / (width * rate)
            case "flat":
                weight = torch.ones_like(rate)
        masks = _mask_at_rate(draws, maskable, rate, weight)
        if not self.redraw:
            return masks
        count, fits = truncated_binomial(
            draws.spare, block_counts(maskable, draws), rate, low=self.low, high=self.high
        )
        masked = torch.where(_per_token(fits, draws), mask_counts(draws, maskable, count), masks.masked[:, 0])
        return _weighted(masked, _per_token(weight, draws), rate)


def truncated_binomial(
    quantile: Tensor, n: Tensor, rate: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """The count k ~ Binomial(n, rate) given low <= k/n <= high, and whether any count fits that range.

    All arguments are (rows, blocks). It inverts the distribution function at `quantile`.
    """
    k = torch.arange(int(n.max()) + 1, device=n.device, dtype=torch.float64)
    n_k = n.to(torch.float64).unsqueeze(-1)
    slack = 1e-9 * n_k.clamp_min(1.0)  # 0.3 · 10 must admit a count of 3 despite rounding
    allowed = (k <= n_k) & (k >= low * n_k - slack) & (k <= high * n_k + slack)
    r = rate.unsqueeze(-1)
    log_pmf = (
        torch.lgamma(n_k + 1)
        - torch.lgamma(k + 1)
        - torch.lgamma((n_k - k).clamp_min(0.0) + 1)
        + torch.xlogy(k, r)
        + torch.xlogy((n_k - k).clamp_min(0.0), 1.0 - r)
    ).masked_fill(~allowed, -math.inf)
    fits = allowed.any(-1) & log_pmf.isfinite().any(-1) & (n > 0)
    cdf = torch.softmax(log_pmf.masked_fill(~fits.unsqueeze(-1), 0.0), -1).cumsum(-1)
    cdf = cdf / cdf[..., -1:]
    count = torch.searchsorted(cdf, quantile.unsqueeze(-1)).squeeze(-1)
    return torch.minimum(count, n), fits


def block_counts(maskable: Tensor, draws: Draws) -> Tensor:
    """n, the number of maskable tokens of each block (rows, blocks)."""
    if maskable.shape != draws.tokens.shape or maskable.dtype != torch.bool:
        raise ValueError(
            f"maskable must be a bool tensor of shape {tuple(draws.tokens.shape)}, got {maskable.dtype} "
            f"of shape {tuple(maskable.shape)}"
        )
    return maskable.unflatten(1, (-1, draws.block_size)).sum(-1)


def mask_counts(draws: Draws, maskable: Tensor, count: Tensor) -> Tensor:
    """Mask a uniformly random set of `count` (rows, blocks) maskable tokens of each block: (rows, length)."""
    return token_ranks(draws, maskable) < _per_token(count, draws)


def token_ranks(draws: Draws, maskable: Tensor, *, lean: float = 0.0) -> Tensor:
    """The order in which each block's maskable tokens are masked, from 0. Other tokens come last.

    The order is uniformly random or, with a lean, the reverse of the order of reveal (`orders`).
    """
    uniform = draws.tokens.unflatten(1, (-1, draws.block_size))
    return _ranks(-log_reveal_times(uniform, lean) if lean else uniform, maskable)


def reveal_ranks(draws: Draws, maskable: Tensor, *, lean: float = 0.0) -> Tensor:
    """The order in which each block's maskable tokens are revealed, from 0. Other tokens come last.

    The smallest number comes first, in a uniformly random order. With a lean the smallest clock −log(1 −
    u)/w_i comes first (`orders`), which is the same for equal rates.
    """
    uniform = draws.tokens.unflatten(1, (-1, draws.block_size))
    if lean:
        left = (1.0 - uniform).clamp_min(torch.finfo(uniform.dtype).tiny)  # u may be 1
        uniform = log_reveal_times(left, lean)
    return _ranks(uniform, maskable)


def _ranks(keys: Tensor, maskable: Tensor) -> Tensor:
    """Ranks of each block's maskable tokens by their keys (rows, blocks, block_size): (rows, length)."""
    keys = keys.masked_fill(~maskable.view_as(keys), math.inf)
    return torch.argsort(keys, dim=-1, stable=True).argsort(-1).flatten(1)


def _mask_at_rate(draws: Draws, maskable: Tensor, rate: Tensor, weight: Tensor) -> Masks:
    """Mask each maskable token of a block independently with the block's probability `rate`."""
    block_counts(maskable, draws)  # checks the shapes
    masked = maskable & (draws.tokens <= _per_token(rate, draws))
    return _weighted(masked, _per_token(weight, draws), rate)


def _weighted(masked: Tensor, weight: Tensor, rate: Tensor | None) -> Masks:
    """One noisy copy."""
    return Masks(
        masked=masked.unsqueeze(1),
        weight=(weight * masked).float().unsqueeze(1),
        mask_rate=rate,
    )


def _per_token(per_block: Tensor, draws: Draws) -> Tensor:
    return per_block.repeat_interleave(draws.block_size, dim=1)
