"""`bd3lm score MODEL FILE...`: how likely a model finds each document, long ones by sliding windows."""

import json
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bd3lm.commands.records import plain_json
from bd3lm.commands.samples import check_out
from bd3lm.commands.subjects import Subject
from bd3lm.config import LanguageModelConfig
from bd3lm.data import Tokenizer
from bd3lm.data.files import FileCorpus
from bd3lm.diffusion import derive_seed
from bd3lm.evaluation import perplexity
from bd3lm.lm import TextLikelihood, build_estimator
from bd3lm.lm.prompts import text_tokens

_BATCHES_TOGETHER = 16  # so that windows of about equal lengths can share a batch

Window = tuple[int, int, int]
"""Where it begins and ends in the text, and how many of its tokens are given."""


def windows(length: int, *, context: int, stride: int, given: int) -> list[Window]:
    """The windows over a text of some tokens, the first `given` of them given: each token is scored once.

    The first window is the first context. Each further one begins a stride later and scores what is new, so
    that a token is scored after at least context − stride others, or all there are.
    """
    if not 1 <= stride <= context:
        raise ValueError(f"stride must be 1 to {context} tokens, a context, got {stride}")
    found = [(0, min(length, context), given)]
    while (scored := found[-1][1]) < length:
        start = scored + stride - context
        found.append((start, min(length, start + context), scored - start))
    return found


def score_document(subject: Subject, text: str, **options: Any) -> dict[str, Any]:
    """log p of one text of any length, without an end token, and what it is worth."""
    (found,) = score_documents(subject, [("the text", text)], **options)
    return found


def score_documents(
    subject: Subject,
    texts: Iterable[tuple[str, str]],
    *,
    estimator: str = "auto",
    samples: int | None = None,
    stride: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
) -> Iterator[dict[str, Any]]:
    """The same for each text, in their order; windows of several texts go through the network together.

    With each text comes a name, for what is wrong with it. Those before it are scored all the same.
    """
    model = subject.model
    if model.tokenizer is None:
        raise ValueError(f"{subject.name} was saved without a tokenizer; name one with --tokenizer")
    drawn = build_estimator(model.network, model.config, estimator).is_random
    asked: dict[str, Any] = {"estimator": estimator, "samples": samples, "batch_size": batch_size}
    documents = _documents(texts, model.config, model.tokenizer, stride)
    together = 1 if drawn else _BATCHES_TOGETHER * batch_size
    problem: Exception | None = None
    while problem is None:
        group, problem = _gather(documents, together)
        yield from _scored(subject, group, drawn, seed, asked)
    if not isinstance(problem, StopIteration):
        raise problem


@dataclass(frozen=True)
class _Document:
    name: str
    text: str
    tokens: Sequence[int]
    windows: list[Window]
    size: int  # of what is scored, in bytes
    characters: int


def _documents(
    texts: Iterable[tuple[str, str]], config: LanguageModelConfig, tokenizer: Tokenizer, stride: int | None
) -> Iterator[_Document]:
    context, first = config.network.context, int(not config.method.score_first)
    step = max(1, context // 2) if stride is None else stride
    for name, text in texts:
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
            tokenizer.text_bytes(np.array(tokens[first:])),
            len(tokenizer.decode(tokens[first:])),
        )


def _gather(documents: Iterator[_Document], together: int) -> tuple[list[_Document], Exception | None]:
    """Documents until they have so many windows, and what came instead of the next, where something did."""
    found: list[_Document] = []
    try:
        while sum(len(each.windows) for each in found) < together:
            found.append(next(documents))
    except Exception as problem:
        return found, problem
    return found, None


def _scored(
    subject: Subject, documents: Sequence[_Document], drawn: bool, seed: int, asked: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The records of some documents; if one of them is refused, those before it come first."""
    try:
        found = iter(_likelihoods(subject, documents, drawn, seed, asked))
    except ValueError as error:
        if len(documents) == 1:
            raise ValueError(f"{documents[0].name}: {error}") from None
        for each in documents:
            yield from _scored(subject, [each], drawn, seed, asked)
        return
    for document in documents:
        yield _record(subject, document, list(islice(found, len(document.windows))))


def _likelihoods(
    subject: Subject, documents: Sequence[_Document], drawn: bool, seed: int, asked: dict[str, Any]
) -> list[TextLikelihood]:
    """Those of all windows, in the order of the documents."""
    pieces = [
        (each.tokens[start:end], given, number)
        for each in documents
        for number, (start, end, given) in enumerate(each.windows)
    ]
    # A call draws the same numbers for each of its texts, so windows that draw have calls of their own.
    # Others go by their lengths, and little is padded.
    order = sorted(range(len(pieces)), key=lambda place: -len(pieces[place][0]))
    found: dict[int, TextLikelihood] = {}
    for group in ([place] for place in order) if drawn else [order] if order else []:
        number = pieces[group[0]][2] if drawn else 0
        likelihoods = subject.model.log_likelihood(
            [pieces[place][0] for place in group],
            given=[pieces[place][1] for place in group],
            seed=derive_seed(seed, "window", number) if number else seed,
            **asked,
        )
        found.update(zip(group, likelihoods, strict=True))
    return [found[place] for place in range(len(pieces))]


def _record(subject: Subject, document: _Document, found: Sequence[TextLikelihood]) -> dict[str, Any]:
    log_p, scored = sum(each.log_p for each in found), sum(each.tokens for each in found)
    errors = [each.error for each in found]
    bits = -log_p / math.log(2)
    size, characters = document.size, document.characters
    return {
        "tokens": scored,
        "windows": len(document.windows),
        "log_p": log_p,
        "error": None if None in errors else math.hypot(*(error or 0.0 for error in errors)),
        "nats_per_token": -log_p / scored,
        "perplexity": perplexity(-log_p / scored),
        "bits_per_byte": bits / size if size else None,
        "bits_per_character": bits / characters if characters else None,
        "estimator": found[0].figure.name,
        "lean": subject.lean,
        "meaning": found[0].figure.meaning,
        "text": document.text,
    }


def run_score(subject: Subject, files: Sequence[str], *, out: Path | None, **options: Any) -> None:
    """A JSON line for each document of the files, in their order: on standard output, or in `out`, which is
    called OUT.partial until all are there."""
    if not files:
        raise ValueError("files must name at least one file or folder of text, got none")
    _check_flags(subject, **options)
    corpora = [(file, FileCorpus(file, held_out=0)) for file in files]
    partial = None if out is None else check_out(out)
    count = 0
    with nullcontext(sys.stdout) if partial is None else partial.open("w", encoding="utf-8") as lines:
        for line in _lines(subject, corpora, options):
            print(line, file=lines, flush=True)
            count += 1
    if not count:
        if partial is not None:
            partial.unlink()
        raise ValueError(f"files must hold at least one document that is not blank, got {', '.join(files)}")
    if partial is not None and out is not None:
        partial.replace(out)
        print(f"wrote {out}: {count:,} documents", file=sys.stderr)


def _check_flags(
    subject: Subject, *, estimator: str, samples: int | None, stride: int | None, seed: int, batch_size: int
) -> None:
    """Refuse, by the names of the flags, what no document could be scored with."""
    config = subject.model.config
    build_estimator(subject.model.network, config, estimator)
    most = config.network.context - int(not config.method.score_first)
    if stride is not None and not 1 <= stride <= most:
        raise ValueError(
            f"--stride must be 1 to {most} tokens, so that a window has some that are given, got {stride}"
        )
    for flag, value, least in (("--samples", samples, 1), ("--batch", batch_size, 1), ("--seed", seed, 0)):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")


def _lines(
    subject: Subject, corpora: Sequence[tuple[str, FileCorpus]], options: dict[str, Any]
) -> Iterator[str]:
    places: deque[tuple[str, int]] = deque()

    def texts() -> Iterator[tuple[str, str]]:
        for file, corpus in corpora:
            for index, text in enumerate(corpus.documents("train")):
                places.append((file, index))
                yield f"document {index} of {file}", text

    for found in score_documents(subject, texts(), **options):
        file, index = places.popleft()
        record = plain_json({"file": file, "index": index, **found})
        yield json.dumps(record, ensure_ascii=False, allow_nan=False)
