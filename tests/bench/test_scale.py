"""The arithmetic of docs/scale.md: what it counts is there, and the page says what it gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bd3lm.bench.scale import RATE, SIZES, Scale, kept_by_layer, memory_table, time_table
from bd3lm.bench.shapes import Shape
from bd3lm.methods import AutoregressiveMethod, LanguageModelConfig
from bd3lm.models import Bidirectional, TransformerConfig
from bd3lm.runs.memory import training_memory

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
KINDS: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama": {"norm": "rms", "mlp": "swiglu", "mlp_width": 96, "mlp_bias": False, "kv_heads": 2},
    "Qwen3": {
        "norm": "rms",
        "mlp": "swiglu",
        "mlp_width": 96,
        "mlp_bias": False,
        "kv_heads": 2,
        "qk_norm": True,
    },
}


def kept(network: TransformerConfig, rows: int, length: int, *, recompute: bool) -> int:
    """Bytes that a pass keeps for its gradients, weights aside, each storage once."""
    model = network.build()
    if recompute:
        model.recompute_layers()
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(network.vocab_size, (rows, length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        states = model(tokens, layout=Bidirectional(length))
    assert states.requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_what_layers_keep_is_counted(kind: str) -> None:
    """Of 8 layers more than of 2, so that what is kept once drops out; in float32, on a CPU."""
    rows, length = 2, 64
    few = TransformerConfig(
        vocab_size=16, layers=2, hidden=64, heads=4, context=length, dropout=0.0, **KINDS[kind]
    )
    many = replace(few, layers=8)
    added = kept(many, rows, length, recompute=False) - kept(few, rows, length, recompute=False)
    expected = 6 * rows * length * kept_by_layer(few, wide=4, narrow=4)
    assert added == pytest.approx(expected, rel=0.02)
    again = kept(many, rows, length, recompute=True) - kept(few, rows, length, recompute=True)
    assert again <= 6 * rows * length * 4 * few.hidden * 1.05


def test_recomputed_layers_keep_their_input() -> None:
    one = Scale(shape=Shape(method="ar", size="qwen3-0.6b", vocabulary=151_936))
    network, layer = one.shape.network, one.positions * kept_by_layer(one.shape.network)
    assert one.activations(recompute=False) == 28 * layer
    assert one.activations(recompute=True) == 28 * 1024 * 4 * network.hidden + layer
    joint = replace(one, shape=replace(one.shape, method="joint"))
    assert joint.activations(recompute=False) == 2 * one.activations(recompute=False)


def test_states_are_those_that_a_run_counts() -> None:
    one = Scale(shape=Shape(method="ar", size="small"))
    config = LanguageModelConfig(network=one.shape.network, method=AutoregressiveMethod(), mask_id=50_257)
    counted = training_memory(config)
    assert (one.weights, one.gradients, one.moments) == (counted.weights, counted.gradients, counted.moments)
    assert one.states == 20 * one.parameters
    assert replace(one, average=False).states == 16 * one.parameters
    assert replace(one, processes=8).states == pytest.approx(one.states / 8)
    assert one.seconds_per_token(recompute=False) * RATE * 1024 == pytest.approx(one.shape.training_flops(1))
    assert one.seconds_per_token(recompute=True) == pytest.approx(
        4 / 3 * one.seconds_per_token(recompute=False)
    )


def test_sizes_are_what_they_are_called() -> None:
    for name, size, vocabulary in SIZES:
        number = Scale(shape=Shape(method="ar", size=size, vocabulary=vocabulary)).parameters / 1e9
        assert abs(number - float(name.split()[0])) < 0.25, (name, number)


def test_the_page_has_these_numbers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (memory_table(), time_table()):
        assert "\n".join(table) in page
