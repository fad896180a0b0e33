"""Triton: draw tokens from logits, with the counter's own noise and no sort. Imported only with CUDA.

Why no sort is needed: order tokens by likelihood, equal ones by index. The nucleus is the start of this
order. The draw is the token of the nucleus with the highest score, where a score is the logit over the
temperature plus the token's Gumbel number. Normalizing adds the same number to all scores, so we leave it
out.

Take the token with the highest score of all. If it lies in the nucleus, it also has the highest score there,
so it is the draw. One sum decides this: the total probability of all likelier tokens. If the token lies
outside, all tokens that are no likelier lie outside too. Keep only the likelier tokens, take the highest
score among them, and check again. The remaining set always contains the whole nucleus and shrinks every
round, at the latest to the likeliest token, which is never outside. The first token is outside with the
probability that the nucleus leaves out, so at p = 0.9 there is rarely a second round.

Most tokens cannot have the highest score, and showing this takes less than two 64-bit logarithms: since −log
u ≥ 1 − u, a Gumbel number −log(−log u) is at most −log(1 − u), which is a close bound where the number is
large. We compute a score only if the logit plus this bound reaches the highest score so far.

Rounding: `RowSharpening.draw` orders and scores float32 log-probabilities and sums their exponentials. This
kernel works with the logits themselves. The two can differ where two scores, or a sum and p, are within about
1e-6 of each other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bd3lm.counter import GOLDEN, MIX_1, MIX_2, MOST_POSITIONS, PURPOSES, Purpose

_TILE, _WARPS = 128, 1  # tokens that a program scores, or skips, together
_PROGRAMS = 8192  # programs that share the scoring, about: enough to fill a GPU
_ROW_TILE, _ROW_WARPS = 4096, 16  # tokens of a row that its one program then reads together

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_MOST_POSITIONS = tl.constexpr(MOST_POSITIONS)
_PURPOSES = tl.constexpr(PURPOSES)
_TOKEN = tl.constexpr(int(Purpose.TOKEN))
# Relative to the size of a score, which is within 37 of its logit: more than rounding takes from their sum.
_ROUNDING = tl.constexpr(2.0**-20)


def draw(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    repeat: Tensor,
    *,
    mask_id: int,
    temperature: Tensor,
    top_p: Tensor | None,
    inclusive: Tensor,
) -> Tensor:
    """Tokens (n,) for logits (n, vocabulary), as from `RowSharpening.draw` of `subs_at_masks(logits,
    mask_id)`.

    seeds and positions are int64 (n,), repeat is int64 (n,) or (1,). temperature and top_p are float64 and
    inclusive is bool, all with one value per text (texts,). Every text has the same number of logit rows,
    next to each other. Without top_p there is no nucleus. The stride between rows of logits may exceed their
    length. The host reads nothing, so a CUDA graph can replay the call with other values.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"logits of a row must be contiguous, got strides {logits.stride()}")
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, _TILE)
    chunk = triton.cdiv(tiles, max(1, _PROGRAMS // max(rows, 1))) * _TILE
    chunks = triton.cdiv(vocabulary, chunk)
    scores = torch.empty(rows, chunks, dtype=torch.float64, device=logits.device)
    candidates = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    largest = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return tokens
    row = (
        *(logits, seeds.contiguous(), positions.contiguous(), repeat.contiguous()),
        *(logits.stride(0), int(repeat.numel() > 1), vocabulary, mask_id),
        *(temperature.contiguous(), rows // len(temperature)),
    )
    _score[(rows, chunks)](*row, scores, candidates, largest, chunk, TILE=_TILE, num_warps=_WARPS)
    _settle[(rows,)](
        *(*row, scores, candidates, largest, tokens, chunks),
        *(temperature if top_p is None else top_p.contiguous(), inclusive.contiguous()),
        NUCLEUS=top_p is not None,
        CHUNKS=triton.next_power_of_2(chunks),
        TILE=_ROW_TILE,
        num_warps=_ROW_WARPS,
    )
    return tokens


@triton.jit
def _score(
    logits,
    seeds,
    positions,
    repeat,
    stride,
    repeat_stride,
    vocabulary,
    mask_id,
    temperatures,
    each,
    scores,
    candidates,
    largest,
    chunk,
    TILE: tl.constexpr,
):
    """One chunk of one row per program: the highest score, its token, and the largest logit."""
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = (1.0 / tl.load(temperatures + row // each)).to(tl.float32)
    logits += row * stride
    key = _key(seeds, positions, repeat, row, repeat_stride)
    first = tl.program_id(1) * chunk
    column = tl.arange(0, TILE)
    top = tl.full((TILE,), -float("inf"), tl.float32)
    best = tl.full((TILE,), -float("inf"), tl.float64)
    best_at = tl.full((TILE,), 0, tl.int32) + first
    bar = -float("inf")  # the least score that counts
    for start in range(first, tl.minimum(first + chunk, vocabulary), TILE):
        scaled = _scaled(logits, start + column, vocabulary, mask_id, inverse_temperature)
        top = tl.maximum(top, scaled)
        words = _words(key, start + column)
        hopeful = scaled + _gumbel_bound(words) >= bar
        if tl.max(hopeful.to(tl.int32), 0) > 0:
            best, best_at = _better(best, best_at, scaled, start + column, words)
            highest = tl.max(best, 0).to(tl.float32)
            # If the score is infinite this is NaN, and no later token is scored: none could come first.
            bar = highest - (tl.abs(highest) + 100.0) * _ROUNDING
    at = row * tl.num_programs(1) + tl.program_id(1)
    score, candidate = _highest(best, best_at)
    tl.store(scores + at, score)
    tl.store(candidates + at, candidate)
    tl.store(largest + at, tl.max(top, 0))


@triton.jit
def _settle(
    logits,
    seeds,
    positions,
    repeat,
    stride,
    repeat_stride,
    vocabulary,
    mask_id,
    temperatures,
    each,
    scores,
    candidates,
    largest,
    tokens,
    chunks,
    top_ps,
    inclusives,
    NUCLEUS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row per program: the highest score of all, then of likelier tokens until it is in the nucleus.

    In each round, one pass sums what is likelier than the candidate. Rarely, a second pass finds the next
    candidate.
    """
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = (1.0 / tl.load(temperatures + row // each)).to(tl.float32)
    logits += row * stride
    part = tl.arange(0, CHUNKS)
    at = row * chunks + part
    score = tl.load(scores + at, mask=part < chunks, other=-float("inf"))
    first = tl.load(candidates + at, mask=part < chunks, other=0)
    highest, candidate = _highest(score, first)
    if NUCLEUS:
        top = tl.max(tl.load(largest + at, mask=part < chunks, other=-float("inf")), 0)
        key = _key(seeds, positions, repeat, row, repeat_stride)
        column = tl.arange(0, TILE)
        top_p = tl.load(top_ps + row // each)
        inclusive = tl.load(inclusives + row // each)
        outside = top_p < 1.0
        while outside:
            own = tl.load(logits + candidate).to(tl.float32) * inverse_temperature
            total = tl.zeros((TILE,), tl.float64)
            before = tl.zeros((TILE,), tl.float64)
            for start in range(0, vocabulary, TILE):
                scaled = _scaled(logits, start + column, vocabulary, mask_id, inverse_temperature)
                mass = tl.exp(scaled - top).to(tl.float64)
                total += mass
                before += tl.where(_is_likelier(scaled, start + column, own, candidate), mass, 0.0)
            limit = top_p * tl.sum(total, 0)
            likelier = tl.sum(before, 0)
            # NaN must never count as outside: the loop must end whatever the logits are. The exclusive rule
            # always keeps the likeliest token, which has nothing before it.
            crossing = (likelier > 0.0) & (likelier + tl.exp(own - top) > limit)
            outside = tl.where(inclusive, likelier >= limit, crossing)
            if outside:
                best = tl.full((TILE,), -float("inf"), tl.float64)
                best_at = tl.full((TILE,), 0, tl.int32)
                for start in range(0, vocabulary, TILE):
                    scaled = _scaled(logits, start + column, vocabulary, mask_id, inverse_temperature)
                    eligible = _is_likelier(scaled, start + column, own, candidate)
                    if tl.max(eligible.to(tl.int32), 0) > 0:
                        scaled = tl.where(eligible, scaled, -float("inf"))
                        words = _words(key, start + column)
                        best, best_at = _better(best, best_at, scaled, start + column, words)
                _, candidate = _highest(best, best_at)
    # Nothing is higher than −∞ if all logits are NaN or −∞: there is no distribution, see `or_mask`.
    tl.store(tokens + row, tl.where(highest > -float("inf"), candidate, mask_id).to(tl.int64))


@triton.jit
def _scaled(logits, columns, vocabulary, mask_id, inverse_temperature):
    """Logits over the temperature: log-probabilities up to a constant; −∞ for tokens that are not allowed."""
    possible = (columns < vocabulary) & (columns != mask_id)
    return tl.load(logits + columns, mask=possible, other=-float("inf")).to(tl.float32) * inverse_temperature


@triton.jit
def _is_likelier(scaled, columns, own, candidate):
    return (scaled > own) | ((scaled == own) & (columns < candidate))


@triton.jit
def _better(best, best_at, scaled, columns, words):
    """The highest score that each lane has seen, and its token; the first of equal ones."""
    score = scaled.to(tl.float64) + _gumbel(words)
    better = score > best
    return tl.where(better, score, best), tl.where(better, columns, best_at)


@triton.jit
def _highest(best, best_at):
    """The highest over all lanes; of equal ones the lowest token."""
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, best_at, 2147483647), 0)


# --- the same as in bd3lm.counter, bit for bit ---


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def _key(seeds, positions, repeat, row, repeat_stride):
    position = tl.load(positions + row) + tl.load(repeat + row * repeat_stride) * _MOST_POSITIONS
    return _mix(_mix(tl.load(seeds + row)) + (position * _PURPOSES + _TOKEN + 1) * _GOLDEN)


@triton.jit
def _words(key, columns):
    return _mix(key + (columns + 1).to(tl.int64) * _GOLDEN)


@triton.jit
def _gumbel(words):
    uniform = (_shift_right(words, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return -tl.log(-tl.log(uniform))


@triton.jit
def _gumbel_bound(words):
    """An upper bound of `_gumbel` in float32: −log(1 − u) for the largest u with these first 24 bits."""
    rest = (16777215 - _shift_right(words, 40).to(tl.int32)).to(tl.float32)
    return -tl.log(tl.maximum(rest, 1.8626451492309570e-09) * 5.9604644775390625e-08)  # 2^-29 and 2^-24
