"""Exact NELBO and likelihood of small blocks by enumeration, and an importance-weighted bound for larger
ones.

The continuous-time sampler reveals the tokens of a block in a uniformly random order, so

    p(x^b | x^{<b}) = (1/n!) Σ over orders of the product of conditionals.

A recursion over the set S of tokens revealed so far computes this from 2^n − 1 mask patterns:

    F(∅) = 1,   F(S) = Σ_{i in S} F(S∖{i}) · p(x_i | x_{S∖{i}}, x^{<b}) · r(i | S∖{i}),   p = F(all),

where r(i | S) = 1/(n − |S|) is the probability that token i is next. In an order that leans to the left
(`bd3lm.diffusion.orders`) it is w_i / Σ_{j not in S} w_j, and the same patterns give that sampler's
likelihood. The NELBO is Σ_S P(S) Σ_{i not in S} −r(i | S)·log p(x_i | x_S, x^{<b}), where P(S) is the
probability that S occurs on the way.

Each pattern is applied to every block of a batch at once. The likelihood is that of the sampler at
temperature 1, without a nucleus, which sees the whole text before a block, for a network that ignores time.
If a text ends inside a block, the positions past its end stay masked, and the orders cover its own tokens. If
a prompt ends inside a block, the recursion starts from its tokens, as the sampler does.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Draws, LevelSampler, log_reveal_rates
from bd3lm.diffusion.masking import reveal_ranks
from bd3lm.models import BlockReading, Denoiser, require_evaluation_mode
from bd3lm.objectives import BlockDenoiser, TokenBatch
from bd3lm.objectives.denoising import Algorithm

MAX_EXACT_BLOCK = 12


@dataclass(frozen=True)
class ExactLikelihood:
    """Exact figures for each block of each row in nats, all (rows, blocks) and float64."""

    nll: Tensor  # −log p(x^b | x^{<b})
    nelbo: Tensor  # its bound of eq. 8, without Monte-Carlo noise
    tokens: Tensor  # the number of scored tokens in the block


def exact_likelihood(
    model: Denoiser, batch: TokenBatch, reading: BlockReading, *, lean: float = 0.0
) -> ExactLikelihood:
    """−log p and the NELBO of every block, from 2^block_size − 1 passes and one clean pass."""
    (found,) = exact_likelihoods(model, batch, reading, [lean])
    return found


@torch.no_grad()
def exact_likelihoods(
    model: Denoiser, batch: TokenBatch, reading: BlockReading, leans: Iterable[float]
) -> tuple[ExactLikelihood, ...]:
    """The same for several leans, at the cost of one."""
    _refuse_noise(model)
    if (block_size := reading.block_size) > MAX_EXACT_BLOCK:
        raise ValueError(
            f"block_size must be at most {MAX_EXACT_BLOCK} for an exact likelihood, got {block_size}, which "
            f"would take 2^{block_size} − 1 passes a batch; use importance_weighted_nll instead"
        )
    conditionals = _conditionals(_denoiser(model, batch, reading))
    scored = batch.scored.unflatten(1, (-1, block_size))
    found = (_over_orders(conditionals, scored, lean) for lean in leans)
    return tuple(ExactLikelihood(nll=-log_p, nelbo=nelbo, tokens=scored.sum(-1)) for log_p, nelbo in found)


def draw_orders(
    orders: int,
    rows: int,
    length: int,
    block_size: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Draws, ...]:
    """The random numbers that decide the order of reveal within each block, for any lean."""
    if orders < 1:
        raise ValueError(f"orders must be at least 1, got {orders}")
    sampler = LevelSampler()
    return tuple(
        sampler.draw(rows, length, block_size, generator=generator, device=device) for _ in range(orders)
    )


@torch.no_grad()
def exact_fill_ratio(
    model: Denoiser, batch: TokenBatch, gaps: Tensor, reading: BlockReading, *, lean: float = 0.0
) -> Tensor:
    """log p/q of the scored tokens of each block, (rows, blocks). p is their likelihood, and q the
    probability that the sampler fills the `gaps` (rows, length) among them with these tokens, given the
    others.

    Both come from the same passes.
    """
    _refuse_noise(model)
    conditionals = _conditionals(_denoiser(model, batch, reading))
    log_p, log_q = (
        _over_orders(conditionals, tokens.unflatten(1, (-1, reading.block_size)), lean)[0]
        for tokens in (batch.scored, batch.scored & gaps)
    )
    return log_p - log_q


@torch.no_grad()
def given_first_log_likelihood(
    model: Denoiser,
    batch: TokenBatch,
    gaps: Tensor,
    reading: BlockReading,
    orders: Sequence[Draws],
    *,
    lean: float = 0.0,
) -> Tensor:
    """The log of the mean over `orders` of a likelihood for each block, (rows, blocks): that of the scored
    tokens outside of the `gaps` (rows, length), revealed before the gaps.

    An order takes as many passes as the largest number of such tokens in a block.
    """
    _refuse_noise(model)
    denoiser = _denoiser(model, batch, reading)
    hidden = batch.scored & gaps
    log_p = [_along_order(denoiser, draws, lean, hidden=hidden) for draws in orders]
    return torch.logsumexp(torch.stack(log_p), dim=0) - math.log(len(orders))


@torch.no_grad()
def importance_weighted_nll(
    model: Denoiser,
    batch: TokenBatch,
    reading: BlockReading,
    orders: Sequence[Draws],
    *,
    lean: float = 0.0,
) -> Tensor:
    """−log of the mean over random `orders` (`draw_orders`) of p(x^b along the order), (rows, blocks).

    Its expectation lies between the NLL and the NELBO for the same `lean`. It equals the NELBO for one order,
    and falls as the number of orders grows. Each order takes as many passes as a block has tokens; one clean
    pass serves all orders.
    """
    _refuse_noise(model)
    denoiser = _denoiser(model, batch, reading)
    log_p = torch.stack([_along_order(denoiser, draws, lean) for draws in orders])
    return math.log(len(orders)) - torch.logsumexp(log_p, dim=0)


@torch.no_grad()
def order_log_likelihood(
    model: Denoiser,
    batch: TokenBatch,
    reading: BlockReading,
    draws: Draws,
    *,
    lean: float = 0.0,
) -> Tensor:
    """log p(x^b | x^{<b}) along one order: the token of a block with the smallest draw is revealed first.

    With a `lean` it is the token with the smallest −log(1 − u)/w_i, where u is its draw.
    """
    _refuse_noise(model)
    denoiser = _denoiser(model, batch, reading)
    return _along_order(denoiser, draws, lean)


def _along_order(
    denoiser: BlockDenoiser, draws: Draws, lean: float, *, hidden: Tensor | None = None
) -> Tensor:
    """log p along an order. Tokens in `hidden` stay masked and add nothing."""
    batch, block_size = denoiser.batch, denoiser.reading.block_size
    scored = batch.scored if hidden is None else batch.scored & ~hidden
    rank = reveal_ranks(draws, scored, lean=lean).masked_fill(~scored, block_size)
    log_p = torch.zeros(
        batch.tokens.shape[0], denoiser.blocks, dtype=torch.float64, device=batch.tokens.device
    )
    for step in range(block_size):
        still_masked = (rank >= step) & scored
        if not still_masked.any():
            break
        if hidden is not None:
            still_masked |= hidden
        nats = denoiser.nats(still_masked.unsqueeze(1)).squeeze(1).double()
        log_p -= (nats * (rank == step)).unflatten(1, (-1, block_size)).sum(-1)
    return log_p


def _conditionals(denoiser: BlockDenoiser) -> Tensor:
    """−log p(x_i | tokens of its block outside the pattern, x^{<b}) for every pattern of masked tokens.

    (2^block_size, rows, blocks, block_size). Bit i of a pattern's number says whether token i is masked.
    Given tokens stay visible under any pattern, and absent ones stay masked.
    """
    batch, block_size = denoiser.batch, denoiser.reading.block_size
    rows, length = batch.tokens.shape
    shape = (2**block_size, rows, denoiser.blocks, block_size)
    nats = torch.zeros(shape, dtype=torch.float64, device=batch.tokens.device)
    for pattern in range(1, 2**block_size):
        bits = torch.tensor([pattern >> i & 1 for i in range(block_size)], dtype=torch.bool)
        masked = bits.to(batch.tokens.device).repeat(length // block_size) & batch.scored
        if masked.any():
            nats[pattern] = denoiser.nats(masked.unsqueeze(1)).view(shape[1:]).double()
    return nats


def _over_orders(conditionals: Tensor, scored: Tensor, lean: float) -> tuple[Tensor, Tensor]:
    """log p and the NELBO of all blocks, by the recursion over revealed sets, with log p in log space.

    A set is a bit pattern over the whole block. Tokens that are not scored count as revealed from the start,
    so the recursion begins at their set, and never reaches sets that lack one of them.
    """
    patterns, size = conditionals.shape[0], conditionals.shape[-1]
    everything, device = patterns - 1, scored.device
    bit = 2 ** torch.arange(size, device=device)
    start = (everything - (scored * bit).sum(-1)).unsqueeze(0)  # (1, rows, blocks)
    log_f = torch.full((patterns, *scored.shape[:2]), -math.inf, dtype=torch.float64, device=device)
    log_f.scatter_(0, start, 0.0)
    met = torch.zeros_like(log_f).scatter_(0, start, 1.0)
    nelbo = torch.zeros_like(log_f[0])
    log_rates = log_reveal_rates(size, lean, device=device)
    for revealed in range(everything):
        masked = everything ^ revealed
        places = [i for i in range(size) if masked >> i & 1]
        nats = conditionals[masked][..., places]
        possible = scored[..., places]  # otherwise `revealed` is not reached
        log_share = torch.log_softmax(log_rates[places], -1)
        step = torch.where(possible, log_share - nats, -math.inf)
        chance = met[revealed].unsqueeze(-1) * log_share.exp()
        nelbo += torch.where(chance > 0, chance * nats, 0.0).sum(-1)  # 0 · ∞ counts as 0
        for place, i in enumerate(places):
            after = revealed | 1 << i
            log_f[after] = torch.logaddexp(log_f[after], log_f[revealed] + step[..., place])
            met[after] += chance[..., place]
    return log_f[everything], nelbo


def _denoiser(model: Denoiser, batch: TokenBatch, reading: BlockReading) -> BlockDenoiser:
    require_evaluation_mode(model)
    # Two passes, since one clean pass serves every pattern, if the network can store its keys and values.
    algorithm: Algorithm = "single_pass" if model.cache_shape is None else "two_pass"
    return BlockDenoiser(model, batch, reading, algorithm=algorithm)


def _refuse_noise(model: Denoiser) -> None:
    if model.uses_noise:
        raise ValueError(
            "model is conditioned on the noise level, so its conditionals depend on when a token is revealed "
            "and no finite set of mask patterns covers them; use the Monte-Carlo NELBO"
        )
