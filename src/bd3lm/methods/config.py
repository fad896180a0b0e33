"""The config of a language model, as plain values: its network, its method and its mask token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bd3lm.kinds import plain, plugins_of
from bd3lm.methods.base import Frame, Law, Method
from bd3lm.models import NetworkConfig
from bd3lm.parsing import raise_problems, with_plugins


@dataclass(frozen=True, kw_only=True)
class Base:
    """A frozen model that another model adds to."""

    source: str
    """The folder, file or hub id of the base model."""
    sha256: str
    """The hash of its weights. Additions to any other weights would be meaningless."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """A network and the method that trains and samples it."""

    network: NetworkConfig
    method: Method
    mask_id: int
    """The token that stands for an unknown token."""
    base: Base | None = None
    """The model that this one only adds to. None for a model with all of its weights."""

    def __post_init__(self) -> None:
        raise_problems(self._problems())
        object.__setattr__(self, "method", self.method.resolved(self.network.context))

    def _problems(self) -> Iterator[str]:
        known, predicted = self.network.input_vocab_size, self.network.vocab_size
        if not 0 <= self.mask_id < known:
            yield f"mask_id must lie in 0..{known - 1}, got {self.mask_id}"
        elif known > predicted and self.mask_id != predicted:
            yield f"mask_id must be {predicted}, the network's extra vector for it, got {self.mask_id}"
        network, method = self.network, self.method
        if network.adds_everywhere and method.trains_beside:
            yield f"network.additions_at must be masks for method.kind {method.kind}, which keeps its law"
        if network.learns_beside and not network.adds_everywhere and not method.trains_beside:
            yield (
                f"network.additions must be 0 for method.kind {method.kind}, which trains all weights; or "
                "set network.additions_at to all, which trains additions at every position"
            )
        yield from self.method.conflicts(self.frame)

    def under(self, law: Law) -> "LanguageModelConfig":
        """The same network with the method that writes and measures under this law."""
        return replace(self, method=self.method.under(law))

    @property
    def frame(self) -> Frame:
        """What the method must know about the network."""
        return Frame.of(self.network, self.mask_id)

    @property
    def trains_beside(self) -> bool:
        """Whether only the network's additions are trained and saved."""
        return self.method.trains_beside or self.network.adds_everywhere

    @property
    def title(self) -> str:
        """The model's name in tables."""
        return self.method.title_for(self.network.context)


def config_to_dict(config: LanguageModelConfig) -> dict[str, Any]:
    """The config as plain values for JSON or YAML, with the plugins needed to read it."""
    values: dict[str, Any] = {name: value for name, value in plain(config).items() if value is not None}
    plugins = plugins_of(config)
    return {**values, "plugins": plugins} if plugins else values


def config_from_dict(data: Mapping[str, Any], *, where: str = "config") -> LanguageModelConfig:
    """The config from the values of `config_to_dict`. `where` names their origin in errors."""
    return with_plugins(LanguageModelConfig, data, where=where)
