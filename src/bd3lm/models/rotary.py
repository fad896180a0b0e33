"""Rotary positions in the half-split form, with angles computed in double precision.

In float32 the angle at position 100,000 is off by thousandths of a radian in some dimensions. With float64 a
key keeps its meaning however long the text is, so a cache can drop old tokens without touching the keys it
keeps.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bd3lm.kinds import Kinded

Rotation = tuple[Tensor, Tensor]  # cosines and sines (..., positions, head_dim / 2)


class RotaryScaling(Kinded, ABC, family="rotary scaling"):
    """How rotary angles are slowed down in a network stretched to a longer context."""

    @abstractmethod
    def scaled(self, frequencies: Tensor) -> Tensor:
        """The angle of each pair from one position to the next, given the angle without scaling."""


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RotaryScaling):
    """Divide all angles by one number."""

    kind = "linear"

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def scaled(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RotaryScaling):
    """Divide slow angles by a number, keep fast ones, and ramp between them (Llama 3.1).

    An angle is slow if it turns less than `low_freq_factor` times within the original context, and fast if it
    turns more than `high_freq_factor` times.
    """

    kind = "llama3"

    factor: float
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if self.original_context < 1:
            raise ValueError(f"original_context must be at least 1, got {self.original_context}")
        if not 0.0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError(
                "low_freq_factor and high_freq_factor must be positive, the first below the second, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )

    def scaled(self, frequencies: Tensor) -> Tensor:
        turns = self.original_context * frequencies / (2 * math.pi)
        spread = self.high_freq_factor - self.low_freq_factor
        fast = ((turns - self.low_freq_factor) / spread).clamp(0.0, 1.0)
        return frequencies * (fast + (1.0 - fast) / self.factor)


def _check_factor(factor: float) -> None:
    if not 1.0 <= factor < math.inf:
        raise ValueError(f"factor must be at least 1 and finite, got {factor}")


def frequencies(
    head_dim: int, *, base: float, scaling: RotaryScaling | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """base^(−2i/head_dim) for i = 0..head_dim/2 − 1, scaled, in float64: how much each angle grows from one
    position to the next."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    plain = base**-exponents
    return plain if scaling is None else scaling.scaled(plain)


def rotation(
    positions: Tensor,
    head_dim: int,
    *,
    base: float,
    dtype: torch.dtype,
    scaling: RotaryScaling | None = None,
) -> Rotation:
    """cos and sin of the angles at some positions, one number for each pair of a head."""
    slopes = frequencies(head_dim, base=base, scaling=scaling, device=positions.device)
    angles = positions.unsqueeze(-1).double() * slopes
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (x_i, x_{i + head_dim/2}) of x (..., head_dim)."""
    cos, sin = rotation
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    # Return `rotated` itself if the dtype fits: torch 2.11 compiles `.to` there to an output without a
    # gradient.
    return rotated if rotated.dtype == x.dtype else rotated.to(x.dtype)


def rotated_parts(
    projected: Tensor, rotation: Rotation, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint projection into rotated queries (rows, positions, heads, head_dim), rotated keys and
    values (.., kv_heads, head_dim).

    `rotation` has a dimension for the heads.
    """
    same_in_every_row = rotation[0].ndim == 3
    if (
        torch.compiler.is_compiling()
        and projected.is_cuda  # where compiling needs Triton anyway
        and same_in_every_row
        and projected.dtype != torch.float64
    ):
        parts: tuple[Tensor, Tensor, Tensor] = _Joined.apply(projected, *rotation, heads, kv_heads)
        return parts
    return _rotated_parts(projected, rotation, heads, kv_heads)


def split_heads(projected: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a joint projection into queries (.., heads, head_dim), keys and values (.., kv_heads,
    head_dim)."""
    parts = projected.unflatten(-1, (heads + 2 * kv_heads, -1))
    query, key, value = parts.split((heads, kv_heads, kv_heads), dim=-2)
    return query, key, value


def _rotated_parts(
    projected: Tensor, rotation: Rotation, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = split_heads(projected, heads, kv_heads)
    return rotate(query, rotation), rotate(key, rotation), value


class _Joined(torch.autograd.Function):
    """`_rotated_parts`, with one kernel that rotates the gradient back and joins its parts."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated_parts(projected, (cos, sin), heads, kv_heads)

    @staticmethod
    def backward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        from bd3lm.models.kernels.rotary import joined_gradient  # there may be no Triton on other machines

        cos, sin = (angle.squeeze(-2).contiguous() for angle in ctx.saved_tensors)
        return joined_gradient(query, key, value, cos, sin), None, None, None, None
