"""Qwen3's network written out, from a checkpoint's tensors and config.json, for any rule of who sees whom."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def qwen3_logits(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Tensor, sees: Callable[[int, int], bool]
) -> Tensor:
    """Logits (positions, vocabulary) of token ids (positions,), in double precision."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width, eps = config["head_dim"], config["rms_norm_eps"]
    places = len(tokens)
    allowed = torch.tensor([[sees(query, key) for key in range(places)] for query in range(places)])
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        h = norm(x, own["input_layernorm.weight"], eps)
        query = (h @ own["self_attn.q_proj.weight"].T).view(places, heads, width)
        key = (h @ own["self_attn.k_proj.weight"].T).view(places, groups, width)
        value = (h @ own["self_attn.v_proj.weight"].T).view(places, groups, width)
        query = turned(norm(query, own["self_attn.q_norm.weight"], eps), config["rope_theta"])
        key = turned(norm(key, own["self_attn.k_norm.weight"], eps), config["rope_theta"])
        seen = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = query[:, head] @ key[:, group].T / width**0.5
            seen.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value[:, group])
        x = x + torch.cat(seen, -1) @ own["self_attn.o_proj.weight"].T
        h = norm(x, own["post_attention_layernorm.weight"], eps)
        gate = h @ own["mlp.gate_proj.weight"].T
        up = h @ own["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ own["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, base: float) -> Tensor:
    """(positions, heads, width), whose pairs (i, i + width/2) are turned by the position times an angle."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).double()[:, None, None] * base ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
    )
