"""A training run from its command: resolve the recipe, run its stages, keep what they wrote."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from bd3lm import interop
from bd3lm.build import Run, build_run, check_run, open_store
from bd3lm.config import did_you_mean
from bd3lm.data.disk import only_writer
from bd3lm.interop import RUN_MODEL
from bd3lm.presets import ONLY, Stage, preset
from bd3lm.recipe import (
    BlockDiffusionRecipe,
    ClippedMasking,
    Recipe,
    merge,
    read_settings,
    recipe_from_dict,
    recipe_to_dict,
)
from bd3lm.training import Engine

RECIPE_FILE = "recipe.yaml"
STOPPED_FILE = "STOPPED"


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
    stages = preset(name).stages if name is not None else (Stage(ONLY, {}),)
    layers = [read_settings(config)] if config is not None else []
    layers.append(dict(overrides or {}))
    names = {stage.name for stage in stages} if len(stages) > 1 else set()
    for layer in layers:
        _check_stage_names(layer, [stage.name for stage in stages])
    if start_from is not None:
        stages = stages[-1:]
    resolved = []
    for stage in stages:
        data: dict[str, Any] = dict(stage.recipe)
        for layer in layers:
            common = {key: value for key, value in layer.items() if key not in names}
            data = merge(data, common, layer[stage.name] if stage.name in names & layer.keys() else {})
        if start_from is not None:
            data = merge(data, {"start_from": start_from})
        try:
            recipe = recipe_from_dict(data, where=_where(name, config, stage.name))
        except ValueError as error:
            common = {key: value for key, value in layers[-1].items() if key not in names}
            raise ValueError(f"{error}{_other_stages(stages, common)}") from None
        resolved.append((stage.name, recipe))
    return resolved


def _check_stage_names(layer: Mapping[str, Any], stages: Sequence[str]) -> None:
    """Refuse a key that is neither a stage nor a part of a recipe, and a stage given a plain value."""
    if len(stages) == 1:
        return  # which is not named, and a recipe says itself what is wrong with it
    parts = [each.name for each in fields(Recipe)]
    for key, value in layer.items():
        if key in stages and not isinstance(value, Mapping):
            raise ValueError(f"{key} is a stage, whose settings are {key}.any.field, got {value!r}")
        if key not in stages and key not in parts:
            hint = did_you_mean(key, [*stages, *parts]) or ","
            raise ValueError(
                f"{key}: unknown key{hint} allowed are the stages {', '.join(stages)}, and {', '.join(parts)}"
            )


def _other_stages(stages: Sequence[Stage], flags: Mapping[str, Any]) -> str:
    """Lines that say of flags which some stages know and others do not how they are given to those alone."""
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


def _unknown_keys(data: Mapping[str, Any]) -> set[str]:
    """What a recipe says of itself that it does not know."""
    try:
        recipe_from_dict(data, where="")
    except ValueError as error:
        return set(re.findall(r"^ *([\w.]+): unknown key", str(error), re.MULTILINE))
    return set()


def _is_under(leaf: str, keys: set[str]) -> bool:
    return any(f"{leaf}.".startswith(f"{key}.") for key in keys)


def _leaves(value: Any, name: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [name]
    return [leaf for key, each in value.items() for leaf in _leaves(each, f"{name}.{key}")]


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
    _forget_stop(out)
    _check_layout(out, [name for name, _ in stages])
    start = stages[0][1].start_from
    if start is not None and not resume:
        interop.resolve(start)  # complains before anything is written
    runs: list[Run] = []
    parallel = stages[0][1].parallel
    with (
        Engine.from_environment(parallel="ddp" if parallel == "auto" else parallel, device=device) as engine,
        _only_trainer(out, engine),
    ):
        for name, folder, recipe in _checked(_plan(stages, out), resume, engine, console):
            run = build_run(
                recipe, folder, engine=engine, data_folder=out / "data", console=console, label=name
            )
            _train(run, recipe, resume=resume, console=console)
            runs.append(run)
            if run.trainer.stopped_by == "signal":
                break
    return runs


def _forget_stop(out: Path) -> None:
    """Remove what an earlier run left where it was stopped: of a start that is refused it would not be true,
    and a job script would start it again and again."""
    for marker in [*out.glob(STOPPED_FILE), *out.glob(f"*/{STOPPED_FILE}")]:
        marker.unlink(missing_ok=True)  # by any process of the run


@contextmanager
def _only_trainer(out: Path, engine: Engine) -> Iterator[None]:
    """Hold a run's folder against a second command that would train into it, however this one ends.

    A folder that was made for it, and in which nothing was written, is removed.
    """
    with ExitStack() as held:
        busy = False
        if engine.is_main:
            is_new = not out.exists()
            out.mkdir(parents=True, exist_ok=True)
            try:
                held.enter_context(only_writer(out))
            except BlockingIOError:
                busy = True
            else:
                if is_new:
                    held.callback(_remove_if_empty, out)
        if engine.any_true(busy):
            raise ValueError(
                f"{out} is being trained into by another process; wait for it, or give another --out"
            )
        yield


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


class _Planned(NamedTuple):
    """A stage, the folder it is trained in, and its recipe with what follows from the stage before it."""

    name: str
    folder: Path
    recipe: Recipe

    @property
    def has_checkpoint(self) -> bool:
        return open_store(self.recipe, self.folder).latest() is not None


def _plan(stages: Sequence[tuple[str, Recipe]], out: Path) -> list[_Planned]:
    """Each stage goes on from the model of the one before, in a folder of its own if there are several."""
    planned: list[_Planned] = []
    for name, recipe in stages:
        if planned:
            before = planned[-1]
            recipe = _after(before.recipe, recipe, start_from=str(before.folder / RUN_MODEL))
        planned.append(_Planned(name, out / name if len(stages) > 1 else out, recipe))
    return planned


def _checked(planned: Sequence[_Planned], resume: bool, engine: Engine, console: Console) -> list[_Planned]:
    """The stages to train, checked all of them before the first is: mistakes in later ones cost hours.

    Where a later stage has a checkpoint, an earlier one that has none was done, and was cleared away.
    """
    checked = []
    for index, stage in enumerate(planned):
        before = planned[index - 1].recipe if index else None
        if resume and not stage.has_checkpoint and any(each.has_checkpoint for each in planned[index:]):
            if (stage.folder / RECIPE_FILE).exists():
                _require_same(stage.folder, stage.recipe)
            if engine.is_main:
                console.print(
                    f"{stage.folder}: no checkpoint, and a later stage has one: going on with that",
                    soft_wrap=True,
                )
            continue
        recipe = _check_folder(stage, resume=resume, chained=before is not None)
        check_run(recipe, stage.folder, engine=engine, before=None if stage.has_checkpoint else before)
        checked.append(stage._replace(recipe=recipe))
    return checked


def _after(before: Recipe, recipe: Recipe, *, start_from: str) -> Recipe:
    """A stage that goes on from the one before: from its weights, and with the text that it has not read."""
    data = recipe.data
    if data.skip is None:
        in_one_order = (before.data.path, before.data.context, before.data.bos_eos, before.train.seed) == (
            data.path,
            data.context,
            data.bos_eos,
            recipe.train.seed,
        )
        read = (before.data.skip or 0) + before.train.steps * before.train.global_batch
        data = replace(data, skip=read if in_one_order else 0)
    return replace(recipe, start_from=start_from, data=data)


def is_run(out: Path) -> bool:
    """Whether a folder holds a run, of one stage or of several."""
    return bool([*out.glob(RECIPE_FILE), *out.glob(f"*/{RECIPE_FILE}")])


def run_stages(out: Path) -> list[Path]:
    """The folders of a run's stages, in the order they were trained; a run of one stage is its own."""
    if (out / RECIPE_FILE).is_file():
        return [out]
    names = sorted(file.parent.name for file in out.glob(f"*/{RECIPE_FILE}"))
    if not names:
        raise ValueError(f"{out} must be the folder of a run, with its {RECIPE_FILE}, got none")
    # A stage starts from OUT/STAGE/model. The first may start from a stage of another run, whatever its name.
    sources = {name: Path(read_recipe(out / name).start_from or "").parent for name in names}
    own = {name: place for name, place in sources.items() if place.parent.resolve() == out.resolve()}
    # Where OUT was moved since, or copied, no path leads into it, and names are all there is to go by.
    starts = {name: place.name for name, place in (own or sources).items()}

    def stages_until(name: str) -> int:
        chain = [name]
        while (start := starts.get(chain[-1], "")) in names and start not in chain:
            chain.append(start)
        return len(chain)

    return [out / name for name in sorted(names, key=stages_until)]


def read_recipe(folder: Path) -> Recipe:
    """The resolved recipe of a run of one stage."""
    file = folder / RECIPE_FILE
    return recipe_from_dict(read_settings(file), where=str(file))


def _check_layout(out: Path, stages: Sequence[str]) -> None:
    """Refuse to put a run of several stages beside a single one in the same folder, or the reverse."""
    single = (out / RECIPE_FILE).exists()
    staged = sorted(path.parent.name for path in out.glob(f"*/{RECIPE_FILE}"))
    if single and len(stages) > 1:
        raise ValueError(
            f"{out} holds a run of one stage, not of the stages {', '.join(stages)}: resume it with the same "
            "--from or preset, or give another --out"
        )
    if staged and (len(stages) == 1 or not set(staged) <= set(stages)):
        raise ValueError(
            f"{out} holds a run of the stages {', '.join(staged)}: resume it with its preset, or give "
            "another --out"
        )


def _train(run: Run, recipe: Recipe, *, resume: bool, console: Console) -> None:
    trainer = run.trainer
    resumed = resume and trainer.resume()  # complains of other data than the recipe's were
    _save_recipe(run.out, recipe, trainer.engine)  # of a run that can be
    if resumed and trainer.engine.is_main:
        finished = trainer.step >= trainer.settings.steps
        console.print(
            f"{run.out}: {'already trained to' if finished else 'resumed at'} step {trainer.step}",
            soft_wrap=True,
        )
    if trainer.engine.is_main and trainer.step < trainer.settings.steps:
        how = "compiled; the first step takes about a minute" if trainer.settings.compile else "not compiled"
        console.print(f"training on {trainer.engine.device} in {trainer.precision}, {how}")
    try:
        trainer.run()
    except FloatingPointError as error:
        raise FloatingPointError(f"{error}. {_way_out(run)}") from error
    folder = run.export()
    if trainer.engine.is_main and trainer.stopped_by == "signal":
        # torchrun has one exit status for all ends but success; this tells a job script more.
        (run.out / STOPPED_FILE).touch()
        console.print(
            f"stopped at step {trainer.step} of {trainer.settings.steps}; everything is saved in "
            f"{folder.parent}, and --resume goes on",
            soft_wrap=True,
        )


def _way_out(run: Run) -> str:
    """What can be done about a loss that is not finite; the model of the last checkpoint is released for it.

    Going on from there would come to the same loss again, and another learning rate makes another run.
    """
    command = f"bd3lm train --config {run.out / RECIPE_FILE} --optimizer.lr LOWER --out ANOTHER"
    if not run.trainer.resume():
        return f"Begin again: {command}"
    run.export()
    return f"Begin again, or from the model of step {run.trainer.step}: {command} [--from {run.out}]"


def _check_folder(stage: _Planned, *, resume: bool, chained: bool) -> Recipe:
    """The recipe to train a folder's run with. Refused is whatever would replace something trained.

    A run is resumed with a recipe that computes the same. It began where its own recipe says, whatever is
    said now; a stage that is `chained` to one before it began in the run's own folder, which may have moved.
    """
    folder, recipe = stage.folder, stage.recipe
    model, file = folder / RUN_MODEL, folder / RECIPE_FILE
    if not stage.has_checkpoint:
        if model.exists():
            raise ValueError(
                f"{folder} holds a model, which would be replaced, and no checkpoint to go on from; give "
                f"another --out, or move {model} away"
            )
        return recipe
    if not file.exists():
        raise ValueError(
            f"{folder} holds checkpoints without the {RECIPE_FILE} they were trained with; give another "
            "--out, or put it back (their state.json has it, under state, run) and give --resume"
        )
    if not resume:
        raise ValueError(f"{folder} holds a run; give --resume to go on with it, or another --out")
    saved = _require_same(folder, recipe)
    return recipe if chained else replace(recipe, start_from=saved.start_from)


def _require_same(folder: Path, recipe: Recipe) -> Recipe:
    """The recipe that a run was started with, after making sure that it computes the same as this one."""
    saved = read_recipe(folder)
    if changed := _differences(recipe_to_dict(saved), recipe_to_dict(recipe), _may_change(saved)):
        raise ValueError(
            f"{folder} was started with another recipe; to go on needs one that computes the same: give "
            f"that, or another --out. Different: {', '.join(sorted(changed))}"
        )
    return saved


def _save_recipe(folder: Path, recipe: Recipe, engine: Engine) -> None:
    """Write the resolved recipe beside the run."""
    engine.barrier()  # nobody writes before everybody has looked
    if engine.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / RECIPE_FILE
        text = yaml.safe_dump(recipe_to_dict(recipe), sort_keys=False)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    engine.barrier()


def _may_change(recipe: Recipe) -> set[str]:
    """What may differ between the parts of a run because it does not change what is computed.

    Micro-batches and devices change only how sums are ordered and, with dropout, which units are dropped.
    Data may lie elsewhere: a checkpoint knows their fingerprint. Nor does it need what the run started from.
    """
    free = {"train.log_every", "train.checkpoint_every", "train.micro_batch", "train.compile"}
    free |= {"parallel", "checkpoint", "trackers", "data.path", "start_from"}
    free.add("method.lean")  # of the model that is released
    if recipe.optimizer.decay == "constant":
        free.add("train.steps")
    masking = recipe.method.masking if isinstance(recipe.method, BlockDiffusionRecipe) else None
    if not (isinstance(masking, ClippedMasking) and masking.search is not None):
        free |= {"train.validate_every", "data.validation_batch", "data.validation_sequences"}
    return free


def _differences(before: Any, after: Any, free: set[str], path: str = "") -> list[str]:
    if path in free:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in before.keys() | after.keys()
            for line in _differences(before.get(key), after.get(key), free, f"{path}.{key}" if path else key)
        ]
    return [] if before == after else [f"{path} ({before!r} then, {after!r} now)"]


def _where(name: str | None, config: Path | None, stage: str) -> str:
    parts = [part for part in (f"preset {name}" if name else "", str(config or "")) if part]
    return " with ".join(parts or ["the recipe"]) + (f" (stage {stage})" if stage != ONLY else "")
