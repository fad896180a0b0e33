"""Tiny networks with strong opinions, and attention rules written out pair by pair."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bd3lm.models import BlockReading, Denoiser, Layout, Transformer, TransformerConfig
from bd3lm.models.rotary import Llama3Scaling
from bd3lm.objectives.base import token_nats

MASK = 2  # in the middle of the vocabulary, where a mistake about which token it is shows
CLEAN = (0, 1, 3)

_OF_TODAY: dict[str, Any] = {
    "norm": "rms",
    "norm_eps": 1e-6,
    "mlp": "swiglu",
    "mlp_width": 20,
    "mlp_bias": False,
    "head_bias": False,
    "heads": 4,
    "mask_vector": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "Llama": _OF_TODAY
    | {"kv_heads": 2, "tied": True, "rotary_scaling": Llama3Scaling(factor=4.0, original_context=16)},
    "Qwen3": _OF_TODAY | {"kv_heads": 1, "head_dim": 6, "qk_norm": True},
}
"""What sets a network of each family apart, at any size that four heads divide."""


def blocks_of(size: int, *, mask_id: int = MASK, **options: bool) -> BlockReading:
    """Texts with this mask, read in blocks."""
    return BlockReading(block_size=size, mask_id=mask_id, **options)


def mask_of(model: Any) -> int:
    """The id of a network's mask: beside its vocabulary, or else in the middle of it."""
    config = getattr(model, "config", None)
    return config.vocab_size if config is not None and config.mask_vector else MASK


def clean_of(model: Any) -> tuple[int, ...]:
    """The tokens that a network predicts."""
    return tuple(token for token in range(model.vocab_size) if token != mask_of(model))


def tiny_transformer(
    seed: int = 0, *, dtype: torch.dtype = torch.float64, gain: float = 1.5, **config: Any
) -> Transformer:
    """A random network whose distributions are far from uniform and change with every token it sees."""
    shape: dict[str, Any] = {
        "vocab_size": 4,
        "layers": 2,
        "hidden": 16,
        "heads": 2,
        "context": 64,
        "dropout": 0.0,
    }
    model = Transformer(TransformerConfig(**(shape | config))).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("norm.weight"):
                noise = 1 + 0.3 * noise
            elif parameter.ndim == 2 and (model.config.tied or name != "embedding.weight"):
                noise *= gain / parameter.shape[1] ** 0.5
            elif parameter.ndim == 1:
                noise *= 0.5
            parameter.copy_(noise)
    return model.eval()


def network_of(family: str, seed: int = 0, **config: Any) -> Transformer:
    """One of a family, which predicts three tokens that are no mask."""
    shape = FAMILIES[family]
    return tiny_transformer(seed, **{"vocab_size": 3 if shape.get("mask_vector") else 4} | shape | config)


@dataclass(frozen=True)
class Written(Layout):
    """A layout given by a plain function of two positions, asked pair by pair."""

    sees: Callable[[int, int], bool]

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        table = [[self.sees(q, k) for k in range(self.length)] for q in range(self.length)]
        return torch.tensor(table)[query, key]


def block_after_clean(past: int, block_size: int, *, causal_clean: bool = False) -> Written:
    """`past` clean tokens and one block after them: what a network called once a block would see."""

    def sees(query: int, key: int) -> bool:
        if query >= past:
            return True
        return key <= query if causal_clean else key // block_size <= query // block_size

    return Written(past + block_size, sees)


def log_probabilities(logits: Tensor, mask_id: int = MASK) -> Tensor:
    """Over the vocabulary without the mask; −inf at the mask."""
    others = [v for v in range(logits.shape[-1]) if v != mask_id]
    log_p = torch.full_like(logits, -torch.inf)
    log_p[..., others] = logits[..., others] - logits[..., others].exp().sum(-1, keepdim=True).log()
    return log_p


def logits_of(model: Transformer, tokens: Tensor, layout: Layout, **options: Any) -> Tensor:
    return model.head(model(tokens, layout=layout, **options))


def vectors_of(model: Transformer) -> Tensor:
    """The vector of each token id, the mask's among them."""
    weight = model.embedding.weight
    return weight if model.mask_vector is None else torch.cat((weight, model.mask_vector.unsqueeze(0)))


class AfterPrevious:
    """A network that is shown masks with the token before them, for rows in the order of the text."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.mask_id = model, mask_of(model)

    def __call__(self, tokens: Tensor, *, layout: Layout, **options: Any) -> Tensor:
        vector = vectors_of(self.model)
        rows = []
        for row in tokens.tolist():
            shown = []
            for place, token in enumerate(row):
                before = row[place - 1] if place else self.mask_id
                shown.append(vector[token] + vector[before] if token == self.mask_id else vector[token])
            rows.append(torch.stack(shown))
        return self.model(torch.stack(rows), layout=layout, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class Plain:
    """What a network is not asked for on a CPU, or has none of."""

    cache_shape = None
    recordable = False
    graph_key = None
    new_cache = Denoiser.new_cache

    def check_room(self, rows: int, positions: int) -> None:
        return None


class CopyNetwork(Plain):
    """Knows that the two tokens of a block are equal, and nothing else: blocks of 2, p = 1/V or 1.

    Here NLL = NELBO = log V, all of it paid when both tokens are masked.
    """

    uses_noise = False
    device = torch.device("cpu")

    def __init__(self, vocab_size: int = 4, mask_id: int = MASK) -> None:
        self.vocab_size, self.mask_id = vocab_size, mask_id

    def __call__(
        self, tokens: Tensor, *, layout: Layout, noise: Tensor | None = None, cache: object = None
    ) -> Tensor:
        start, stop = layout.read
        partner = tokens[:, torch.arange(start, stop) ^ 1]
        certain = 1e3 * torch.eye(self.vocab_size, dtype=torch.float64)
        certain[self.mask_id] = 0.0
        return certain[partner]

    def head(self, states: Tensor) -> Tensor:
        return states

    def cross_entropy(
        self, states: Tensor, targets: Tensor, weights: Tensor, *, excluded: int
    ) -> tuple[Tensor, Tensor]:
        nats = token_nats(self.head(states), targets, excluded)
        return (nats * weights).sum(), nats.detach()
