"""Runs a training run: its stages one after another, each in a folder that keeps what it trained."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from bd3lm import interop
from bd3lm.interop import RUN_MODEL
from bd3lm.io.console import Console
from bd3lm.io.files import make_folder, only_writer, remove_leftovers
from bd3lm.io.places import STAGES_FILE
from bd3lm.runs.folders import (
    CHECKPOINTS,
    METRICS_FILE,
    RECIPE_FILE,
    SAMPLES_FILE,
    begun_stages,
)
from bd3lm.runs.plan import Plan, Run, open_store, plan_run, with_network_of_start
from bd3lm.runs.recipe import Recipe, recipe_to_dict
from bd3lm.runs.stages import read_recipe, save_recipe, save_stages
from bd3lm.training import CheckpointStore, Engine
from bd3lm.training.distributed import JOIN_TIMEOUT
from bd3lm.training.signals import stop_requests

STOPPED_FILE = "STOPPED"
_ANSWER_WHILE_SAVING = "saving the model, then stopping; again to quit at once"


def train_stages(
    stages: Sequence[tuple[str, Recipe]],
    out: Path,
    *,
    resume: bool = False,
    device: str | None = None,
    console: Console | None = None,
    join_timeout: float | None = None,
) -> list[Run]:
    """Run the stages in order in `out`, each from the one before, or from the one that start_from names.

    Returns the runs; the last is the model. Under torchrun, all processes must join within `join_timeout`
    seconds (default: five minutes). If a signal stops training, the runs so far are returned, the last one
    unfinished.
    """
    console = console or Console()
    _forget_stop(out)
    _check_layout(out, [name for name, _ in stages])
    start = stages[0][1].start_from
    if start is not None and not resume:
        interop.resolve(start)  # refuses mistakes before anything is written
    runs: list[Run] = []
    parallel = stages[0][1].parallel
    with (
        Engine.from_environment(
            parallel="ddp" if parallel == "auto" else parallel,
            device=device,
            join_timeout=JOIN_TIMEOUT if join_timeout is None else timedelta(seconds=join_timeout),
        ) as engine,
        _only_trainer(out, engine) as is_held,
    ):
        checked = _checked(_chained(stages, out), resume, engine, console)

        def begin() -> None:
            if is_held:
                _sweep_up(out, [name for name, _ in stages])
            save_stages(out, stages)

        _on_main(engine, begin)
        for name, plan in checked:
            run = plan.build(data_folder=out / "data", console=console, label=name)
            _train(run, plan.recipe, resume=resume, console=console)
            runs.append(run)
            if run.trainer.stopped_by == "signal":
                break
    return runs


def _forget_stop(out: Path) -> None:
    """Remove the marker of an earlier stop.

    Otherwise, if this start were refused, a job script would see the marker and start again and again.
    """
    for marker in [*out.glob(STOPPED_FILE), *out.glob(f"*/{STOPPED_FILE}")]:
        marker.unlink(missing_ok=True)  # by any process of the run


@contextmanager
def _only_trainer(out: Path, engine: Engine) -> Iterator[bool]:
    """Hold a run's folder against a second command that would train in it, however this one ends.

    Yields whether this process holds it; one process does, if the file system has locks. A folder that was
    created for the run and stayed empty is removed.
    """
    with ExitStack() as held:
        busy = is_held = False
        if engine.is_main:
            is_new = not out.exists()
            make_folder(out)
            try:
                is_held = held.enter_context(only_writer(out))
            except BlockingIOError:
                busy = True
            else:
                if is_new:
                    held.callback(_remove_if_empty, out)
        if engine.any_true(busy):
            raise ValueError(f"another process is training in {out}; wait for it, or use another --out")
        yield is_held


def _sweep_up(out: Path, stages: Sequence[str]) -> None:
    """Remove what killed trainers of a run left: half-written files or models, half-saved checkpoints.

    `out` is held. Folders of stages that another process holds stay untouched, and so do files that others,
    such as a report, may be writing without holding the folder.
    """
    _sweep_up_folder(out)
    for folder in (out / name for name in stages if len(stages) > 1):
        if folder.is_dir():
            with suppress(BlockingIOError), only_writer(folder) as held:
                if held:
                    _sweep_up_folder(folder)


def _sweep_up_folder(folder: Path) -> None:
    remove_leftovers(folder, of=(RECIPE_FILE, STAGES_FILE, METRICS_FILE, SAMPLES_FILE))
    if (folder / RUN_MODEL).is_dir():
        remove_leftovers(folder / RUN_MODEL)
    CheckpointStore(folder / CHECKPOINTS).sweep_up()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


class _Stage(NamedTuple):
    """A stage: its folder, its recipe with everything that follows from the stage it starts from, and that
    stage's recipe."""

    name: str
    folder: Path
    recipe: Recipe
    before: Recipe | None

    @property
    def has_checkpoint(self) -> bool:
        return open_store(self.recipe, self.folder).latest() is not None


def _chained(stages: Sequence[tuple[str, Recipe]], out: Path) -> list[_Stage]:
    """Chain the stages: each starts from the one before, or from the one that its start_from names, in its
    own folder if there are several."""
    chained: dict[str, _Stage] = {}
    last: _Stage | None = None
    for name, recipe in stages:
        folder = out / name if len(stages) > 1 else out
        start = chained.get(recipe.start_from or "", last)
        if start is not None:
            recipe = _after(start.recipe, recipe, start_from=str(start.folder / RUN_MODEL))
        elif recipe.network.is_checkpoints and (folder / RECIPE_FILE).is_file():
            recipe = replace(recipe, network=read_recipe(folder).network)  # the checkpoint may be gone by now
        else:
            recipe = with_network_of_start(recipe)
        last = chained[name] = _Stage(name, folder, recipe, None if start is None else start.recipe)
    return list(chained.values())


def _checked(
    stages: Sequence[_Stage], resume: bool, engine: Engine, console: Console
) -> list[tuple[str, Plan]]:
    """The stages to train, all checked before the first is trained.

    If an earlier stage has no checkpoint and a later one has, the earlier one was finished and cleaned up.
    """
    checked = []
    for index, stage in enumerate(stages):
        if resume and not stage.has_checkpoint and any(each.has_checkpoint for each in stages[index:]):
            if (stage.folder / RECIPE_FILE).exists():
                _require_same(stage.folder, stage.recipe)
            if engine.is_main:
                console.print(
                    f"{stage.folder}: no checkpoint, but a later stage has one: continuing with that",
                    soft_wrap=True,
                )
            continue
        recipe = _check_folder(stage, resume=resume, chained=stage.before is not None)
        before = None if stage.has_checkpoint else stage.before
        checked.append((stage.name, plan_run(recipe, stage.folder, engine=engine, before=before)))
    return checked


def _after(before: Recipe, recipe: Recipe, *, start_from: str) -> Recipe:
    """A stage that starts from an earlier one: from its weights, and with text that it has not read."""
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
    return replace(recipe, start_from=start_from, data=data, network=recipe.network.like(before.network))


def _check_layout(out: Path, stages: Sequence[str]) -> None:
    """Refuse to mix a run of several stages and a run of one stage in the same folder."""
    single = (out / RECIPE_FILE).exists()
    staged = begun_stages(out)
    if single and len(stages) > 1:
        raise ValueError(
            f"{out} holds a run of one stage, not of the stages {', '.join(stages)}: resume it with the same "
            "--from or preset, or use another --out"
        )
    if staged and (len(stages) == 1 or not set(staged) <= set(stages)):
        raise ValueError(
            f"{out} holds a run of the stages {', '.join(staged)}: resume it with its preset, or use another "
            "--out"
        )


def _train(run: Run, recipe: Recipe, *, resume: bool, console: Console) -> None:
    trainer = run.trainer
    resumed = resume and trainer.resume()  # refuses data that differs from the data at the start
    _on_main(trainer.engine, lambda: save_recipe(run.out, recipe))  # only once the run can start
    if resumed and trainer.engine.is_main:
        finished = trainer.step >= trainer.settings.steps
        console.print(
            f"{run.out}: {'already trained to' if finished else 'resumed at'} step {trainer.step}",
            soft_wrap=True,
        )
    if trainer.engine.is_main and trainer.step < trainer.settings.steps:
        how = "compiled; the first step takes about a minute" if trainer.settings.compile else "not compiled"
        console.print(f"training on {trainer.engine.device} in {trainer.precision}, {how}")
        if run.nothing_held_out is not None:
            console.print(f"{run.nothing_held_out}: nothing will be validated", soft_wrap=True, markup=False)
    with stop_requests(lambda: _ANSWER_WHILE_SAVING if trainer.engine.is_main else "") as stop_requested:
        try:
            trainer.run()  # handles signals itself
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}. {_way_out(run)}") from error
        folder = run.export()
        if trainer.engine.any_true(stop_requested()):
            trainer.stopped_by = "signal"
    if trainer.engine.is_main and trainer.stopped_by == "signal":
        # torchrun has one exit status for every end but success; this file tells a job script more.
        (run.out / STOPPED_FILE).touch()
        console.print(
            f"stopped at step {trainer.step} of {trainer.settings.steps}; everything is saved in "
            f"{folder.parent}: to continue, train with --resume, or start the demo again",
            soft_wrap=True,
        )


def _way_out(run: Run) -> str:
    """Advice for a loss that is not finite; the model of the last checkpoint is released for it.

    Continuing from there would reach the same loss again, and another learning rate is another run.
    """
    command = f"bd3lm train --config {run.out / RECIPE_FILE} --optimizer.lr LOWER --out ANOTHER"
    if not run.trainer.resume():
        return f"Start again: {command}"
    run.export()
    return f"Start again, or start from the model of step {run.trainer.step}: {command} [--from {run.out}]"


def _check_folder(stage: _Stage, *, resume: bool, chained: bool) -> Recipe:
    """The recipe for training in a folder; refuses anything that would replace trained weights.

    A run is resumed only with a recipe that computes the same. It keeps the start of its own recipe, whatever
    is requested now; a `chained` stage started from the stage before it, in the run's own folder, which may
    have moved.
    """
    folder, recipe = stage.folder, stage.recipe
    model, file = folder / RUN_MODEL, folder / RECIPE_FILE
    if not stage.has_checkpoint:
        if model.exists():
            raise ValueError(
                f"{folder} holds a model, which would be replaced, and no checkpoint to continue from; use "
                f"another --out, or move {model} away"
            )
        return recipe
    if not file.exists():
        raise ValueError(
            f"{folder} holds checkpoints without the {RECIPE_FILE} they were trained with; use another "
            "--out, or restore it (their state.json has it, under state, run) and use --resume"
        )
    if not resume:
        raise ValueError(f"{folder} holds a run already; use --resume to continue it, or another --out")
    saved = _require_same(folder, recipe)
    return recipe if chained else replace(recipe, start_from=saved.start_from)


def _require_same(folder: Path, recipe: Recipe) -> Recipe:
    """The recipe that a run was started with, after checking that it computes the same as this one."""
    saved = read_recipe(folder)
    if changed := _differences(_comparable(saved), _comparable(recipe), _may_change(saved)):
        steps = any(each.startswith("train.steps ") for each in changed)
        raise ValueError(
            f"{folder} was started with another recipe, and --resume needs one that computes the same: leave "
            "out the preset and these flags, or use another --out. Different: "
            f"{', '.join(sorted(changed))}{_about_steps(folder, saved) if steps else ''}"
        )
    return saved


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain values, equal for equal networks, however they were described."""
    return {**recipe_to_dict(recipe), "network": recipe.network.resolved}


def _about_steps(folder: Path, saved: Recipe) -> str:
    return (
        f". The learning rate's {saved.optimizer.decay} decay depends on train.steps; to train longer from "
        f"its weights use --from {folder} with another --out"
    )


def _on_main(engine: Engine, write: Callable[[], None]) -> None:
    """Write in one process, after all have read what was there and before any continues."""
    engine.barrier()
    if engine.is_main:
        write()
    engine.barrier()


def _may_change(recipe: Recipe) -> set[str]:
    """Fields that may differ when a run is resumed, because they do not change what is computed.

    Micro-batches and devices change only the order of sums and, with dropout, which units are dropped. Data
    may move: a checkpoint knows its fingerprint. A run with a checkpoint does not need its start either.
    """
    free = {"train.log_every", "train.checkpoint_every", "train.micro_batch", "train.compile"}
    free.add("train.recompute_activations")
    free |= {"parallel", "checkpoint", "trackers", "data.path", "start_from"}
    free |= {f"method.{name}" for name in recipe.method.concerns_release_only}
    if recipe.optimizer.decay == "constant":
        free.add("train.steps")
    if recipe.objective.search is None:
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
