"""Attention under a layout's rule, by whichever kernel suits the device.

- a layout with a kernel of its own (causal, bidirectional) needs no mask at all;
- on CUDA other layouts run in FlexAttention, compiled, which skips the empty parts of the mask;
- on a CPU they run as scaled dot-product attention with a dense mask: FlexAttention has no CPU backward.
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
_SHORT = 128  # for fewer queries FlexAttention has another kernel, which cuts tiles by itself


@dataclass(frozen=True)
class AttentionMask:
    """A layout's rule, ready for a kernel. With no mask and not causal, everything is visible.

    `fine` masks of blocks skip squares of 64 rather than 128.
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
    """softmax(q kᵀ / √d + mask) v, all (rows, heads, positions, head_dim); a head of keys and values may
    serve several of queries, which follow one another."""
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
    """Tiles no larger than the mask's squares; for heads of 64 what was measured fastest (decisions.md)."""
    # Not ROWS_GUARANTEED_SAFE, although each token sees itself: it means each row of each tile.
    options: dict[str, Any] = {"PRESCALE_QK": True}
    if not fine:
        return options
    if dtype == torch.float32:  # torch's own tiles for the backward pass are small enough
        return options | {"fwd_BLOCK_M": _FINE, "fwd_BLOCK_N": 32}
    options |= {"fwd_BLOCK_M": _FINE, "fwd_BLOCK_N": _FINE if head_dim <= 128 else 32}
    options |= {f"bwd_{name}": _FINE for name in ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")}
    return options | ({"num_warps": 4, "num_stages": 3} if head_dim <= 64 else {})


@lru_cache(maxsize=16)
def _has_fine_tiles(device: torch.device) -> bool:
    """Whether masks of 64 can be used: block diffusion over 1,024 has a tenth fewer tiles than with 128.

    They were measured on Hopper, and need a torch whose compiler can be offered another tile (`_FineTiles`).
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from torch._inductor import choices, compile_fx, virtualized

        _fine_config()
    except (ImportError, TypeError):  # another torch, with other insides
        return False
    return (
        hasattr(choices.InductorChoices, "get_flex_attention_bwd_configs")
        and hasattr(compile_fx, "compile_fx_inner")
        and hasattr(virtualized.V, "set_choices_handler")
    )


def compiler(graph: Any, inputs: Sequence[Any]) -> Any:
    """The backend of `torch.compile` for what holds attention: torch's own, offered fine tiles on Hopper.

    It asks the tensors of the graph where they are, since a network may be compiled before it is moved. No
    other graph is offered them. A backward pass is compiled when it first runs, on another thread, so each
    graph's own compilation is wrapped, and not this call.
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
    """Dynamo gives up after eight graphs of a function and runs it eagerly, without a word.

    For FlexAttention that means the whole score matrix. A process that evaluates several block sizes meets
    more than eight.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)


@lru_cache(maxsize=2)
def _compiled_flex(fine: bool) -> Any:
    """FlexAttention compiled, one graph for each layout, dtype and shape that it meets."""
    allow_many_graphs()
    return torch.compile(flex_attention, dynamic=False, backend=compiler if fine else "inductor")
