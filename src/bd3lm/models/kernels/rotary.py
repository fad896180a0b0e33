"""Triton: the gradient of a projection with rotated queries and keys, in one pass.

A compiler would write the rotated gradients first and join the three parts in a second pass. Imported only
with CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

_PAIRS = 2048  # numbers of each half that a program rotates


@custom_op("bd3lm::joined_gradient", mutates_args=())
def joined_gradient(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Join the gradients of queries (rows, positions, heads, head_dim), keys and values (.., kv_heads,
    head_dim) into the gradient of their projection (rows, positions, (heads + 2 kv_heads) · head_dim).

    cos and sin (positions, head_dim / 2) rotated queries and keys.
    """
    (rows, positions, heads, head_dim), kv_heads = query.shape, key.shape[2]
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    width = (heads + 2 * kv_heads) * head_dim
    out = torch.empty(rows, positions, width, dtype=query.dtype, device=query.device)
    half = head_dim // 2
    lines = triton.next_power_of_2(max(_PAIRS // half, 1))
    grid = (triton.cdiv(rows * positions * heads, lines), 3)
    _join[grid](
        query,
        key,
        value,
        cos,
        sin,
        out,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        rows * positions,
        positions,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        WIDTH=triton.next_power_of_2(half),
        LINES=lines,
        num_warps=8,
    )
    return out


@joined_gradient.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rows, positions, heads, head_dim = query.shape
    return query.new_empty(rows, positions, (heads + 2 * key.shape[2]) * head_dim)


@triton.jit
def _join(
    query,
    key,
    value,
    cos,
    sin,
    out,
    query_row,
    query_position,
    query_head,
    key_row,
    key_position,
    key_head,
    value_row,
    value_position,
    value_head,
    tokens,
    positions,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
):
    """Some heads at some positions of one of the three parts: rotated back, except for values."""
    part = tl.program_id(1)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    if part == 0:
        head, token = line % HEADS, line // HEADS
    else:
        head, token = line % KV_HEADS, line // KV_HEADS
    row, position = token // positions, token % positions
    column = tl.arange(0, WIDTH)[None, :]
    inside = (token < tokens)[:, None] & (column < HALF)
    if part == 0:
        source = query + (row * query_row + position * query_position + head * query_head)[:, None] + column
    elif part == 1:
        source = key + (row * key_row + position * key_position + head * key_head)[:, None] + column
    else:
        source = value + (row * value_row + position * value_position + head * value_head)[:, None] + column
    first = tl.load(source, mask=inside)
    second = tl.load(source + HALF, mask=inside)
    if part < 2:
        angle = position[:, None] * HALF + column
        c = tl.load(cos + angle, mask=inside)
        s = tl.load(sin + angle, mask=inside)
        x, y = first.to(tl.float32), second.to(tl.float32)
        first, second = (x * c + y * s).to(first.dtype), (y * c - x * s).to(second.dtype)
    first_head = tl.where(part == 0, 0, HEADS + (part - 1) * KV_HEADS)
    target = out + (token * (HEADS + 2 * KV_HEADS) + first_head + head)[:, None] * (2 * HALF) + column
    tl.store(target, first, mask=inside)
    tl.store(target + HALF, second, mask=inside)
