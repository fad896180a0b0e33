"""Attention under a layout's rule, with the kernel that suits the device.

- a layout with a kernel of its own (causal, bidirectional) needs no mask
- on CUDA other layouts run in compiled FlexAttention, which skips the empty parts of the mask
- on a CPU they run as scaled dot-product attention with a dense mask: FlexAttention has no CPU backward
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bd3lm.models.layouts import MASK_GRANULARITY, Bidirectional, Causal, Layout, Span

Backend = Literal["auto", "dense", "flex"]
_GRAPHS = 256
_FINE = 64
_SHORT = 128  # for fewer queries FlexAttention switches to another kernel, which picks its own tiles


@dataclass(frozen=True)
class AttentionMask:
    """A layout's rule in the form that a kernel takes. With no mask and not causal, everything is visible.

    `fine` block masks skip squares of 64 instead of 128.
    """

    dense: Tensor | None = None
    blocks: BlockMask | None = None
    fine: bool = False
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
        fine = queries[1] - queries[0] >= _SHORT and _has_fine_tiles(device)
        granularity = _FINE if fine else MASK_GRANULARITY
        return AttentionMask(blocks=layout.block_mask(queries, device, granularity=granularity), fine=fine)
    dense = layout.dense(queries, device)
    return AttentionMask(dense=dense if layout.rows is None else dense.unsqueeze(1))  # one for all heads


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """softmax(q kᵀ / √d + mask) v, all (rows, heads, positions, head_dim). Each key/value head may serve
    several consecutive query heads."""
    grouped = query.shape[1] != key.shape[1]
    if mask.blocks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask.dense, is_causal=mask.causal, enable_gqa=grouped
        )
    if not query.is_cuda:
        attended: Tensor = flex_attention(query, key, value, block_mask=mask.blocks, enable_gqa=grouped)
        return attended
    options = _kernel_options(query.shape[-1], query.dtype, mask.fine)
    flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex(mask.fine)
    attended = flex(query, key, value, block_mask=mask.blocks, kernel_options=options, enable_gqa=grouped)
    return attended


def _kernel_options(head_dim: int, dtype: torch.dtype, fine: bool) -> dict[str, Any]:
    """Tiles no larger than the mask's squares. For heads of 64 these were the fastest (decisions.md)."""
    # Not ROWS_GUARANTEED_SAFE, although each token sees itself: it promises this for every row of every tile.
    options: dict[str, Any] = {"PRESCALE_QK": True}
    if not fine:
        return options
    if dtype == torch.float32:  # torch's own backward tiles are small enough
        return options | {"fwd_BLOCK_M": _FINE, "fwd_BLOCK_N": 32}
    options |= {"fwd_BLOCK_M": _FINE, "fwd_BLOCK_N": _FINE if head_dim <= 128 else 32}
    options |= {f"bwd_{name}": _FINE for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}
    return options | ({"num_warps": 4, "num_stages": 3} if head_dim <= 64 else {})


@lru_cache(maxsize=16)
def _has_fine_tiles(device: torch.device) -> bool:
    """Whether masks with squares of 64 can be used. Block diffusion over 1,024 has a tenth fewer tiles than
    with 128.

    They were measured on Hopper, and need a torch whose compiler accepts another tile size (`_FineTiles`).
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from torch._inductor import choices, compile_fx, virtualized

        _fine_config()
    except (ImportError, TypeError):  # a torch with other internals
        return False
    return (
        hasattr(choices.InductorChoices, "get_flex_attention_bwd_configs")
        and hasattr(compile_fx, "compile_fx_inner")
        and hasattr(virtualized.V, "set_choices_handler")
    )


def compiler(graph: Any, inputs: Sequence[Any]) -> Any:
    """The `torch.compile` backend for graphs with attention: torch's own, plus fine tiles on Hopper.

    It looks at the device of the graph's inputs, because a network may be compiled before it is moved. Other
    graphs see no fine tiles. torch compiles a backward pass when it first runs, on another thread, so the
    compilation of each graph is wrapped rather than this call.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    if not any(isinstance(given, Tensor) and _has_fine_tiles(given.device) for given in inputs):
        return compile_fx(graph, inputs)

    def compile_one(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(_FineTiles(V.choices)):
            return compile_fx_inner(*args, **kwargs)

    return compile_fx(graph, inputs, inner_compile=compile_one)


class _FineTiles:
    """The compiler's choices, with 64-wide tiles for FlexAttention's backward pass.

    For heads of 64 on Hopper torch offers only 128-wide backward tiles and rejects 64-wide masks, whatever
    the kernel options say, so we add a 64-wide config wherever none of torch's own divides 64.
    """

    def __init__(self, choices: Any) -> None:
        self._choices = choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._choices, name)

    def get_flex_attention_bwd_configs(self, *args: Any, **kwargs: Any) -> list[Any]:
        found: list[Any] = self._choices.get_flex_attention_bwd_configs(*args, **kwargs)
        return found if any(_divides(cut, _FINE) for cut in found) else [*found, _fine_config()]


def _fine_config() -> Any:
    from torch._inductor.template_heuristics.triton import FlexBwDConfig

    return FlexBwDConfig(_FINE, _FINE, _FINE, _FINE, num_stages=3, num_warps=4)


def _divides(cut: Any, size: int) -> bool:
    return all(size % block == 0 for block in (cut.block_m1, cut.block_n1, cut.block_m2, cut.block_n2))


def allow_many_graphs() -> None:
    """Raise Dynamo's limit of eight graphs per function, after which it silently runs the function eagerly.

    For FlexAttention, eager means the whole score matrix, and a process that evaluates several block sizes
    needs more than eight graphs.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)


@lru_cache(maxsize=2)
def _compiled_flex(fine: bool) -> Any:
    """FlexAttention, compiled once for each layout, dtype and shape."""
    allow_many_graphs()
    return torch.compile(flex_attention, dynamic=False, backend=compiler if fine else "inductor")
