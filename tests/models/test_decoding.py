"""Which passes the fused kernels take, the warning for unsupported networks, and merged weights."""

import gc
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bd3lm.models import (
    BlockCopies,
    BlockDiffusion,
    Causal,
    Drafting,
    Transformer,
    TransformerConfig,
    decoding,
)
from tests.oracles.networks import tiny_transformer


@pytest.mark.parametrize("head_dim", [24, 32])
def test_a_network_without_fused_kernels_warns_once(head_dim, monkeypatch):
    kernels = SimpleNamespace(
        supports=lambda config, dtype: config.head_dim == 32, ring_rule=lambda *_: "causal"
    )
    monkeypatch.setattr(decoding, "_kernels", lambda: kernels)
    monkeypatch.setattr(decoding, "runs_kernels", lambda device: True)
    decoding._say_not_fused.cache_clear()
    config = TransformerConfig(vocab_size=5, layers=1, hidden=16, heads=2, head_dim=head_dim, context=8)
    network = Transformer(config).eval()
    cache = network.new_cache(1, segment=1)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        passes = [
            decoding.can_decode(network, torch.zeros(1, 1, dtype=torch.long), Causal(1), cache)
            for _ in range(3)
        ]
    assert passes == [head_dim == 32] * 3
    said = [str(each.message) for each in caught]
    if head_dim == 32:
        assert not said
    else:
        assert len(said) == 1
        assert "they support a head_dim of 16, 32, 64 or 128, got 24" in said[0]


@pytest.mark.parametrize("layout", [Drafting.of((0, 0, 1), 2), BlockCopies.of(4, 1, causal_clean=True)])
@torch.no_grad()
def test_speculative_passes_use_the_kernels_with_and_without_additions(layout, monkeypatch):
    monkeypatch.setattr(decoding, "runs_kernels", lambda device: True)
    monkeypatch.setattr(decoding, "_serves", lambda network: True)
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    for additions in (0, 2):
        network = tiny_transformer(4, additions=additions, dtype=torch.float32)
        cache = network.new_cache(1, segment=12)
        tokens = torch.zeros(1, layout.size, dtype=torch.long)
        assert decoding.can_decode(network, tokens, layout, cache)
        assert decoding.can_decode(network, network.embed(tokens), layout, cache)
        assert not decoding.can_decode(network, tokens, BlockDiffusion(6, 2), cache)


def merged_of(network: Transformer) -> list[dict[str, torch.Tensor]]:
    """The expected merged weights."""
    return [
        {name: addition.merged(getattr(layer, name).weight) for name, addition in layer.additions.items()}
        for layer in network.layers
    ]


@torch.no_grad()
def optimize_unseen(network: Transformer) -> None:
    """Change weights as fused optimizers do, between two rounds of a loop that trains and samples."""
    network.train()
    for parameter in network.parameters():
        parameter.data.add_(0.5)
    network.eval()


CHANGES: dict[str, Callable[[Transformer], object]] = {
    "of an addition": lambda network: torch.nn.init.ones_(network.layers[1].additions["mlp_in"].up),
    "of a weight": lambda network: torch.nn.init.ones_(network.layers[0].qkv.weight),
    "other weights": lambda network: network.load_state_dict(
        tiny_transformer(5, additions=2).to(network.dtype).state_dict()
    ),
    "training": optimize_unseen,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_merged_weights_are_updated_in_place_when_the_network_changes(change):
    network = tiny_transformer(4, additions=2)
    with torch.inference_mode():
        first = decoding._merged(network)
        assert decoding._merged(network) is first
    assert [set(layer) for layer in first] == [{"qkv", "attention_out", "mlp_in", "mlp_out"}] * 2
    places = [weight.data_ptr() for layer in first for weight in layer.values()]
    torch.testing.assert_close(first, merged_of(network), rtol=0, atol=0)
    key = network.graph_key
    assert network.graph_key == key
    change(network)
    assert network.graph_key != key  # recorded passes do not check for stale merged weights
    with torch.inference_mode():
        found = decoding._merged(network)
    torch.testing.assert_close(found, merged_of(network), rtol=0, atol=0)
    assert [weight.data_ptr() for layer in found for weight in layer.values()] == places


def test_merged_weights_follow_the_precision_and_go_with_the_network():
    network = tiny_transformer(4, additions=2)
    decoding._merged(network)
    network.half()
    found = decoding._merged(network)
    torch.testing.assert_close(found, merged_of(network), rtol=0, atol=0)
    assert found[0]["qkv"].dtype == torch.float16
    weight = weakref.ref(found[0]["qkv"])
    del network, found
    gc.collect()
    assert weight() is None


def test_a_weight_in_half_precision_is_merged_with_one_rounding():
    network = tiny_transformer(4, additions=2)
    layer, exact = network.layers[0], merged_of(network)[0]["qkv"]
    network.half()
    found = layer.additions["qkv"].merged(layer.qkv.weight).double()
    summands = layer.qkv.weight.abs().max() + exact.abs().max()
    assert (found - merged_of(network.double())[0]["qkv"]).abs().max() <= 2**-11 * summands


def test_graphs_of_a_network_without_additions_outlive_training():
    network = tiny_transformer(4)
    key = network.graph_key
    network.train().eval()
    assert network.graph_key == key


def test_narrowing_a_pass_keeps_its_merged_weights():
    """In every row, with additions that begin before the positions that are read."""
    draw = torch.Generator().manual_seed(0)
    x, weight, merged = (torch.randn(*shape, generator=draw) for shape in ((2, 7, 4), (3, 4), (3, 4)))
    stream = decoding._Stream(x, (2, 5))
    stream.narrow((3, 7))
    found = stream._product(stream._x, decoding._Linear(weight, None, merged)).view(2, 4, 3)
    torch.testing.assert_close(found[:, :2], x[:, 3:5] @ merged.T)
    torch.testing.assert_close(found[:, 2:], x[:, 5:] @ weight.T)
    stream.narrow((2, 4))
    assert stream._product(stream._x, decoding._Linear(weight, None, merged)).equal(
        x[:, 5:].flatten(0, 1) @ weight.T
    )
