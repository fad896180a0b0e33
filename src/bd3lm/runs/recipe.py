"""Everything a training run needs, as plain values from a YAML file or a preset.

A recipe holds settings and builds nothing; `plan` turns it into a run. A choice with its own options (the
method, the masking rule) is a member of a family, selected by its `kind`, so an option exists only where it
has an effect.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bd3lm.kinds import plain, plugin_of, plugins_of, spelt_out
from bd3lm.methods import Frame, Method, Training
from bd3lm.models import NetworkConfig
from bd3lm.parsing import raise_problems, with_plugins
from bd3lm.runs.network import (
    NetworkRecipe,
    every_network_class,
    network_class,
    network_to_dict,
    usual_network,
)
from bd3lm.runs.reading import parse_flags, types_in
from bd3lm.runs.sections import CheckpointRecipe, DataRecipe, TrackerRecipe
from bd3lm.training import OptimizerSettings, TrainSettings


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run."""

    train: TrainSettings
    method: Method
    """The method of the model, saved with it."""
    objective: Training = field(default_factory=Training)
    """The training options of the method."""
    data: DataRecipe = field(default_factory=DataRecipe)
    network: NetworkRecipe = field(default_factory=usual_network)
    """The kind of network, and the fields that differ from its defaults."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    trackers: TrackerRecipe = field(default_factory=TrackerRecipe)
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """auto is a single process, or DDP under torchrun."""
    start_from: str | None = None
    """A checkpoint whose (EMA) weights training starts from, with a fresh optimizer; also --from. In a later
    stage, the name of an earlier stage to start from instead of the one before."""

    def __post_init__(self) -> None:
        if type(self.objective) is Training:
            object.__setattr__(self, "objective", self.method.Training())
        raise_problems(self._conflicts())

    @classmethod
    def types_for(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The types that depend on other fields. Training options depend on the method (any mapping if its
        kind is unknown), and network fields on the kind of network."""
        said = spelt_out(data.get("method"))
        kind = said.get("kind") if isinstance(said, Mapping) else None
        member = Method.members().get(kind) if isinstance(kind, str) else None
        return {
            "objective": dict if member is None else member.Training,
            "network": network_class(data.get("network")) or NetworkConfig,  # reports what is wrong with it
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
                "objective.masking.search.every must be a multiple of train.validate_every "
                f"{self.train.validate_every}, because the search is made then, got {search.every}"
            )
        # The real tokens are known only from the data; these checks do not depend on them.
        frame = Frame(vocab_size=2, mask_id=1, context=self.data.context, learns_beside=method.trains_beside)
        if not self.network.is_checkpoints:  # otherwise this is checked when the checkpoint has been read
            try:
                shape = self.network.config(vocab_size=2, context=self.data.context)
            except ValueError as error:
                yield str(error)
                return
            frame = Frame.of(shape, mask_id=shape.input_vocab_size - 1)
        yield from self.conflicts(frame)

    def conflicts(self, frame: Frame) -> Iterator[str]:
        """Why the method, or its training, does not work with a network."""
        yield from self.method.conflicts(frame)
        yield from self.method.training_conflicts(self.objective, frame)


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain values, ready for YAML, with the plugins that are needed to read them."""
    values: dict[str, Any] = {**plain(recipe), "network": network_to_dict(recipe.network)}
    plugins = plugins_of(recipe)
    if (plugin := plugin_of(recipe.network.config_class)) is not None:
        plugins[recipe.network.kind] = plugin
    return {**values, "plugins": plugins} if plugins else values


def recipe_from_dict(data: Mapping[str, Any], *, where: str) -> Recipe:
    """Make a recipe from plain values; one ValueError lists everything that is wrong."""
    return with_plugins(Recipe, data, where=where)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`parse_flags` for the fields of recipes of any method."""
    return parse_flags(words, _types_at)


def _types_at(path: Sequence[str]) -> list[Any]:
    """The types that a field of a recipe may have. Training options are those of any method; a network's
    fields are those of its class."""
    methods = [member.Training for member in Method.members().values()]
    return types_in(Recipe, path, {Training: [Training, *methods], NetworkRecipe: every_network_class()})
