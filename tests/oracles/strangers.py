"""Networks that are none of ours, as a plugin would bring them: one plain, one that keeps keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bd3lm.models import CacheShape, KVStore, Layout, Network, NetworkConfig, NoStore, attend


@dataclass(frozen=True, kw_only=True)
class PlainConfig(NetworkConfig):
    """Linear attention under the layout's mask; nothing else is said."""

    kind = "plain_stranger"
    width: int
    layers: int = 1
    tied: bool = False

    def build(self) -> "PlainStranger":
        return PlainStranger(self)


class PlainStranger(Network):
    config: PlainConfig

    def __init__(self, config: PlainConfig) -> None:
        super().__init__(config)
        width = config.width
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.table = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(config.context, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(config.layers))
        self.output = nn.Linear(width, config.vocab_size)
        if config.tied:
            self.output.weight = self.table.weight

    def embed(self, tokens: Tensor) -> Tensor:
        weight = self.table.weight
        return tokens.to(weight.dtype) @ weight if tokens.is_floating_point() else self.table(tokens)

    def forward(
        self, tokens: Tensor, *, layout: Layout, noise: Tensor | None = None, cache: KVStore | None = None
    ) -> Tensor:
        assert cache is None
        seen = layout.dense(device=tokens.device)
        x = (tokens if tokens.is_floating_point() else self.embed(tokens)) + self.places(
            layout.text_positions(tokens.device)
        )
        for layer in self.layers:
            query, key, value = layer(x).chunk(3, dim=-1)
            weight = (F.elu(query) + 1.0) @ (F.elu(key) + 1.0).mT * seen
            x = x + self.scale * torch.tanh(weight / weight.sum(-1, keepdim=True) @ value + x)
        return x[:, slice(*layout.read)]

    def head(self, states: Tensor) -> Tensor:
        return self.output(states)


@dataclass(frozen=True, kw_only=True)
class KeepingConfig(NetworkConfig):
    """One head of attention, whose keys and values go through the store that a pass is given."""

    kind = "keeping_stranger"
    width: int = 8
    layers: int = 2

    def build(self) -> "KeepingStranger":
        return KeepingStranger(self)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(layers=self.layers, heads=1, head_dim=self.width)


class KeepingStranger(Network):
    config: KeepingConfig

    def __init__(self, config: KeepingConfig) -> None:
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, 3 * config.width) for _ in range(config.layers))
        self.output = nn.Linear(config.width, config.vocab_size)

    def embed(self, tokens: Tensor) -> Tensor:
        weight = self.table.weight
        return tokens.to(weight.dtype) @ weight if tokens.is_floating_point() else self.table(tokens)

    def forward(
        self, tokens: Tensor, *, layout: Layout, noise: Tensor | None = None, cache: KVStore | None = None
    ) -> Tensor:
        store = NoStore() if cache is None else cache
        positions = store.text_positions(layout, tokens)
        mask = store.mask(layout, (0, tokens.shape[1]), tokens.device, "dense")
        x = tokens if tokens.is_floating_point() else self.embed(tokens)
        x = x + self.places(positions % self.config.context)  # before a text they are negative
        for index, layer in enumerate(self.layers):
            query, key, value = (part.unsqueeze(1) for part in layer(x).chunk(3, dim=-1))
            x = x + attend(query, *store.extend(index, key, value), mask).squeeze(1)
        return x[:, slice(*layout.read)]

    def head(self, states: Tensor) -> Tensor:
        return self.output(states)


def stranger(config: NetworkConfig, seed: int = 0) -> Network:
    """A network of strong opinions, in float64 and evaluation mode."""
    network = config.build().double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=1.0, generator=generator)
    return network
