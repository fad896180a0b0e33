"""Dropout from a short hash: each choice is a function of a seed and of the element's position.

When compiled, it is fused with its neighbors and recomputed in the backward pass, so no mask is stored. The
same seed makes the same choices on every device, compiled or not. torch's own generator takes ten rounds per
element, and differs between devices.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bd3lm.models.devices import send

# int32 wraps. Steps of the golden ratio keep neighbors apart. A product carries bits only upwards, so before
# each one a shift folds the high half into the low half.
_GOLDEN = 0x9E3779B9
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - 2**32


def draw_seeds(number: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw seeds for `dropout` from torch's global generator on the CPU, the same for any device.

    Each seed is a tensor of its own at a round address: compiled kernels that are otherwise equal can then be
    shared.
    """
    drawn = torch.randint(-(2**31), 2**31, (number, 2), dtype=torch.int32)
    return send(F.pad(drawn, (0, 2)), device).unbind()


def dropout(x: Tensor, rate: float, seed: Tensor) -> Tensor:
    """Set each element to zero with probability `rate`; multiply the others by 1/(1 − rate).

    `seed` is one of `draw_seeds`: two int32, then padding. The first says where in the hash's cycle of 2^32
    the elements begin, the second selects the cycle. With the first alone, all masks would be pieces of the
    same cycle.
    """
    if not torch.compiler.is_compiling():
        return _drop(x, rate, seed)
    dropped: Tensor = _Recomputed.apply(x, rate, seed)
    return dropped


class Dropout(nn.Module):
    """`dropout` while training. In evaluation mode, or at rate 0, it does nothing and needs no seed."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, seed: Tensor | None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if seed is None:
            raise RuntimeError("in training mode dropout needs a seed, got None")
        return dropout(x, self.p, seed)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _Recomputed(torch.autograd.Function):
    """Dropout that keeps only the seed for the backward pass. Used only in compiled graphs: in eager mode,
    hashing twice is slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, seed: Tensor) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.rate = rate
        return _drop(x, rate, seed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        return _drop(grad, ctx.rate, seed, again=True), None, None


def _drop(x: Tensor, rate: float, seed: Tensor, *, again: bool = False) -> Tensor:
    kept = _hash(x.shape, seed, again) >= round(rate * 2**32) - 2**31
    return torch.where(kept, x * (1.0 / (1.0 - rate)), 0.0)


def _hash(shape: torch.Size, seed: Tensor, again: bool) -> Tensor:
    """A random int32 for each element. Its high bits, which decide a comparison, are mixed best."""
    start, cycle = seed[0], seed[1]
    width = shape[-1]
    # Computed from rows and columns: the index of an element may be too large for int32.
    row = torch.arange(math.prod(shape[:-1]), dtype=torch.int32, device=seed.device)
    column = torch.arange(width, dtype=torch.int32, device=seed.device)
    row = row * _int32(width * _GOLDEN)
    # Written in a different order the second time: a compiler would otherwise see one mask, and store it.
    row = start + row if again else row + start
    x = row.unsqueeze(1) + column * _int32(_GOLDEN)
    x = (x ^ _shift_right(x, 16)) * _MIX_1 + cycle
    x = (x ^ _shift_right(x, 15)) * _MIX_2
    return x.view(shape)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; int32's own shift keeps the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _int32(number: int) -> int:
    """A number as int32 holds it."""
    return (number + 2**31) % 2**32 - 2**31
