"""Weights for the fills of a template, for each kind of law: how well the given text after a gap fits them.

A weight is p/q of the model itself, at temperature 1 and without a nucleus, however the fills are sharpened.
p is the likelihood of everything after the first gap, and q the probability of the fill. If fills are not
sharpened this is the weight of importance sampling, and the chosen fill approaches the model's distribution
given all given tokens. If they are sharpened, the same holds for a model that sharpens its fills but not the
given tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import Draws, derive_seed
from bd3lm.evaluation.exact import draw_orders, exact_fill_ratio, given_first_log_likelihood
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import Autoregressive, TokenBatch
from bd3lm.sampling import FillWeights, Weights


@dataclass(frozen=True, kw_only=True)
class CausalFills(FillWeights):
    """Fills drawn token by token: the weight is the product of p(given token | all before it), from one pass.
    The factors of the fill itself cancel out."""

    mask_id: int
    score_first: bool = False

    def weigh(self, model: Denoiser, texts: Tensor, gaps: Tensor, seeds: Sequence[int]) -> Weights:
        scored = (_after_first_gap(gaps) & ~gaps).expand_as(texts)
        batch = TokenBatch(texts, scored).to(model.device)
        likelihood = Autoregressive(mask_id=self.mask_id, score_first=self.score_first)
        nats = likelihood.loss(model, batch).nats.double().sum(1)
        return Weights(-nats.cpu(), passes=1)


@dataclass(frozen=True, kw_only=True)
class EnumeratedFills(FillWeights):
    """Fills drawn block by block: p/q of each block from the sum over all orders of reveal."""

    reading: BlockReading
    lean: float = 0.0

    def weigh(self, model: Denoiser, texts: Tensor, gaps: Tensor, seeds: Sequence[int]) -> Weights:
        size = self.reading.block_size
        batch, gaps = _in_blocks(texts, gaps, size, weighed=_after_first_gap(gaps))
        ratio = exact_fill_ratio(
            model, batch.to(model.device), gaps.to(model.device), self.reading, lean=self.lean
        )
        places = int(batch.scored[0].unflatten(0, (-1, size)).any(0).sum())
        patterns = 2**size - 2 ** (size - places)  # that mask a scored token
        return Weights(ratio.sum(1).cpu(), passes=patterns + _clean_passes(model, batch, size))


@dataclass(frozen=True, kw_only=True)
class OrderedFills(FillWeights):
    """Fills drawn in blocks too large to enumerate. In blocks after the one with the first gap, given tokens
    count as revealed before the gaps, which are then filled exactly as they were. So the weight is the
    likelihood of these given tokens, averaged over some random orders."""

    reading: BlockReading
    lean: float = 0.0
    orders: int = 4

    def weighs(self, gaps: Tensor) -> bool:
        return bool((self._later(gaps) & ~gaps).any())

    def _later(self, gaps: Tensor) -> Tensor:
        """Places in a later block than the first gap."""
        blocks = torch.arange(len(gaps)) // self.reading.block_size
        return blocks > blocks[int(gaps.int().argmax())]

    def weigh(self, model: Denoiser, texts: Tensor, gaps: Tensor, seeds: Sequence[int]) -> Weights:
        size, later = self.reading.block_size, self._later(gaps)
        batch, gaps = _in_blocks(texts, gaps, size, weighed=later)
        given = batch.scored[0] & ~gaps[0]
        most = int(given.unflatten(0, (-1, size)).sum(1).max())
        if not most:  # no given token depends on a fill of an earlier block
            return Weights(torch.zeros(len(texts), dtype=torch.float64), passes=0)
        log_p = given_first_log_likelihood(
            model,
            batch.to(model.device),
            gaps.to(model.device),
            self.reading,
            [each.to(model.device) for each in self._draws(seeds, batch.tokens.shape[1])],
            lean=self.lean,
        )
        passes = self.orders * most + _clean_passes(model, batch, size)
        return Weights(log_p.sum(1).cpu(), passes=passes)

    def _draws(self, seeds: Sequence[int], length: int) -> list[Draws]:
        """Orders for each fill from its own seed, so that its weight does not depend on the other fills."""
        size = self.reading.block_size
        each = [
            draw_orders(
                self.orders,
                1,
                length,
                size,
                generator=torch.Generator().manual_seed(derive_seed(seed, "orders")),
            )
            for seed in seeds
        ]
        return [
            Draws(
                levels=torch.cat([draws.levels for draws in several]),
                spare=torch.cat([draws.spare for draws in several]),
                tokens=torch.cat([draws.tokens for draws in several]),
            )
            for several in zip(*each, strict=True)
        ]


def _after_first_gap(gaps: Tensor) -> Tensor:
    """Places from the first gap on. Everything before is a prompt."""
    return gaps.cumsum(0) > 0


def _in_blocks(texts: Tensor, gaps: Tensor, size: int, *, weighed: Tensor) -> tuple[TokenBatch, Tensor]:
    """Texts padded to whole blocks, and their gaps. Nothing sees the padding. Of the `weighed` tokens, those
    in a block with a given token are scored; in any other block p and q are equal."""
    length = len(gaps)
    left = -length % size
    texts, gaps, weighed = (F.pad(each, (0, left)) for each in (texts, gaps, weighed))
    has_given = (weighed & ~gaps).unflatten(0, (-1, size)).any(1).repeat_interleave(size)
    absent = torch.arange(length + left) >= length
    batch = TokenBatch(
        texts, (weighed & has_given).expand_as(texts), absent.expand_as(texts) if left else None
    )
    return batch, gaps.expand_as(texts)


def _clean_passes(model: Denoiser, batch: TokenBatch, size: int) -> int:
    """1 if there is clean text before a block that one pass reads for all, else 0."""
    return int(model.cache_shape is not None and batch.tokens.shape[1] > size)
