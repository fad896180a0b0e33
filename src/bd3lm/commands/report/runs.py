"""The runs of a report: their stages, their logs, and the content of the report."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bd3lm
from bd3lm.commands.report.reproduction import repeatable
from bd3lm.commands.shared.records import kept
from bd3lm.commands.shared.subjects import Subject
from bd3lm.interop import CONFIG_NAME, RUN_MODEL
from bd3lm.lm import LanguageModel
from bd3lm.reports import KINDS, Report, Run
from bd3lm.reports.records import LARGEST
from bd3lm.runs.folders import CHECKPOINTS, METRICS_FILE, RECIPE_FILE, begun_stages, is_run
from bd3lm.runs.recipe import Recipe, recipe_to_dict
from bd3lm.runs.stages import read_recipe, run_stages
from bd3lm.runs.train import STOPPED_FILE
from bd3lm.training import CheckpointStore, CsvLog


@dataclass(frozen=True)
class Stage:
    """The folder of one stage of a run; `before` are the folders of earlier stages."""

    folder: Path
    before: tuple[Path, ...]

    @property
    def is_trained(self) -> bool:
        """Whether it has a model. A stage that was stopped before it logged anything does not count."""
        stopped_at_once = (self.folder / STOPPED_FILE).exists() and not _log(self.folder)
        return (self.folder / RUN_MODEL / CONFIG_NAME).is_file() and not stopped_at_once

    def training(self) -> "Training":
        """The training of this stage and of everything it started from.

        The start is looked up where the recipe says and, because a run may have been moved, among the earlier
        stages.
        """
        done, start, seen = (
            [_totals(self.folder)],
            read_recipe(self.folder).start_from,
            {self.folder.resolve()},
        )
        while start is not None:
            source = Path(start).parent if Path(start).name == RUN_MODEL else Path(start)
            places = [source, *(stage for stage in self.before if stage.name == source.name)]
            found = [place for place in places if place.resolve() not in seen and _log(place)]
            if not found:
                break
            done.insert(0, _totals(found[0]))
            seen.add(found[0].resolve())
            start = read_recipe(found[0]).start_from
        return Training(tuple(steps for steps, _ in done), tuple(tokens for _, tokens in done), start)


@dataclass(frozen=True)
class Training:
    """Steps and tokens of consecutive runs; `start` is what the first one started from, if anything."""

    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    start: str | None


@dataclass(frozen=True)
class Opened:
    """A trained run with its log."""

    subject: Subject
    log: list[dict[str, float]]
    training: Training


def runs_in(folder: Path) -> list[Path]:
    """The run in a folder, or all runs in a folder of runs."""
    if is_run(folder) or not folder.is_dir():
        return [folder]
    runs = [each for each in folder.iterdir() if is_run(each) or begun_stages(each)]
    return sorted(runs) or [folder]


def stages_of(folder: Path) -> list[Stage]:
    folders = run_stages(folder)
    return [Stage(each, tuple(folders[:index])) for index, each in enumerate(folders)]


def check_different(folders: Sequence[Path]) -> None:
    """Refuse one run under two names, which would be compared with itself."""
    names: dict[Path, Path] = {}
    for folder in folders:
        first = names.setdefault(folder.resolve(), folder)
        if first is not folder:
            raise ValueError(f"runs must be different, got {first} and {folder}")


def open_run(stage: Stage, device: str | None) -> Opened:
    log = _log(stage.folder)
    if not log:
        raise ValueError(f"{stage.folder / METRICS_FILE} must hold the log of a training run, got no rows")
    return Opened(Subject.open(stage.folder, device=device), log, stage.training())


def _log(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's log; none if there is no run."""
    file = folder / METRICS_FILE
    if not (file.is_file() and (folder / RECIPE_FILE).is_file()):
        return []
    return [_entry(row, file) for row in CsvLog(file).rows()]


def _entry(row: Mapping[str, str], file: Path) -> dict[str, float]:
    """The numbers in a row that can be plotted: a loss may have overflowed or be missing."""
    entry: dict[str, float] = {}
    for name, text in row.items():
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{file} must hold numbers, got {name} {text!r:.60}") from None
        if abs(value) <= LARGEST:
            entry[name] = value
    if not (entry.get("step", 0) >= 1 and entry.get("tokens", -1) >= 0):
        raise ValueError(
            f"{file} must have in each row a step, from 1 on, and the tokens seen so far, got "
            f"{dict(row)!r:.80}"
        )
    if not {"clip_low", "clip_high"} <= entry.keys():
        entry.pop("clip_low", None)
        entry.pop("clip_high", None)
    return entry


def _totals(folder: Path) -> tuple[int, int]:
    """Steps and tokens, including those after the last log entry: a stopped run leaves a checkpoint."""
    last = _log(folder)[-1]
    step = int(last["step"])
    made = max(step, CheckpointStore(folder / CHECKPOINTS).latest() or 0)
    return made, int(last["tokens"]) // step * made


def content(
    opened: Sequence[Opened], unmeasured: dict[tuple[str, str], str], unfinished: Sequence[str]
) -> Report:
    """The content of the page, as plain values."""
    runs = []
    for each in opened:
        subject = each.subject
        if subject.recipe is None:
            raise RuntimeError(f"{subject.name} was opened as a run")
        recipe = recipe_to_dict(subject.recipe)
        runs.append(
            Run(
                folder=subject.name,
                title=subject.title,
                recipe=recipe,
                parameters=sum(parameter.numel() for parameter in subject.model.network.parameters()),
                steps=each.training.steps,
                tokens=each.training.tokens,
                start=each.training.start,
                log=each.log,
                records=[
                    repeatable(record, recipe, subject.law)
                    for kind in KINDS
                    for record in kept(subject, kind)
                ],
                **losses(subject.recipe, subject.model, each.log),
                **shown(subject.recipe, subject.model),
            )
        )
    versions = {"bd3lm": bd3lm.__version__, "Python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "matplotlib")}
    return Report(runs=tuple(runs), unmeasured=unmeasured, unfinished=unfinished, versions=versions)


def shown(recipe: Recipe, model: LanguageModel) -> dict[str, Any]:
    """The facts about a model that a report shows, as its method gives them."""
    method, frame, context = recipe.method, model.config.frame, recipe.data.context
    writes = model.config.method  # under the law of the model
    return {
        "validation_is_exact": method.validation(recipe.objective, frame).is_exact(model.network),
        "has_likelihood": method.no_likelihood is None,
        "masks_by_rule": method.masks_by_rule,
        "writes_in_order": writes.piece(context) == 1,
        "writes_blocks": writes.has_order,
        "uncovers": writes.uncovers,
        "variant": recipe.objective.variant,
        "clip_range": recipe.objective.mask_range if recipe.objective.search else None,
        "law": model.law,
        "lean": writes.order_lean,
    }


def losses(recipe: Recipe, model: LanguageModel, log: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What the logged losses of training and validation mean, according to their objectives."""
    method, frame, network = recipe.method, model.config.frame, model.network
    trained = method.objective(recipe.objective, frame)
    searched = [  # a search has changed the range of mask rates since then
        trained.in_range(row["clip_low"], row["clip_high"]) for row in log if "clip_low" in row
    ]
    return {
        "train_is_bound": all(objective.bounds(network) for objective in (trained, *searched)),
        "train_lean": trained.order_lean,
        "valid_lean": method.validation(recipe.objective, frame).order_lean,
    }
