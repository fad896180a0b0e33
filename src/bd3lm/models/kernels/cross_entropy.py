"""Triton: cross-entropies from logits, and their gradient in place. Imported only with CUDA.

Both kernels are bound by memory, so each reads nothing but the logits. The second also sums the gradient over
positions, which is the gradient of the bias, while it has the gradient at hand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PER_NAT = tl.constexpr(1.4426950408889634)  # log2 e: the hardware computes exponentials to base 2
_PIECES, _LANES = 4, 1024  # logits of a row that are read together; each lane takes its own maximum
_ROWS, _ROWS_AT_ONCE, _TOKENS = 128, 4, 1024  # the part of the gradient that one program computes


def log_totals(logits: Tensor) -> Tensor:
    """log Σ exp of each row of logits, in single precision."""
    rows, tokens = logits.shape
    totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _log_totals[(rows,)](
            logits, totals, logits.stride(0), tokens, PIECES=_PIECES, LANES=_LANES, num_warps=4
        )
    return totals


def grad_logits(logits: Tensor, totals: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """weight·(softmax − one-hot target), written over the logits, and its sum over the rows."""
    rows, tokens = logits.shape
    parts = triton.cdiv(rows, _ROWS)
    sums = torch.empty(parts, tokens, dtype=torch.float32, device=logits.device)
    if rows:
        _grad_logits[(triton.cdiv(tokens, _TOKENS), parts)](
            logits,
            totals,
            targets,
            weights,
            sums,
            logits.stride(0),
            rows,
            tokens,
            ROWS=_ROWS,
            AT_ONCE=_ROWS_AT_ONCE,
            TOKENS=_TOKENS,
            num_warps=4,
        )
    return logits, sums.sum(0)


@triton.jit
def _log_totals(logits, totals, stride, tokens, PIECES: tl.constexpr, LANES: tl.constexpr):
    """One row per program. Each lane rescales its sum once per `PIECES` logits instead of once per logit."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    place = tl.arange(0, PIECES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full((LANES,), -float("inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, tokens, PIECES * LANES):
        token = start + place
        score = tl.load(logits + token, mask=token < tokens, other=-float("inf")).to(tl.float32) * _PER_NAT
        larger = tl.maximum(largest, tl.max(score, 0))
        # A lane that has seen only −∞ must not compute ∞ − ∞.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp2(largest - base) + tl.sum(tl.exp2(score - base[None, :]), 0)
        largest = larger
    top = tl.max(largest, 0)
    tl.store(totals + row, (top + tl.log2(tl.sum(total * tl.exp2(largest - top), 0))) / _PER_NAT)


@triton.jit
def _grad_logits(
    logits,
    totals,
    targets,
    weights,
    sums,
    stride,
    rows,
    tokens,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """`ROWS` rows of `TOKENS` tokens per program: their gradient, and its sum over these rows."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    grad_bias = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, ROWS, AT_ONCE):
        row = part * ROWS + start + tl.arange(0, AT_ONCE)
        inside = row < rows
        total = tl.load(totals + row, mask=inside, other=0.0) * _PER_NAT
        target = tl.load(targets + row, mask=inside, other=-1)
        weight = tl.load(weights + row, mask=inside, other=0.0)
        here = logits + row.to(tl.int64)[:, None] * stride + token[None, :]
        there = inside[:, None] & (token < tokens)[None, :]
        score = tl.load(here, mask=there, other=-float("inf")).to(tl.float32)
        grad = tl.exp2(score * _PER_NAT - total[:, None])
        grad = (grad - tl.where(token[None, :] == target[:, None], 1.0, 0.0)) * weight[:, None]
        grad_bias += tl.sum(grad, 0)
        tl.store(here, grad.to(logits.dtype.element_ty), mask=there)
    tl.store(sums + part.to(tl.int64) * tokens + token, grad_bias, mask=token < tokens)
