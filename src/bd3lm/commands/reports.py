"""`bd3lm report RUN...`: measure what is missing and cheap, and write all that is known as a page."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import bd3lm
from bd3lm.commands.corpora import HELD_OUT, open_sequences
from bd3lm.commands.perplexities import OWN, measure_perplexity
from bd3lm.commands.records import keep, kept, new_record
from bd3lm.commands.subjects import Subject
from bd3lm.commands.variances import RULES, measure_variances
from bd3lm.config import BlockDiffusionMethod, SimplexMethod
from bd3lm.data import Tokenizer
from bd3lm.evaluation import Enumerated, corpus_likelihood
from bd3lm.lm import Generation, Settings, build_estimator
from bd3lm.recipe import recipe_to_dict
from bd3lm.reports import COMMANDS, Report, Run, record_film, write_report
from bd3lm.runs import run_stages
from bd3lm.training import CsvLog

_AFFORDABLE = 60.0  # seconds; what would take longer is left to its own command
_FEWEST_SEQUENCES = 16  # for a perplexity whose error means anything
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
    """Write report.html, and the same as Markdown, into `out`; returns the page.

    `out` is by default the run's folder, or report/ for several runs. A run of several stages is reported
    stage by stage. With `measure` what is missing and cheap is measured first, and kept beside each run.
    """
    console = console or Console(stderr=True)
    if not folders:
        raise ValueError("runs must name at least one run, got none")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    out = out or (folders[0] if len(folders) == 1 else Path("report"))
    opened = [each for folder in folders for each in _open(folder, device)]
    _content(opened, {})  # what is wrong with the runs is said before anything is measured
    unmeasured: dict[tuple[str, str], str] = {}
    if measure:
        for each in opened:
            for kind, why in _measure(each.subject, samples, console).items():
                unmeasured[each.subject.name, kind] = why
    return write_report(_content(opened, unmeasured), out)


@dataclass(frozen=True)
class _Opened:
    """A stage of a run, with its training log and what the stages it started from have done."""

    subject: Subject
    log: list[dict[str, float]]
    earlier: tuple["_Opened", ...]

    @property
    def totals(self) -> tuple[int, int]:
        """Steps and tokens."""
        return int(self.log[-1]["step"]), int(self.log[-1]["tokens"])


def _open(folder: Path, device: str | None) -> list[_Opened]:
    opened: dict[str, _Opened] = {}
    for stage in run_stages(folder):
        file = stage / "metrics.csv"
        rows = CsvLog(file).rows() if file.is_file() else []
        if not rows:
            raise ValueError(f"{file} must hold the log of a training run, got no rows")
        log = [{name: float(value) for name, value in row.items()} for row in rows]
        subject = Subject.open(stage, device=device)
        start = Path((subject.recipe and subject.recipe.start_from) or "").parent.name
        before = opened.get(start)
        earlier = (*before.earlier, before) if before is not None else ()
        opened[stage.name] = _Opened(subject, log, earlier)
    return list(opened.values())


def _content(opened: Sequence[_Opened], unmeasured: dict[tuple[str, str], str]) -> Report:
    runs = []
    for each in opened:
        subject = each.subject
        if subject.recipe is None:
            raise RuntimeError(f"{subject.name} was opened as a run")
        totals = [stage.totals for stage in (*each.earlier, each)]
        runs.append(
            Run(
                folder=subject.name,
                title=subject.title,
                recipe=recipe_to_dict(subject.recipe),
                parameters=sum(parameter.numel() for parameter in subject.model.network.parameters()),
                steps=tuple(steps for steps, _ in totals),
                tokens=tuple(tokens for _, tokens in totals),
                log=each.log,
                records=[record for kind in COMMANDS for record in kept(subject, kind)],
            )
        )
    versions = {"bd3lm": bd3lm.__version__, "Python": platform.python_version()}
    versions |= {name: version(name) for name in ("torch", "matplotlib")}
    return Report(runs=tuple(runs), unmeasured=unmeasured, versions=versions)


def _measure(subject: Subject, samples: int, console: Console) -> dict[str, str]:
    """Measure what is missing; says of each kind that was left out why."""
    left_out: dict[str, str] = {}
    if not isinstance(subject.model.config.method, SimplexMethod):
        left_out |= _measure_likelihoods(subject, console)
    _draw(subject, samples, console)
    return left_out


def _measure_likelihoods(subject: Subject, console: Console) -> dict[str, str]:
    """Perplexity of the held-out text and, for block diffusion, the variances, if there is time for them."""
    method = subject.model.config.method
    wanted = []
    if not any(record["settings"]["data"] == OWN for record in kept(subject, "perplexity")):
        wanted.append("perplexity")
    if isinstance(method, BlockDiffusionMethod) and not kept(subject, "variance"):
        wanted.append("variance")
    if not wanted:
        return {}
    try:
        speed = _Speed.measure(subject)
    except (ValueError, OSError) as error:  # its data is gone, or has nothing held out
        return dict.fromkeys(wanted, str(error))
    left_out = {}
    if "perplexity" in wanted:
        _say(console, subject, "perplexity of held-out text")
        affordable = int(_AFFORDABLE / speed.perplexity)
        if affordable < min(_FEWEST_SEQUENCES, speed.sequences):
            left_out["perplexity"] = _too_long(speed.perplexity * speed.sequences)
        else:
            limit = speed.limit if affordable >= speed.sequences else affordable
            measure_perplexity(subject, limit=limit, console=_bars(console))
    if "variance" in wanted:
        _say(console, subject, "variance of the loss")
        affordable = min(_VARIANCE_BATCHES, int(_AFFORDABLE / speed.variance))
        if affordable < 1:
            left_out["variance"] = _too_long(speed.variance * _VARIANCE_BATCHES)
        else:
            measure_variances(subject, batches=affordable, console=_bars(console))
    return left_out


@dataclass(frozen=True)
class _Speed:
    """What measuring costs here, in seconds, from one pass over a few sequences."""

    sequences: int
    limit: int | None
    perplexity: float  # of a sequence
    variance: float  # of a batch

    @classmethod
    def measure(cls, subject: Subject, trial: int = 16) -> "_Speed":
        network, config = subject.model.network, subject.model.config
        if subject.recipe is None:
            raise RuntimeError(f"{subject.name} was opened as a run")
        data = subject.recipe.data
        once = build_estimator(network, config, "auto" if config.method.kind == "autoregressive" else "nelbo")
        with open_sequences(subject, None, limit=data.validation_sequences) as text:
            few = next(text.batches(subject, trial))
        trials = []
        for _ in range(3):  # the first time everything is slower, and the machine may be busy with others
            begun = time.perf_counter()
            corpus_likelihood(network, once, [few])
            trials.append((time.perf_counter() - begun) / len(few.tokens))
        seconds = min(trials)
        chosen = build_estimator(network, config, "auto")
        passes = 2**chosen.block_size - 1 if isinstance(chosen, Enumerated) else 1
        batch = len(RULES) * data.validation_batch
        return cls(text.number, data.validation_sequences, passes * seconds, batch * seconds)


def _draw(subject: Subject, samples: int, console: Console) -> None:
    """Samples to be read and a film to be watched, both from the beginnings of held-out documents."""
    method = subject.model.config.method
    if subject.model.tokenizer is None:
        raise ValueError(f"{subject.name} was saved without a tokenizer, so what it writes cannot be read")
    steps = _STEPS if method.kind in ("score_entropy", "d3pm", "simplex") else None
    context = subject.model.config.network.context
    if not any(len(record["result"]["texts"]) == samples for record in kept(subject, "samples")):
        _say(console, subject, f"{samples} samples")
        settings = Settings(length=min(context, _SAMPLE_TOKENS), steps=steps).for_method(method)
        prompts = _prompts(subject, subject.model.tokenizer, samples)
        written = subject.model.generate(prompts, settings)
        texts = [_sample(prompt, text) for prompt, text in zip(prompts, written, strict=True)]
        _keep(subject, "samples", settings, {"texts": texts})
    rewrites = isinstance(method, SimplexMethod) or getattr(method, "process", None) == "uniform"
    if not rewrites and not kept(subject, "denoising"):
        _say(console, subject, "a film of a text being written")
        settings = Settings(length=min(context, _FILM_TOKENS), steps=steps, stop_at_eos=False)
        settings = settings.for_method(method)
        events = subject.model.stream(_prompts(subject, subject.model.tokenizer, 1), settings)
        film = record_film(events, subject.model.tokenizer.decode, mask_id=method.mask_id)
        _keep(subject, "denoising", settings, film.to_json())


def _sample(prompt: str, generation: Generation) -> dict[str, Any]:
    sample, text = generation.sample, generation.text or ""
    written = text.removeprefix(prompt)
    return {
        "given": text[: len(text) - len(written)],
        "written": written,
        "tokens": sample.written,
        "evaluations": sample.evaluations,
        "stopped_by": sample.stopped_by,
        "entropy": generation.entropy,
        "seed": sample.seed,
    }


def _keep(subject: Subject, kind: str, settings: Settings, result: dict[str, Any]) -> None:
    used = ("length", "nucleus_p", "unmasking", "steps", "stop_at_eos", "seed")
    record = new_record(
        subject, kind, settings={name: getattr(settings, name) for name in used}, result=result
    )
    keep(subject, kind, record)


def _prompts(subject: Subject, tokenizer: Tokenizer, count: int) -> list[str]:
    """The first words of held-out documents; nothing where there are none, which the report shows."""
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
    """Where progress bars go: nowhere unless somebody watches."""
    return console if console.is_terminal else Console(quiet=True)


def _too_long(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"about {seconds / unit:.0f} {name} here"
    return f"about {seconds:.0f} seconds here"
