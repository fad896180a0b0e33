"""Additions apply exactly where a layout says, as if the network had other weights there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from bd3lm.kinds import plain as plain_values
from bd3lm.models import BlockCausal, BlockDecoding, BlockDiffusion, Causal, KVTape, Transformer, decoding
from bd3lm.models.additions import Addition
from tests.oracles.networks import logits_of, tiny_transformer

FAMILIES = {
    "GPT": {},
    "Llama": {"norm": "rms", "mlp": "swiglu", "mlp_width": 10, "heads": 4, "kv_heads": 2, "head_dim": 4},
    "Qwen": {"norm": "rms", "mlp": "swiglu", "mlp_width": 10, "qk_norm": True, "qkv_bias": True},
}


def with_additions(family: str, rank: int = 3, **config: object) -> Transformer:
    """A network with additions that change every output."""
    return tiny_transformer(4, additions=rank, mask_vector=True, **FAMILIES[family] | config)


class Chosen(nn.Module):
    """A linear layer with other weights at some positions."""

    def __init__(self, linear: nn.Linear, weight: Tensor, chosen: Tensor) -> None:
        super().__init__()
        self.linear, self.other, self.chosen = linear, weight, chosen
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        other = nn.functional.linear(x, self.other, self.bias)
        return torch.where(self.chosen[:, None], other, self.linear(x))


def merged_at(model: Transformer, chosen: Tensor) -> Transformer:
    """The network without additions, with merged weights at the chosen positions."""
    plain = Transformer(replace(model.config, additions=0)).double().eval()
    plain.load_state_dict({n: w for n, w in model.state_dict().items() if ".additions." not in n})
    for layer, own in zip(plain.layers, model.layers, strict=True):
        for name, addition in own.additions.items():
            linear = getattr(layer, name)
            setattr(layer, name, Chosen(linear, addition.merged(linear.weight), chosen))
    return plain


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_additions_act_as_other_weights_at_the_noisy_positions(family):
    model, layout = (
        with_additions(family),
        BlockDiffusion(8, 4, causal_clean=True, read_clean=True, adds=True),
    )
    clean = torch.randint(0, 4, (2, 8), generator=torch.Generator().manual_seed(1))
    tokens = torch.cat((torch.full((2, 8), 4), clean), dim=1)
    expected = logits_of(merged_at(model, torch.arange(16) < 8), tokens, layout)
    found = logits_of(model, tokens, layout)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    without = logits_of(model, tokens, replace(layout, adds=False))
    assert (found[:, :8] - without[:, :8]).abs().min(-1).values.max() > 0.01
    assert torch.equal(found[:, 8:], without[:, 8:])  # to the last bit: causal predictions are unchanged
    in_part = logits_of(model, tokens, replace(layout, read_clean=False))
    torch.testing.assert_close(in_part, found[:, :8], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_network_gives_its_additions_and_its_mask_all_the_gradient(family):
    """In two passes the clean pass needs no additions, and training gives the same as in one pass."""
    model = with_additions(family)
    learned = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".additions." in name or name == "mask_vector")
        if parameter.requires_grad:
            learned[name] = parameter
    layout = BlockDiffusion(8, 4, causal_clean=True, adds=True)
    clean = torch.randint(0, 4, (2, 8), generator=torch.Generator().manual_seed(1))
    masks = torch.full((2, 8), 4)
    model(torch.cat((masks, clean), dim=1), layout=layout).square().sum().backward()
    at_once = {name: parameter.grad.clone() for name, parameter in learned.items()}
    assert all(gradient.abs().max() > 0 for gradient in at_once.values())
    assert all(p.grad is None for name, p in model.named_parameters() if name not in learned)
    model.zero_grad()
    tape = KVTape()
    with torch.no_grad():
        model(clean, layout=Causal(8, keys_only=True), cache=tape)
    model(masks, layout=layout, cache=tape.replay()).square().sum().backward()
    for name, parameter in learned.items():
        torch.testing.assert_close(parameter.grad, at_once[name])


def test_new_additions_add_nothing():
    model = Transformer(with_additions("Qwen").config)
    tokens, layout = torch.zeros(1, 16, dtype=torch.long), BlockDiffusion(8, 4, adds=True)
    assert torch.equal(model(tokens, layout=layout), model(tokens, layout=replace(layout, adds=False)))
    assert all(a.down.any() for a in model.modules() if isinstance(a, Addition))


def test_impossible_ranks_are_refused():
    for rank in (-1, 17):
        with pytest.raises(ValueError, match=f"additions must be a rank up to hidden 16, .* got {rank}"):
            with_additions("GPT", rank)


# --- at every position ---

SHAPES = FAMILIES | {"tied": {"tied": True, "adaln": True}, "no mask apart": {"mask_vector": False}}


def everywhere(family: str, **config: object) -> Transformer:
    shape = {"additions": 3, "additions_at": "all", "mask_vector": True} | SHAPES[family] | config
    return tiny_transformer(4, **shape)


@torch.no_grad()
@pytest.mark.parametrize("family", SHAPES)
def test_everywhere_they_are_other_weights_and_merged_they_are_gone(family):
    """In every pass, whatever the layout says: with partial reading, a tape, or a cache."""
    model = everywhere(family)
    plain = model.merged()
    assert plain.config == replace(model.config, additions=0, additions_at="masks")
    assert not any(".additions." in name for name, _ in plain.named_parameters())
    assert (plain.output.weight is plain.embedding.weight) == model.config.tied
    without = Transformer(plain.config).double().eval()
    without.load_state_dict({n: w for n, w in model.state_dict().items() if ".additions." not in n})
    generator = torch.Generator().manual_seed(1)
    for layout in (
        Causal(8),
        BlockDiffusion(8, 4, causal_clean=True),
        BlockDiffusion(8, 4, read_clean=True, adds=True),
        BlockDecoding(8, 4),
    ):
        tokens = torch.randint(0, model.config.input_vocab_size, (2, layout.size), generator=generator)
        found = logits_of(model, tokens, layout)
        torch.testing.assert_close(found, logits_of(plain, tokens, layout), rtol=0, atol=1e-12)
        assert (found - logits_of(without, tokens, layout)).abs().amax(-1).min() > 1e-3  # at every position
    caches = [each.new_cache(2, segment=4) for each in (model, plain)]
    for start in range(0, 8, 4):
        passes = []
        for each, cache in zip((model, plain), caches, strict=True):
            passes.append(logits_of(each, tokens[:, start : start + 4], BlockCausal(4, 4), cache=cache))
            cache.advance(4)
        torch.testing.assert_close(*passes, rtol=0, atol=1e-12)
    tapes = [KVTape(), KVTape()]
    for each, tape in zip((model, plain), tapes, strict=True):
        each(tokens, layout=Causal(8, keys_only=True), cache=tape)
    for one, other in zip(tapes[0].layers, tapes[1].layers, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@torch.no_grad()
def test_merging_leaves_the_network_as_it_is_and_shares_nothing_with_it():
    model = everywhere("Llama", tied=True).half().train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    draws = torch.random.get_rng_state()
    plain = model.merged()
    assert torch.equal(torch.random.get_rng_state(), draws)
    assert plain.dtype == torch.float16
    assert plain.training
    assert all(parameter.requires_grad for parameter in plain.parameters())
    for parameter in plain.parameters():
        parameter.zero_()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_a_network_without_additions_merges_to_itself():
    for model in (with_additions("GPT"), tiny_transformer(4), everywhere("GPT").merged()):
        assert model.merged() is model


@pytest.mark.parametrize("family", SHAPES)
def test_additions_and_mask_get_the_gradient_of_merged_weights(family):
    """The gradient of B and A is the merged weight's gradient, projected down; nothing else learns."""
    model = everywhere(family)
    plain = model.merged()
    model.learn_beside()
    layout = BlockDiffusion(8, 4)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.input_vocab_size, (2, 16), generator=generator)
    tokens[:, ::3] = model.config.input_vocab_size - 1
    for each in (model, plain):
        each(tokens, layout=layout).square().sum().backward()
    learned = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in model.named_parameters() if model._is_beside(name)}
    if model.mask_vector is not None:
        torch.testing.assert_close(model.mask_vector.grad, plain.mask_vector.grad)
    for layer, other in zip(model.layers, plain.layers, strict=True):
        for name, addition in layer.additions.items():
            gradient = getattr(other, name).weight.grad.split(addition.parts)
            downs, ups = addition.down.split(addition.rank), addition.up.split(addition.parts)
            for_up = torch.cat([each @ down.T for each, down in zip(gradient, downs, strict=True)])
            for_down = torch.cat([up.T @ each for each, up in zip(gradient, ups, strict=True)])
            torch.testing.assert_close(addition.up.grad, for_up)
            torch.testing.assert_close(addition.down.grad, for_down)


def test_additions_at_needs_additions():
    with pytest.raises(ValueError, match="additions_at must be 'masks' or 'all', got 'some'"):
        tiny_transformer(additions=2, additions_at="some")
    with pytest.raises(
        ValueError, match="additions_at must be 'masks' where there are no additions, got 'al"
    ):
        tiny_transformer(additions_at="all")
    said = plain_values(everywhere("GPT").config), plain_values(with_additions("GPT").config)
    assert [each.get("additions_at") for each in said] == ["all", None]


def test_additions_everywhere_use_the_plain_path(monkeypatch):
    """Until they are merged, so that weights that change unnoticed cannot make a text wrong."""
    kernels = SimpleNamespace(supports=lambda config, dtype: True, ring_rule=lambda *_: "causal")
    monkeypatch.setattr(decoding, "_kernels", lambda: kernels)
    monkeypatch.setattr(decoding, "runs_kernels", lambda device: True)
    tokens = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for model, taken in ((everywhere("GPT"), False), (everywhere("GPT").merged(), True)):
            model.float()
            cache = model.new_cache(1, segment=1)
            assert decoding.can_decode(model, tokens, Causal(1), cache) == taken
