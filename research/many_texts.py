"""What the kernels for many tokens give to sampling, and how the kernel that draws tokens is best cut.

    PYTHONPATH=src python research/many_texts.py --out many.jsonl

On a GPU, alone. First the time of a draw, by how its two kernels are cut; then tokens/s of many texts with
GELU, or a branch's sum with the norm after it, as torch's own kernels compute them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.bench import Shape
from bd3lm.bench.sampling import SamplingCase, sampling_run
from bd3lm.models import decoding

_VOCABULARY = 50_258
# Tokens that are scored together, warps, and programs in all; then tokens that are summed together, warps.
_CUTS = (
    (1024, 4, 2048),
    (512, 2, 4096),
    (256, 1, 4096),
    (256, 1, 8192),
    (128, 1, 8192),
    (512, 1, 4096),
    (256, 1, 16384),
    (1024, 2, 2048),
)
_ROW_CUTS = ((4096, 8), (8192, 16), (8192, 32))
_DRAWS = 10  # in a graph: one alone would be lost in its launch
_LENGTH = 256  # tokens of a text


def plain_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Instead of `decoding._gelu_linear`."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def add_at_once(self: decoding._Stream, x: Tensor, linear: decoding._Linear, gate: Tensor | None) -> None:
    """Instead of `_Stream.add_linear`: no branch waits for a norm."""
    flat = decoding._flat(x)
    if len(flat) <= decoding._FEW_TO_ADD:
        self._x = decoding._kernels().linear_residual(flat, linear.weight, linear.bias, self._x, gate)
    else:
        y = self._product(flat, linear)
        self._x = self._x + (y if gate is None else gate * y)


_GELU = (decoding, "_gelu_linear", plain_gelu)
_ADD = (decoding._Stream, "add_linear", add_at_once)
_VARIANTS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "new": (),
    "plain gelu": (_GELU,),
    "plain add": (_ADD,),
    "plain both": (_GELU, _ADD),
    "new again": (),
}


def draws() -> Iterator[dict[str, Any]]:
    """Microseconds a draw from a nucleus of 0.9, of flat and of peaked logits; `same` are its tokens."""
    for rows, scale in ((256, 0.5), (256, 4.0), (64, 0.5), (1, 0.5)):
        first: Tensor | None = None
        for tile, warps, programs in _CUTS:
            us, tokens = _draw_time(rows, scale, _TILE=tile, _WARPS=warps, _PROGRAMS=programs)
            first = tokens if first is None else first
            cut = {"tile": tile, "warps": warps, "programs": programs}
            yield {"rows": rows, "scale": scale, **cut, "us": us, "same": torch.equal(tokens, first)}
        for tile, warps in _ROW_CUTS:
            us, tokens = _draw_time(rows, scale, _ROW_TILE=tile, _ROW_WARPS=warps)
            cut = {"row_tile": tile, "row_warps": warps}
            yield {"rows": rows, "scale": scale, **cut, "us": us, "same": torch.equal(tokens, first)}


def _draw_time(rows: int, scale: float, **cut: int) -> tuple[float, Tensor]:
    from triton.testing import do_bench

    from bd3lm.models.kernels import drawing as kernel

    torch.manual_seed(0)
    logits = scale * torch.randn(rows, _VOCABULARY, device="cuda")
    numbers, zero = torch.arange(rows, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def draw() -> Tensor:
        return kernel.draw(
            *(logits, numbers, numbers, zero),
            mask_id=_VOCABULARY - 1,
            temperature=1.0,
            top_p=0.9,
            inclusive=True,
        )

    with mock.patch.multiple(kernel, **cut):
        tokens = draw()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_DRAWS):
                draw()
        spent = do_bench(graph.replay, warmup=50, rep=200, return_mode="median")
    return round(1e3 * spent / _DRAWS, 1), tokens


def texts() -> Iterator[dict[str, Any]]:
    """Tokens/s, the median of three runs after one."""
    for name, shape, batch in (
        ("4", Shape(block_size=4), 256),
        ("16", Shape(block_size=16), 256),
        ("ar", Shape(method="ar"), 256),
        ("4", Shape(block_size=4), 64),
    ):
        case = SamplingCase(shape=shape, batch_size=batch, length=_LENGTH, dtype="bfloat16")
        for variant, patches in _VARIANTS.items():
            with ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(mock.patch.object(*patch))
                run = stack.enter_context(sampling_run(case, device=torch.device("cuda")))
                spent = [_seconds(run) for _ in range(4)]
            pace = round(case.tokens / median(spent[1:]))
            yield {"case": name, "batch": batch, "variant": variant, "tokens_per_s": pace}


def _seconds(run: Callable[[int], object]) -> float:
    begun = time.perf_counter()
    run(_LENGTH)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file to append JSON lines to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("these kernels need a GPU, and there is none")
    for part in (draws, texts):
        for record in part():
            line = json.dumps(record)
            print(line, flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
