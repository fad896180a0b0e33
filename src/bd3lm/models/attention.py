"""Attention under a layout's rule, by whichever kernel suits the device.

- a layout with a kernel of its own (causal, bidirectional) needs no mask at all;
- on CUDA other layouts run in FlexAttention, compiled, which skips the empty parts of the mask;
- on a CPU they run as scaled dot-product attention with a dense mask: FlexAttention has no CPU backward.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bd3lm.models.layouts import Bidirectional, Causal, Layout, Span

Backend = Literal["auto", "dense", "flex"]
_FLEX_GRAPHS = 256


@dataclass(frozen=True)
class AttentionMask:
    """A layout's rule, ready for a kernel. With no mask and not causal, everything is visible."""

    dense: Tensor | None = None
    blocks: BlockMask | None = None
    causal: bool = False


def render(layout: Layout, queries: Span, device: torch.device, backend: Backend = "auto") -> AttentionMask:
    """The mask for some queries of a layout against all its positions."""
    if backend not in ("auto", "dense", "flex"):
        raise ValueError(f"backend must be 'auto', 'dense' or 'flex', got {backend!r}")
    if backend == "auto":
        if isinstance(layout, Bidirectional):
            return AttentionMask()
        if isinstance(layout, Causal) and queries == (0, layout.size):
            return AttentionMask(causal=True)
        backend = "flex" if device.type == "cuda" else "dense"
    if backend == "flex":
        return AttentionMask(blocks=layout.block_mask(queries, device))
    return AttentionMask(dense=layout.dense(queries, device))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """softmax(q kᵀ / √d + mask) v, all (rows, heads, positions, head_dim)."""
    if mask.blocks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.dense, is_causal=mask.causal)
    flex = _compiled_flex() if query.is_cuda else flex_attention
    attended: Tensor = flex(query, key, value, block_mask=mask.blocks)
    return attended


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    """FlexAttention compiled, one graph for each layout, dtype and shape that it meets.

    Dynamo gives up after eight graphs of a function and runs it eagerly, which for FlexAttention means the
    whole score matrix, without a word. A process that evaluates several block sizes meets more than eight.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _FLEX_GRAPHS)
    return torch.compile(flex_attention, dynamic=False)
