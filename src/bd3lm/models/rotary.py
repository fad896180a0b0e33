"""Rotary positions in the half-split form, with angles computed in double precision.

In float32 the angle at position 100,000 is off by thousandths of a radian in some dimensions; in float64 a
key keeps its meaning however far the text has run, which is what lets a cache evict old tokens without
touching the keys it keeps.
"""

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
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
