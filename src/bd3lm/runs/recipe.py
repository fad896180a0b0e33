"""Everything a training run needs, as plain values: what a YAML file or a preset says.

A recipe holds settings and builds nothing; `plan` turns it into a run. Where a choice has options of its own
(the method, how masks are drawn) it is a member of a family, told by its `kind`, so that no option exists
where it would do nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args

import yaml

from bd3lm.kinds import plain, plugin_of, plugins_of, spelt_out
from bd3lm.methods import Frame, Method, Training
from bd3lm.models import NetworkConfig
from bd3lm.parsing import hints_of, raise_problems, types_of, with_plugins
from bd3lm.runs.network import (
    NetworkRecipe,
    every_network_class,
    network_class,
    network_to_dict,
    usual_network,
)
from bd3lm.training import OptimizerSettings, TrainSettings

BUILTIN = "builtin"
"""The path of the corpus that every Python carries."""


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where the tokens are."""

    path: str = BUILTIN
    """A folder that `bd3lm data prepare` wrote; or builtin, prepared on the way."""
    context: int = 1024
    bos_eos: bool = False
    """Put BOS and EOS at the ends of each sequence, as MDLM does."""
    skip: int | None = None
    """Sequences of the order to begin after. By default a stage begins where the one before it stopped."""
    builtin_vocabulary: int = 1024
    """Size of the BPE trained for the built-in corpus."""
    validation_sequences: int | None = None
    """How many held-out sequences to validate on; by default all."""
    validation_batch: int = 16

    def __post_init__(self) -> None:
        for name in ("context", "validation_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.builtin_vocabulary < 258:
            raise ValueError(
                "builtin_vocabulary must be at least 258 (256 bytes and two special tokens), "
                f"got {self.builtin_vocabulary}"
            )
        if self.validation_sequences is not None and self.validation_sequences < 1:
            raise ValueError(
                f"validation_sequences must be at least 1, or null for all, got {self.validation_sequences}"
            )
        if self.skip is not None and self.skip < 0:
            raise ValueError(f"skip must not be negative, got {self.skip}")


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """How many checkpoints are kept."""

    keep_last: int = 2
    keep_best: int = 1


@dataclass(frozen=True, kw_only=True)
class TrackerRecipe:
    """Who is told besides metrics.csv."""

    tensorboard: bool = False
    wandb_project: str | None = None
    nelbo_variance_batches: int = 0
    """Measure the variance of the training loss over blocks on this many held-out batches; 0 does not."""
    gradient_variance_batches: int = 0
    """Measure the gradient's variance over this many batches at validation; 0 does not."""

    def __post_init__(self) -> None:
        for name in ("nelbo_variance_batches", "gradient_variance_batches"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative (0 measures none), got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run."""

    train: TrainSettings
    method: Method
    """What the model is; this is saved with it."""
    objective: Training = field(default_factory=Training)
    """How the method is trained, by its own options."""
    data: DataRecipe = field(default_factory=DataRecipe)
    network: NetworkRecipe = field(default_factory=usual_network)
    """Its kind, and the fields of that kind of network that are not to be as by default."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    trackers: TrackerRecipe = field(default_factory=TrackerRecipe)
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """auto is one process alone, or DDP under torchrun."""
    start_from: str | None = None
    """A checkpoint whose (EMA) weights training starts from, with a fresh optimizer; also --from. For a later
    stage of several the name of an earlier one, in place of the one before."""

    def __post_init__(self) -> None:
        if type(self.objective) is Training:
            object.__setattr__(self, "objective", self.method.Training())
        raise_problems(self._conflicts())

    @classmethod
    def types_for(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options of training are those of the method; any mapping, where its kind is not known. The
        fields of the network are those of its kind."""
        said = spelt_out(data.get("method"))
        kind = said.get("kind") if isinstance(said, Mapping) else None
        member = Method.members().get(kind) if isinstance(kind, str) else None
        return {
            "objective": dict if member is None else member.Training,
            "network": network_class(data.get("network")) or NetworkConfig,  # which says what is wrong
        }

    def _conflicts(self) -> Iterator[str]:
        method, training = self.method, self.objective
        if type(training) is not method.Training:
            needed = method.Training.__name__
            yield f"objective must be a {needed} for method.kind {method.kind}, got {training}"
            return
        if self.trackers.gradient_variance_batches == 1:
            yield "trackers.gradient_variance_batches must be 0 or at least 2, got 1"
        if method.no_likelihood and self.trackers.nelbo_variance_batches:
            yield (
                f"trackers.nelbo_variance_batches must be 0 for method.kind {method.kind}, which has no NELBO"
            )
        if self.parallel == "fsdp" and training.not_under_fsdp:
            yield training.not_under_fsdp
        search = training.search
        if search is not None and search.every % self.train.validate_every:
            yield (
                f"objective.masking.search.every must be a multiple of train.validate_every "
                f"{self.train.validate_every}, when the search is made, got {search.every}"
            )
        # The data knows better which tokens there are; nothing here depends on it.
        frame = Frame(vocab_size=2, mask_id=1, context=self.data.context, learns_beside=method.trains_beside)
        if not self.network.is_checkpoints:  # of which it is asked when the checkpoint is there
            try:
                shape = self.network.config(vocab_size=2, context=self.data.context)
            except ValueError as error:
                yield str(error)
                return
            frame = replace(frame, told_noise=shape.told_noise, learns_beside=shape.learns_beside)
        yield from self.conflicts(frame)

    def conflicts(self, frame: Frame) -> Iterator[str]:
        """What keeps the method, and its training, from working with a network."""
        yield from self.method.conflicts(frame)
        yield from self.method.training_conflicts(self.objective, frame)


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain values, ready for YAML, with the plugins that reading them takes."""
    values: dict[str, Any] = {**plain(recipe), "network": network_to_dict(recipe.network)}
    plugins = plugins_of(recipe)
    if (plugin := plugin_of(recipe.network.config_class)) is not None:
        plugins[recipe.network.kind] = plugin
    return {**values, "plugins": plugins} if plugins else values


def recipe_from_dict(data: Mapping[str, Any], *, where: str) -> Recipe:
    """A recipe from plain values; one ValueError says all that is wrong."""
    return with_plugins(Recipe, data, where=where)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`--train.steps 100 --method.masking.kind=times` as a nested dict; the values of text fields are
    taken as they are, all others are read as YAML."""
    overrides: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ValueError(f"expected --any.field value, got {word!r}")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{name} needs a value, got none")
            text = rest.pop(0)
        target = overrides
        path = name.replace("-", "_").split(".")
        if path[0] == "plugins":
            raise ValueError(f"--{name} is not for flags: a run writes it; to load a plugin give --plugin")
        *parents, leaf = path
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"--{name} sets a part of something that another flag sets whole")
        if isinstance(target.get(leaf), dict):
            raise ValueError(f"--{name} sets whole something of which another flag sets a part")
        try:
            target[leaf] = _flag_value(text, _types_at(path) or _types_at(path[1:]))  # after a stage's name
        except ValueError as error:
            raise ValueError(f"--{name}: {error}") from None
    return overrides


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file that people write by hand; a ValueError names the file."""
    try:
        data = _load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config must be a YAML file, got {path}, which does not exist") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got a file that is not: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {type(data).__name__}")
    return data


_DECIMAL = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"),
    "tag:yaml.org,2002:float": re.compile(
        r"""(?:[-+]?(?:0|[1-9][0-9_]*)\.[0-9_]*(?:[eE][-+][0-9]+)?
            |\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?
            |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
}
_DATE = "tag:yaml.org,2002:timestamp"


class _SettingsLoader(yaml.SafeLoader):
    """YAML 1.1 with decimal numbers only, so that 010 is not 8 and 1:30 not 90, and with every key once.

    What it takes for a number YAML 1.1 does too, so a text that `yaml.safe_dump` wrote comes back as one.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, _DECIMAL.get(tag, pattern)) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ValueError(f"{key.value} is given twice, again in line {key.start_mark.line + 1}")
            seen.add(key.value)
        return node


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_SettingsLoader)


def _types_at(path: Sequence[str]) -> list[Any]:
    """The types that a field of a recipe may have, by its path of names; none if there is no such field."""
    types: list[Any] = [Recipe]
    for name in path:
        kinds = [kind for each in types for kind in types_of(each, None)]
        if Training in kinds:
            kinds += [member.Training for member in Method.members().values()]
        if NetworkRecipe in kinds:
            kinds = [*(kind for kind in kinds if kind is not NetworkRecipe), *every_network_class()]
        found = [hints[name] for kind in kinds if name in (hints := hints_of(kind, None))]
        types = [
            member for each in found for member in (get_args(each) if isinstance(each, UnionType) else [each])
        ]
    return types


def _flag_value(text: str, types: Sequence[Any]) -> Any:
    """A flag's value for a field of one of the types; the recipe reports what is wrong with it."""
    if NoneType in types and text.lower() in ("null", "none", "~", ""):
        return None
    if str in types:
        return text
    if int in types and re.fullmatch(r"[-+]?[1-9][0-9]*(\.[0-9]*)?[eE]\+?[0-9]+", text):
        return float(text)  # which is an integer where it is whole
    try:
        return _load_yaml(text)
    except yaml.YAMLError:
        return text
