"""Triton: matrix products over few tokens, fused with norm, bias, activation, gate and residual.

A pass over a handful of tokens takes as long as its launches and the latency of its loads, not its
arithmetic. So a layer is five launches (the fifth is in `ring`), and a product starts loading all its weights
at once, before the previous kernel has ended. Over many tokens the library computes the products, with
`add_norm` and `swiglu` between them. Imported only with CUDA.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from bd3lm.models.config import TransformerConfig
from bd3lm.models.kernels.overlap import overlap, start, wait
from bd3lm.models.kernels.ring import RingRule, attend_ring, ring_rule, rotations

__all__ = [
    "OtherWeight",
    "RingRule",
    "add_norm",
    "attend_ring",
    "linear_residual",
    "norm_linear",
    "ring_rule",
    "rotations",
    "supports",
    "swiglu",
]

Activation = Literal["gelu", "swiglu"]
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "gelu": 1, "swiglu": 2}
_SWIGLU = 1024  # features of a token in one program


def supports(config: TransformerConfig, dtype: torch.dtype) -> bool:
    """Whether these kernels support a network: head_dim 16, 32, 64 or 128, and at most 32 bits per number."""
    head_dim = config.head_dim
    return (
        16 <= head_dim <= 128
        and head_dim & (head_dim - 1) == 0
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: the tokens and features of one program, which loads `depth` numbers at a time."""

    tokens: int
    features: int
    depth: int
    warps: int


def linear_tiles(tokens: int, features: int, depth: int, dtype: torch.dtype) -> Tiles:
    """How to cut a product of this shape: the fastest choice measured (docs/decisions.md)."""
    if dtype == torch.float32:  # exact: no tensor cores, operands twice as large
        return Tiles(tokens=16, features=16, depth=256, warps=8)
    return Tiles(
        tokens=16,
        features=16 if features > 1024 else 8,
        depth=min(max(triton.next_power_of_2(depth), 256), 1024),
        warps=4,
    )


@dataclass(frozen=True)
class OtherWeight:
    """A weight that replaces the usual one at tokens first..last − 1 of every `size`."""

    weight: Tensor
    size: int
    first: int
    last: int


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rms: bool = False,
    activation: Activation | None = None,
    eps: float = 1e-5,
    other: OtherWeight | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """norm(x) · weightᵀ + bias, then an optional activation: (M, K) to (M, N), rounded at each step.

    The norm is LayerNorm or RMSNorm. SwiGLU is SiLU of the first half of the features times the second half.
    """
    return _launch_linear(
        x,
        weight,
        bias,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        rms=rms,
        activation=activation,
        eps=eps,
        other=other,
        tiles=tiles,
    )


def linear_residual(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gate: Tensor | None = None,
    *,
    other: OtherWeight | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """residual + gate · (a · weightᵀ + bias), from (M, K) and (M, N), rounded at each step."""
    return _launch_linear(a, weight, bias, residual=residual, gate=gate, other=other, tiles=tiles)


def add_norm(
    residual: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    *,
    rms: bool = False,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """residual + gate · branch, and its LayerNorm or RMSNorm, both (M, N), rounded at each step."""
    tokens, features = residual.shape
    added, normed = torch.empty_like(residual), torch.empty_like(residual)
    width = triton.next_power_of_2(features)
    _add_norm[(tokens,)](
        residual,
        branch,
        gate,
        norm_weight,
        norm_bias,
        added,
        normed,
        eps,
        RMS=rms,
        FEATURES=features,
        WIDTH=width,
        num_warps=min(max(width // 256, 1), 8),
        **overlap(residual.device),
    )
    return added, normed


def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of the features times the second half: (M, 2 N) to (M, N), rounded at each
    step."""
    tokens, features = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, features, device=x.device, dtype=x.dtype)
    _swiglu[(tokens, triton.cdiv(features, _SWIGLU))](
        x, out, FEATURES=features, WIDTH=_SWIGLU, num_warps=4, **overlap(x.device)
    )
    return out


def _launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    rms: bool = False,
    activation: Activation | None = None,
    eps: float = 0.0,
    other: OtherWeight | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    (tokens, depth), features = x.shape, weight.shape[0]
    cut = tiles or linear_tiles(tokens, features, depth, x.dtype)
    if activation == "swiglu":  # each feature has two rows of weights
        features //= 2
        cut = replace(cut, features=max(cut.features // 2, 8))
    out = torch.empty(tokens, features, device=x.device, dtype=x.dtype)
    if other is None:
        tiles_of_tokens, size, first, last = triton.cdiv(tokens, cut.tokens), 0, 0, 0
    else:  # all tokens of a tile use the same weight
        size, first, last = other.size, other.first, other.last
        others = tokens // size * (last - first)
        tiles_of_tokens = triton.cdiv(tokens - others, cut.tokens) + triton.cdiv(others, cut.tokens)
    _linear[(triton.cdiv(features, cut.features), tiles_of_tokens)](
        x,
        norm_weight,
        norm_bias,
        weight,
        None if other is None else other.weight,
        bias,
        gate,
        residual,
        out,
        tokens,
        features,
        size,
        first,
        last,
        eps,
        RMS=rms,
        ACTIVATION=_ACTIVATIONS[activation],
        DEPTH=depth,
        TOKENS=cut.tokens,
        FEATURES=cut.features,
        STEP=cut.depth,
        WARPS=cut.warps,
        num_warps=cut.warps,
        **overlap(x.device),
    )
    return out


# One binary for any number of tokens, whichever of them have another weight.
@triton.jit(do_not_specialize=["tokens", "size", "first", "last"])
def _linear(
    x,
    norm_weight,
    norm_bias,
    weight,
    other_weight,
    bias,
    gate,
    residual,
    out,
    tokens,
    features,
    size,
    first,
    last,
    eps,
    RMS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of the product. It loads known addresses before `wait`, and the rest right after it."""
    start(OVERLAP)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    if other_weight is None:
        token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    else:
        token, is_other = _tokens_of_a_kind(tl.program_id(1), tokens, size, first, last, TOKENS)
        weight = tl.where(is_other, other_weight, weight)
    inside = (token < tokens)[:, None] & (feature < features)[None, :]
    place = token[:, None] * features + feature[None, :]
    # The first part of the depth; for all but deep products this is all of it.
    some = _tile(weight, feature, features, 0, DEPTH, STEP, WARPS)
    factors = weight + features * DEPTH  # SwiGLU's second projection
    if ACTIVATION == 2:
        others = _tile(factors, feature, features, 0, DEPTH, STEP, WARPS)
    if norm_weight is not None:
        gain = _vector(norm_weight, 0, DEPTH, STEP, WARPS)
    if norm_bias is not None:
        shift = _vector(norm_bias, 0, DEPTH, STEP, WARPS)
    if bias is not None:
        offset = tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)
        if ACTIVATION == 2:
            offsets = tl.load(bias + features + feature, mask=feature < features, other=0.0).to(tl.float32)
    if gate is not None:
        opening = tl.load(gate + feature, mask=feature < features, other=0.0).to(tl.float32)
    wait(OVERLAP)
    if residual is not None:
        before = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    part = _tile(x, token, tokens, 0, DEPTH, STEP, WARPS)
    if norm_weight is not None:
        mean, scale = _statistics(part, x, token, tokens, eps, RMS, DEPTH, STEP, WARPS)
        y = (part.to(tl.float32) - mean) * scale * gain
        if norm_bias is not None:
            y += shift
        part = y.to(part.dtype)
    total = tl.dot(part, tl.permute(some, (0, 2, 1)), input_precision="ieee")
    if ACTIVATION == 2:
        factor = tl.dot(part, tl.permute(others, (0, 2, 1)), input_precision="ieee")
    for begin in range(STEP, DEPTH, STEP):
        some = _tile(weight, feature, features, begin, DEPTH, STEP, WARPS)
        part = _tile(x, token, tokens, begin, DEPTH, STEP, WARPS)
        if norm_weight is not None:
            y = (part.to(tl.float32) - mean) * scale * _vector(norm_weight, begin, DEPTH, STEP, WARPS)
            if norm_bias is not None:
                y += _vector(norm_bias, begin, DEPTH, STEP, WARPS)
            part = y.to(part.dtype)
        total = tl.dot(part, tl.permute(some, (0, 2, 1)), total, input_precision="ieee")
        if ACTIVATION == 2:
            others = _tile(factors, feature, features, begin, DEPTH, STEP, WARPS)
            factor = tl.dot(part, tl.permute(others, (0, 2, 1)), factor, input_precision="ieee")
    y = tl.sum(total, 0)
    if bias is not None:
        y += offset[None, :]
    y = y.to(out.dtype.element_ty)
    if ACTIVATION == 2:
        times = tl.sum(factor, 0)
        if bias is not None:
            times += offsets[None, :]
        times = times.to(out.dtype.element_ty)
        z = y.to(tl.float32)
        y = (z / (1.0 + tl.exp(-z))).to(out.dtype.element_ty).to(tl.float32) * times.to(tl.float32)
        y = y.to(out.dtype.element_ty)
    if ACTIVATION == 1:
        z = y.to(tl.float32)
        bent = 1.5957691216057308 * (z + 0.044715 * z * z * z)  # 2√(2/π): (1 + tanh u) / 2 is σ(2u)
        y = (z / (1.0 + tl.exp(-bent))).to(out.dtype.element_ty)
    if gate is not None:
        y = (y.to(tl.float32) * opening[None, :]).to(out.dtype.element_ty)
    if residual is not None:
        y = (before + y.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + place, y, mask=inside)


@triton.jit
def _tokens_of_a_kind(tile, tokens, size, first, last, TOKENS: tl.constexpr):
    """The tokens of a tile, and whether they are first..last − 1 of every `size`. Tiles of the other tokens
    come first. Padding lies past the last token."""
    others = last - first
    tiles = tl.cdiv(tokens // size * (size - others), TOKENS)
    is_other = tile >= tiles
    index = tl.where(is_other, tile - tiles, tile) * TOKENS + tl.arange(0, TOKENS)
    of_a_row = tl.where(is_other, others, size - others)
    row = index // of_a_row
    place = index % of_a_row
    place = tl.where(is_other, first + place, tl.where(place < first, place, place + others))
    return tl.where(row < tokens // size, row * size + place, tokens), is_other


@triton.jit
def _columns(begin, STEP: tl.constexpr, WARPS: tl.constexpr):
    """Columns begin..begin + STEP − 1 as (warps, 1, columns of a warp).

    Each warp takes a share of the depth: a single chain of all products would take longer than the loads.
    """
    share: tl.constexpr = STEP // WARPS
    return begin + tl.arange(0, WARPS)[:, None, None] * share + tl.arange(0, share)[None, None, :]


@triton.jit
def _tile(matrix, row, rows, begin, DEPTH: tl.constexpr, STEP: tl.constexpr, WARPS: tl.constexpr):
    """Some columns of some rows, (warps, rows, columns of a warp); zeros outside the matrix."""
    column = _columns(begin, STEP, WARPS)
    inside = (row < rows)[None, :, None]
    if DEPTH % STEP != 0:
        inside = inside & (column < DEPTH)
    return tl.load(matrix + row[None, :, None] * DEPTH + column, mask=inside, other=0.0)


@triton.jit
def _vector(vector, begin, DEPTH: tl.constexpr, STEP: tl.constexpr, WARPS: tl.constexpr):
    """Like `_tile`, for a single row, in float32."""
    return _tile(vector, tl.arange(0, 1), 1, begin, DEPTH, STEP, WARPS).to(tl.float32)


@triton.jit
def _statistics(
    part,
    x,
    token,
    tokens,
    eps,
    RMS: tl.constexpr,
    DEPTH: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Mean and inverse standard deviation of each token's row; the first part is already loaded. RMSNorm does
    not center, so its mean is 0."""
    if RMS:
        mean = tl.zeros((1, 1, 1), tl.float32)
    else:
        total = tl.sum(part.to(tl.float32), 2)
        for begin in range(STEP, DEPTH, STEP):
            total += tl.sum(_tile(x, token, tokens, begin, DEPTH, STEP, WARPS).to(tl.float32), 2)
        mean = (tl.sum(total, 0) / DEPTH)[None, :, None]
    square = _squares(part, mean, 0, DEPTH, STEP, WARPS)
    for begin in range(STEP, DEPTH, STEP):
        other = _tile(x, token, tokens, begin, DEPTH, STEP, WARPS)
        square += _squares(other, mean, begin, DEPTH, STEP, WARPS)
    return mean, (1.0 / tl.sqrt(tl.sum(square, 0) / DEPTH + eps))[None, :, None]


@triton.jit
def _squares(part, mean, begin, DEPTH: tl.constexpr, STEP: tl.constexpr, WARPS: tl.constexpr):
    """Each warp's sum of squared differences between a part and the mean."""
    apart = part.to(tl.float32) - mean
    if DEPTH % STEP != 0:
        apart = tl.where(_columns(begin, STEP, WARPS) < DEPTH, apart, 0.0)
    return tl.sum(apart * apart, 2)


@triton.jit
def _add_norm(
    residual,
    branch,
    gate,
    norm_weight,
    norm_bias,
    added,
    normed,
    eps,
    RMS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token per program. As in `_linear`, weights are loaded before `wait`."""
    start(OVERLAP)
    feature = tl.arange(0, WIDTH)
    inside = feature < FEATURES
    place = tl.program_id(0).to(tl.int64) * FEATURES + feature
    gain = tl.load(norm_weight + feature, mask=inside, other=0.0).to(tl.float32)
    if norm_bias is not None:
        shift = tl.load(norm_bias + feature, mask=inside, other=0.0).to(tl.float32)
    if gate is not None:
        opening = tl.load(gate + feature, mask=inside, other=0.0).to(tl.float32)
    wait(OVERLAP)
    before = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(branch + place, mask=inside, other=0.0)
    if gate is not None:
        y = (y.to(tl.float32) * opening).to(added.dtype.element_ty)
    x = (before + y.to(tl.float32)).to(added.dtype.element_ty)
    tl.store(added + place, x, mask=inside)
    x = x.to(tl.float32)
    apart = x  # 0 past the features
    if not RMS:
        apart = tl.where(inside, x - tl.sum(x, 0) / FEATURES, 0.0)
    z = apart / tl.sqrt(tl.sum(apart * apart, 0) / FEATURES + eps) * gain
    if norm_bias is not None:
        z += shift
    tl.store(normed + place, z, mask=inside)


@triton.jit
def _swiglu(x, out, FEATURES: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    """Some features of one token."""
    start(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = feature < FEATURES
    place = x + token * (2 * FEATURES) + feature
    wait(OVERLAP)
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    times = tl.load(place + FEATURES, mask=inside, other=0.0).to(tl.float32)
    y = (z / (1.0 + tl.exp(-z))).to(out.dtype.element_ty).to(tl.float32) * times
    tl.store(out + token * FEATURES + feature, y.to(out.dtype.element_ty), mask=inside)
