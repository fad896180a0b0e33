"""Properties of every network that a config can describe, on tiny random configs."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bd3lm.interop import load, save
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import (
    Bidirectional,
    BlockCausal,
    BlockDiffusion,
    Causal,
    KVTape,
    Transformer,
    TransformerConfig,
)
from bd3lm.models.rotary import LinearScaling, Llama3Scaling
from tests.oracles.networks import logits_of, tiny_transformer

FLAGS = ("qk_norm", "qkv_bias", "attention_bias", "mlp_bias", "head_bias", "tied", "mask_vector", "adaln")
SCALINGS = (
    None,
    LinearScaling(factor=3.0),
    Llama3Scaling(factor=8.0, original_context=16, low_freq_factor=0.5, high_freq_factor=2.0),
)


@st.composite
def shapes(draw: Any) -> dict[str, Any]:
    """Fields of a valid config; sizes with a default are sometimes left out."""
    groups, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, shape = groups * kv_heads, {name: draw(st.booleans()) for name in FLAGS}
    if draw(st.booleans()):
        shape |= {"head_dim": 2 * draw(st.integers(1, 4)), "hidden": draw(st.integers(1, 13))}
    else:
        shape["hidden"] = heads * 2 * draw(st.integers(1, 2))
    if draw(st.booleans()):
        shape["mlp_width"] = draw(st.integers(1, 9))
    return shape | {
        "vocab_size": draw(st.integers(2, 70)),
        "layers": draw(st.integers(1, 3)),
        "heads": heads,
        "kv_heads": kv_heads,
        "mlp": draw(st.sampled_from(("gelu", "swiglu"))),
        "norm": draw(st.sampled_from(("layer", "rms"))),
        "norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        "rotary_base": draw(st.sampled_from((100.0, 10_000.0, 1e6))),
        "rotary_scaling": draw(st.sampled_from(SCALINGS)),
        "dropout": draw(st.sampled_from((0.0, 0.5))),
        "additions": draw(st.integers(0, min(2, shape["hidden"]))),
        "time_conditioning": shape["adaln"] and draw(st.booleans()),
        "conditioning_dim": draw(st.integers(1, 5)),
        "context": 16,
    }


def random_ids(model: Transformer, rows: int, length: int, seed: int) -> Tensor:
    """Random tokens from everything the network reads, which may include a mask outside its vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.input_vocab_size, (rows, length), generator=generator)


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@given(shapes(), st.integers(1, 3))
@torch.no_grad()
def test_a_cache_changes_no_logits(shape: dict[str, Any], size: int) -> None:
    """Three blocks one by one against the whole text: block-causal, and causal token by token."""
    model = tiny_transformer(3, **shape)
    text, noisy = random_ids(model, 2, 3 * size, 0), random_ids(model, 2, 3 * size, 1)
    cache, clean = model.new_cache(2, segment=size), torch.zeros(2, 3 * size)
    for start in range(0, 3 * size, size):
        block, told = slice(start, start + size), torch.full((2, size), 0.7)
        whole = torch.cat((text[:, :start], noisy[:, block]), 1)
        noise = torch.cat((clean[:, :start], told), 1)
        expected = logits_of(model, whole, BlockCausal(start + size, size), noise=noise)[:, start:]
        found = logits_of(model, noisy[:, block], Bidirectional(size), noise=told, cache=cache)
        assert_same(found, expected)
        finished = BlockCausal(size, size, keys_only=True)
        model(text[:, block], layout=finished, noise=clean[:, block], cache=cache)
        cache.advance(size)
    cache = model.new_cache(2, segment=1)
    whole = logits_of(model, text, Causal(3 * size), noise=clean)
    for place in range(3 * size):
        here = slice(place, place + 1)
        found = logits_of(model, text[:, here], Causal(1), noise=clean[:, here], cache=cache)
        cache.advance(1)
        assert_same(found, whole[:, here])


@given(shapes(), st.integers(1, 3), st.booleans(), st.booleans())
@torch.no_grad()
def test_two_passes_are_one(shape: dict[str, Any], size: int, causal_clean: bool, adds: bool) -> None:
    """A tape of the clean text, then the noisy copies against it, with additions at the noisy positions."""
    model, length = tiny_transformer(3, **shape), 2 * size
    layout = BlockDiffusion(length, size, copies=2, causal_clean=causal_clean, adds=adds)
    tokens, noise = random_ids(model, 2, layout.size, 0), torch.rand(2, layout.size)
    noise[:, layout.noisy :] = 0.0
    single = logits_of(model, tokens, layout, noise=noise)
    tape, finished = KVTape(), BlockCausal(length, size, keys_only=True)
    if causal_clean:
        finished = Causal(length, keys_only=True)
    model(tokens[:, layout.noisy :], layout=finished, noise=noise[:, layout.noisy :], cache=tape)
    noisy = tokens[:, : layout.noisy]
    double = logits_of(model, noisy, layout, noise=noise[:, : layout.noisy], cache=tape.replay())
    assert_same(double, single)
    assert single.shape[-1] == shape["vocab_size"]


@given(shapes())
def test_the_parameters_of_a_config_are_those_of_its_matrices(shape: dict[str, Any]) -> None:
    config = TransformerConfig(**shape)
    with torch.device("meta"):
        network = Transformer(config)
    named = network.named_parameters()
    matrices = [p.numel() for name, p in named if p.ndim == 2 and "noise_embedding" not in name]
    assert config.parameters == sum(matrices)


@settings(max_examples=15)
@given(shapes(), st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
def test_what_is_saved_comes_back_bit_for_bit(shape: dict[str, Any], dtype: torch.dtype) -> None:
    """Whole models only; a model that adds to another is saved separately."""
    model = tiny_transformer(3, dtype=dtype, **shape | {"additions": 0})
    causal = not model.uses_noise
    method = AutoregressiveMethod() if causal else BlockDiffusionMethod(block_size=4)
    config = LanguageModelConfig(
        network=model.config, method=method, mask_id=model.config.input_vocab_size - 1
    )
    with TemporaryDirectory() as folder:
        save(model, config, Path(folder))
        again, same = load(folder)
    assert same == config
    assert again.config == model.config
    assert (again.output.weight is again.embedding.weight) == model.config.tied
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype, name
        assert torch.equal(weight, theirs[name]), name
    tokens = random_ids(model, 2, 6, 0)
    with torch.no_grad():
        found, expected = (logits_of(each, tokens, Causal(6), noise=torch.ones(2)) for each in (again, model))
    assert torch.equal(found, expected)
