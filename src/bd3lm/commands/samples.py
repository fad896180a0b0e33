"""`bd3lm sample`: texts as they are written in a terminal, and as JSON lines in a file."""

import json
import os
import time
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import bd3lm
from bd3lm.commands.partials import partial_of
from bd3lm.commands.prompts import Template, template_text
from bd3lm.commands.records import check_new_file
from bd3lm.data import Tokenizer
from bd3lm.evaluation import stop_counts
from bd3lm.io.files import write_atomically
from bd3lm.kinds import plain
from bd3lm.lm import Generation, LanguageModel, Settings
from bd3lm.models.devices import pick_device
from bd3lm.reports import film_svg, record_film
from bd3lm.sampling import BlockStarted, Event, Started, Stopped, TokenHidden, TokenRevealed

_MASK_SIGN = "░"
_FRAMES_PER_SECOND = 20
_SMALL = 20_000_000  # parameters
_SHOWN = 2000  # last tokens that an animation decodes: more than a screen holds


@dataclass(frozen=True)
class Author:
    """The model that writes: its name as it was given, and the digest of its weights."""

    name: str | None = None
    weights: str | None = None


_UNNAMED = Author()


def run_sample(
    model: LanguageModel,
    prompts: Sequence[str | Template],
    settings: Settings,
    *,
    author: Author = _UNNAMED,
    max_new_tokens: int | None = None,
    out: Path | None = None,
    film: Path | None = None,
    show: bool = True,
    console: Console | None = None,
    notes: Console | None = None,
) -> list[Generation]:
    """Write a text for each prompt or template, show them, and say on `notes` how fast it went.

    One text in a terminal is shown while it is written, hidden tokens and all; of several each is shown
    when it is finished, and elsewhere than in a terminal once those before it are; without `show` none is.
    Records are kept as texts are finished, and `out` appears, in the order of the prompts, when all are. How
    a single text was written goes to `film`, an animated SVG.
    """
    console = console or Console()
    notes = notes or console
    settings = settings.for_method(model.config.method)  # what is recorded is what was used
    if model.tokenizer is None:
        raise ValueError("the model was saved without a tokenizer; name one with --tokenizer")
    partial = None if out is None else check_out(out)
    check_film(film, len(prompts), out)
    watch = show and len(prompts) == 1 and console.is_terminal
    begun = time.perf_counter()
    # complains before anything is written
    events = model.stream(prompts, settings, max_new_tokens=max_new_tokens, watch=watch or film is not None)
    filmed: list[Event] = []
    done: list[Generation] = []
    display = _Animation(model, console) if watch else _Bar(console, len(prompts))
    alone = min(len(prompts), settings.batch_size) == 1
    with (
        partial.open("w", encoding="utf-8") if partial else nullcontext() as file,
        _threads(model, alone),
        display,
        _Printer(console, len(prompts)) as printer,
    ):
        for event in events:
            display.show(event)
            if film is not None:
                filmed.append(event)
            if isinstance(event, Stopped):
                generation = model.generation(event.sample)
                done.append(generation)
                if file is not None:  # first of all, in case it cannot be shown
                    prompt = prompts[event.index]
                    record = sample_record(generation, prompt, settings, model, author, max_new_tokens)
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    file.flush()
                if show and not watch:
                    printer.show(generation)
    seconds = time.perf_counter() - begun
    if watch:
        _print(console, done[0], many=False)
    if partial is not None and out is not None:
        _put_in_order(partial, [generation.sample.index for generation in done])
        partial.replace(out)
    if film is not None:
        recorded = record_film(filmed, model.tokenizer.decode, mask_id=model.config.method.mask_id)
        write_atomically(film, film_svg(recorded).encode())
    notes.print(Text(_summary(done, seconds)), soft_wrap=True)
    for written in filter(None, (out, film)):
        notes.print(Text(f"wrote {written}"), soft_wrap=True)
    return sorted(done, key=lambda generation: generation.sample.index)


def sampling_dtype(asked: str | None, device: str | None) -> str | None:
    """The precision to sample in: the one asked for, else bfloat16 on a GPU that has it, else as saved."""
    if asked or pick_device(device).type != "cuda":
        return asked
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else None


@contextmanager
def _threads(model: LanguageModel, alone: bool) -> Iterator[None]:
    """One thread on a CPU for one text of a small network, unless OMP_NUM_THREADS says how many.

    Its products are too small to gain by being shared, and where cores are busy the threads wait for each
    other: a text of 8 layers x 256 then took three times as long.
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


def check_out(out: Path) -> Path:
    """Where records go until all are there; refuses what would be overwritten or cannot be written."""
    check_new_file(out)
    partial = partial_of(out)
    if partial.exists():
        raise ValueError(f"--out {out} was begun before: move away {partial}, which holds what was written")
    return partial


def check_film(film: Path | None, texts: int, out: Path | None) -> None:
    """Refuse a film of several texts, one that is not called .svg, and one that would overwrite a file."""
    if film is None:
        return
    if film == out:
        raise ValueError(f"--film and --out must be two files, got {film} for both")
    if texts != 1:
        raise ValueError(f"--film is of one text, got {texts}")
    if film.suffix != ".svg":
        raise ValueError(f"--film must be a file called .svg, got {film}")
    check_new_file(film, "--film")


def _put_in_order(file: Path, indices: Sequence[int]) -> None:
    """Sort lines by their indices; texts with less to write are finished before earlier ones."""
    if indices == sorted(indices):
        return
    lines = file.read_bytes().splitlines(keepends=True)  # text would also be split where JSON is not
    ordered = sorted(zip(indices, lines, strict=True))
    write_atomically(file, b"".join(line for _, line in ordered))


class _Animation:
    """The end of a text that is being written, redrawn as its tokens come."""

    def __init__(self, model: LanguageModel, console: Console) -> None:
        if model.tokenizer is None:
            raise RuntimeError("an animation needs a tokenizer")
        self.tokenizer, self.mask_id = model.tokenizer, model.config.method.mask_id
        self.console = console
        self.live = Live(console=console, refresh_per_second=_FRAMES_PER_SECOND, transient=True)
        self.tokens: list[int] = []
        self.drawn = 0.0

    def __enter__(self) -> "_Animation":
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def show(self, event: Event) -> None:
        match event:
            case Started(request=request):
                self.tokens = request.given.tolist()
            case BlockStarted(stop=stop):
                self.tokens += [self.mask_id] * (stop - len(self.tokens))
            case TokenRevealed(position=position, token=token):
                self.tokens[position] = token
            case TokenHidden(position=position):
                self.tokens[position] = self.mask_id
        if time.perf_counter() - self.drawn > 1 / _FRAMES_PER_SECOND:
            self.drawn = time.perf_counter()
            self.live.update(self._tail())

    def _tail(self) -> Text:
        """As many of the last lines as the terminal has room for."""
        shown = Text()
        for masked, run in groupby(self.tokens[-_SHOWN:], lambda token: token == self.mask_id):
            tokens = list(run)  # decoded together: a character may be several tokens
            if masked:
                shown.append(_MASK_SIGN * len(tokens), style="dim")
            else:
                shown.append(_printable(self.tokenizer.decode(tokens)))
        lines = shown.wrap(self.console, self.console.width)
        return Text("\n").join(lines[-max(self.console.height - 2, 1) :])


class _Bar:
    """How many texts are finished, in a terminal; nothing elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self.progress = Progress(
            TextColumn("writing"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} texts"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("writing", total=total)

    def __enter__(self) -> "_Bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, event: Event) -> None:
        if isinstance(event, Stopped):
            self.progress.advance(self.task)


class _Printer:
    """Prints finished texts: in a terminal at once, elsewhere in the order of the prompts.

    What a program reads must not depend on which text was finished first. Texts that still wait for an
    earlier one when writing is interrupted are printed then.
    """

    def __init__(self, console: Console, texts: int) -> None:
        self.console, self.many = console, texts > 1
        self.waiting: dict[int, Generation] = {}
        self.next = 0

    def __enter__(self) -> "_Printer":
        return self

    def __exit__(self, *_: object) -> None:
        for index in sorted(self.waiting):
            _print(self.console, self.waiting.pop(index), many=self.many)

    def show(self, generation: Generation) -> None:
        if self.console.is_terminal:
            _print(self.console, generation, many=self.many)
            return
        self.waiting[generation.sample.index] = generation
        while self.next in self.waiting:
            self.next += 1
            _print(self.console, self.waiting.pop(self.next - 1), many=self.many)


def _print(console: Console, generation: Generation, *, many: bool) -> None:
    """A text as it is into a file or a pipe; in a terminal without what would steer the terminal."""
    text, written = generation.text or "", generation.completion or ""
    sample = generation.sample
    if many:
        title = f"text {sample.index}: {len(sample.tokens)} tokens, stopped by {sample.stopped_by}"
        console.rule(f"[bold]{title}", align="left")
    if not console.is_terminal:
        console.file.write(text + "\n")
        return
    given = text[: len(text) - len(written)]
    console.print(Text.assemble((_printable(given), "dim"), _printable(written)), soft_wrap=True)


def _printable(text: str) -> str:
    return "".join(c for c in text if c in "\n\t" or not unicodedata.category(c).startswith("C"))


def sample_record(
    generation: Generation,
    prompt: str | Template,
    settings: Settings,
    model: LanguageModel,
    author: Author = _UNNAMED,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """A text, what it cost, how it was written and by what: a line of --out."""
    sample = generation.sample
    recorded = settings_record(settings)
    if max_new_tokens is not None:
        recorded["max_new_tokens"] = max_new_tokens
    return {
        "index": sample.index,
        "prompt": prompt if isinstance(prompt, str) else "",
        "template": None if isinstance(prompt, str) else template_text(prompt),
        "text": generation.text,
        "completion": generation.completion,
        "documents": _documents(generation, model.tokenizer),
        "tokens": generation.tokens,
        "length": len(sample.tokens),
        "given": sample.given,
        "evaluations": sample.evaluations,
        "fill_passes": sample.fill_passes,
        "stopped_by": sample.stopped_by,
        "redraws": sample.redraws,
        "redrawn_passes": sample.redrawn_passes,
        "entropy": round(generation.entropy, 6),
        "seed": sample.seed,
        "model": author.name,
        "weights": author.weights,
        "bd3lm": bd3lm.__version__,
        "dtype": str(model.network.embedding.weight.dtype).removeprefix("torch."),
        "settings": recorded,
    }


def settings_record(settings: Settings) -> dict[str, Any]:
    """Settings as JSON has them."""
    return {
        **asdict(settings),
        "unmasking": plain(settings.unmasking),
        "stop": list(settings.stop),
    }


def _documents(generation: Generation, tokenizer: Tokenizer | None) -> list[str]:
    """The text cut at its end tokens, which the text itself does not show."""
    if tokenizer is None or generation.text is None:
        return []
    tokens = generation.tokens
    ends = [place for place, token in enumerate(tokens) if token == tokenizer.eos_id]
    pieces = (tokens[start + 1 : stop] for start, stop in pairwise([-1, *ends, len(tokens)]))
    documents = [document for piece in pieces if (document := tokenizer.decode(piece))]
    left_off = len(tokenizer.decode(tokens)) - len(generation.text)  # from a stop string on
    while left_off and documents:
        last = documents.pop()
        if len(last) > left_off:
            documents.append(last[:-left_off])
        left_off -= min(left_off, len(last))
    return documents


def _summary(done: Sequence[Generation], seconds: float) -> str:
    """Speed by what is left of what was written: prompts, dropped ends and redrawn texts do not count.

    The time is all of it: reading prompts, showing and recording texts included.
    """
    samples = [generation.sample for generation in done]
    written = sum(sample.written for sample in samples)
    evaluations = sum(sample.evaluations for sample in samples)
    fills = sum(sample.fill_passes for sample in samples)
    reasons = stop_counts([sample.stopped_by for sample in samples])
    ends = ", ".join(f"{count} by {reason}" for reason, count in reasons.items() if count)
    redraws, wasted = (sum(getattr(s, name) for s in samples) for name in ("redraws", "redrawn_passes"))
    again = f"; {redraws} drawn again, {_number(wasted, 'pass', 'passes')} for nothing" if redraws else ""
    reading = f", and {_number(fills, 'pass', 'passes')} to read what was given" if fills else ""
    tokens, network = _number(written, "token", "tokens"), _number(evaluations, "evaluation", "evaluations")
    return (
        f"{tokens} written in {seconds:.1f} s: {written / seconds:,.1f} tokens/s. "
        f"{network} of the network{reading}. Stopped: {ends}{again}."
    )


def _number(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
