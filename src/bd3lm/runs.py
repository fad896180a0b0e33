"""A training run from its command: resolve the recipe, run its stages, keep what they wrote."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from bd3lm.build import Run, build_run
from bd3lm.presets import Stage, preset
from bd3lm.recipe import Recipe, merge, recipe_from_dict, recipe_to_dict
from bd3lm.training import Engine

RECIPE_FILE = "recipe.yaml"


def resolve_stages(
    name: str | None,
    *,
    config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    start_from: str | None = None,
) -> list[tuple[str, Recipe]]:
    """The stages of a preset with their recipes: flag over file over preset over default.

    A flag or a file's key that names a stage applies to that stage alone, any other to every stage. With
    `start_from` only the last stage is run, from there.
    """
    stages = preset(name).stages if name is not None else (Stage("train", {}),)
    layers = [_read_yaml(config)] if config is not None else []
    layers.append(dict(overrides or {}))
    names = {stage.name for stage in stages}
    if start_from is not None:
        stages = stages[-1:]
    resolved = []
    for stage in stages:
        data: dict[str, Any] = dict(stage.recipe)
        for layer in layers:
            common = {key: value for key, value in layer.items() if key not in names}
            data = merge(data, common, layer.get(stage.name) or {})
        if start_from is not None:
            data = merge(data, {"start_from": start_from})
        resolved.append((stage.name, recipe_from_dict(data, where=_where(name, config, stage.name))))
    return resolved


def train_stages(
    stages: Sequence[tuple[str, Recipe]],
    out: Path,
    *,
    resume: bool = False,
    device: str | None = None,
    console: Console | None = None,
) -> list[Run]:
    """Run the stages in order, each from the one before, under `out`; returns them, the last being the model.

    Stopped by a signal, the runs so far are returned, the last one unfinished.
    """
    console = console or Console()
    runs: list[Run] = []
    parallel = stages[0][1].parallel
    with Engine.from_environment(parallel="ddp" if parallel == "auto" else parallel, device=device) as engine:
        previous: Path | None = None
        for name, recipe in stages:
            folder = out / name if len(stages) > 1 else out
            recipe = replace(recipe, start_from=str(previous)) if previous is not None else recipe
            recipe = _saved_recipe(folder, recipe, resume=resume, engine=engine)
            run = build_run(
                recipe, folder, engine=engine, data_folder=out / "data", console=console, label=name
            )
            _train(run, resume=resume, console=console)
            runs.append(run)
            if run.trainer.step < recipe.train.steps:
                break
            previous = run.out / "model"
    return runs


def _train(run: Run, *, resume: bool, console: Console) -> None:
    trainer = run.trainer
    if resume and trainer.resume() and trainer.engine.is_main:
        console.print(f"resumed at step {trainer.step}")
    if trainer.step < trainer.settings.steps:
        trainer.run()
    folder = run.export()
    if trainer.engine.is_main and trainer.step < trainer.settings.steps:
        console.print(
            f"stopped at step {trainer.step} of {trainer.settings.steps}; everything is saved in "
            f"{folder.parent}, and --resume goes on",
            soft_wrap=True,
        )


def _saved_recipe(folder: Path, recipe: Recipe, *, resume: bool, engine: Engine) -> Recipe:
    """Write the resolved recipe beside the run; a folder that holds a run already is resumed or refused."""
    file = folder / RECIPE_FILE
    if file.exists():
        if not resume:
            raise ValueError(f"{folder} holds a run; give --resume to go on with it, or another --out")
        saved = recipe_from_dict(_read_yaml(file), where=str(file))
        if changed := _differences(recipe_to_dict(saved), recipe_to_dict(recipe)):
            raise ValueError(
                f"{folder} was started with another recipe; --resume needs the same, but for train.steps, how"
                f" often to look and where to run. Different: {', '.join(changed)}"
            )
    engine.barrier()  # nobody writes before everybody has looked
    if engine.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    engine.barrier()
    return recipe


# What may change between the parts of a run: it does not change what is computed.
_MAY_CHANGE = {
    "train.steps",
    "train.log_every",
    "train.validate_every",
    "train.checkpoint_every",
    "train.micro_batch",
    "train.compile",
    "parallel",
    "checkpoint",
    "trackers",
}


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    if path in _MAY_CHANGE:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in before.keys() | after.keys()
            for line in _differences(before.get(key), after.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if before == after else [f"{path} ({before!r} then, {after!r} now)"]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config must be a YAML file, got {path}, which does not exist") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {type(data).__name__}")
    return data


def _where(name: str | None, config: Path | None, stage: str) -> str:
    parts = [part for part in (f"preset {name}" if name else "", str(config or "")) if part]
    return " with ".join(parts or ["the recipe"]) + (f" (stage {stage})" if stage != "train" else "")
