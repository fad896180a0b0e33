"""A whole network in plain operations, from its weights, under a mask that is given pair by pair."""

import math

import torch
from torch import Tensor

from bd3lm.models import Transformer
from bd3lm.models.rotary import Llama3Scaling

from .networks import vectors_of


def written_out_logits(
    model: Transformer, tokens: Tensor, sees: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Logits at every position of ids (rows, n), where query i may see key j by `sees[i, j]`.

    `positions` (n,) are those of the text, by default 0, 1, … n − 1. Adaptive norms are not written out here.
    """
    w, config = dict(model.named_parameters()), model.config
    head, eps = config.head_dim, config.norm_eps
    places = torch.arange(tokens.shape[1]) if positions is None else positions
    turns = torch.polar(torch.ones(len(places), head // 2).double(), _angles(model, places))

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w[name + ".weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x - x.mean(-1, keepdim=True) if config.norm == "layer" else x, name)

    def turned(x: Tensor) -> Tensor:
        z = torch.complex(x[..., : head // 2], x[..., head // 2 :]) * turns
        return torch.cat((z.real, z.imag), -1)

    def attended(x: Tensor, layer: str) -> Tensor:
        """One head after another, each with its group's keys and values."""
        projected = linear(x, f"{layer}.qkv").split(head, -1)
        outputs = []
        for index in range(config.heads):
            group = config.heads + index // (config.heads // config.kv_heads)
            query, key, value = projected[index], projected[group], projected[group + config.kv_heads]
            if config.qk_norm:
                query, key = rms(query, f"{layer}.query_norm"), rms(key, f"{layer}.key_norm")
            scores = turned(query) @ turned(key).transpose(-1, -2) / head**0.5
            outputs.append(scores.masked_fill(~sees, -math.inf).softmax(-1) @ value)
        return linear(torch.cat(outputs, -1), f"{layer}.attention_out")

    def mlp(x: Tensor, layer: str) -> Tensor:
        h = linear(x, f"{layer}.mlp_in")
        if config.mlp == "swiglu":
            gate, value = h.chunk(2, -1)
            h = gate / (1 + torch.exp(-gate)) * value
        else:
            h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        return linear(h, f"{layer}.mlp_out")

    x = vectors_of(model)[tokens]
    for index in range(config.layers):
        layer = f"layers.{index}"
        x = x + attended(norm(x, f"{layer}.attention_norm"), layer)
        x = x + mlp(norm(x, f"{layer}.mlp_norm"), layer)
    x = norm(x, "final_norm")
    return x @ model.output.weight.T + w.get("output.bias", 0.0)  # a tied head goes by the embedding's name


def _angles(model: Transformer, places: Tensor) -> Tensor:
    """How far each pair is turned at each place, (n, head_dim / 2)."""
    config, size = model.config, model.config.head_dim
    each = [config.rotary_base ** (-2 * pair / size) for pair in range(size // 2)]
    if config.rotary_scaling is not None:
        each = [_stretched(angle, config.rotary_scaling) for angle in each]
    return places.double().unsqueeze(1) * torch.tensor(each, dtype=torch.float64)


def _stretched(angle: float, scaling: object) -> float:
    """Llama 3.1's rule: by wavelengths, as it was published."""
    assert isinstance(scaling, Llama3Scaling)
    wavelength = 2 * math.pi / angle
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    if wavelength < shortest:
        return angle
    if wavelength > longest:
        return angle / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * angle / scaling.factor + smooth * angle
