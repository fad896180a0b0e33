"""Checks a recipe before torch is loaded: everything but the method and the network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bd3lm.parsing import SettingsError, parse
from bd3lm.runs.presets import Stage
from bd3lm.runs.reading import parse_flags, read_settings, types_in
from bd3lm.runs.sections import (
    BUILTIN,
    CheckpointRecipe,
    DataRecipe,
    TrackerRecipe,
    check_data,
)
from bd3lm.runs.settling import settle
from bd3lm.training import OptimizerSettings, TrainSettings

_OF_MODELS = ("method", "objective", "network", "plugins")


@dataclass(frozen=True, kw_only=True)
class Outline:
    """The fields of a `Recipe`, with its method and network unchecked."""

    train: TrainSettings
    method: Any
    objective: Any = None
    data: DataRecipe = field(default_factory=DataRecipe)
    network: Any = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    trackers: TrackerRecipe = field(default_factory=TrackerRecipe)
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    start_from: str | None = None


def check_outline(
    stages: Sequence[Stage],
    words: Sequence[str],
    *,
    where: str,
    config: Path | None = None,
    start_from: str | None = None,
    reads_data: bool,
) -> None:
    """Refuse flags that are wrong whatever the model is, and data that does not exist.

    `where` names the stages that the flags modify, such as a preset's. If a flag or the file sets something
    of the model, nothing is checked here: then only the full recipe can report all mistakes at once.
    `reads_data` says whether the data must exist.
    """
    if config is not None and config.exists() and not config.is_file():
        return  # a pipe can be read only once, by the recipe itself
    layers = [read_settings(config)] if config is not None else []
    layers.append(parse_flags(words, partial(types_in, Outline)))
    if any(_touches_model(layer, [stage.name for stage in stages]) for layer in layers):
        return
    where = " with ".join([where, *([str(config)] if config else [])])
    try:
        found = settle(stages, layers, where, start_from, kind=Outline, read=partial(parse, Outline))
    except SettingsError as error:
        if all("." in key for key in error.unknown_keys):
            raise
        return  # the key may belong to the model, which the full recipe checks
    for _, outline in found:
        if reads_data and outline.data.path != BUILTIN:
            check_data(outline.data.path)


def _touches_model(layer: Mapping[str, Any], stages: Sequence[str]) -> bool:
    return any(key in _OF_MODELS for key in _keys(layer, stages))


def _keys(layer: Mapping[str, Any], stages: Sequence[str]) -> Iterator[str]:
    for key, value in layer.items():
        yield key
        if key in stages and isinstance(value, Mapping):
            yield from value
