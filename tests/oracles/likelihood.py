"""Likelihoods of a block, by brute force: one network call a mask, every order, quadrature over the rate.

Everything rests on a table of cross-entropies: for every set M of masked tokens, −log p(x_i | x outside M,
x^{<b}) at the tokens i of M, from a network that is given the clean past and one noisy block, nothing else.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, pairwise, product
from math import log

import numpy as np
import torch
from torch import Tensor

from bd3lm.models import Transformer

from .networks import block_after_clean, log_probabilities, logits_of, mask_of
from .orders import law_of_orders

Table = dict[frozenset[int], Tensor]  # masked set -> (rows, block size), zero at tokens that are visible


def subsets(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(tokens, k) for k in range(1, len(tokens) + 1))


def every_text(vocabulary: Sequence[int], length: int) -> Tensor:
    """All texts (vocabulary^length, length)."""
    return torch.tensor(list(product(vocabulary, repeat=length)))


def block_nats(
    model: Transformer,
    texts: Tensor,
    start: int,
    block_size: int,
    masked: Iterable[int],
    *,
    absent: Iterable[int] = (),
    causal_clean: bool = False,
    mask_id: int | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """−log p at the masked tokens (counted inside the block) of the block that starts at `start`.

    `noise` (rows,) is that block's; the clean past has none. The mask is by default that of `mask_of`.
    """
    masked, mask_id = list(masked), mask_of(model) if mask_id is None else mask_id
    tokens = texts[:, : start + block_size].clone()
    tokens[:, [start + i for i in (*masked, *absent)]] = mask_id
    if noise is not None:
        per_token = noise.new_zeros(tokens.shape)
        per_token[:, start:] = noise.unsqueeze(1)
        noise = per_token
    layout = block_after_clean(start, block_size, causal_clean=causal_clean)
    log_p = log_probabilities(logits_of(model, tokens, layout, noise=noise)[:, start:], mask_id)
    nats = torch.zeros(log_p.shape[:2], dtype=log_p.dtype)
    for i in masked:
        nats[:, i] = -log_p[torch.arange(len(texts)), i, texts[:, start + i]]
    return nats


@torch.no_grad()
def table(
    model: Transformer, texts: Tensor, start: int, block_size: int, scored: Sequence[int], **options
) -> Table:
    """One network call for every set of masked tokens."""
    return {
        frozenset(masked): block_nats(model, texts, start, block_size, masked, **options)
        for masked in subsets(scored)
    }


def log_p_along(table: Table, order: Sequence[int]) -> Tensor:
    """log p of revealing the tokens in this order, (rows,)."""
    rows = next(iter(table.values())).shape[0]
    log_p = torch.zeros(rows, dtype=torch.float64)
    for step, token in enumerate(order):
        log_p -= table[frozenset(order[step:])][:, token]
    return log_p


def nll(table: Table, scored: Sequence[int], lean: float = 0.0) -> Tensor:
    """−log of the mean over all n! orders, by how likely they are."""
    orders = law_of_orders(scored, lean).items()
    return -torch.logsumexp(torch.stack([log(p) + log_p_along(table, order) for order, p in orders]), 0)


def nelbo_by_orders(table: Table, scored: Sequence[int], lean: float = 0.0) -> Tensor:
    """The mean of −log p along all n! orders, by how likely they are."""
    return -sum(p * log_p_along(table, order) for order, p in law_of_orders(scored, lean).items())


def nelbo(table: Table, scored: Sequence[int]) -> Tensor:
    """∫ over the mask rate r of (1/r) · Σ over masks of their probability · their cross-entropies (eq. 8)."""
    x, w = np.polynomial.legendre.leggauss(16)
    total = torch.zeros(1, dtype=torch.float64)
    for rate, width in zip((x + 1) / 2, w / 2, strict=True):
        total = total + width / rate * _expected_nats(table, scored, rate)
    return total


def discrete_nelbo(table: Table, scored: Sequence[int], rates: Sequence[float]) -> Tensor:
    """T steps between the mask rates 0 = rates[0] < … < rates[T] = 1.

    From step j a masked token is revealed with probability 1 − rates[j−1]/rates[j], and pays then.
    """
    return sum(
        (1 - before / after) * _expected_nats(table, scored, after) for before, after in pairwise(rates)
    )


def discrete_nll(table: Table, scored: Sequence[int], rates: Sequence[float]) -> Tensor:
    """−log p of the sampler that takes those T steps, each token revealed or not on its own."""
    # p(what was revealed is x, and these are still masked)
    reached = {frozenset(scored): torch.ones(1, dtype=torch.float64)}
    for before, after in reversed(list(pairwise(rates))):
        stays = before / after
        following: dict[frozenset[int], Tensor] = {}
        for masked, probability in reached.items():
            for left in map(frozenset, ((), *subsets(sorted(masked)))):
                revealed = sorted(masked - left)
                step = stays ** len(left) * (1 - stays) ** len(revealed)
                drawn = torch.exp(-table[masked][:, revealed].sum(1)) if masked else 1.0
                following[left] = following.get(left, 0.0) + probability * step * drawn
        reached = following
    return -torch.log(reached[frozenset()])


def importance_weighted(
    order_log_p: Tensor, samples: int, probabilities: Sequence[float] | None = None
) -> Tensor:
    """E[−log of the mean of p over `samples` orders], over all tuples; order_log_p is (orders, ...).

    `probabilities` are those of the orders, by default the same for all.
    """
    number = len(order_log_p)
    tuples = torch.tensor(list(product(range(number), repeat=samples)))
    weights = torch.tensor(probabilities or [1 / number] * number, dtype=torch.float64)[tuples].prod(1)
    nats = log(samples) - torch.logsumexp(order_log_p[tuples], 1)  # (tuples, ...)
    return torch.tensordot(weights, nats, 1)


@torch.no_grad()
def chain_rule_nats(model: Transformer, texts: Tensor) -> Tensor:
    """−log p(x_i | x_{<i}) of a network for blocks of one token, position by position: (rows, length)."""
    return torch.cat([block_nats(model, texts, i, 1, [0]) for i in range(texts.shape[1])], 1)


def _expected_nats(table: Table, scored: Sequence[int], rate: float) -> Tensor:
    total = torch.zeros(1, dtype=torch.float64)
    for masked in subsets(scored):
        probability = rate ** len(masked) * (1 - rate) ** (len(scored) - len(masked))
        total = total + probability * table[frozenset(masked)].sum(1)
    return total
