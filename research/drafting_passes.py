"""What a pass that speculates takes on a GPU, by the drafts, masks and texts in it and how it is computed.

    PYTHONPATH=src python research/drafting_passes.py --out drafting.jsonl

On a GPU, alone. A network of the shape of SmolLM2-135M with additions of rank 64, of random weights in
bfloat16; no text goes on. Beside the passes as they are computed: plain ones, the fused products up to other
numbers of tokens (`decoding._FEW_OF_TWO_KINDS`), the library's above them, and tiles of other sizes.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bd3lm.models import BlockCopies, Causal, Drafting, Layout, Transformer, TransformerConfig, decoding

_SHAPE = TransformerConfig(
    vocab_size=49_152,
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    context=2048,
    norm="rms",
    mlp="swiglu",
    mlp_width=1536,
    mlp_bias=False,
    head_bias=False,
    tied=True,
    mask_vector=True,
    additions=64,
)
_TEXT = 512  # tokens before a pass
_LAYOUTS: dict[str, Layout] = {
    "a token": Causal(1),
    "16 tokens": Causal(16),
    "32 tokens": Causal(32),
    **{
        f"{drafts} drafts, {masks} masks each": Drafting.of(range(drafts), masks)
        for drafts, masks in ((0, 3), (1, 1), (2, 2), (3, 0), (3, 3), (4, 4), (5, 5), (7, 7))
    },
    "3 drafts of 2 candidates, 3 masks each": Drafting.of((0, 1, 2, 0, 1, 2), 3),
    **{f"{copies} copies of 4": BlockCopies.of(4, copies, causal_clean=False) for copies in (1, 2, 4)},
}
_FUSED_UP_TO = (0, 16, 32, 64, 128)
_FEATURES = (8, 16, 32)


def variants(tokens: int, has_additions: bool) -> Iterator[tuple[str, list[Any]]]:
    """Ways to compute a pass, and what they patch."""
    from bd3lm.models.kernels import decoding as kernels

    yield "as it is", []
    yield "plain", [mock.patch("bd3lm.models.transformer.can_decode", return_value=False)]
    if not has_additions:
        return
    for few in _FUSED_UP_TO:
        yield f"fused up to {few}", [mock.patch.object(decoding, "_FEW_OF_TWO_KINDS", few)]
    if tokens <= decoding._FEW_OF_TWO_KINDS:
        cut = kernels.linear_tiles
        for features in _FEATURES:

            def other_cut(*shape: Any, features: int = features) -> Any:
                return replace(cut(*shape), features=features)

            yield f"tiles of {features} features", [mock.patch.object(kernels, "linear_tiles", other_cut)]


@torch.inference_mode()
def microseconds(network: Transformer, layout: Layout, rows: int, patches: list[Any]) -> float:
    from triton.testing import do_bench

    cache = network.new_cache(rows, segment=layout.size)
    cache.advance(_TEXT)
    tokens = torch.zeros(rows, layout.size, dtype=torch.long, device="cuda")
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        network(tokens, layout=layout, cache=cache)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            network(tokens, layout=layout, cache=cache)
    spent: float = do_bench(graph.replay, warmup=50, rep=200, return_mode="median")
    return round(1e3 * spent, 1)


def records() -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    network = Transformer(_SHAPE).to("cuda", torch.bfloat16).eval()
    for rows in (1, 4, 16, 64):
        for name, layout in _LAYOUTS.items():
            for variant, patches in variants(rows * layout.size, layout.added[0] < layout.added[1]):
                us = microseconds(network, layout, rows, patches)
                yield {"rows": rows, "pass": name, "positions": layout.size, "variant": variant, "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file to append JSON lines to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need a GPU, and there is none")
    for record in records():
        line = json.dumps(record)
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
