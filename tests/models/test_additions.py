"""Additions apply where a layout says, and nowhere else: as if the network had other weights there."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bd3lm.models import BlockDiffusion, Causal, KVTape, Transformer
from bd3lm.models.additions import Addition
from tests.oracles.networks import logits_of, tiny_transformer

FAMILIES = {
    "GPT": {},
    "Llama": {"norm": "rms", "mlp": "swiglu", "mlp_width": 10, "heads": 4, "kv_heads": 2, "head_dim": 4},
    "Qwen": {"norm": "rms", "mlp": "swiglu", "mlp_width": 10, "qk_norm": True, "qkv_bias": True},
}


def with_additions(family: str, rank: int = 3, **config: object) -> Transformer:
    """A network and additions that change every output."""
    return tiny_transformer(4, additions=rank, mask_vector=True, **FAMILIES[family] | config)


class Chosen(nn.Module):
    """A linear layer that has other weights at some positions."""

    def __init__(self, linear: nn.Linear, weight: Tensor, chosen: Tensor) -> None:
        super().__init__()
        self.linear, self.other, self.chosen = linear, weight, chosen
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        other = nn.functional.linear(x, self.other, self.bias)
        return torch.where(self.chosen[:, None], other, self.linear(x))


def merged_at(model: Transformer, chosen: Tensor) -> Transformer:
    """The network without additions, whose weights at the chosen positions have them merged in."""
    plain = Transformer(replace(model.config, additions=0)).double().eval()
    plain.load_state_dict({n: w for n, w in model.state_dict().items() if ".additions." not in n})
    for layer, own in zip(plain.layers, model.layers, strict=True):
        for name, addition in own.additions.items():
            linear = getattr(layer, name)
            setattr(layer, name, Chosen(linear, addition.merged(linear.weight), chosen))
    return plain


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_other_weights_at_the_noisy_positions(family):
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
    assert torch.equal(found[:, 8:], without[:, 8:])  # to the last bit: the causal law is as it was
    in_part = logits_of(model, tokens, replace(layout, read_clean=False))
    torch.testing.assert_close(in_part, found[:, :8], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_network_gives_its_additions_and_its_mask_all_the_gradient(family):
    """In two passes the clean one needs none, and what is learned is as in one."""
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
