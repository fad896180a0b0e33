"""Resolves the settings of stages, with a file and flags over them, into a recipe for each stage.

The caller says what a recipe is: the full one, which needs torch for its methods, or the parts that do not.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from bd3lm.parsing import SettingsError, did_you_mean, did_you_mean_deeper, named, shown
from bd3lm.runs.merging import CHECKPOINT, ONLY, merge
from bd3lm.runs.presets import Stage

T = TypeVar("T", covariant=True)


class Reader(Protocol[T]):
    """Plain values to a recipe, or to part of one."""

    def __call__(self, data: Mapping[str, Any], *, where: str) -> T:
        """One ValueError lists everything that is wrong; errors call the recipe `where`."""


def settle(
    stages: Sequence[Stage],
    layers: Sequence[Mapping[str, Any]],
    where: str,
    start_from: str | None = None,
    *,
    kind: type[Any],
    read: Reader[T],
) -> list[tuple[str, T]]:
    """Each stage's settings under the layers, the last being the flags, read as recipes of a `kind`."""
    names = {stage.name for stage in stages if stage.name != ONLY}
    for layer in layers:
        _check_stage_names(layer, [stage.name for stage in stages], kind)
    if start_from is not None:
        _check_flags_beside_start(layers[-1], stages)
        stages = stages[-1:]
    resolved = []
    for stage in stages:
        data: dict[str, Any] = dict(stage.recipe)
        for layer in layers:
            common = {key: value for key, value in layer.items() if key not in names}
            if stage.recipe.get("start_from") in names:
                common.pop("start_from", None)  # the start of the first stage, which is not this stage's
            data = merge(data, common, layer[stage.name] if stage.name in names & layer.keys() else {})
        if start_from is not None:
            data = merge(data, {"start_from": start_from})
        # A stage after the first starts later, and the recipe of that earlier stage knows its network.
        if data.get("start_from") is not None and data["start_from"] not in names and "network" not in data:
            data["network"] = {"size": CHECKPOINT}
        try:
            named = f"{where} (stage {stage.name})" if stage.name != ONLY else where
            recipe = read(data, where=named)
        except ValueError as error:
            common = {key: value for key, value in layers[-1].items() if key not in names}
            raise ValueError(f"{error}{_other_stages(stages, common, read)}") from None
        resolved.append((stage.name, recipe))
    return resolved


def _check_flags_beside_start(flags: Mapping[str, Any], stages: Sequence[Stage]) -> None:
    """Refuse flags that have no effect with --from: flags for skipped stages, and another start."""
    *skipped, last = [stage.name for stage in stages]
    if found := [name for name in skipped if name in flags]:
        raise ValueError(f"with --from only the stage {last} runs, got flags --{found[0]}.any.field")
    own = flags.get(last)
    if "start_from" in flags or (isinstance(own, Mapping) and "start_from" in own):
        raise ValueError("--from and --start_from both set the start of training: give only one of them")


def _check_stage_names(layer: Mapping[str, Any], stages: Sequence[str], kind: type[Any]) -> None:
    """Refuse a key that is neither a stage nor a part of a recipe, and a stage with a plain value."""
    if list(stages) == [ONLY]:
        return  # a single stage has no name, and the recipe reports what is wrong
    parts = [each.name for each in fields(kind)]
    for key, value in layer.items():
        if key in stages and not isinstance(value, Mapping):
            raise ValueError(f"{key} is a stage, set with {key}.any.field, got {shown(value)}")
        if key not in stages and key not in parts:
            near = did_you_mean(key, [*stages, *parts])
            hint = near or did_you_mean_deeper(key, kind, layer) or ","
            raise ValueError(
                f"{named(key)}: unknown key{hint} allowed are the stages {', '.join(stages)}, and "
                f"{', '.join(parts)}"
            )


def _other_stages(stages: Sequence[Stage], flags: Mapping[str, Any], read: Reader[Any]) -> str:
    """Hints for flags that only some stages have: how to set them there."""
    lines = []
    for part, value in flags.items():
        unknown = {stage.name: _unknown_keys(merge(stage.recipe, {part: value}), read) for stage in stages}
        for name in unknown:
            given = [
                f"--{name}.{leaf}"
                for leaf in _leaves(value, part)
                if not _is_under(leaf, unknown[name])
                and any(_is_under(leaf, other) for other in unknown.values())
            ]
            if given:
                lines.append(f"\n  the stage {name} has it: {' '.join(given)}")
    return "".join(lines)


def _unknown_keys(data: Mapping[str, Any], read: Reader[Any]) -> Collection[str]:
    """The keys of a stage's settings that its recipe does not have."""
    try:
        read(data, where="")
    except SettingsError as error:
        return error.unknown_keys
    return ()


def _is_under(leaf: str, keys: Collection[str]) -> bool:
    return any(f"{leaf}.".startswith(f"{key}.") for key in keys)


def _leaves(value: Any, name: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [name]
    return [leaf for key, each in value.items() for leaf in _leaves(each, f"{name}.{key}")]
