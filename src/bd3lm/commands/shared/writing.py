"""Generate texts, and write their records to a file that appears when all are done."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

import bd3lm
from bd3lm.commands.shared.partials import Partial
from bd3lm.commands.shared.progress import TimeLeft
from bd3lm.commands.shared.prompts import Template, template_text
from bd3lm.commands.shared.records import check_new_file
from bd3lm.data import Tokenizer
from bd3lm.evaluation import stop_counts
from bd3lm.io.console import Console
from bd3lm.io.files import write_atomically
from bd3lm.kinds import plain
from bd3lm.lm import Generation, LanguageModel, Settings
from bd3lm.lm.prompts import text_seeds
from bd3lm.models.devices import pick_device
from bd3lm.sampling import BlockFinished, Event, Sample, Started, Stopped

_SMALL = 20_000_000  # parameters
_BETWEEN_DRAWINGS = 0.1  # seconds


@dataclass(frozen=True)
class Author:
    """The model that writes: its name as the user gave it, and the digest of its weights."""

    name: str | None = None
    weights: str | None = None


UNNAMED = Author()


class Display:
    """Shows texts while they are written; this base class shows nothing."""

    watches = False
    """Whether it needs every event, or only the start and end of each text."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: Event) -> None:
        """Called for each event."""

    def text(self, text: Generation) -> None:
        """Called when a text is finished and recorded."""


class Bar(Display):
    """A progress bar with the time left, on a terminal only.

    On a CPU it follows every block: texts in a batch end at about the same time, so a count of finished texts
    would not move until then. On a GPU that would slow down the sampler.
    """

    def __init__(self, console: Console, total: int, *, device: torch.device | None = None) -> None:
        self.progress = Progress(
            TextColumn("writing"),
            BarColumn(),
            TextColumn("{task.fields[texts]}/{task.fields[of]} texts"),
            TimeLeft(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.watches = console.is_terminal and device is not None and device.type == "cpu"
        self.texts, self.total = 0, total
        self.lengths: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.drawn = float("-inf")
        self.task = self.progress.add_task("writing", total=1.0, texts=0, of=total)

    def __enter__(self) -> "Bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def event(self, event: Event) -> None:
        match event:
            case Started(index=index, request=request):
                self.lengths[index] = request.length
            case BlockFinished(index=index, stop=stop):
                self.written[index] = stop
            case Stopped(index=index):
                self.texts += 1
                self.written[index] = self.lengths.setdefault(index, 1)
            case _:
                return
        if time.perf_counter() - self.drawn > _BETWEEN_DRAWINGS or isinstance(event, Stopped):
            self.drawn = time.perf_counter()
            share = sum(self.written.values()) / sum(self.lengths.values()) * len(self.lengths) / self.total
            self.progress.update(self.task, completed=share, texts=self.texts)


def write_texts(
    model: LanguageModel,
    prompts: "Sequence[str | Template]",
    settings: Settings,
    *,
    displays: Sequence[Display],
    notes: Console,
    author: Author = UNNAMED,
    max_new_tokens: int | None = None,
    out: Path | None = None,
) -> list[Generation]:
    """Write a text for each prompt or template, in order; print the speed to `notes`.

    Each record is written when its text is finished. `out` appears when all are done, in the order of the
    prompts. Texts that an interrupted run of the same command has already written are not written, shown or
    returned again.
    """
    settings = model.config.method.settled(settings)  # record the settings that are really used
    if model.tokenizer is None:
        raise ValueError("the model was saved without a tokenizer; name one with --tokenizer")
    check_new_file(out)
    watch = settings.alternatives is not None or any(display.watches for display in displays)
    begun = time.perf_counter()
    # checks all arguments before anything is written
    events = model.stream(prompts, settings, max_new_tokens=max_new_tokens, watch=watch)
    done: list[Generation] = []
    origins = [_origin(prompt, settings, model, author, max_new_tokens) for prompt in prompts]
    with ExitStack() as stack:
        partial = None if out is None else stack.enter_context(Partial.open(out))
        before = _written_before(partial, origins)
        left = [index for index in range(len(prompts)) if index not in before]
        if before and left:
            seeds = text_seeds(settings.seed, len(prompts))
            events = model.stream(
                [prompts[index] for index in left],
                settings,
                seeds=[seeds[index] for index in left],
                max_new_tokens=max_new_tokens,
                watch=watch,
            )
        with ExitStack() as shown:
            shown.enter_context(fitting_threads(model, alone=min(len(left), settings.batch_size) == 1))
            for display in displays:
                shown.enter_context(display)
            for event in events if left else ():
                event = replace(event, index=left[event.index])
                for display in displays:
                    display.event(event)
                if isinstance(event, Stopped):
                    generation = model.generation(replace(event.sample, index=event.index))
                    done.append(generation)
                    if partial is not None:  # before the displays, in case one of them fails
                        record = _record(generation, origins[event.index], model)
                        partial.write(json.dumps(record, ensure_ascii=False))
                    for display in displays:
                        display.text(generation)
        seconds = time.perf_counter() - begun
        if partial is not None:
            _put_in_order(partial.path, [*before, *(generation.sample.index for generation in done)])
            partial.finish()
    notes.print(Text(summary(done, seconds)), soft_wrap=True)
    if out is not None:
        notes.print(Text(f"wrote {out}"), soft_wrap=True)
    return sorted(done, key=lambda generation: generation.sample.index)


def _written_before(partial: Partial | None, origins: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of the texts that are already in the file, in the file's order."""
    found: list[int] = []

    def is_ours(record: dict[str, Any]) -> bool:
        index = record.get("index")
        if not isinstance(index, int) or not 0 <= index < len(origins) or index in found:
            return False
        found.append(index)
        return _same(record, origins[index])

    if partial is not None:
        del found[partial.take_up(is_ours) :]
    return found


def _same(record: Mapping[str, Any], origin: Mapping[str, Any]) -> bool:
    """Whether a record was made from this origin; the batch size does not matter."""
    ours: dict[str, Any] = json.loads(json.dumps(origin))
    found = {name: record.get(name) for name in ours}
    for each in (ours, found):
        if isinstance(each["settings"], dict):
            each["settings"] = {k: v for k, v in each["settings"].items() if k != "batch_size"}
    return found == ours


def sampling_dtype(asked: str | None, device: str | None) -> str | None:
    """The sampling precision: the requested one, else bfloat16 on a GPU that supports it, else as saved."""
    if asked or pick_device(device).type != "cuda":
        return asked
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else None


@contextmanager
def fitting_threads(model: LanguageModel, alone: bool) -> Iterator[None]:
    """Use one thread for a single text of a small network on a CPU, unless OMP_NUM_THREADS is set.

    Its matrices are too small to gain from threads, and on busy cores threads wait for each other: a text of
    8 layers x 256 then took three times as long.
    """
    network = model.network
    small = network.device.type == "cpu" and sum(p.numel() for p in network.parameters()) < _SMALL
    if not (alone and small) or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _put_in_order(file: Path, indices: Sequence[int]) -> None:
    """Sort lines by index; short texts finish before earlier, longer ones."""
    if indices == sorted(indices):
        return
    lines = file.read_bytes().splitlines(keepends=True)  # str would also split inside JSON
    ordered = sorted(zip(indices, lines, strict=True))
    write_atomically(file, b"".join(line for _, line in ordered))


def sample_record(
    generation: Generation,
    prompt: "str | Template",
    settings: Settings,
    model: LanguageModel,
    author: Author = UNNAMED,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """A line of --out: the text, its cost, its settings and its model."""
    return _record(generation, _origin(prompt, settings, model, author, max_new_tokens), model)


def _origin(
    prompt: "str | Template",
    settings: Settings,
    model: LanguageModel,
    author: Author,
    max_new_tokens: int | None,
) -> dict[str, Any]:
    """The part of a record that is known before the text is written: prompt, settings and model."""
    recorded = settings_record(settings)
    if max_new_tokens is not None:
        recorded["max_new_tokens"] = max_new_tokens
    return {
        "prompt": prompt if isinstance(prompt, str) else "",
        "template": None if isinstance(prompt, str) else template_text(prompt),
        "model": author.name,
        "weights": author.weights,
        "bd3lm": bd3lm.__version__,
        "dtype": str(model.network.dtype).removeprefix("torch."),
        "law": model.law,
        "settings": recorded,
    }


def _record(generation: Generation, origin: Mapping[str, Any], model: LanguageModel) -> dict[str, Any]:
    sample = generation.sample
    return {
        "index": sample.index,
        "prompt": origin["prompt"],
        "template": origin["template"],
        "text": generation.text,
        "completion": generation.completion,
        "documents": _documents(generation, model.tokenizer),
        "tokens": generation.tokens,
        "length": len(sample.tokens),
        "given": sample.given,
        "evaluations": sample.evaluations,
        "fill_passes": sample.fill_passes,
        "drafted": list(sample.drafted),
        "accepted": list(sample.accepted),
        "fills": sample.fills,
        "effective_fills": round(sample.effective_fills, 6),
        "stopped_by": sample.stopped_by,
        "redraws": sample.redraws,
        "redrawn_passes": sample.redrawn_passes,
        "entropy": round(generation.entropy, 6),
        "seed": sample.seed,
        **_chances(sample),
        **origin,
    }


def _chances(sample: Sample) -> dict[str, Any]:
    """The log-probability of each token and of alternatives, if requested."""
    if sample.log_p is None:
        return {}
    return {
        "log_p": list(sample.log_p),
        "alternatives": [list(map(list, each)) for each in sample.alternatives],
    }


def settings_record(settings: Settings) -> dict[str, Any]:
    """Settings as plain JSON values."""
    return {
        **asdict(settings),
        "unmasking": plain(settings.unmasking),
        "stop": list(settings.stop),
    }


def _documents(generation: Generation, tokenizer: Tokenizer | None) -> list[str]:
    """The text split at its end tokens, which the text itself does not show."""
    if tokenizer is None or generation.text is None:
        return []
    tokens = generation.tokens
    ends = [place for place, token in enumerate(tokens) if token == tokenizer.eos_id]
    pieces = (tokens[start + 1 : stop] for start, stop in pairwise([-1, *ends, len(tokens)]))
    documents = [document for piece in pieces if (document := tokenizer.decode(piece))]
    left_off = len(tokenizer.decode(tokens)) - len(generation.text)  # cut off at a stop string
    while left_off and documents:
        last = documents.pop()
        if len(last) > left_off:
            documents.append(last[:-left_off])
        left_off -= min(left_off, len(last))
    return documents


def summary(done: Sequence[Generation], seconds: float) -> str:
    """The line about speed.

    Tokens count only if they are in the final texts: no prompts, dropped ends or redrawn texts. The time
    includes everything: reading prompts, display and recording.
    """
    samples = [generation.sample for generation in done]
    written = sum(sample.written for sample in samples)
    evaluations = sum(sample.evaluations for sample in samples)
    fills = sum(sample.fill_passes for sample in samples)
    reasons = stop_counts([sample.stopped_by for sample in samples])
    ends = ", ".join(f"{count} by {reason}" for reason, count in reasons.items() if count)
    redraws, wasted = (sum(getattr(s, name) for s in samples) for name in ("redraws", "redrawn_passes"))
    again = f"; {redraws} drawn again, {_number(wasted, 'pass', 'passes')} wasted" if redraws else ""
    reading = f", and {_number(fills, 'pass', 'passes')} to read the prompts" if fills else ""
    fills_drawn = sum(sample.fills for sample in samples if sample.fills > 1)
    weighed = f"; {fills_drawn} fills of gaps compared" if fills_drawn else ""
    tokens, network = _number(written, "token", "tokens"), _number(evaluations, "evaluation", "evaluations")
    return (
        f"{tokens} written in {seconds:.1f} s: {written / seconds:,.1f} tokens/s. {network} of the "
        f"network{reading}{_drafts(samples, written, evaluations)}. Stopped: {ends}{again}{weighed}."
    )


def _drafts(samples: Sequence[Sample], written: int, evaluations: int) -> str:
    """The gain from speculation, and how many drafts were accepted at each position."""
    drafted, accepted = (
        [sum(each) for each in zip_longest(*(getattr(sample, name) for sample in samples), fillvalue=0)]
        for name in ("drafted", "accepted")
    )
    if not any(drafted):
        return ""
    shares = ", ".join(
        f"{right / number:.0%}" for right, number in zip(accepted, drafted, strict=True) if number
    )
    return (
        f": {written / evaluations:.2f} tokens per pass; of {_number(sum(drafted), 'draft', 'drafts')} "
        f"{sum(accepted):,} were accepted, by position {shares}"
    )


def _number(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
