"""`bd3lm score MODEL FILE...`: likelihood of each document, long ones by sliding windows."""

import json
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from bd3lm.commands.shared.command import Command
from bd3lm.commands.shared.flags import (
    DeviceFlag,
    DTypeFlag,
    EstimatorFlag,
    FieldFlag,
    LawFlag,
    LeanFlag,
    MaxDocumentFlag,
    Model,
    OptionalInt,
    SeedFlag,
    TokenizerFlag,
    named,
)
from bd3lm.commands.shared.skipped import say_skipped
from bd3lm.io.terminal import give, say

if TYPE_CHECKING:
    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.data import Tokenizer
    from bd3lm.data.files import FileCorpus
    from bd3lm.lm import TextLikelihood
    from bd3lm.methods import LanguageModelConfig

_FIGURES = (
    "tokens",
    "windows",
    "log_p",
    "error",
    "nats_per_token",
    "perplexity",
    "bits_per_byte",
    "bits_per_character",
    "estimator",
    "lean",
    "meaning",
)
_BLANK = "blank"  # the meaning for a document without figures
_BATCHES_TOGETHER = 16  # so that windows of similar lengths can share a batch

Window = tuple[int, int, int]
"""Where a window begins and ends in the text, and how many of its tokens are given."""
Place = tuple[str, int, str]
"""A document: its file, its row in the file, and its text."""


@dataclass(frozen=True)
class Score(Command):
    """Score documents: one JSON line each, with an exact likelihood or a bound.

    A document longer than the context is scored in windows; each window is given tokens that the windows
    before it scored.
    """

    kind = "score"

    model: Model
    files: Positional[
        Annotated[
            tuple[str, ...],
            named(
                "FILE ...",
                help="Files or folders of text, split into documents as `bd3lm data prepare` does. A blank "
                "document gets a line too, without a figure.",
            ),
        ]
    ]
    field: FieldFlag = None
    max_document: MaxDocumentFlag = None
    estimator: EstimatorFlag = "auto"
    law: LawFlag = None
    lean: LeanFlag = None
    samples: OptionalInt = None
    """Draws of a random estimate; their spread gives the error. Default: 16, for iw:K 1."""
    stride: OptionalInt = None
    """New tokens that each window after the first scores. Default: half the context."""
    seed: SeedFlag = 0
    batch_size: int = 8
    """Documents (or windows, or draws) per batch."""
    tokenizer: TokenizerFlag = None
    device: DeviceFlag = None
    dtype: DTypeFlag = None
    out: Annotated[
        Path | None,
        named(
            "FILE",
            help="Write the lines to this new .jsonl file instead of standard output. Until it is complete "
            "it is called FILE.partial, and the same command continues it.",
        ),
    ] = None

    def run(self) -> int:
        from bd3lm.commands.shared.models import check_models
        from bd3lm.commands.shared.records import check_new_file
        from bd3lm.data import FileCorpus
        from bd3lm.limits import check_counts

        check_new_file(self.out)
        check_models([self.model], device=self.device, lean=self.lean)
        check_counts(samples=self.samples, stride=self.stride, batch_size=self.batch_size)
        for file in self.files:
            FileCorpus(file, held_out=0)  # finds the files without reading them

        from bd3lm.commands.shared.subjects import Subject, check_lean_is_for  # this import loads torch

        subject = Subject.open(
            self.model,
            device=self.device,
            dtype=self.dtype,
            tokenizer=self.tokenizer,
            law=self.law,
            lean=self.lean,
        )
        check_lean_is_for([subject], self.lean)
        run_score(subject, self)
        return 0


def run_score(subject: "Subject", flags: Score) -> None:
    """Write a JSON line for each document of the files, in order, to standard output or to --out.

    --out is called OUT.partial until it is complete. Lines that the same command wrote earlier are not scored
    again.
    """
    from bd3lm.commands.shared.partials import Partial
    from bd3lm.data.files import FileCorpus

    if not flags.files:
        raise ValueError("files must name at least one file or folder of text, got none")
    _check_numbers(subject, flags)
    options: dict[str, Any] = {"field": flags.field or "text", "max_document": flags.max_document}
    corpora = [(file, FileCorpus(file, held_out=0, **options)) for file in flags.files]
    for _, corpus in corpora:
        say_skipped(corpus)
    tally = _Tally()
    if flags.out is None:
        for line in _lines(subject, _places(corpora), tally, flags):
            give(line)
        tally.check(flags.files)
        return
    places, origin = _places(corpora), _origin(subject, flags)
    with Partial.open(flags.out) as partial:
        waiting: list[Place] = []  # the first document that is not in the partial file

        def is_next(line: dict[str, Any]) -> bool:
            waiting[:] = islice(places, 1)
            written = line.get("file"), line.get("index"), line.get("text")
            if waiting != [written] or any(line.get(name) != value for name, value in origin.items()):
                return False
            tally.add(line)
            waiting.clear()
            return True

        partial.take_up(is_next)
        for line in _lines(subject, chain(waiting, places), tally, flags):
            partial.write(line)
        if tally.documents == tally.blank:
            partial.discard()
        tally.check(flags.files)
        partial.finish()
    say(f"wrote {flags.out}: {tally}", to=sys.stderr)


def windows(length: int, *, context: int, stride: int, given: int) -> list[Window]:
    """Split a text into windows; the first `given` tokens are given, and every other token is scored once.

    The first window is the first context. Each further window begins a stride later and scores the new
    tokens, so each token is scored after at least context − stride other tokens, or after all there are.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride must be 1 to {context} tokens, a context, got {stride}")
    found = [(0, min(length, context), given)]
    while (scored := found[-1][1]) < length:
        start = scored + stride - context
        found.append((start, min(length, start + context), scored - start))
    return found


def score_documents(
    subject: "Subject", texts: Iterable[tuple[str, str]], flags: Score
) -> Iterator[dict[str, Any]]:
    """Yield log p of each text in turn, of any length and without an end token, with its meaning.

    Windows of several texts share batches. Each text comes with a name for errors; texts before a bad one are
    still scored. A blank text gets a record too, so records match texts.
    """
    from bd3lm.lm import build_estimator

    model = subject.model
    if model.tokenizer is None:
        raise ValueError(f"{subject.name} was saved without a tokenizer; name one with --tokenizer")
    drawn = build_estimator(model.config, flags.estimator).is_random
    documents = _documents(texts, model.config, model.tokenizer, flags.stride)
    together = 1 if drawn else _BATCHES_TOGETHER * flags.batch_size
    problem: Exception | None = None
    while problem is None:
        group, problem = _gather(documents, together)
        yield from _scored(subject, group, drawn, flags)
    if not isinstance(problem, StopIteration):
        raise problem


@dataclass(frozen=True)
class _Document:
    name: str
    text: str
    tokens: Sequence[int]
    windows: list[Window]
    size: int  # bytes of the scored text
    characters: int


def _documents(
    texts: Iterable[tuple[str, str]],
    config: "LanguageModelConfig",
    tokenizer: "Tokenizer",
    stride: int | None,
) -> Iterator[_Document]:
    import numpy as np

    from bd3lm.lm.prompts import text_tokens

    context, first = config.network.context, int(not config.method.score_first)
    step = max(1, context // 2) if stride is None else stride
    for name, text in texts:
        if not text.strip():
            yield _Document(name, text, [], [], 0, 0)
            continue
        try:
            (tokens,) = text_tokens([text], config, tokenizer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if len(tokens) <= first:
            raise ValueError(f"{name} must have at least one token to score, got {text!r:.80}")
        yield _Document(
            name,
            text,
            tokens,
            windows(len(tokens), context=context, stride=step, given=first),
            tokenizer.text_bytes(np.array(tokens[first:]), before=tokens[:first]),
            len(tokenizer.decode(tokens[first:])),
        )


def _gather(documents: Iterator[_Document], together: int) -> tuple[list[_Document], Exception | None]:
    """Collect documents with this many windows; also return the exception that stopped it, if any."""
    found: list[_Document] = []
    try:
        while sum(len(each.windows) for each in found) < together:
            found.append(next(documents))
    except Exception as problem:
        return found, problem
    return found, None


def _scored(
    subject: "Subject", documents: Sequence[_Document], drawn: bool, flags: Score
) -> Iterator[dict[str, Any]]:
    """Yield the records of some documents; if one is refused, the records before it come first."""
    try:
        found = iter(_likelihoods(subject, documents, drawn, flags))
    except ValueError as error:
        if len(documents) == 1:
            raise ValueError(f"{documents[0].name}: {error}") from None
        for each in documents:
            yield from _scored(subject, [each], drawn, flags)
        return
    for document in documents:
        yield _record(subject, document, list(islice(found, len(document.windows))))


def _likelihoods(
    subject: "Subject", documents: Sequence[_Document], drawn: bool, flags: Score
) -> "list[TextLikelihood]":
    """The records of all windows, in the order of the documents."""
    from bd3lm.diffusion import derive_seed

    pieces = [
        (each.tokens[start:end], given, number)
        for each in documents
        for number, (start, end, given) in enumerate(each.windows)
    ]
    # A call draws the same numbers for each of its texts, so windows that draw need separate calls. The
    # others are sorted by length, to save padding.
    order = sorted(range(len(pieces)), key=lambda place: -len(pieces[place][0]))
    found: dict[int, TextLikelihood] = {}
    for group in ([place] for place in order) if drawn else [order] if order else []:
        number = pieces[group[0]][2] if drawn else 0
        likelihoods = subject.model.log_likelihood(
            [pieces[place][0] for place in group],
            given=[pieces[place][1] for place in group],
            seed=derive_seed(flags.seed, "window", number) if number else flags.seed,
            estimator=flags.estimator,
            samples=flags.samples,
            batch_size=flags.batch_size,
        )
        found.update(zip(group, likelihoods, strict=True))
    return [found[place] for place in range(len(pieces))]


def _record(subject: "Subject", document: _Document, found: "Sequence[TextLikelihood]") -> dict[str, Any]:
    from bd3lm.evaluation import perplexity

    text = {"text": document.text}
    if not found:
        return dict.fromkeys(_FIGURES) | {"tokens": 0, "windows": 0, "meaning": _BLANK} | text
    log_p, scored = sum(each.log_p for each in found), sum(each.tokens for each in found)
    errors = [each.error for each in found]
    bits = -log_p / math.log(2)
    size, characters = document.size, document.characters
    figures = (
        scored,
        len(document.windows),
        log_p,
        None if None in errors else math.hypot(*(error or 0.0 for error in errors)),
        -log_p / scored,
        perplexity(-log_p / scored),
        bits / size if size else None,
        bits / characters if characters else None,
        found[0].figure.name,
        subject.lean,
        found[0].figure.meaning,
    )
    return dict(zip(_FIGURES, figures, strict=True)) | text


@dataclass
class _Tally:
    """Counts the documents that have a line, and the blank ones among them."""

    documents: int = 0
    blank: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        self.documents += 1
        self.blank += record["meaning"] == _BLANK

    def check(self, files: Sequence[str]) -> None:
        if self.documents == self.blank:
            raise ValueError(
                f"files must hold at least one document that is not blank, got {', '.join(files)}"
            )

    def __str__(self) -> str:
        blank = f", {self.blank:,} of them blank" if self.blank else ""
        return f"{self.documents:,} documents{blank}"


def _check_numbers(subject: "Subject", flags: Score) -> None:
    """Refuse flags with which no document could be scored; errors name the flags."""
    from bd3lm.lm import build_estimator

    config = subject.model.config
    build_estimator(config, flags.estimator)
    most = config.network.context - int(not config.method.score_first)
    if flags.stride is not None and not 1 <= flags.stride <= most:
        raise ValueError(
            f"--stride must be 1 to {most} tokens, so that each window has some given tokens, got "
            f"{flags.stride}"
        )
    for flag, value, least in (
        ("--samples", flags.samples, 1),
        ("--batch-size", flags.batch_size, 1),
        ("--seed", flags.seed, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")


def _origin(subject: "Subject", flags: Score) -> dict[str, Any]:
    """Everything a score depends on besides its text, unless its figures already say it.

    The batch size is left out: it changes only the last digits of float32.
    """
    import bd3lm
    from bd3lm.lm import build_estimator

    model = subject.model
    return {
        "model": subject.name,
        "weights": subject.weights,
        "bd3lm": bd3lm.__version__,
        "dtype": subject.dtype,
        "settings": {
            "estimator": build_estimator(model.config, flags.estimator).name,
            "samples": flags.samples,
            "stride": flags.stride,
            "seed": flags.seed,
            "law": subject.law,
            "lean": subject.lean,
            "tokenizer": None if model.tokenizer is None else model.tokenizer.fingerprint,
        },
    }


def _places(corpora: "Sequence[tuple[str, FileCorpus]]") -> Iterator[Place]:
    for file, corpus in corpora:
        for index, text in enumerate(corpus.rows("train")):
            yield file, index, text


def _lines(subject: "Subject", places: Iterable[Place], tally: _Tally, flags: Score) -> Iterator[str]:
    from bd3lm.commands.shared.records import plain_json

    origin = _origin(subject, flags)
    read: deque[tuple[str, int]] = deque()

    def texts() -> Iterator[tuple[str, str]]:
        for file, index, text in places:
            read.append((file, index))
            yield f"document {index} of {file}", text

    for found in score_documents(subject, texts(), flags):
        file, index = read.popleft()
        record = plain_json({"file": file, "index": index, **found, **origin})
        tally.add(record)
        yield json.dumps(record, ensure_ascii=False, allow_nan=False)
