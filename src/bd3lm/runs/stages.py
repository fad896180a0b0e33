"""The stages of a run and their recipes: from a preset, a file and flags, or from the folder of a run."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from bd3lm.interop import RUN_MODEL
from bd3lm.io.files import write_atomically
from bd3lm.parsing import SettingsError, did_you_mean, did_you_mean_deeper
from bd3lm.runs.folders import CHECKPOINTS, RECIPE_FILE, STAGES_FILE, begun_stages
from bd3lm.runs.merging import CHECKPOINT, merge
from bd3lm.runs.presets import ONLY, Stage, preset
from bd3lm.runs.recipe import Recipe, read_settings, recipe_from_dict, recipe_to_dict


def resolve_stages(
    name: str | None,
    *,
    config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    start_from: str | None = None,
) -> list[tuple[str, Recipe]]:
    """The stages of a run with their recipes: flag over file over preset over default.

    Without a preset the file says everything: one recipe, or several stages by name, in their order. A flag
    or a file's key that names a stage applies to that stage alone, any other to every stage. With
    `start_from` only the last stage is run, from there. A stage that starts from a checkpoint has the network
    of that checkpoint where nothing is said of it.
    """
    files = [read_settings(config)] if config is not None else []
    if name is not None:
        stages = preset(name).stages
    else:
        stages, files = _stages_of(files[0] if files else {}, where=str(config)), []
    where = " with ".join([*([f"preset {name}"] if name else []), *([str(config)] if config else [])])
    return _resolved(stages, [*files, dict(overrides or {})], where or "the recipe", start_from)


def _stages_of(settings: Mapping[str, Any], where: str) -> tuple[Stage, ...]:
    """The stages in a file that has no preset under it; a file without stages is one recipe.

    One stage that can be told is enough: what is wrong with the others is then said of these.
    """
    parts = {each.name for each in fields(Recipe)}
    recipes = [each for each in settings.values() if isinstance(each, Mapping) and each.keys() & parts]
    if not recipes or settings.keys() & parts:
        return (Stage(ONLY, settings),)
    for name, recipe in settings.items():
        if not isinstance(recipe, Mapping):
            raise ValueError(f"{where}: the stage {name} must be a mapping of settings, got {recipe!r}")
        is_name = isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name)
        if not is_name or name in (RUN_MODEL, CHECKPOINTS):
            raise ValueError(
                f"{where}: the name of a stage is that of its folder and must be made of letters, digits, _ "
                f"and -, other than {RUN_MODEL} and {CHECKPOINTS}, got {name!r}"
            )
    return tuple(Stage(name, recipe) for name, recipe in settings.items())


def saved_stages(out: Path, overrides: Mapping[str, Any] | None = None) -> list[tuple[str, Recipe]]:
    """The stages that the run in a folder was started with, those not begun included, changed by flags."""
    if (out / RECIPE_FILE).is_file():
        stages = [Stage(ONLY, read_settings(out / RECIPE_FILE))]
    else:
        stages = [Stage(name, settings) for name, settings in _read_stages(out).items()]
    return _resolved(stages, [dict(overrides or {})], str(out))


def _resolved(
    stages: Sequence[Stage],
    layers: Sequence[Mapping[str, Any]],
    where: str,
    start_from: str | None = None,
) -> list[tuple[str, Recipe]]:
    """Each stage's settings under the layers, the last of which are flags, as a recipe."""
    names = {stage.name for stage in stages if stage.name != ONLY}
    for layer in layers:
        _check_stage_names(layer, [stage.name for stage in stages])
    if start_from is not None:
        _check_flags_beside_start(layers[-1], stages)
        stages = stages[-1:]
    resolved = []
    for stage in stages:
        data: dict[str, Any] = dict(stage.recipe)
        for layer in layers:
            common = {key: value for key, value in layer.items() if key not in names}
            if stage.recipe.get("start_from") in names:
                common.pop("start_from", None)  # that of the first stage, from which this one does not start
            data = merge(data, common, layer[stage.name] if stage.name in names & layer.keys() else {})
        if start_from is not None:
            data = merge(data, {"start_from": start_from})
        # From an earlier stage it starts later, and what that one's network is the recipe of that one says.
        if data.get("start_from") is not None and data["start_from"] not in names and "network" not in data:
            data["network"] = {"size": CHECKPOINT}
        try:
            named = f"{where} (stage {stage.name})" if stage.name != ONLY else where
            recipe = recipe_from_dict(data, where=named)
        except ValueError as error:
            common = {key: value for key, value in layers[-1].items() if key not in names}
            raise ValueError(f"{error}{_other_stages(stages, common)}") from None
        resolved.append((stage.name, recipe))
    return resolved


def _check_flags_beside_start(flags: Mapping[str, Any], stages: Sequence[Stage]) -> None:
    """Refuse flags that --from leaves nothing to do: those of stages it skips, and another start."""
    *skipped, last = [stage.name for stage in stages]
    if found := [name for name in skipped if name in flags]:
        raise ValueError(f"with --from only the stage {last} is run, got flags --{found[0]}.any.field")
    own = flags.get(last)
    if "start_from" in flags or (isinstance(own, Mapping) and "start_from" in own):
        raise ValueError("--from says what to start from, got --start_from too: give one of them")


def _check_stage_names(layer: Mapping[str, Any], stages: Sequence[str]) -> None:
    """Refuse a key that is neither a stage nor a part of a recipe, and a stage given a plain value."""
    if list(stages) == [ONLY]:
        return  # a single stage is not named, and the recipe reports what is wrong with it
    parts = [each.name for each in fields(Recipe)]
    for key, value in layer.items():
        if key in stages and not isinstance(value, Mapping):
            raise ValueError(f"{key} is a stage, whose settings are {key}.any.field, got {value!r}")
        if key not in stages and key not in parts:
            near = did_you_mean(key, [*stages, *parts])
            hint = near or did_you_mean_deeper(key, Recipe, layer) or ","
            raise ValueError(
                f"{key}: unknown key{hint} allowed are the stages {', '.join(stages)}, and {', '.join(parts)}"
            )


def _other_stages(stages: Sequence[Stage], flags: Mapping[str, Any]) -> str:
    """Hints for flags that only some stages accept: how to set them for those stages."""
    lines = []
    for part, value in flags.items():
        unknown = {stage.name: _unknown_keys(merge(stage.recipe, {part: value})) for stage in stages}
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


def _unknown_keys(data: Mapping[str, Any]) -> Collection[str]:
    """The keys of a stage's settings that its recipe does not have."""
    try:
        recipe_from_dict(data, where="")
    except SettingsError as error:
        return error.unknown_keys
    return ()


def _is_under(leaf: str, keys: Collection[str]) -> bool:
    return any(f"{leaf}.".startswith(f"{key}.") for key in keys)


def _leaves(value: Any, name: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [name]
    return [leaf for key, each in value.items() for leaf in _leaves(each, f"{name}.{key}")]


def run_stages(out: Path) -> list[Path]:
    """The folders of the stages of a run that were begun, in their order; a run of one stage is its own."""
    if (out / RECIPE_FILE).is_file():
        return [out]
    begun = [out / name for name in _read_stages(out) if (out / name / RECIPE_FILE).is_file()]
    if not begun:
        raise ValueError(f"{out} must be the folder of a run that was begun, got one in which no stage was")
    return begun


def read_recipe(folder: Path) -> Recipe:
    """The resolved recipe of a stage."""
    file = folder / RECIPE_FILE
    return recipe_from_dict(read_settings(file), where=str(file))


def save_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the resolved recipe of a stage into its folder."""
    _write(folder / RECIPE_FILE, recipe_to_dict(recipe))


def save_stages(out: Path, stages: Sequence[tuple[str, Recipe]]) -> None:
    """Write what `saved_stages` needs; the recipe of a single stage lies in the folder itself."""
    if len(stages) > 1:
        _write(out / STAGES_FILE, stages_to_dict(stages))


def stages_to_dict(stages: Sequence[tuple[str, Recipe]]) -> dict[str, Any]:
    """The recipes as a file that --config takes: one as it is, several each under its stage."""
    plain = {name: recipe_to_dict(recipe) for name, recipe in stages}
    return plain if len(plain) > 1 else next(iter(plain.values()))


def _read_stages(out: Path) -> dict[str, Any]:
    file = out / STAGES_FILE
    if not file.is_file() and (begun := begun_stages(out)):
        raise ValueError(
            f"{out} has the stages {', '.join(begun)}, but no {STAGES_FILE} with their order: name one of "
            "them, or resume the run once with its preset"
        )
    if not file.is_file():
        raise ValueError(
            f"{out} must be the folder of a run, with its {RECIPE_FILE} or {STAGES_FILE}, got neither"
        )
    return read_settings(file)


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, yaml.safe_dump(settings, sort_keys=False).encode())
