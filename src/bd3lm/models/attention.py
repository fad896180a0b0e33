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
    if not query.is_cuda:
        attended: Tensor = flex_attention(query, key, value, block_mask=mask.blocks)
        return attended
    options = _kernel_options(query.shape[-1], query.device)
    attended = _compiled_flex()(query, key, value, block_mask=mask.blocks, kernel_options=options)
    return attended


def _kernel_options(head_dim: int, device: torch.device) -> dict[str, Any]:
    """What was measured fastest (docs/performance.md): on Hopper, smaller tiles than FlexAttention's own."""
    # Not ROWS_GUARANTEED_SAFE, although each token sees itself: it means each row of each tile.
    always: dict[str, Any] = {"PRESCALE_QK": True}
    if head_dim > 64 or torch.cuda.get_device_capability(device) < (9, 0):
        return always
    shared = {"num_warps": 4, "num_stages": 3}
    forward = shared | {"BLOCK_M": 64, "BLOCK_N": 64}
    backward = shared | {"BLOCK_M1": 32, "BLOCK_N1": 128, "BLOCK_M2": 128, "BLOCK_N2": 32}
    return (
        always
        | {f"fwd_{name}": value for name, value in forward.items()}
        | {f"bwd_{name}": value for name, value in backward.items()}
    )


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    """FlexAttention compiled, one graph for each layout, dtype and shape that it meets.

    Dynamo gives up after eight graphs of a function and runs it eagerly, which for FlexAttention means the
    whole score matrix, without a word. A process that evaluates several block sizes meets more than eight.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _FLEX_GRAPHS)
    return torch.compile(flex_attention, dynamic=False)
