"""The stages of a run and their recipes, from a preset, a file and flags, or from the folder of a run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from bd3lm.interop import RUN_MODEL
from bd3lm.io.files import write_atomically
from bd3lm.io.places import STAGES_FILE
from bd3lm.parsing import named, shown
from bd3lm.runs.folders import CHECKPOINTS, RECIPE_FILE, begun_stages
from bd3lm.runs.merging import ONLY
from bd3lm.runs.presets import Stage, preset
from bd3lm.runs.reading import read_settings
from bd3lm.runs.recipe import Recipe, recipe_from_dict, recipe_to_dict
from bd3lm.runs.settling import settle


def resolve_stages(
    name: str | None,
    *,
    config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    start_from: str | None = None,
) -> list[tuple[str, Recipe]]:
    """The stages of a run with their recipes: flags over file over preset over defaults.

    Without a preset, the file says everything: one recipe, or several stages by name, in order. A flag or key
    that begins with the name of a stage applies only to that stage; any other applies to every stage. With
    `start_from`, only the last stage runs, from that model. A stage that starts from a checkpoint has its
    network unless the settings say otherwise.
    """
    files = [read_settings(config)] if config is not None else []
    if name is not None:
        stages = preset(name).stages
    else:
        stages, files = _stages_of(files[0] if files else {}, where=str(config)), []
    where = " with ".join([*([f"preset {name}"] if name else []), *([str(config)] if config else [])])
    return _resolved(stages, [*files, dict(overrides or {})], where or "the recipe", start_from)


def resolve_recipes(
    recipes: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any], *, where: str
) -> list[tuple[str, Recipe]]:
    """The same for stages given as plain values by name, with flags over them."""
    stages = [Stage(name, recipe) for name, recipe in recipes.items()]
    return _resolved(stages, [overrides], where)


def _stages_of(settings: Mapping[str, Any], where: str) -> tuple[Stage, ...]:
    """The stages in a file without a preset; a file without stages is one recipe.

    One recognizable stage is enough to read the file as stages; errors are then about the others.
    """
    parts = {each.name for each in fields(Recipe)}
    recipes = [each for each in settings.values() if isinstance(each, Mapping) and each.keys() & parts]
    if not recipes or settings.keys() & parts:
        return (Stage(ONLY, settings),)
    for name, recipe in settings.items():
        if not isinstance(recipe, Mapping):
            raise ValueError(
                f"{where}: the stage {named(name)} must be a mapping of settings, got {shown(recipe)}"
            )
        is_name = isinstance(name, str) and re.fullmatch(r"\w[\w-]*", name)
        if not is_name or name in (RUN_MODEL, CHECKPOINTS):
            raise ValueError(
                f"{where}: the name of a stage is also its folder and must be made of letters, digits, _ and "
                f"-, other than {RUN_MODEL} and {CHECKPOINTS}, got {shown(name)}"
            )
    return tuple(Stage(name, recipe) for name, recipe in settings.items())


def saved_stages(out: Path, overrides: Mapping[str, Any] | None = None) -> list[tuple[str, Recipe]]:
    """All stages that the run in a folder was started with, begun or not, changed by flags."""
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
    return settle(stages, layers, where, start_from, kind=Recipe, read=recipe_from_dict)


def run_stages(out: Path) -> list[Path]:
    """The folders of the stages of a run that have begun, in order. A run of one stage is its own folder."""
    if (out / RECIPE_FILE).is_file():
        return [out]
    begun = [out / name for name in _read_stages(out) if (out / name / RECIPE_FILE).is_file()]
    if not begun:
        raise ValueError(f"{out} must be the folder of a run that has begun, got one in which no stage has")
    return begun


def read_recipe(folder: Path) -> Recipe:
    """The resolved recipe of a stage."""
    file = folder / RECIPE_FILE
    return recipe_from_dict(read_settings(file), where=str(file))


def save_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the resolved recipe of a stage into its folder."""
    _write(folder / RECIPE_FILE, recipe_to_dict(recipe))


def save_stages(out: Path, stages: Sequence[tuple[str, Recipe]]) -> None:
    """Write what `saved_stages` needs. The recipe of a single stage is in the folder itself."""
    if len(stages) > 1:
        _write(out / STAGES_FILE, stages_to_dict(stages))


def stages_to_dict(stages: Sequence[tuple[str, Recipe]]) -> dict[str, Any]:
    """The recipes as a file for --config: a single one as it is, several under the names of their stages."""
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
