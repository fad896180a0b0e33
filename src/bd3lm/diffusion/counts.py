"""Masking rules that draw the number of masked tokens.

For a block of n maskable tokens and a network that ignores t, the time integral of the NELBO has a closed
form: the mask of a set M has total weight 1/(|M|·C(n, |M|)). So

    NELBO(x^b) = Σ_{k=1..n} (1/k) · E_{|M|=k} [ Σ_{i in M} −log p(x_i | x_{outside M}, x^{<b}) ],

and drawing k directly gives the same objective as drawing t, without empty masks and without the noise of 1/t
given k. At n = 1 the token is always masked with weight 1, which is the autoregressive loss.

If the order of reveal leans (`orders`), M are the last k tokens of such an order, and each term is weighted
by the probability w_i / Σ_{j in M} w_j that token i is the next of them to be revealed, which is 1/k for
equal rates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from bd3lm.diffusion.draws import Draws
from bd3lm.diffusion.masking import MaskingRule, Masks, block_counts, token_ranks
from bd3lm.diffusion.orders import log_reveal_rates
from bd3lm.limits import check_lean

CountsWeight = Literal["nelbo", "flat"]
_MOMENT_MEMORY = 0.9  # the share of the old second moments that an update keeps
_LEAST_SHARE = 1e-9  # far above rounding, so that differences of a running sum are accurate probabilities


@dataclass(frozen=True, kw_only=True)
class Counts(MaskingRule):
    """Mask k ~ `proposal` of the n maskable tokens of a block, each with weight 1/(k·q(k)).

    Without a proposal k is uniform on 1..n and the weight is n/k. A proposal has a positive number for each
    count 1..block_size, in any scale. A block with fewer maskable tokens uses the first n numbers.

    `complementary` makes two noisy copies. The first masks k tokens and the second all the others, so every
    token is predicted once. A copy that masks j < n tokens occurs as the first with probability q(j) and as
    the second with probability q(n − j), hence the weight 1/(j·(q(j) + q(n − j))), or n/(2j) for the uniform
    q. A copy that masks all n occurs only as the first: 1/(n·q(n)), which is 1. (Averaging the n/k losses of
    the two copies would be biased.) At block size 1 the second copy would always be empty, so there is only
    one.

    `lean` gives the NELBO of that order of reveal. It cannot be combined with `complementary`, because the
    complement is not the tail of an order.

    `weight="flat"` gives every masked token weight 1 instead. This has less noise and gives masks of many
    tokens more influence, but it is not a bound.
    """

    kind = "counts"

    draws_times = False

    proposal: tuple[float, ...] | None = None
    complementary: bool = False
    lean: float = 0.0
    weight: CountsWeight = "nelbo"

    def __post_init__(self) -> None:
        check_lean(self.lean)
        if self.weight not in ("nelbo", "flat"):
            raise ValueError(f"weight must be 'nelbo' or 'flat', got {self.weight!r}")
        if self.lean and self.complementary:
            raise ValueError(f"complementary=True needs lean 0, got {self.lean:g}")
        if self.proposal is not None and not all(0.0 < q < float("inf") for q in self.proposal):
            raise ValueError(
                f"proposal must hold a positive number for every count (a count that is never drawn would be "
                f"missing from the NELBO), got {self.proposal}"
            )
        if self.proposal and min(self.proposal) < _LEAST_SHARE * max(self.proposal):
            raise ValueError(
                f"proposal must not differ by more than {1 / _LEAST_SHARE:.0e} between counts, or some are "
                f"never drawn, got {min(self.proposal)} and {max(self.proposal)}"
            )

    @property
    def order_lean(self) -> float:
        return self.lean

    @property
    def variant(self) -> str:
        return f", trained for lean {self.lean:g}" if self.lean else ""

    def check_blocks(self, block_size: int) -> None:
        if self.proposal is not None and len(self.proposal) != block_size:
            raise ValueError(
                f"proposal must have one entry for each count 1..{block_size} (the block size), "
                f"got {len(self.proposal)}"
            )

    def copies(self, block_size: int) -> int:
        return 2 if self.complementary and block_size > 1 else 1

    def is_unbiased(self, block_size: int) -> bool:
        return self.weight == "nelbo" or block_size == 1

    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        n = block_counts(maskable, draws)
        q = self._cumulative(draws)
        k = torch.minimum(torch.searchsorted(q, draws.levels * q[n]), n)
        rank = token_ranks(draws, maskable, lean=self.lean).unflatten(1, (*n.shape[1:], -1))
        first = rank < k.unsqueeze(-1)
        masked = [first, maskable.view_as(first) & ~first][: self.copies(draws.block_size)]
        if self.weight == "flat":
            return _masks(masked, [torch.ones_like(draws.levels).unsqueeze(-1)] * len(masked))
        if len(masked) == 1:
            return _masks(masked, [self._weight(first, k, self._probability(q, k, n))])
        return _masks(masked, [self._pair_weight(q, j, n).unsqueeze(-1) for j in (k, n - k)])

    def _weight(self, masked: Tensor, k: Tensor, probability: Tensor) -> Tensor:
        """The weight of each masked token: P(revealed next) / q(k)."""
        if not self.lean:
            return 1.0 / (k * probability).unsqueeze(-1)
        rates = log_reveal_rates(masked.shape[-1], self.lean, device=masked.device)
        return torch.softmax(torch.where(masked, rates, -torch.inf), -1) / probability.unsqueeze(-1)

    def _cumulative(self, draws: Draws) -> Tensor:
        """Q(k) = q(1) + … + q(k) for k = 0..block_size, not normalized."""
        self.check_blocks(draws.block_size)
        proposal = (1.0,) * draws.block_size if self.proposal is None else self.proposal
        q = torch.tensor((0.0, *proposal), dtype=torch.float64, device=draws.levels.device)
        return (q / q.max()).cumsum(0)

    @staticmethod
    def _probability(q: Tensor, k: Tensor, n: Tensor) -> Tensor:
        """q(k) among the counts 1..n; zero for k = 0."""
        return (q[k] - q[(k - 1).clamp_min(0)]) / q[n]

    def _pair_weight(self, q: Tensor, j: Tensor, n: Tensor) -> Tensor:
        arises = self._probability(q, j, n) + self._probability(q, n - j, n)
        return 1.0 / (j * arises)


@dataclass(frozen=True, kw_only=True)
class LearnedCounts(MaskingRule):
    """`Counts` with a proposal that adapts to the second moments of the loss (`learned_proposal`).

    It starts with the uniform proposal. It is unbiased under any proposal.
    """

    kind = "learned_counts"
    learned = frozenset({"second_moments"})

    draws_times = False

    second_moments: tuple[float, ...] | None = None
    """Running estimates of E[S²] for each count, where S is the summed cross-entropy of a block. None before
    the first update."""

    @cached_property
    def counts(self) -> Counts:
        """The current `Counts` rule."""
        return Counts(proposal=learned_proposal(self.second_moments) if self.second_moments else None)

    def is_unbiased(self, block_size: int) -> bool:
        return True

    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        return self.counts(draws, maskable)

    def statistics(self, nats: Tensor, weight: Tensor, block_size: int) -> dict[str, Tensor]:
        """For each count k, the sum of S² over the blocks with k masked tokens, and the number of these
        blocks."""
        blocks = (-1, block_size)
        k = (weight > 0).unflatten(-1, blocks).sum(-1).flatten()
        squares = nats.detach().double().unflatten(-1, blocks).sum(-1).square().flatten()
        sums = torch.zeros(2, block_size + 1, dtype=torch.float64, device=nats.device)
        sums[0].index_add_(0, k, squares)
        sums[1].index_add_(0, k, torch.ones_like(squares))
        return {"count_moments": sums[:, 1:]}

    def adapt(self, statistics: Mapping[str, Tensor]) -> Self:
        """Blend in new second moments."""
        squares, seen = statistics["count_moments"].tolist()
        fresh = [square / times if times else None for square, times in zip(squares, seen, strict=True)]
        known = [moment / k**2 for k, moment in enumerate(fresh, 1) if moment is not None]
        if not known:
            return self
        typical = sum(known) / len(known)  # of S²/k², assumed for counts that have not occurred
        old = self.second_moments or tuple(typical * k**2 for k in range(1, len(fresh) + 1))
        keep = _MOMENT_MEMORY if self.second_moments else 0.0
        moments = tuple(
            before if moment is None else keep * before + (1.0 - keep) * moment
            for before, moment in zip(old, fresh, strict=True)
        )
        return replace(self, second_moments=moments)

    def state(self) -> dict[str, Any]:
        return {"second_moments": list(self.second_moments)} if self.second_moments else {}

    def restore(self, state: Mapping[str, Any]) -> Self:
        if state.keys() != {"second_moments"}:
            return super().restore(state)
        return replace(self, second_moments=tuple(state["second_moments"]))


def _masks(masked: list[Tensor], weight: list[Tensor]) -> Masks:
    """Stack the copies. An empty copy has an infinite weight on no token, which counts as nothing."""
    tokens = torch.stack([h.flatten(1) for h in masked], 1)
    per_token = torch.stack(
        [torch.where(h, w, 0.0).flatten(1) for h, w in zip(masked, weight, strict=True)], 1
    )
    return Masks(masked=tokens, weight=per_token.float(), mask_rate=None)


def learned_proposal(second_moments: tuple[float, ...], *, uniform_share: float = 0.2) -> tuple[float, ...]:
    """The proposal over counts that minimizes the variance of a block's loss, given the observed moments.

    `second_moments[k − 1]` estimates E[S²], where S is the summed cross-entropy of a mask of k tokens. The
    estimate S/(k·q(k)) has the second moment Σ_k E[S²]/(k²·q(k)), which is smallest for q(k) ∝ √E[S²]/k. A
    share of the uniform proposal is mixed in, so that a moment that was estimated too low cannot make a
    weight explode.
    """
    if not second_moments:
        raise ValueError("second_moments must hold a number for each count, got none")
    if not 0.0 < uniform_share <= 1.0:
        raise ValueError(f"uniform_share must lie in (0, 1], got {uniform_share}")
    ideal = [max(moment, 0.0) ** 0.5 / k for k, moment in enumerate(second_moments, 1)]
    total, n = sum(ideal), len(ideal)
    if not 0.0 < total < float("inf"):
        return (1.0 / n,) * n
    return tuple((1.0 - uniform_share) * q / total + uniform_share / n for q in ideal)
