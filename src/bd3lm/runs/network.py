"""The `network` section of a recipe: every field of the network's own config, all of them optional.

There is no second list of fields. The section is built from the config class that its `kind` names, without
the fields that the data determines, plus a named size.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Self, cast, get_type_hints

from bd3lm.kinds import plain, why_unusable
from bd3lm.models import NetworkConfig
from bd3lm.parsing import did_you_mean
from bd3lm.runs.merging import CHECKPOINT, USUAL_NETWORK

_OF_DATA = ("vocab_size", "context")
_OWN = ("kind", "size", "initialisation")


@dataclass(frozen=True, kw_only=True)
class NetworkRecipe:
    """The shape of the network; vocabulary and context come from the data."""

    config_class: ClassVar[type[NetworkConfig]]

    kind: str
    size: str | None
    """A named size, which the fields below modify; or checkpoint, the network that training starts from, in
    which only a few fields may change, such as the dropout."""

    def __post_init__(self) -> None:
        sizes = (*self.config_class.sizes, CHECKPOINT)
        if self.size is not None and self.size not in sizes:
            raise ValueError(
                f"size must be one of {', '.join(sizes)}, got {self.size!r}{did_you_mean(self.size, sizes)}"
            )
        free = self.config_class.may_differ
        beside = [name for name in self.shape if name not in free]
        if self.is_checkpoints and beside:
            raise ValueError(
                f"size {CHECKPOINT} takes the shape from the checkpoint; only "
                f"{', '.join(sorted(free)) or 'no field'} may be given with it, got {', '.join(beside)}"
            )

    @property
    def is_checkpoints(self) -> bool:
        """Whether it is the network of the checkpoint that training starts from."""
        return self.size == CHECKPOINT

    @property
    def shape(self) -> dict[str, Any]:
        """The given fields of the network's config; they replace parts of the size."""
        names = (each.name for each in fields(self) if each.name not in _OWN)
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def initialised_as(self) -> str | None:
        """How the first weights are drawn, if there is a choice."""
        return getattr(self, "initialisation", None)

    @property
    def resolved(self) -> dict[str, Any]:
        """All settings as plain values, with the size spelled out."""
        usual = {
            each.name: each.default for each in _fields(self.config_class) if each.default is not MISSING
        }
        values = {**usual, **self.config_class.sizes.get(self.size or "", {}), **self.shape}
        found: dict[str, Any] = plain({"kind": self.kind, **values, "initialisation": self.initialised_as})
        return found

    def config(self, *, vocab_size: int, context: int) -> NetworkConfig:
        """The network's config for some data; a ValueError says why no network can have it."""
        if self.is_checkpoints:
            raise ValueError(f"network.size {CHECKPOINT} has no shape until the checkpoint has been read")
        given = {**self.config_class.sizes.get(self.size or "", {}), **self.shape}
        needed = [each.name for each in _fields(self.config_class) if _is_required(each)]
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"network.{missing[0]} must be given, but is missing")
        try:
            return self.config_class(vocab_size=vocab_size, context=context, **given)
        except ValueError as error:
            raise ValueError(f"network: {error}") from None

    @classmethod
    def of(cls, config: NetworkConfig, initialisation: str | None = None) -> "NetworkRecipe":
        """The recipe of an existing network, with everything that differs from the defaults."""
        kind = recipe_class(type(config))
        try:
            usual: Any = kind().config(vocab_size=config.vocab_size, context=config.context)
        except ValueError:  # a field without a default
            usual = None
        given = {each.name: getattr(config, each.name) for each in _fields(type(config))}
        given = {
            name: value for name, value in given.items() if usual is None or getattr(usual, name) != value
        }
        return kind(**given, **({} if initialisation is None else {"initialisation": initialisation}))

    def from_checkpoint(self, config: NetworkConfig) -> "NetworkRecipe":
        """The network of a checkpoint, with the fields that may be given for it."""
        found = self.of(config)
        given = {name: value for name, value in self.shape.items() if hasattr(found, name)}
        return type(found)(**{**_said(found), **given})

    def like(self, before: "NetworkRecipe") -> Self | "NetworkRecipe":
        """The network of the stage before, if this stage takes the network of its checkpoint."""
        if not self.is_checkpoints:
            return self
        given = {name: value for name, value in self.shape.items() if hasattr(before, name)}
        return type(before)(**{**_said(before), **given})


def network_to_dict(recipe: NetworkRecipe) -> dict[str, Any]:
    """Plain values, without fields that are not given."""
    return {name: value for name, value in plain(recipe).items() if value is not None}


def network_class(network: object) -> type[NetworkRecipe] | None:
    """The recipe's section for these settings; None if their kind is invalid."""
    kind = network.get("kind", USUAL_NETWORK) if isinstance(network, Mapping) else USUAL_NETWORK
    member = NetworkConfig.members().get(kind) if isinstance(kind, str) else None
    return None if member is None or why_unusable(member) is not None else recipe_class(member)


def usual_network() -> NetworkRecipe:
    """The network of a recipe that has no settings for it."""
    return recipe_class(NetworkConfig.members()[USUAL_NETWORK])()


def every_network_class() -> list[type[NetworkRecipe]]:
    """The section for each kind of network."""
    usable = (each for each in NetworkConfig.members().values() if why_unusable(each) is None)
    return [recipe_class(each) for each in usable]


@cache
def recipe_class(config: type[NetworkConfig]) -> Any:
    """The `network` section of recipes for one config class."""
    hints, one_of = get_type_hints(config), cast("Any", Literal)
    own: list[tuple[str, Any, Any]] = [
        ("kind", one_of[config.kind], field(default=config.kind)),
        ("size", str | None, field(default=config.default_size)),
    ]
    own += [(each.name, hints[each.name] | None, field(default=None)) for each in _fields(config)]
    if config.initialisations:
        ways = config.initialisations
        own.append(("initialisation", one_of[ways], field(default=ways[0])))
    return make_dataclass(
        f"{config.__name__}Recipe",
        own,
        bases=(NetworkRecipe,),
        namespace={"config_class": config, "__doc__": NetworkRecipe.__doc__},
        frozen=True,
        kw_only=True,
    )


def _fields(config: type[NetworkConfig]) -> list[Any]:
    return [each for each in fields(config) if each.name not in _OF_DATA]


def _is_required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _said(recipe: NetworkRecipe) -> dict[str, Any]:
    return {each.name: getattr(recipe, each.name) for each in fields(recipe)}
