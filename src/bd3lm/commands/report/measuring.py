"""Measurements that a report lacks and that take less than a minute; they are stored next to the run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.text import Text

from bd3lm.commands.eval import Eval, measure_perplexity
from bd3lm.commands.shared.corpora import open_sequences
from bd3lm.commands.shared.records import keep, kept, new_record
from bd3lm.commands.shared.subjects import Subject
from bd3lm.commands.shared.writing import settings_record
from bd3lm.commands.variance import Variance, measurable_rules, measure_variances
from bd3lm.data import Tokenizer
from bd3lm.evaluation import corpus_likelihood
from bd3lm.interop import BOX
from bd3lm.io.console import Console
from bd3lm.lm import Generation, LanguageModel, Settings, build_estimator
from bd3lm.methods import Method
from bd3lm.reports import Film, record_film
from bd3lm.reports.content import HELD_OUT, OWN

_AFFORDABLE = 60.0  # seconds; anything slower is left to its own command
_FEWEST_SEQUENCES = 16  # the fewest for a perplexity with a meaningful error
_AS_MUCH = 0.5  # this share of the affordable sequences is enough, since timing varies between runs
_SAMPLE_TOKENS, _FILM_TOKENS = 256, 128  # at most; both are for human readers
_STEPS = 64  # for methods with a thousand steps by default


def measure_missing(subject: Subject, samples: int, console: Console) -> dict[str, str]:
    """Measure what is missing; return the reason for each kind that is left out."""
    left_out: dict[str, str] = {}
    if subject.model.config.method.no_likelihood is None:
        left_out |= _measure_likelihoods(subject, console)
    with _failing_alone(left_out, "samples"):
        _draw_samples(subject, samples, console)
    with _failing_alone(left_out, "denoising"):
        _draw_film(subject, console)
    return left_out


def _measure_likelihoods(subject: Subject, console: Console) -> dict[str, str]:
    """Measure perplexity of held-out text and, for block diffusion, the variances, if there is time."""
    left_out: dict[str, str] = {}
    context = subject.model.config.network.context
    of_held_out = [
        record
        for record in kept(subject, "perplexity")
        if _is_held_out(record)
        and record["settings"].get("law", subject.law) == subject.law
        and record["settings"].get("lean", 0.0) == subject.lean
        and record["settings"]["context"] == context
    ]
    measured = max((record["result"]["sequences"] for record in of_held_out), default=0)
    wants_variance = subject.model.record.method.masks_by_rule and not kept(subject, "variance")
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
            measure_perplexity(subject, Eval(sequences=limit), console=_bars(console))
    if wants_variance:
        _say(console, subject, "variance of the loss")
        affordable = min(Variance.batches, int(_AFFORDABLE / speed.variance))
        if affordable < 1:
            left_out["variance"] = _too_long(speed.variance * Variance.batches)
        else:
            with _failing_alone(left_out, "variance"):
                measure_variances(subject, Variance(batches=affordable), console=_bars(console))
    return left_out


@contextmanager
def _failing_alone(left_out: dict[str, str], kind: str) -> Iterator[None]:
    """Turn the failure of a measurement into a reason for leaving it out; the page still gets the others."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        left_out[kind] = " ".join(str(error).split())


def _is_held_out(record: dict[str, Any]) -> bool:
    return record["settings"]["data"] == OWN and record["settings"]["split"] in HELD_OUT


def _held_out_sequences(subject: Subject) -> int:
    """The number of held-out sequences, at most as many as validation uses."""
    with open_sequences(subject, None, limit=_validation_sequences(subject)) as text:
        if text.split not in HELD_OUT:
            raise ValueError(f"{text.name} has no split {' or '.join(HELD_OUT)} with held-out text")
        return text.number


def _validation_sequences(subject: Subject) -> int | None:
    return None if subject.recipe is None else subject.recipe.data.validation_sequences


@dataclass(frozen=True)
class _Speed:
    """Seconds that measurements take on this machine, estimated from one pass over a few sequences."""

    perplexity: float  # per sequence
    variance: float  # per batch

    @classmethod
    def measure(cls, subject: Subject, trial: int = 16) -> "_Speed":
        network, config = subject.model.network, subject.model.config
        if subject.recipe is None:
            raise RuntimeError(f"{subject.name} was opened as a run")
        data = subject.recipe.data
        once = build_estimator(config, config.method.one_pass_estimator(config.frame))
        with open_sequences(subject, None, limit=trial) as text:
            few = next(text.batches(subject, trial))
        trials = []
        for _ in range(3):  # the first pass is slower, and the machine may be busy
            begun = time.perf_counter()
            corpus_likelihood(network, once, [few])
            trials.append((time.perf_counter() - begun) / len(few.tokens))
        seconds = min(trials)
        passes = build_estimator(config, "auto").passes
        batch = len(measurable_rules(network)) * data.validation_batch
        return cls(passes * seconds, batch * seconds)


def _draw_samples(subject: Subject, samples: int, console: Console) -> None:
    """Write samples to read, from the first words of held-out documents."""
    method, tokenizer = subject.model.config.method, _reader(subject)
    context = subject.model.config.network.context
    if not any(len(record["result"]["texts"]) == samples for record in kept(subject, "samples")):
        _say(console, subject, f"{samples} samples")
        settings = method.settled(Settings(length=min(context, _SAMPLE_TOKENS), steps=_steps(method)))
        written = subject.model.generate(_prompts(subject, tokenizer, samples), settings)
        keep_texts(subject, "samples", settings, written)


def _draw_film(subject: Subject, console: Console) -> None:
    """Record an animation, from the first words of a held-out document."""
    method, tokenizer = subject.model.config.method, _reader(subject)
    context = subject.model.config.network.context
    if method.uncovers and not kept(subject, "denoising"):
        _say(console, subject, "an animation of a text being written")
        settings = Settings(length=min(context, _FILM_TOKENS), steps=_steps(method), stop_at_eos=False)
        settings = method.settled(settings)
        film = _film(subject.model, tokenizer, _prompts(subject, tokenizer, 1), settings)
        _keep(subject, "denoising", settings, film.to_json())


def keep_box_film(subject: Subject, prompt: str) -> None:
    """Record an animation of the box model, for runs whose own models write nothing readable."""
    if kept(subject, "box_film"):
        return
    box = Subject.open(BOX, device=str(subject.device))
    settings = box.model.config.method.settled(Settings(length=_FILM_TOKENS, stop_at_eos=False))
    film = _film(box.model, _reader(box), [prompt], settings)
    parameters = sum(parameter.numel() for parameter in box.model.network.parameters())
    result = {"title": box.title, "parameters": parameters, "film": film.to_json()}
    _keep(subject, "box_film", settings, result)


def _film(model: LanguageModel, tokenizer: Tokenizer, prompts: list[str], settings: Settings) -> Film:
    return record_film(model.stream(prompts, settings), tokenizer.decode, mask_id=model.config.mask_id)


def _reader(subject: Subject) -> Tokenizer:
    """The tokenizer that makes the model's texts readable."""
    if subject.model.tokenizer is None:
        raise ValueError(f"{subject.name} was saved without a tokenizer, so its texts cannot be read")
    return subject.model.tokenizer


def _steps(method: Method) -> int | None:
    return None if method.default_steps is None else _STEPS


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
    """Store texts for the report next to the run of the model that wrote them."""
    _keep(subject, kind, settings, {"texts": [_sample(text) for text in written]})


def _keep(subject: Subject, kind: str, settings: Settings, result: dict[str, Any]) -> None:
    used = ("length", "top_p", "unmasking", "steps", "stop_at_eos", "seed")
    plain = settings_record(settings)
    record = new_record(subject, kind, settings={name: plain[name] for name in used}, result=result)
    keep(subject, kind, record)


def _prompts(subject: Subject, tokenizer: Tokenizer, count: int) -> list[str]:
    """The first words of held-out documents; empty prompts if there are none, as the report shows."""
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
            words = tokenizer.decode(shards.read(split, start, start + size)).rstrip("\ufffd")  # cut in half
            prompts += [words.rsplit(None, 1)[0] if len(words.split()) > 1 else words] if words else []
        place += begins + length + ends
    return [*prompts, *[""] * (count - len(prompts))]


def _say(console: Console, subject: Subject, what: str) -> None:
    console.print(Text(f"{subject.name} ({subject.title}): {what}"), soft_wrap=True)


def _bars(console: Console) -> Console:
    """The console for progress bars, if it is a terminal; else a silent one."""
    return console if console.is_terminal else Console(quiet=True)


def _too_long(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"about {seconds / unit:.0f} {name} here"
    return f"about {seconds:.0f} seconds here"
