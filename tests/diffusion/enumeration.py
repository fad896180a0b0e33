"""Draws that are not random: every order, every mask, a grid of levels; and what a rule makes of them."""

from collections.abc import Sequence
from itertools import permutations, product
from math import exp

import numpy as np
import torch
from torch import Tensor

from bd3lm.diffusion import Draws, LevelSampler, MaskingRule, Masks
from tests.oracles.masking import Array


def midpoints(count: int) -> Tensor:
    """The centres of `count` equal cells of (0, 1)."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def every_order(n: int) -> Tensor:
    """Token draws (n!, n) that put the tokens in every order once."""
    return (torch.tensor(list(permutations(range(n))), dtype=torch.float64) + 0.5) / n


def revealed_in(order: Sequence[int], n: int, lean: float) -> Tensor:
    """Token draws (n,) whose clocks ring in this order, which may leave out some of the n places.

    A clock of rate e^{lean·(n − 1 − i)} rings at −log(u) over its rate: here a little later than the last.
    """
    u = torch.full((n,), 0.5, dtype=torch.float64)
    for after, place in enumerate(order, start=1):
        u[place] = exp(-0.03 * after * exp(lean * (n - 1 - place)))
    return u


def product_draws(levels: Tensor, tokens: Tensor) -> Draws:
    """One block a row: every level with every row of `tokens`."""
    levels, rows = levels.repeat_interleave(len(tokens)), tokens.repeat(len(levels), 1)
    return Draws(levels=levels[:, None], spare=torch.full_like(levels, 0.5)[:, None], tokens=rows)


def everything(draws: Draws) -> Tensor:
    """All tokens maskable."""
    return torch.ones_like(draws.tokens, dtype=torch.bool)


def set_weights(masks: Masks, probability: Array | None = None) -> Array:
    """The expected weight of every masked set (2^n,) over rows of one block, summed over copies."""
    rows, _copies, n = masks.masked.shape
    probability = np.full(rows, 1 / rows) if probability is None else probability
    bits = hidden_bits(masks, n)[..., 0]
    weight = masks.weight.double().amax(-1).numpy() * probability[:, None]
    return np.bincount(bits.ravel(), weight.ravel(), minlength=2**n)


def set_weights_by_count_rule(rule: MaskingRule, n: int, levels: Tensor) -> Array:
    """Exact for a rule that uses only the order of the tokens, where `levels` is a grid that resolves it."""
    draws = product_draws(levels, every_order(n))
    return set_weights(rule(draws, everything(draws)))


def set_weights_by_rate_rule(rule: MaskingRule, n: int, levels: Tensor, probability: Array) -> Array:
    """Exact for a rule that hides each token on its own: every mask at every level, by its probability.

    The tokens are put a hair below the block's mask rate or a hair above it, so the threshold must be there.
    """
    rate = rule(
        product_draws(levels, torch.ones(1, n)), torch.ones(len(levels), n, dtype=torch.bool)
    ).mask_rate
    hide = torch.tensor(list(product((False, True), repeat=n))).repeat(len(levels), 1)
    r = rate.repeat_interleave(2**n, 0)
    draws = product_draws(levels, torch.ones(2**n, n, dtype=torch.float64))
    draws = Draws(
        levels=draws.levels, spare=draws.spare, tokens=torch.where(hide, r * (1 - 1e-9), r * (1 + 1e-9))
    )
    masks = rule(draws, everything(draws))
    assert torch.equal(masks.masked[:, 0], hide)
    bernoulli = torch.where(hide, r, 1 - r).prod(-1).numpy()
    return set_weights(masks, bernoulli * probability.repeat(2**n))


def replicates(
    sampler: LevelSampler, count: int, *, rows: int, length: int, block_size: int, seed: int = 0
) -> Draws:
    """`count` independent batches of `rows`, one below the other."""
    generator = torch.Generator().manual_seed(seed)
    batches = [sampler.draw(rows, length, block_size, generator=generator) for _ in range(count)]
    return Draws(
        levels=torch.cat([d.levels for d in batches]),
        spare=torch.cat([d.spare for d in batches]),
        tokens=torch.cat([d.tokens for d in batches]),
    )


def hidden_bits(masks: Masks, block_size: int) -> Array:
    """The masked set of every (row, copy, block), as bits."""
    masked = masks.masked.unflatten(-1, (-1, block_size))
    return (masked.long() << torch.arange(block_size)).sum(-1).numpy()


def losses(masks: Masks, tables: Array) -> Array:
    """Σ weight · c per (row, block), summed over copies; `tables` has one table a block."""
    blocks, _, size = tables.shape
    c = tables[np.arange(blocks), hidden_bits(masks, size)]
    return (masks.weight.double().unflatten(-1, (blocks, size)).numpy() * c).sum((1, 3))


def assert_mean(samples: Array, truth: float, *, precision: float = 0.05) -> None:
    """Within 4 standard errors, and with standard errors small enough for that to mean something."""
    error = samples.std(ddof=1) / len(samples) ** 0.5
    assert error <= precision * abs(truth)
    assert abs(samples.mean() - truth) <= 4 * error + 1e-6 * abs(truth)
