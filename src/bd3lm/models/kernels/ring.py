"""Triton: attention of a pass over a KV ring, and its rotations. Imported only with CUDA."""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bd3lm.models.kernels.overlap import overlap, start, wait
from bd3lm.models.layouts import (
    Bidirectional,
    BlockCausal,
    BlockCopies,
    BlockDecoding,
    Causal,
    Drafting,
    Layout,
    Span,
)
from bd3lm.models.rotary import RotaryScaling, Rotation, frequencies

_PROGRAMS = 132  # about as many as a GPU has multiprocessors; with fewer, the text is split
_LEAST_TEXT = 64  # positions that justify a program of their own


def rotations(
    ends: Tensor,
    segment: int,
    *,
    head_dim: int,
    base: float,
    scaling: RotaryScaling | None = None,
    places: Tensor | None = None,
) -> Rotation:
    """cos and sin (rows, segment, head_dim / 2) of consecutive positions from each end, as in
    `rotary.rotation`.

    With `places` (segment,) the positions are not consecutive: each place is a distance from the end.
    """
    shape = (ends.shape[0], segment, head_dim // 2)
    cos, sin = (torch.empty(shape, device=ends.device, dtype=torch.float32) for _ in range(2))
    _rotate[(ends.shape[0], segment)](
        ends,
        places,
        None if scaling is None else _frequencies(head_dim, base, scaling, ends.device),
        cos,
        sin,
        SLOPE=-2 * math.log2(base) / head_dim,
        HALF=head_dim // 2,
        num_warps=1,
        **overlap(ends.device),
    )
    return cos, sin


@lru_cache(maxsize=16)
def _frequencies(head_dim: int, base: float, scaling: RotaryScaling, device: torch.device) -> Tensor:
    """Computed once: a pass over few tokens notices every launch."""
    return frequencies(head_dim, base=base, scaling=scaling, device=device)


@triton.jit
def _rotate(ends, places, slopes, cos, sin, SLOPE: tl.constexpr, HALF: tl.constexpr, OVERLAP: tl.constexpr):
    """One token, in double precision, which the angles of a long text need. A kernel argument would be
    single."""
    start(OVERLAP)
    row, token = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, HALF)
    place = (row * tl.num_programs(1) + token) * HALF + index
    after = token
    if places is not None:
        after = tl.load(places + token)
    wait(OVERLAP)
    position = (tl.load(ends + row) + after).to(tl.float64)
    if slopes is not None:
        angle = position * tl.load(slopes + index)
    else:
        angle = position * tl.exp2(index.to(tl.float64) * SLOPE)
    tl.store(cos + place, tl.cos(angle).to(tl.float32))
    tl.store(sin + place, tl.sin(angle).to(tl.float32))


@dataclass(frozen=True)
class RingRule:
    """Who sees whom in a pass through a ring, as numbers.

    A token sees the groups of `block_size` in the pass up to its own group, except that the first `causal`
    tokens see nothing after themselves. Of the text it sees the `window` positions before its group. If
    `listed` is set, the pass does not follow this rule: a table then holds each pair of tokens.
    """

    window: int
    segment_capacity: int
    block_size: int
    causal: int
    listed: Layout | None = None

    @property
    def capacity(self) -> int:
        return self.window + self.segment_capacity

    def listing(self, device: torch.device) -> "Listing | None":
        return None if self.listed is None else _listing(self.listed, self.window, device)


class Listing(NamedTuple):
    """`KVCache.mask` for a pass, token by token."""

    allowed: Tensor  # (size, size), 1 if a token sees another token of the pass, else 0
    groups: Tensor  # (size,) where each token's group begins, counted from the end of the text
    places: Tensor  # (size,) where each token sits, counted from the end of the text


@cache  # never dropped, not even older ones: CUDA graphs read it at its address
def _listing(layout: Layout, window: int, device: torch.device) -> Listing:
    token = torch.arange(layout.size, device="cpu")
    groups, places = layout.group_start(token), layout.text_positions()
    # If a group begins further from the text than the window, it no longer sees the first tokens of the pass.
    allowed = layout.dense() & (token >= groups.unsqueeze(1) - window)
    return Listing(
        allowed.to(device, torch.uint8), groups.to(device, torch.int32), places.to(device, torch.int32)
    )


def ring_rule(layout: Layout, window: int, segment_capacity: int) -> RingRule | None:
    """The rule of a layout's passes through a ring; None if the kernel does not know this layout."""
    causal = 0
    if type(layout) is Causal:
        block_size = 1
    elif type(layout) is Bidirectional:
        block_size = layout.length
    elif type(layout) is BlockCausal:
        block_size = layout.block_size
    elif type(layout) is BlockDecoding:
        block_size = layout.block_size
        if layout.causal_clean:
            causal = layout.length if layout.keys_only else layout.length - layout.block_size
    elif type(layout) in (Drafting, BlockCopies):
        return RingRule(window, segment_capacity, 1, 0, listed=layout)
    else:
        return None
    return RingRule(window, segment_capacity, block_size, causal)


@dataclass(frozen=True)
class RingTiles:
    """How attention is cut: queries and text positions per step, and programs that share a text."""

    queries: int
    text: int
    splits: int
    warps: int
    stages: int


def ring_tiles(programs: int, reads: int, capacity: int, head_dim: int, dtype: torch.dtype) -> RingTiles:
    """How to cut attention, given the number of programs (rows times key/value heads) and of reads per
    program (positions read times the query heads that share a key/value head)."""
    queries = min(max(triton.next_power_of_2(reads), 16), 64)
    programs *= triton.cdiv(reads, queries)
    splits = max(min(_PROGRAMS // max(programs, 1), capacity // _LEAST_TEXT), 1)
    text = 32 if dtype == torch.float32 or head_dim > 64 else 64
    return RingTiles(queries=queries, text=text, splits=splits, warps=4, stages=3 if splits > 1 else 2)


def attend_ring(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    ends: Tensor,
    rule: RingRule,
    read: Span,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    tiles: RingTiles | None = None,
) -> Tensor:
    """Rotate a pass's queries and keys, attend to the ring and to the pass, and write the pass into the ring.

    qkv (rows, segment, (heads + 2 kv_heads) · head_dim) holds the projected queries, keys and values. cos and
    sin (rows, segment, head_dim / 2) are float32. keys and values (rows, kv_heads, capacity, head_dim) are
    one layer's ring, and starts and ends (rows,) delimit its text, as in `KVCache`. With `query_norm` and
    `key_norm` (head_dim,), each head passes an RMSNorm with these weights before its rotation. Returns (rows,
    stop − start, heads · head_dim) for the positions in `read`. If `read` is empty, the kernel only writes
    the ring.
    """
    (rows, segment, width), (_, kv_heads, capacity, head_dim) = qkv.shape, keys.shape
    heads = width // head_dim - 2 * kv_heads
    groups = heads // kv_heads
    if capacity != rule.capacity or segment > rule.segment_capacity:
        raise ValueError(
            f"the ring must have {rule.capacity} slots and the pass up to {rule.segment_capacity} tokens for "
            f"{rule}, got {capacity} slots and {segment} tokens"
        )
    if rule.listed is not None and segment != rule.listed.size:
        raise ValueError(f"the pass must have the {rule.listed.size} tokens of {rule}, got {segment}")
    allowed, group_starts, places = rule.listing(qkv.device) or (None, None, None)
    reads = read[1] - read[0]
    queries = reads * groups
    cut = tiles or ring_tiles(rows * kv_heads, queries, capacity, head_dim, qkv.dtype)
    splits = cut.splits if reads else 1
    out = torch.empty(rows, reads, heads * head_dim, device=qkv.device, dtype=qkv.dtype)
    # For each split: the sum of values, the sum of weights and the largest score, in float32.
    partial = None
    if splits > 1:
        shape = (rows, heads, reads, splits, head_dim + 2)
        partial = torch.empty(shape, device=qkv.device, dtype=torch.float32)
    _attend[(rows * kv_heads, max(triton.cdiv(queries, cut.queries), 1), splits)](
        qkv,
        query_norm,
        key_norm,
        eps,
        cos,
        sin,
        keys,
        values,
        starts,
        ends,
        allowed,
        group_starts,
        places,
        out,
        partial,
        rule.window,
        rule.segment_capacity,
        BLOCK=rule.block_size,
        CAUSAL=rule.causal,
        HEADS=heads,
        GROUPS=groups,
        DIM=head_dim,
        SEGMENT=segment,
        FIRST=read[0],
        READS=reads,
        QUERIES=cut.queries,
        TOKENS=min(max(triton.next_power_of_2(segment), 16), cut.text),
        TEXT=cut.text,
        SPLITS=splits,
        SCALE=math.log2(math.e) / math.sqrt(head_dim),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **overlap(qkv.device),
    )
    if splits > 1:
        _combine[(rows * heads * reads,)](
            partial,
            out,
            HEADS=heads,
            DIM=head_dim,
            READS=reads,
            SPLITS=splits,
            PADDED=triton.next_power_of_2(splits),
            num_warps=1,
            **overlap(qkv.device),
        )
    return out


@triton.jit(do_not_specialize=["window", "segment_capacity"])
def _attend(
    qkv,
    query_norm,
    key_norm,
    eps,
    cos,
    sin,
    keys,
    values,
    starts,
    ends,
    allowed,
    group_starts,
    places,
    out,
    partial,
    window,
    segment_capacity,
    BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SEGMENT: tl.constexpr,
    FIRST: tl.constexpr,
    READS: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    TEXT: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some queries of one row and one key/value head, over a share of the text.

    Other programs may write the ring meanwhile, which is safe. A query sees positions p of the text with end
    − window ≤ p < end; the positions w being written have end ≤ w < end + segment. So 0 < w − p < segment +
    window ≤ capacity, and two positions share a slot only if they are a multiple of the capacity apart. The
    pass's own keys and values come from `qkv`, never from the ring. No kernel of this kind writes a
    `Listing`, so it is read without waiting.
    """
    start(OVERLAP)
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    row = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(1)
    split = tl.program_id(2)
    capacity = window + segment_capacity
    keys += (row * KV_HEADS + kv_head) * capacity * DIM
    values += (row * KV_HEADS + kv_head) * capacity * DIM
    qkv += row * SEGMENT * WIDTH
    own_keys = qkv + (HEADS + kv_head) * DIM
    own_values = own_keys + KV_HEADS * DIM
    cos += row * SEGMENT * (DIM // 2)
    sin += row * SEGMENT * (DIM // 2)
    column = tl.arange(0, DIM)[None, :]
    place = tile * QUERIES + tl.arange(0, QUERIES)  # position by position, each with all its heads
    head = kv_head * GROUPS + place % GROUPS
    # Queries that pad the tile repeat the last position, so that every softmax has something to sum.
    query = tl.minimum(FIRST + place // GROUPS, tl.maximum(FIRST + READS, 1) - 1)
    if allowed is None:
        group = query // BLOCK * BLOCK
        text_place = query
        first_group = (FIRST + tile * QUERIES // GROUPS) // BLOCK * BLOCK
    else:
        group = tl.load(group_starts + query)
        text_place = tl.load(places + query)
        first_group = tl.min(group, 0)
    wait(OVERLAP)
    # From here on all positions are counted from the end of the text.
    end = tl.load(ends + row)
    first = tl.maximum(tl.load(starts + row) - end, -window).to(tl.int32)
    end_slot = ((end + segment_capacity) % capacity).to(tl.int32)
    q = _rotated(qkv + (head * DIM)[:, None], query_norm, eps, cos, sin, query, DIM, WIDTH)
    largest = tl.full((QUERIES,), -1e30, tl.float32)  # finite: a query may see nothing in this share
    total = tl.zeros((QUERIES,), tl.float32)
    mixture = tl.zeros((QUERIES, DIM), tl.float32)

    for begin in tl.range(0, tl.where(split == 0, SEGMENT, 0), TOKENS, num_stages=1):
        key = begin + tl.arange(0, TOKENS)
        there = key < SEGMENT
        token = tl.minimum(key, SEGMENT - 1)
        k = _rotated(own_keys, key_norm, eps, cos, sin, token, DIM, WIDTH)
        v = tl.load(own_values + token[:, None] * WIDTH + column)
        if tile == 0:
            slot = end_slot + key
            slot = tl.where(slot < capacity, slot, slot - capacity)[:, None] * DIM + column
            tl.store(keys + slot, k, mask=there[:, None])
            tl.store(values + slot, v, mask=there[:, None])
        if READS > 0:
            if allowed is None:
                latest = tl.where(query < CAUSAL, query, group + (BLOCK - 1))[:, None]
                seen = there[None, :] & (key[None, :] <= latest) & (key[None, :] >= group[:, None] - window)
            else:
                pair = query[:, None] * SEGMENT + token[None, :]
                seen = there[None, :] & (tl.load(allowed + pair) != 0)
            # If the text begins inside the pass, the tokens before it see each other, and nothing sees them.
            seen = seen & ((key[None, :] >= first) | (text_place[:, None] < first))
            largest, total, mixture = _take(q, k, v, seen, largest, total, mixture, SCALE)

    if READS > 0:
        oldest = tl.maximum(first, first_group - window)
        visible = tl.maximum(-oldest, 0)
        share = tl.cdiv(tl.cdiv(visible, SPLITS), TEXT) * TEXT
        for begin in range(split * share, tl.minimum((split + 1) * share, visible), TEXT):
            index = begin + tl.arange(0, TEXT)
            key = oldest + tl.minimum(index, visible - 1)
            slot = end_slot + key
            slot = tl.where(slot >= 0, slot, slot + capacity)[:, None] * DIM + column
            seen = (index < visible)[None, :] & (key[None, :] >= group[:, None] - window)
            k = tl.load(keys + slot)
            v = tl.load(values + slot)
            largest, total, mixture = _take(q, k, v, seen, largest, total, mixture, SCALE)

        wanted = place < READS * GROUPS
        read = place // GROUPS
        if SPLITS == 1:
            out += row * READS * HEADS * DIM
            mixture = (mixture / total[:, None]).to(out.dtype.element_ty)
            place = (read * HEADS + head) * DIM
            tl.store(out + place[:, None] + column, mixture, mask=wanted[:, None])
        else:
            partial += (row * HEADS * READS * SPLITS + split) * (DIM + 2)
            place = (head * READS + read) * (SPLITS * (DIM + 2))
            tl.store(partial + place[:, None] + column, mixture, mask=wanted[:, None])
            tl.store(partial + place + DIM, total, mask=wanted)
            tl.store(partial + place + (DIM + 1), largest, mask=wanted)


@triton.jit
def _rotated(part, norm, eps, cos, sin, token, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The queries or keys of some tokens, with or without a norm, rotated by their text positions as
    `rotary.rotate` does. `part` points to those of position 0, as (1, 1) or per token."""
    column = tl.arange(0, DIM)
    other = (column + DIM // 2) % DIM
    angle = token[:, None] * (DIM // 2) + (column % (DIM // 2))[None, :]
    part += token[:, None] * WIDTH
    x = tl.load(part + column[None, :])
    partner = tl.load(part + other[None, :]).to(tl.float32)
    if norm is not None:
        wide = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        partner = (partner * scale * tl.load(norm + other)[None, :].to(tl.float32)).to(x.dtype).to(tl.float32)
        x = (wide * scale * tl.load(norm + column)[None, :].to(tl.float32)).to(x.dtype)
    partner = tl.where((column < DIM // 2)[None, :], -partner, partner)
    return (x.to(tl.float32) * tl.load(cos + angle) + partner * tl.load(sin + angle)).to(x.dtype)


@triton.jit
def _take(q, k, v, seen, largest, total, mixture, SCALE: tl.constexpr):
    """Add some keys to a running softmax: the largest score, the sum of weights, the weighted values."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
    score = tl.where(seen, score, -float("inf"))
    larger = tl.maximum(largest, tl.max(score, 1))
    weight = tl.exp2(score - larger[:, None])
    shrink = tl.exp2(largest - larger)
    mixture = tl.dot(weight.to(v.dtype), v, mixture * shrink[:, None], input_precision="ieee")
    return larger, total * shrink + tl.sum(weight, 1), mixture


@triton.jit
def _combine(
    partial,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    READS: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The softmax of one query of one head over its whole text, combined from its shares."""
    start(OVERLAP)
    program = tl.program_id(0)
    row = program // (HEADS * READS)
    head = program // READS % HEADS
    read = program % READS
    split = tl.arange(0, PADDED)
    column = tl.arange(0, DIM)
    there = split < SPLITS
    partial += (program * SPLITS + split) * (DIM + 2)
    wait(OVERLAP)
    largest = tl.load(partial + (DIM + 1), mask=there, other=-1e30)
    scale = tl.exp2(largest - tl.max(largest, 0))
    total = tl.sum(tl.load(partial + DIM, mask=there, other=0.0) * scale, 0)
    mixture = tl.load(partial[:, None] + column[None, :], mask=there[:, None], other=0.0) * scale[:, None]
    place = ((row * READS + read) * HEADS + head) * DIM + column
    tl.store(out + place, (tl.sum(mixture, 0) / total).to(out.dtype.element_ty))
