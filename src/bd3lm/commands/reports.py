"""`bd3lm report RUN...`: measure what is missing and cheap, and write everything that is known as a page."""

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

import bd3lm
from bd3lm.commands.corpora import HELD_OUT, open_sequences
from bd3lm.commands.perplexities import OWN, measure_perplexity
from bd3lm.commands.records import keep, kept, new_record
from bd3lm.commands.samples import settings_record
from bd3lm.commands.subjects import Subject
from bd3lm.commands.variances import measurable_rules, measure_variances
from bd3lm.config import AutoregressiveMethod, BlockDiffusionMethod, Method, SimplexMethod
from bd3lm.data import Tokenizer
from bd3lm.diffusion import ClippedTimes, Counts
from bd3lm.evaluation import Enumerated, corpus_likelihood
from bd3lm.interop import RUN_MODEL, WEIGHTS_NAME, check_folder
from bd3lm.kinds import spelt_out
from bd3lm.lm import Generation, LanguageModel, Settings, build_estimator
from bd3lm.methods import build_objective, validation_objective
from bd3lm.objectives import BlockDiffusionLoss, Objective
from bd3lm.reports import KINDS, MARKDOWN, PAGE, Report, Run, record_film, write_report
from bd3lm.runs.recipe import BlockDiffusionRecipe, Recipe, recipe_to_dict
from bd3lm.runs.stages import RECIPE_FILE, begun_stages, is_run, read_recipe, run_stages
from bd3lm.runs.train import STOPPED_FILE
from bd3lm.training import CheckpointStore, CsvLog

LOG_FILE = "metrics.csv"
_AFFORDABLE = 60.0  # seconds; what would take longer is left to its own command
_FEWEST_SEQUENCES = 16  # for a perplexity with a meaningful error
_AS_MUCH = 0.5  # share of the sequences there is time for that is enough: the time varies from run to run
_VARIANCE_BATCHES = 20
_SAMPLE_TOKENS, _FILM_TOKENS = 256, 128  # at most; both are for reading
_STEPS = 64  # of the methods that by default take a thousand


def make_report(
    folders: Sequence[Path],
    *,
    out: Path | None = None,
    measure: bool = True,
    samples: int = 3,
    device: str | None = None,
    console: Console | None = None,
) -> Path:
    """Write report.html, and the same as Markdown, into `out`; returns the path of the page.

    `out` is by default the run's folder, or report/ for several runs. A run of several stages is reported
    stage by stage, and a folder that holds runs stands for all of them. With `measure` what is missing and
    cheap is measured first, and kept in the folder of each run.
    """
    console = console or Console(stderr=True)
    if not folders:
        raise ValueError("runs must name at least one run, got none")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    for folder in folders:
        check_folder("runs", folder)
    out = out or (folders[0] if len(folders) == 1 else Path("report"))
    _check_out(out)
    stages = [stage for folder in folders for run in _runs(folder) for stage in _stages(run)]
    _check_different([stage.folder for stage in stages])
    unfinished = [str(stage.folder) for stage in stages if not stage.is_trained]
    if len(unfinished) == len(stages):
        raise ValueError(f"runs must hold a trained model, and these do not yet: {', '.join(unfinished)}")
    for name in unfinished:
        console.print(Text(f"{name}: training has not finished, so it is left out"), soft_wrap=True)
    opened = [_open(stage, device) for stage in stages if stage.is_trained]
    _content(opened, {}, unfinished)  # raises what is wrong with the runs before anything is measured
    unmeasured: dict[tuple[str, str], str] = {}
    if measure:
        for each in opened:
            for kind, why in _measure(each.subject, samples, console).items():
                unmeasured[each.subject.name, kind] = why
    return write_report(_content(opened, unmeasured, unfinished), out)


@dataclass(frozen=True)
class _Stage:
    """The folder of one stage of a run; `before` are the folders of the stages before it."""

    folder: Path
    before: tuple[Path, ...]

    @property
    def is_trained(self) -> bool:
        """Whether it has a model; one that was stopped before anything was logged does not count."""
        stopped_at_once = (self.folder / STOPPED_FILE).exists() and not _log(self.folder)
        return (self.folder / RUN_MODEL / WEIGHTS_NAME).is_file() and not stopped_at_once

    def training(self) -> "_Training":
        """The training of this stage and of all that it started from, which is looked for where the recipe
        says and, since a run may have been moved, among the stages before."""
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
        return _Training(tuple(steps for steps, _ in done), tuple(tokens for _, tokens in done), start)


@dataclass(frozen=True)
class _Training:
    """Steps and tokens of one run after another; `start` is what the first started from, if anything."""

    steps: tuple[int, ...]
    tokens: tuple[int, ...]
    start: str | None


@dataclass(frozen=True)
class _Opened:
    """A trained run with its log."""

    subject: Subject
    log: list[dict[str, float]]
    training: _Training


def _check_out(out: Path) -> None:
    """Refuse a path that cannot be a folder, or does not look like one, before anything is measured."""
    if out.is_dir():
        return
    if out.exists() or out.suffix[1:].isalpha():  # a folder may be called v1.2
        raise ValueError(
            f"--out must be the folder that {PAGE} and {MARKDOWN} go into, got a file's name, {out}"
        )
    if not out.parent.is_dir():
        raise ValueError(f"--out must be in an existing folder, and {out.parent} is none")


def _runs(folder: Path) -> list[Path]:
    """The run in a folder, or all of those in a folder of runs."""
    if is_run(folder) or not folder.is_dir():
        return [folder]
    runs = [each for each in folder.iterdir() if is_run(each) or begun_stages(each)]
    return sorted(runs) or [folder]


def _stages(folder: Path) -> list[_Stage]:
    folders = run_stages(folder)
    return [_Stage(each, tuple(folders[:index])) for index, each in enumerate(folders)]


def _check_different(folders: Sequence[Path]) -> None:
    """A run under two names would be compared with itself."""
    names: dict[Path, Path] = {}
    for folder in folders:
        first = names.setdefault(folder.resolve(), folder)
        if first is not folder:
            raise ValueError(f"runs must be different ones, got {first} and {folder}")


def _open(stage: _Stage, device: str | None) -> _Opened:
    log = _log(stage.folder)
    if not log:
        raise ValueError(f"{stage.folder / LOG_FILE} must hold the log of a training run, got no rows")
    return _Opened(Subject.open(stage.folder, device=device), log, stage.training())


def _log(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's log; none where there is no run."""
    file = folder / LOG_FILE
    if not (file.is_file() and (folder / RECIPE_FILE).is_file()):
        return []
    return [{name: float(value) for name, value in row.items()} for row in CsvLog(file).rows()]


def _totals(folder: Path) -> tuple[int, int]:
    """Steps and tokens, including those after the last log entry: a stopped run leaves a checkpoint."""
    last = _log(folder)[-1]
    step = int(last["step"])
    made = max(step, CheckpointStore(folder / "checkpoints").latest() or 0)
    return made, int(last["tokens"]) // step * made


def _content(
    opened: Sequence[_Opened], unmeasured: dict[tuple[str, str], str], unfinished: Sequence[str]
) -> Report:
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
                records=[record for kind in KINDS for record in kept(subject, kind)],
                **_losses(subject.recipe, subject.model, each.log),
                **_shown(recipe["method"]),
            )
        )
    versions = {"bd3lm": bd3lm.__version__, "Python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "matplotlib")}
    return Report(runs=tuple(runs), unmeasured=unmeasured, unfinished=unfinished, versions=versions)


def _shown(method: Mapping[str, Any]) -> dict[str, Any]:
    """What a report shows of a method, by its record in a recipe."""
    kind, masking = method["kind"], spelt_out(method.get("masking")) or {}
    is_blocks, is_ar, is_simplex = (kind == each for each in ("block_diffusion", "autoregressive", "simplex"))
    variant = ""
    if method.get("random_batch"):
        variant = ", random batch size"
    elif masking.get("kind") == "clipped" and masking["low"] == masking["high"] == 1.0:
        variant = ", fully masked"
    elif masking.get("lean"):
        variant = f", trained for lean {masking['lean']:g}"
    return {
        "validation_is_exact": is_ar,
        "has_likelihood": not is_simplex,
        "masks_by_rule": is_blocks,
        "writes_in_order": is_ar,
        "writes_blocks": is_blocks,
        "uncovers": not is_simplex and method.get("process") != "uniform",
        "variant": variant,
        "clip_range": (masking["low"], masking["high"]) if masking.get("kind") == "clipped" else None,
        "lean": method.get("lean", 0.0),
    }


def _losses(recipe: Recipe, model: LanguageModel, log: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What the logged losses of training and validation mean, as the objectives that gave them say."""
    config, network = model.config, model.network
    trained = build_objective(
        recipe.method,
        context=recipe.data.context,
        mask_id=config.method.mask_id,
        vocab_size=config.network.vocab_size,
    )
    lean = recipe.method.lean if isinstance(recipe.method, BlockDiffusionRecipe) else 0.0
    validated = validation_objective(trained, lean=lean, uses_noise=network.uses_noise)
    used: list[Objective] = [trained]
    if isinstance(trained, BlockDiffusionLoss) and isinstance(trained.masking, ClippedTimes):
        searched = [  # a search has changed the range of rates since
            replace(trained.masking, low=row["clip_low"], high=row["clip_high"])
            for row in log
            if "clip_low" in row
        ]
        used += [replace(trained, masking=masking) for masking in searched]
    return {
        "train_is_bound": all(objective.bounds(network) for objective in used),
        "train_lean": _lean(trained),
        "valid_lean": _lean(validated),
    }


def _lean(objective: Objective) -> float:
    """How much the order leans that an objective draws masks for."""
    masking = objective.masking if isinstance(objective, BlockDiffusionLoss) else None
    return masking.lean if isinstance(masking, Counts) else 0.0


def _measure(subject: Subject, samples: int, console: Console) -> dict[str, str]:
    """Measure what is missing; returns the reason for each kind that was left out."""
    left_out: dict[str, str] = {}
    if not isinstance(subject.model.config.method, SimplexMethod):
        left_out |= _measure_likelihoods(subject, console)
    with _failing_alone(left_out, "samples"):
        _draw_samples(subject, samples, console)
    with _failing_alone(left_out, "denoising"):
        _draw_film(subject, console)
    return left_out


def _measure_likelihoods(subject: Subject, console: Console) -> dict[str, str]:
    """Perplexity of the held-out text and, for block diffusion, the variances, if there is time for them."""
    left_out: dict[str, str] = {}
    of_held_out = [
        record
        for record in kept(subject, "perplexity")
        if _is_held_out(record) and record["settings"].get("lean", 0.0) == subject.lean
    ]
    measured = max((record["result"]["sequences"] for record in of_held_out), default=0)
    wants_variance = isinstance(subject.model.config.method, BlockDiffusionMethod) and not kept(
        subject, "variance"
    )
    try:
        sequences = _held_out_sequences(subject)
        if measured >= sequences and not wants_variance:
            return {}
        speed = _Speed.measure(subject)
    except (ValueError, OSError, FloatingPointError) as error:  # its data is gone, or its weights are NaN
        return dict.fromkeys(("perplexity", "variance"), str(error))
    affordable = min(sequences, int(_AFFORDABLE / speed.perplexity))
    if affordable < min(_FEWEST_SEQUENCES, sequences):
        left_out["perplexity"] = _too_long(speed.perplexity * sequences)
    elif measured < sequences and measured < _AS_MUCH * affordable:
        _say(console, subject, "perplexity of held-out text")
        limit = _validation_sequences(subject) if affordable == sequences else affordable
        with _failing_alone(left_out, "perplexity"):
            measure_perplexity(subject, limit=limit, console=_bars(console))
    if wants_variance:
        _say(console, subject, "variance of the loss")
        affordable = min(_VARIANCE_BATCHES, int(_AFFORDABLE / speed.variance))
        if affordable < 1:
            left_out["variance"] = _too_long(speed.variance * _VARIANCE_BATCHES)
        else:
            with _failing_alone(left_out, "variance"):
                measure_variances(subject, batches=affordable, console=_bars(console))
    return left_out


@contextmanager
def _failing_alone(left_out: dict[str, str], kind: str) -> Iterator[None]:
    """Leave out a measurement that fails, and note the reason, so that the others still make the page."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        left_out[kind] = " ".join(str(error).split())


def _is_held_out(record: dict[str, Any]) -> bool:
    return record["settings"]["data"] == OWN and record["settings"]["split"] in HELD_OUT


def _held_out_sequences(subject: Subject) -> int:
    """How many held-out sequences there are, at most as many as validation takes."""
    with open_sequences(subject, None, limit=_validation_sequences(subject)) as text:
        if text.split not in HELD_OUT:
            raise ValueError(f"{text.name} has no split {' or '.join(HELD_OUT)}, which would be held out")
        return text.number


def _validation_sequences(subject: Subject) -> int | None:
    return None if subject.recipe is None else subject.recipe.data.validation_sequences


@dataclass(frozen=True)
class _Speed:
    """How many seconds measuring takes on this machine, from one pass over a few sequences."""

    perplexity: float  # of a sequence
    variance: float  # of a batch

    @classmethod
    def measure(cls, subject: Subject, trial: int = 16) -> "_Speed":
        network, config = subject.model.network, subject.model.config
        if subject.recipe is None:
            raise RuntimeError(f"{subject.name} was opened as a run")
        data = subject.recipe.data
        once = build_estimator(network, config, _in_one_pass(config.method, network.uses_noise))
        with open_sequences(subject, None, limit=trial) as text:
            few = next(text.batches(subject, trial))
        trials = []
        for _ in range(3):  # the first time everything is slower, and the machine may be busy with others
            begun = time.perf_counter()
            corpus_likelihood(network, once, [few])
            trials.append((time.perf_counter() - begun) / len(few.tokens))
        seconds = min(trials)
        chosen = build_estimator(network, config, "auto")
        passes = 2**chosen.block_size - 1 if isinstance(chosen, Enumerated) else 1
        batch = len(measurable_rules(network)) * data.validation_batch
        return cls(passes * seconds, batch * seconds)


def _in_one_pass(method: Method, uses_noise: bool) -> str:
    """The name of an estimator that takes one pass over a text, whatever the model's order of reveal."""
    if isinstance(method, AutoregressiveMethod):
        return "auto"
    return "counts" if isinstance(method, BlockDiffusionMethod) and not uses_noise else "nelbo"


def _draw_samples(subject: Subject, samples: int, console: Console) -> None:
    """Samples to be read, from the beginnings of held-out documents."""
    method, tokenizer = subject.model.config.method, _reader(subject)
    context = subject.model.config.network.context
    if not any(len(record["result"]["texts"]) == samples for record in kept(subject, "samples")):
        _say(console, subject, f"{samples} samples")
        settings = Settings(length=min(context, _SAMPLE_TOKENS), steps=_steps(method)).for_method(method)
        written = subject.model.generate(_prompts(subject, tokenizer, samples), settings)
        keep_texts(subject, "samples", settings, written)


def _draw_film(subject: Subject, console: Console) -> None:
    """A film to be watched, from the beginning of a held-out document."""
    method, tokenizer = subject.model.config.method, _reader(subject)
    context = subject.model.config.network.context
    rewrites = isinstance(method, SimplexMethod) or getattr(method, "process", None) == "uniform"
    if not rewrites and not kept(subject, "denoising"):
        _say(console, subject, "a film of a text being written")
        settings = Settings(length=min(context, _FILM_TOKENS), steps=_steps(method), stop_at_eos=False)
        settings = settings.for_method(method)
        events = subject.model.stream(_prompts(subject, tokenizer, 1), settings)
        film = record_film(events, tokenizer.decode, mask_id=method.mask_id)
        _keep(subject, "denoising", settings, film.to_json())


def _reader(subject: Subject) -> Tokenizer:
    """The tokenizer that makes what a model writes readable."""
    if subject.model.tokenizer is None:
        raise ValueError(f"{subject.name} was saved without a tokenizer, so what it writes cannot be read")
    return subject.model.tokenizer


def _steps(method: Method) -> int | None:
    return _STEPS if method.kind in ("score_entropy", "d3pm", "simplex") else None


def _sample(generation: Generation) -> dict[str, Any]:
    sample, text, written = generation.sample, generation.text or "", generation.completion or ""
    return {
        "given": text[: len(text) - len(written)],
        "written": written,
        "tokens": sample.written,
        "evaluations": sample.evaluations,
        "stopped_by": sample.stopped_by,
        "entropy": generation.entropy,
        "seed": sample.seed,
    }


def keep_texts(subject: Subject, kind: str, settings: Settings, written: Sequence[Generation]) -> None:
    """Texts for a report to show, kept beside the run of the model that wrote them."""
    _keep(subject, kind, settings, {"texts": [_sample(text) for text in written]})


def _keep(subject: Subject, kind: str, settings: Settings, result: dict[str, Any]) -> None:
    used = ("length", "nucleus_p", "unmasking", "steps", "stop_at_eos", "seed")
    plain = settings_record(settings)
    record = new_record(subject, kind, settings={name: plain[name] for name in used}, result=result)
    keep(subject, kind, record)


def _prompts(subject: Subject, tokenizer: Tokenizer, count: int) -> list[str]:
    """The first words of held-out documents; empty where there are none, as the report shows."""
    try:
        shards = subject.shards()
        split = next(name for name in HELD_OUT if name in shards.splits)
    except (ValueError, OSError, StopIteration):
        return [""] * count
    inputs = shards.meta.inputs
    begins, ends = int(inputs.bos_before_documents), int(inputs.eos_between_documents)
    size, place = subject.model.config.network.context // 8, 0
    prompts: list[str] = []
    for length in shards.lengths(split).tolist():
        if len(prompts) == count:
            break
        if length >= 4 * size:
            start = place + begins
            words = tokenizer.decode(shards.read(split, start, start + size)).rstrip("\ufffd")  # half a sign
            prompts += [words.rsplit(None, 1)[0] if len(words.split()) > 1 else words] if words else []
        place += begins + length + ends
    return [*prompts, *[""] * (count - len(prompts))]


def _say(console: Console, subject: Subject, what: str) -> None:
    console.print(Text(f"{subject.name} ({subject.title}): {what}"), soft_wrap=True)


def _bars(console: Console) -> Console:
    """Where progress bars go: to the console if it is a terminal, otherwise nowhere."""
    return console if console.is_terminal else Console(quiet=True)


def _too_long(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"about {seconds / unit:.0f} {name} here"
    return f"about {seconds:.0f} seconds here"
