"""What the decoding kernels must do on any device, against plain torch and the plain cache.

Run as a module it is every small case in Triton's interpreter on the CPU, and prints what failed as JSON:
TRITON_INTERPRET must be set before Triton is imported, so the tests run it in a process of its own.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.models import (
    Bidirectional,
    BlockCausal,
    BlockCopies,
    BlockDecoding,
    Causal,
    Drafting,
    KVCache,
    Layout,
    TransformerConfig,
)
from bd3lm.models.attention import attend
from bd3lm.models.layouts import Span
from bd3lm.models.rotary import LinearScaling, Llama3Scaling, rotate, rotation, split_heads
from bd3lm.sampling import Request, sample
from tests.oracles.networks import tiny_transformer
from tests.sampling.loop_cases import autoregressive, speculative

# Of the largest number: float32 differs by the order of its sums, bfloat16 by a rounding of the result and
# of the weights that mix the values.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, *, slack: float = 1.0) -> None:
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert found.isfinite().all()
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < slack * TOLERANCE[dtype], f"off by {error:.2e} of the largest number"


def numbers(device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Draws tensors of a shape, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


# --- products ---


def products(device: str, dtype: torch.dtype, *, tokens: int, depth: int, features: int) -> None:
    """Both products, with everything that may stand around them and without, against torch in float64."""
    from bd3lm.models.kernels.decoding import linear_residual, norm_linear

    draw = numbers(device, dtype)
    x, weight = 3.0 * draw(tokens, depth) + 1.0, draw(features, depth) / depth**0.5
    slope, shift = 1.0 + 0.2 * draw(depth), draw(depth)
    bias, gate, residual = draw(features), 1.0 + draw(features), draw(tokens, features)

    def exact(normed: Tensor, with_bias: Tensor | None) -> Tensor:
        offset = None if with_bias is None else with_bias.double()
        return F.linear(normed.double(), weight.double(), offset)

    for rms, with_shift, with_bias, activation in (
        (False, None, None, None),
        (False, shift, bias, "gelu"),
        (False, None, bias, "swiglu"),
        (True, None, None, "swiglu"),
        (True, None, bias, None),
        (True, shift, bias, "gelu"),
    ):
        normed = exact_norm(x.double(), slope, with_shift, rms=rms)
        expected = exact(normed, with_bias)
        if activation == "gelu":
            expected = F.gelu(expected, approximate="tanh")
        rows = weight
        if activation == "swiglu":  # a number of features that is odd in the ragged case
            half = features // 2
            rows = weight[: 2 * half]
            with_bias = None if with_bias is None else with_bias[: 2 * half]
            expected = F.silu(expected[:, :half]) * expected[:, half : 2 * half]
        found = norm_linear(x, slope, with_shift, rows, with_bias, rms=rms, activation=activation, eps=1e-3)
        assert_close(found, expected, dtype, slack=2.0 if activation == "swiglu" else 1.0)  # of two products
    for with_bias, with_gate in ((None, None), (bias, None), (bias, gate), (None, gate)):
        expected = exact(x, with_bias)
        if with_gate is not None:
            expected = expected * with_gate.double()
        found = linear_residual(x, weight, with_bias, residual, with_gate)
        assert_close(found, expected + residual.double(), dtype)


def products_of_two_kinds(
    device: str,
    dtype: torch.dtype,
    *,
    rows: int,
    size: int,
    span: Span,
    depth: int = 80,
    features: int = 42,
) -> None:
    """Both products, where some positions of every row have another weight."""
    from bd3lm.models.kernels.decoding import OtherWeight, linear_residual, norm_linear

    draw, (start, stop) = numbers(device, dtype), span
    x, slope = 3.0 * draw(rows * size, depth) + 1.0, 1.0 + 0.2 * draw(depth)
    weight, second = (draw(features, depth) / depth**0.5 for _ in range(2))
    bias, residual = draw(features), draw(rows * size, features)
    place = torch.arange(rows * size, device=device) % size
    is_other = ((place >= start) & (place < stop)).unsqueeze(1)
    other = OtherWeight(second, size, start, stop)

    def exact(x: Tensor) -> Tensor:
        each = (F.linear(x.double(), w.double(), bias.double()) for w in (second, weight))
        return torch.where(is_other, *each)

    gate, value = exact(exact_norm(x.double(), slope, None, rms=True)).chunk(2, -1)
    found = norm_linear(x, slope, None, weight, bias, rms=True, activation="swiglu", eps=1e-3, other=other)
    assert_close(found, F.silu(gate) * value, dtype, slack=2.0)
    assert_close(linear_residual(x, weight, bias, residual, other=other), exact(x) + residual.double(), dtype)


def exact_norm(x: Tensor, slope: Tensor, shift: Tensor | None, *, rms: bool) -> Tensor:
    """LayerNorm or RMSNorm of float64 numbers, written out."""
    centred = x if rms else x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * slope.double()
    return normed if shift is None else normed + shift.double()


def halves(device: str, dtype: torch.dtype, *, tokens: int, features: int) -> None:
    from bd3lm.models.kernels.decoding import swiglu

    x = 3.0 * numbers(device, dtype)(tokens, 2 * features)
    gate, value = x.double().chunk(2, -1)
    assert_close(swiglu(x), F.silu(gate) * value, dtype)


def sums(device: str, dtype: torch.dtype, *, tokens: int, features: int) -> None:
    """A branch added to the stream and the norm of that, with a gate and a shift and without."""
    from bd3lm.models.kernels.decoding import add_norm

    draw = numbers(device, dtype)
    residual, branch = 3.0 * draw(tokens, features) + 1.0, draw(tokens, features)
    gate, slope, shift = 1.0 + draw(features), 1.0 + 0.2 * draw(features), draw(features)
    before = residual.clone(), branch.clone()
    for with_gate, with_shift, rms in (
        (None, None, False),
        (gate, shift, False),
        (None, shift, False),
        (gate, None, True),
        (None, None, True),
        (gate, shift, True),
    ):
        exact = branch.double() if with_gate is None else with_gate.double() * branch.double()
        exact = residual.double() + exact
        added, normed = add_norm(residual, branch, with_gate, slope, with_shift, rms=rms, eps=1e-3)
        assert_close(added, exact, dtype)
        assert_close(normed, exact_norm(exact, slope, with_shift, rms=rms), dtype)
    assert torch.equal(residual, before[0])
    assert torch.equal(branch, before[1])


# --- attention ---

PASSES = {
    "token by token": [Causal(1)] * 6,
    "causal": [Causal(3), Causal(7, keys_only=True), Causal(1), Causal(8)],
    "blocks": [
        BlockCausal(8, 4, keys_only=True),
        BlockDecoding(8, 4),
        BlockDecoding(4, 4),
        BlockCausal(8, 2),
    ],
    "blocks, causal when finished": [
        BlockDecoding(8, 4, causal_clean=True, keys_only=True),
        BlockDecoding(8, 4, causal_clean=True),
        BlockDecoding(4, 4, causal_clean=True),
        BlockDecoding(6, 2, causal_clean=True),
    ],
    "of drafts": [
        Causal(8),
        Drafting.of((0, 1), 1),
        Drafting.of((0, 0, 1, 1, 3, 5), 0),
        Drafting.of((0,), 3),
        Drafting.of((), 4),
    ],
    "of copies": [
        BlockCopies.of(2, 2, causal_clean=False),
        BlockCausal(8, 2),
        BlockCopies.of(2, 1, causal_clean=True),
    ],
    "of odd sizes": [BlockDecoding(6, 3), Bidirectional(5), BlockDecoding(7, 7), BlockDecoding(6, 3)],
}


def passes(
    device: str,
    dtype: torch.dtype,
    *,
    layouts: Sequence[Layout],
    rows: int,
    heads: int,
    head_dim: int,
    window: int,
    segment: int,
    lead: bool = False,
    filled: int = 0,
    splits: int | None = None,
    groups: int = 1,
    normed: bool = False,
) -> None:
    """Passes that keep some of their tokens, a number of each row's own, against the plain cache.

    Each pass is read in its layout's span, in whole, and in part; every time the ring must end up the same.
    `filled` tokens are in the ring at the start. The default cut of the kernel, and one with `splits`. Each
    of the `heads` of keys serves `groups` of queries; `normed` ones go through a norm first.
    """
    from bd3lm.models.kernels.ring import attend_ring, ring_rule, ring_tiles

    draw, choice = numbers(device, dtype), torch.Generator().manual_seed(1)
    cache = KVCache(
        layers=1,
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        window=window,
        segment=segment,
        device=device,
        dtype=dtype,
    )
    if lead:
        cache.lead_in(torch.randint(segment + 1, (rows,), generator=choice).to(device))
    if filled:
        cache.keys, cache.values = draw(*cache.keys.shape), draw(*cache.keys.shape)
        cache.advance(filled)
        gone = torch.randint(min(filled, window), (rows,), generator=choice).to(device)
        torch.maximum(cache.starts, torch.minimum(cache.starts + gone, cache.ends), out=cache.starts)
    norms = {name: 1.0 + 0.3 * draw(head_dim) for name in ("query_norm", "key_norm")} if normed else {}
    for layout in layouts:
        size = layout.size
        qkv = draw(rows, size, (groups + 2) * heads * head_dim)
        ring = cache.keys[0].clone(), cache.values[0].clone()
        cos, sin = rotation(cache.text_positions(layout, qkv), head_dim, base=10000.0, dtype=torch.float32)
        query, key, value = split_heads(qkv, groups * heads, heads)
        if normed:
            query, key = (
                exact_norm(part.double(), slope, None, rms=True).to(dtype)
                for part, slope in ((query, norms["query_norm"]), (key, norms["key_norm"]))
            )
        rope = cos.unsqueeze(2), sin.unsqueeze(2)
        query, key = (rotate(part, rope).transpose(1, 2) for part in (query, key))
        seen_keys, seen_values = cache.extend(0, key, value.transpose(1, 2))
        rule = ring_rule(layout, window, segment)
        assert rule is not None
        for span in {layout.read, (0, size), (size // 2, size), (0, 0)}:
            reads = span[1] - span[0]
            cuts = [None]
            if splits is not None:
                cut = ring_tiles(rows * heads, reads * groups, cache.capacity, head_dim, dtype)
                cuts.append(replace(cut, text=16, splits=splits))
            for tiles in cuts:
                keys, values = (part.clone() for part in ring)
                ring_of = keys, values, cache.starts, cache.ends
                found = attend_ring(qkv, cos, sin, *ring_of, rule, span, tiles=tiles, eps=1e-3, **norms)
                torch.testing.assert_close(keys, cache.keys[0], rtol=2**-7, atol=1e-6)  # turned, then rounded
                assert torch.equal(values, cache.values[0])
                assert found.shape == (rows, reads, groups * heads * head_dim)
                if not reads:
                    continue
                mask = cache.mask(layout, span, torch.device(device), "dense")
                expected = attend(
                    query[:, :, slice(*span)].double(), seen_keys.double(), seen_values.double(), mask
                )
                assert_close(found, expected.transpose(1, 2).flatten(2), dtype)
        cache.advance(torch.randint(size + 1, (rows,), generator=choice).to(device))


def unknown_layouts_have_no_rule(_device: str, _dtype: torch.dtype) -> None:
    from bd3lm.models import BlockDiffusion
    from bd3lm.models.kernels.decoding import ring_rule, supports

    assert ring_rule(BlockDiffusion(8, 4), 10, 8) is None

    def supported(hidden: int, heads: int, dtype: torch.dtype) -> bool:
        return supports(TransformerConfig(vocab_size=4, hidden=hidden, heads=heads), dtype)

    assert supported(768, 12, torch.bfloat16)
    for hidden, heads, dtype in ((768, 16, torch.float32), (64, 8, torch.float32), (64, 4, torch.float64)):
        assert not supported(hidden, heads, dtype)


def passes_that_do_not_fit_are_refused(device: str, dtype: torch.dtype) -> None:
    from bd3lm.models.kernels.ring import RingRule, attend_ring

    draw = numbers(device, dtype)
    ring, turn, bounds = draw(1, 1, 12, 16), draw(1, 5, 8), torch.zeros(1, dtype=torch.long, device=device)
    for rule in (RingRule(8, 4, 1, 0), RingRule(8, 5, 1, 0)):
        with pytest.raises(ValueError, match="12 slots and 5 tokens"):
            attend_ring(draw(1, 5, 48), turn, turn, ring, ring, bounds, bounds, rule, (0, 5))
    drafts = RingRule(7, 5, 1, 0, listed=Drafting.of((0,), 1))
    with pytest.raises(ValueError, match=r"must have the 4 tokens .* got 5"):
        attend_ring(draw(1, 5, 48), turn, turn, ring, ring, bounds, bounds, drafts, (0, 5))


def turns(device: str, _dtype: torch.dtype) -> None:
    """Of far positions too, and of those before the text."""
    from bd3lm.models.kernels.decoding import rotations

    ends = torch.tensor([-3, 0, 17, 100_000, 12_345_678], device=device)
    positions = ends.unsqueeze(1) + torch.arange(5, device=device)
    for head_dim, base, scaling in (
        (16, 10000.0, None),
        (64, 10000.0, LinearScaling(factor=4.0)),
        (128, 500_000.0, None),
        (128, 500_000.0, Llama3Scaling(factor=8.0, original_context=8192)),
    ):
        found = rotations(ends, 5, head_dim=head_dim, base=base, scaling=scaling)
        expected = rotation(positions, head_dim, base=base, dtype=torch.float32, scaling=scaling)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)
    places = torch.tensor([0, 1, 1, 2, 1], device=device)
    found = rotations(ends, 5, head_dim=16, base=10000.0, places=places)
    expected = rotation(ends.unsqueeze(1) + places, 16, base=10000.0, dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)


def rotated_gradients(device: str, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int) -> None:
    """The gradient of a projection, whose queries and keys were rotated, against autograd's."""
    from bd3lm.models.kernels.rotary import joined_gradient

    draw, positions = numbers(device, dtype), 7
    projected = draw(2, positions, (heads + 2 * kv_heads) * head_dim).double().requires_grad_()
    cos, sin = rotation(torch.arange(positions, device=device), head_dim, base=100.0, dtype=torch.float32)
    query, key, value = split_heads(projected, heads, kv_heads)
    rope = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    parts = rotate(query, rope), rotate(key, rope), value
    # As attention gives them: heads before positions in memory, for all but the values.
    grads = [draw(2, part.shape[2], positions, head_dim).transpose(1, 2) for part in parts]
    grads[2] = grads[2].contiguous()
    torch.autograd.backward(parts, [grad.double() for grad in grads])
    found = joined_gradient(*grads, cos, sin)
    assert projected.grad is not None
    assert_close(found, projected.grad, dtype)


Case = Callable[[str, torch.dtype], None]
SMALL = {"rows": 2, "heads": 2, "head_dim": 16}
# --- whole networks ---


@torch.no_grad()
def networks(device: str, dtype: torch.dtype, *, rows: int, **config: Any) -> None:
    """Passes of a whole network by `decode` and by the plain forward, each after its own cache.

    Rows are filled to different lengths, and read one or several positions of a pass.
    """
    from bd3lm.models.decoding import decode

    shape = {"hidden": 32, "heads": 2} | config
    model = tiny_transformer(3, dtype=torch.float64, **shape).to(device, dtype)
    exact = tiny_transformer(3, dtype=torch.float64, **shape).to(device)
    fast, plain = (each.new_cache(rows, segment=12, window=20) for each in (model, exact))
    generator = torch.Generator().manual_seed(1)
    for turn, layout in enumerate(NETWORK_PASSES):
        tokens = torch.randint(0, 4, (rows, layout.size), generator=generator).to(device)
        found = decode(model, tokens, layout, fast)
        expected = exact(tokens, layout=layout, cache=plain)
        if expected.numel():
            assert_close(found, expected, dtype, slack=10.0)  # layers add up
        kept = (torch.arange(rows, device=device) * 3 + turn) % (layout.size + 1)
        for cache in (fast, plain):
            cache.advance(kept)


@torch.no_grad()
def speculating_networks(device: str, dtype: torch.dtype, *, rows: int, **config: Any) -> None:
    """Passes that hold drafts and masks, the text going on along another branch in every row, and past the
    window. Some are of vectors that stand for tokens."""
    from bd3lm.models.decoding import decode

    # A smaller gain: in half precision the plain passes of some rows are off by 3 % with more.
    shape = {"hidden": 32, "heads": 2, "additions": 2, "gain": 1.0} | config
    model = tiny_transformer(3, dtype=torch.float64, **shape).to(device, dtype)
    exact = tiny_transformer(3, dtype=torch.float64, **shape).to(device)
    fast, plain = (each.new_cache(rows, segment=16, window=8) for each in (model, exact))
    generator = torch.Generator().manual_seed(1)
    for turn, layout in enumerate(DRAFTING_PASSES):
        tokens = torch.randint(0, 4, (rows, layout.size), generator=generator).to(device)
        shown, exactly_shown = (each.embed(tokens) if turn % 2 else tokens for each in (model, exact))
        found = decode(model, shown, layout, fast)
        expected = exact(exactly_shown, layout=layout, cache=plain)
        assert_close(found, expected, dtype, slack=10.0)
        paths = layout.behind() if isinstance(layout, Drafting) else [list(range(layout.size))]
        longest = max(len(path) for path in paths)
        ends = [(row + turn) % len(paths) for row in range(rows)]
        path = torch.tensor([paths[end] + list(range(len(paths[end]), longest)) for end in ends])
        kept = torch.tensor([len(paths[end]) for end in ends])
        for cache in (fast, plain):
            cache.advance_along(path.to(device), kept.to(device))


DRAFTING_PASSES = [
    Causal(5),
    Drafting.of((0, 0, 1, 2, 2, 5, 6), 1),
    Drafting.of((0, 1, 2), 3),
    Drafting.of((), 2),
]


def speculated_texts(device: str, _dtype: torch.dtype) -> None:
    """Texts by fused passes that verify trees of drafts are those of plain passes, a token each."""
    from bd3lm.models import decoding, transformer

    model = tiny_transformer(
        2, dtype=torch.float32, hidden=32, layers=1, additions=2, mask_vector=True, vocab_size=5, gain=1.0
    ).to(device)
    writer = speculative(model, context=10, drafts=2, candidates=2)
    requests = [Request(torch.tensor([0, 1, place]), place, 14) for place in (2, 3)]
    with patch.object(transformer, "can_decode", lambda *_: False):
        plain = sample(autoregressive(model, context=10), requests, batch_size=2)
    with (
        patch.object(decoding, "runs_kernels", lambda _: True),
        patch.object(transformer, "decode", wraps=decoding.decode) as decode,
    ):
        fused = sample(writer, requests, batch_size=2)
    assert [each.tokens.tolist() for each in fused] == [each.tokens.tolist() for each in plain]
    assert sum(fused[0].accepted) > 0
    assert any(isinstance(call.args[2], Drafting) for call in decode.call_args_list)


NETWORK_PASSES = [  # of several sizes, read whole, in part and not at all; `passes` has all layouts
    BlockDecoding(12, 4, keys_only=True),
    BlockDecoding(8, 4),
    BlockDecoding(4, 4),
    BlockDecoding(8, 4, causal_clean=True),
    Causal(7, keys_only=True),
    Causal(1),
]


LLAMA: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": 1e-6,
    "mlp": "swiglu",
    "mlp_width": 40,
    "mlp_bias": False,
    "head_bias": False,
    "mask_vector": True,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "": {},
    ", adaptive norms": {"adaln": True},
    ", Llama": LLAMA
    | {"heads": 3, "kv_heads": 1, "hidden": 48, "rotary_scaling": LinearScaling(factor=2.0), "tied": True},
    ", Qwen": LLAMA | {"heads": 4, "kv_heads": 2, "head_dim": 16, "qk_norm": True, "qkv_bias": True},
}


CASES: dict[str, Case] = {
    **{
        f"networks, {rows} rows{name}": partial(networks, rows=rows, **config)
        for rows in (1, 2, 6)
        for name, config in NETWORKS.items()
    },
    **{
        f"speculating networks, {rows} rows{name}": partial(
            speculating_networks, rows=rows, **NETWORKS[name] | {"layers": layers}
        )
        for rows, name, layers in ((1, ", Llama", 2), (2, ", Qwen", 1), (3, "", 2), (3, ", Llama", 1))
    },
    "speculated texts": speculated_texts,
    "rotated gradients": partial(rotated_gradients, heads=4, kv_heads=4, head_dim=16),
    "rotated gradients of grouped heads": partial(rotated_gradients, heads=6, kv_heads=2, head_dim=24),
    "no rule": unknown_layouts_have_no_rule,
    "turns": turns,
    "no fit": passes_that_do_not_fit_are_refused,
    "products": partial(products, tokens=5, depth=64, features=48),
    "products of one token": partial(products, tokens=1, depth=256, features=32),
    "products, ragged": partial(products, tokens=19, depth=80, features=41),
    "products, deep": partial(products, tokens=3, depth=5000, features=16),
    "products of two kinds": partial(products_of_two_kinds, rows=3, size=7, span=(2, 5)),
    "products of two kinds, drafts": partial(products_of_two_kinds, rows=2, size=16, span=(4, 16)),
    "products of two kinds, one alone": partial(products_of_two_kinds, rows=3, size=4, span=(0, 4)),
    "halves": partial(halves, tokens=5, features=24),
    "halves, ragged": partial(halves, tokens=2, features=1031),
    "sums": partial(sums, tokens=33, features=64),
    "sums, ragged": partial(sums, tokens=3, features=41),
    **{
        f"passes {name}{', after a lead-in' if lead else ''}": partial(
            passes, layouts=layouts, window=20, segment=8, lead=lead, filled=0 if lead else 60, **SMALL
        )
        for name, layouts in PASSES.items()
        for lead in (False, True)
    },
    "passes of grouped heads": partial(
        passes,
        layouts=PASSES["causal"] + PASSES["blocks"],
        window=20,
        segment=8,
        filled=60,
        groups=3,
        **SMALL,
    ),
    "passes of normed heads": partial(
        passes,
        layouts=PASSES["blocks, causal when finished"],
        window=70,
        segment=8,
        filled=90,
        splits=3,
        groups=2,
        normed=True,
        **SMALL,
    ),
    "passes longer than the window": partial(
        passes, layouts=PASSES["blocks"] + PASSES["causal"], window=3, segment=8, splits=2, **SMALL
    ),
    "passes of drafts and copies longer than the window": partial(
        passes,
        layouts=[Causal(6), Drafting.of((0, 0, 1, 3, 4), 0), BlockCopies.of(2, 2, causal_clean=True)],
        window=3,
        segment=8,
        splits=2,
        groups=2,
        normed=True,
        **SMALL,
    ),
    "passes around a long ring": partial(
        passes, layouts=PASSES["blocks"], window=70, segment=9, filled=1000, splits=3, **SMALL
    ),
    "a pass of several tiles": partial(
        passes, layouts=[BlockDecoding(72, 4), Causal(72)], window=40, segment=72, filled=50, **SMALL
    ),
}


FAMILIES = ("networks", "speculat", "passes")


def interpreted() -> Iterator[tuple[str, torch.dtype]]:
    """Every case in float32 or float16: the interpreter multiplies bfloat16 wrongly.

    Those of a family take turns, since one takes up to half a minute: each size or layout has both types, and
    each type is with and without the rest. A GPU has every case in every type.
    """
    both = (torch.float32, torch.float16)
    for family in FAMILIES:
        for index, name in enumerate(name for name in CASES if name.startswith(family)):
            yield name, both[(index // 2 + index) % 2]
    yield from product((name for name in CASES if not name.startswith(FAMILIES)), both)


def main() -> None:
    failed, done = {}, set()
    for name, dtype in interpreted():
        done.add(name)
        try:
            CASES[name]("cpu", dtype)
        except Exception:
            failed[name] = f"{dtype}: {traceback.format_exc()}"
    assert done == set(CASES)
    json.dump(failed, sys.stdout)


if __name__ == "__main__":
    main()
