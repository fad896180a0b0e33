"""Rotary positions in the half-split form, with angles computed in double precision.

In float32 the angle at position 100,000 is off by thousandths of a radian in some dimensions; in float64 a
key keeps its meaning however far the text has run, so a cache can drop old tokens without touching the
keys it keeps.
"""

from typing import Any

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosines and sines (..., positions, head_dim / 2)


def rotation(positions: Tensor, head_dim: int, *, base: float, dtype: torch.dtype) -> Rotation:
    """cos and sin of position · base^(−2i/head_dim) for i = 0..head_dim/2 − 1."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions.unsqueeze(-1).double() * base**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) of x (..., head_dim)."""
    cos, sin = rotation
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    # Not `rotated.to(x.dtype)` where that is itself: torch 2.11 compiles it to an output without a gradient.
    return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)


def rotated_parts(projected: Tensor, rotation: Rotation, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, rotated, and values (rows, positions, heads, head_dim) of a joint projection.

    `rotation` has a dimension for the heads.
    """
    same_in_every_row = rotation[0].ndim == 3
    if (
        torch.compiler.is_compiling()
        and projected.is_cuda  # where compiling needs Triton too
        and same_in_every_row
        and projected.dtype != torch.float64
    ):
        parts: tuple[Tensor, Tensor, Tensor] = _Joined.apply(projected, *rotation, heads)
        return parts
    return _rotated_parts(projected, rotation, heads)


def _rotated_parts(projected: Tensor, rotation: Rotation, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in projected.chunk(3, dim=-1))
    return rotate(query, rotation), rotate(key, rotation), value


class _Joined(torch.autograd.Function):
    """The same; its gradient is rotated back and put together by one kernel."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, cos: Tensor, sin: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated_parts(projected, (cos, sin), heads)

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None, None]:
        from bd3lm.models.rotary_kernel import joined_gradient  # elsewhere there may be no Triton

        cos, sin = (angle.squeeze(-2).contiguous() for angle in ctx.saved_tensors)
        return joined_gradient(query, key, value, cos, sin), None, None, None
