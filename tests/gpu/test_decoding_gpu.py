"""The decoding kernels on CUDA: plain torch and the plain cache, at small and real sizes, in all precisions.

Run with `pytest --gpu -m gpu tests/gpu`.
"""

import pytest
import torch
from torch import Tensor

from bd3lm.models import BlockCausal, BlockCopies, BlockDecoding, Causal, Drafting, Layout
from bd3lm.models.rotary import rotation
from tests.oracles.decoding_cases import CASES, numbers, passes, products, products_of_two_kinds, sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, HEADS, DIM = 768, 12, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_do_what_plain_torch_does(name, dtype):
    CASES[name]("cuda", dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 16, 17, 32, 64, 130])
@pytest.mark.parametrize(("depth", "features"), [(768, 2304), (768, 768), (768, 3072), (3072, 768)])
def test_products_of_a_real_network(tokens, depth, features, dtype):
    products("cuda", dtype, tokens=tokens, depth=depth, features=features)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("depth", "features"), [(576, 960), (576, 576), (576, 3072), (1536, 576)])
def test_products_of_a_real_network_with_additions(rows, depth, features, dtype):
    products_of_two_kinds("cuda", dtype, rows=rows, size=16, span=(4, 16), depth=depth, features=features)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "features"), [(33, 768), (2048, 768), (512, 1280), (64, 4096)])
def test_sums_of_a_real_network(tokens, features, dtype):
    sums("cuda", dtype, tokens=tokens, features=features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_passes_of_a_real_network(rows, head_dim, dtype):
    """Segments of 1 to 128 tokens, at an early, a middle and a late place of the text."""
    layouts = [
        BlockCausal(128, 4, keys_only=True),
        BlockCausal(128, 4),
        BlockDecoding(8, 4),
        BlockDecoding(4, 4),
        BlockDecoding(32, 16, causal_clean=True),
        BlockDecoding(16, 16),
        Drafting.of((0, 1, 2), 3),
        Drafting.of((0, 1, 2, 0, 0, 1, 1, 2, 2), 4),
        BlockCopies.of(16, 6, causal_clean=True),
        Causal(1),
    ]
    for filled in (0, 500, 100_000):
        passes(
            "cuda",
            dtype,
            layouts=layouts,
            rows=rows,
            heads=HEADS,
            head_dim=head_dim,
            window=972,
            segment=128,
            filled=filled,
            splits=5,
        )


def test_passes_of_many_rows():
    layouts = [BlockDecoding(8, 4), BlockDecoding(32, 16), Drafting.of((0, 1, 2), 3), Causal(1)]
    passes(
        "cuda",
        torch.bfloat16,
        layouts=layouts,
        rows=256,
        heads=HEADS,
        head_dim=DIM,
        window=1068,
        segment=32,
        filled=2000,
    )


class Layers:
    """Two layers over a ring, as one pass of fused kernels; where additions apply, the second's weights stand
    for those of the first that have them in them, and the other way around."""

    def __init__(self, rows: int, layout: Layout, dtype: torch.dtype) -> None:
        draw, segment = numbers("cuda", dtype), layout.size
        self.rows, self.layout = rows, layout
        self.window, self.capacity = 500, 500 + segment
        shape = (2, rows, HEADS, self.capacity, DIM)
        self.keys, self.values, self.x = draw(*shape), draw(*shape), draw(rows * segment, HIDDEN)
        self.ends = torch.full((rows,), 700, device="cuda")
        self.starts = self.ends - self.window
        self.turn = rotation(
            torch.arange(rows * segment, device="cuda").view(rows, segment),
            DIM,
            base=10000.0,
            dtype=torch.float32,
        )
        self.weights = [
            (draw(HIDDEN), *(draw(*size) / size[1] ** 0.5 for size in SIZES), draw(4 * HIDDEN), draw(HIDDEN))
            for _ in range(2)
        ]

    def __call__(self) -> Tensor:
        from bd3lm.models.kernels.decoding import (
            OtherWeight,
            attend_ring,
            linear_residual,
            norm_linear,
            ring_rule,
        )

        def other(weight: Tensor) -> OtherWeight | None:
            added = self.layout.added
            return None if added == (0, 0) else OtherWeight(weight, self.layout.size, *added)

        rule = ring_rule(self.layout, self.window, self.layout.size)
        span, x = (0, self.layout.size), self.x
        for layer, (norm, qkv, out, inner, outer, bias_in, bias_out) in enumerate(self.weights):
            _, *others, _, _ = self.weights[1 - layer]
            other_qkv, other_out, other_inner, other_outer = (other(weight) for weight in others)
            projected = norm_linear(x, norm, None, qkv, None, other=other_qkv)
            projected = projected.view(self.rows, -1, 3 * HIDDEN)
            ring = self.keys[layer], self.values[layer]
            attended = attend_ring(projected, *self.turn, *ring, self.starts, self.ends, rule, span)
            x = linear_residual(attended.flatten(0, 1), out, None, x, other=other_out)
            widened = norm_linear(x, norm, None, inner, bias_in, activation="gelu", other=other_inner)
            x = linear_residual(widened, outer, bias_out, x, other=other_outer)
        return x


SIZES = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        (1, BlockDecoding(8, 4)),
        (3, BlockDecoding(32, 16)),
        (64, BlockDecoding(4, 2)),
        (1, Drafting.of((0, 1, 2), 3)),
        (2, Drafting.of((0, 1, 0, 1), 2)),
        (1, BlockCopies.of(4, 2, causal_clean=True)),
    ],
    ids=str,
)
def test_overlapping_launches_in_a_graph_give_the_numbers_of_separate_ones(rows, layout, dtype, monkeypatch):
    """Bit for bit, every time, and with the text moving on between two replays."""
    from bd3lm.models.kernels import decoding, ring

    layers = Layers(rows, layout, dtype)
    before = layers.keys.clone(), layers.values.clone()
    layers()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for module in (decoding, ring):
        monkeypatch.setattr(module, "overlap", lambda _: {"OVERLAP": False})
    for moved in (0, 3, 500, 10_001):
        layers.ends += moved
        layers.starts += moved
        results = []
        for run in (graph.replay, graph.replay, layers, layers):
            layers.keys.copy_(before[0])
            layers.values.copy_(before[1])
            plain = run()
            results.append([(found if plain is None else plain).clone(), layers.keys.clone()])
        for result in results[1:]:
            assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))
