"""Triton: logits to cross-entropies, and in place to their gradient. Imported only where there is CUDA."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 4096  # logits of a row that a program looks at together


def reduce(logits: Tensor, offset: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As `cross_entropy._reduce`; the logits are overwritten by the gradient, which is returned."""
    rows, tokens = logits.shape
    nats = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _rows[(rows,)](
            logits, offset, targets, weights, nats, logits.stride(0), tokens, TOKENS=_TOKENS, num_warps=16
        )
    return nats, logits


@triton.jit
def _rows(logits, offset, targets, weights, nats, stride, tokens, TOKENS: tl.constexpr):
    """One row a program: the largest and the sum of exponentials in one pass, the gradient in a second."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    weight = tl.load(weights + row)
    # Before the sums, whose barriers keep faster warps from writing over it.
    at_target = tl.load(logits + target).to(tl.float32) + tl.load(offset + target)
    column = tl.arange(0, TOKENS)
    largest = tl.full((TOKENS,), -float("inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, tokens, TOKENS):
        inside = start + column < tokens
        score = tl.load(logits + start + column, mask=inside, other=-float("inf")).to(tl.float32)
        score += tl.load(offset + start + column, mask=inside, other=0.0)
        larger = tl.maximum(largest, score)
        # A lane that has met nothing but −∞ must not compute ∞ − ∞.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(score - base)
        largest = larger
    top = tl.max(largest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(nats + row, log_total - at_target)
    for start in range(0, tokens, TOKENS):
        inside = start + column < tokens
        score = tl.load(logits + start + column, mask=inside, other=-float("inf")).to(tl.float32)
        score += tl.load(offset + start + column, mask=inside, other=0.0)
        slope = tl.exp(score - log_total) - tl.where(start + column == target, 1.0, 0.0)
        tl.store(logits + start + column, (slope * weight).to(logits.dtype.element_ty), mask=inside)
