"""Which passes the fused kernels take, and what is said of a network that they do not."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from bd3lm.models import Causal, Transformer, TransformerConfig, decoding


@pytest.mark.parametrize("head_dim", [24, 32])
def test_a_network_without_fused_kernels_is_said_once(head_dim, monkeypatch):
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
        assert "they take heads of 16, 32, 64 or 128 numbers, got 24" in said[0]
