"""Generative perplexity: how likely a model's texts are under another language model, the judge.

The judge tokenizes a text again. A text longer than its window is scored in overlapping windows, a stride
apart (1,024 and 512 in Suppl. C.5). Each token is scored once, by the first window that holds it. So it has
at least window − stride tokens before it, or all there are. The judge's end token precedes every document of
a text. It is context and never scored, so the first word of a document is scored like any other. A prompt is
not scored either: the text after it is scored given the prompt.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bd3lm.evaluation.likelihood import perplexity, ratio_error

Documents = Sequence[str]
"""The documents in a text: a model that does not stop at its end token writes one after another."""


class Judge(Protocol):
    """A causal language model with its tokenizer."""

    name: str
    dtype: str
    eos_id: int
    context: int | None
    """The most tokens that it can read; None without a limit."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""

    def log_p(self, tokens: Tensor) -> Tensor:
        """log p of each token given those before it in its row, (rows, length); the first column is 0."""


@dataclass(frozen=True)
class Window:
    """Tokens start..stop − 1 of a text. Those from `first` on are scored."""

    text: int
    start: int
    first: int
    stop: int


@dataclass(frozen=True)
class Judgement:
    """A judge's result for texts: the nats and the number of scored tokens of each, (texts,)."""

    nats: Tensor
    tokens: Tensor
    characters: int

    @property
    def nats_per_token(self) -> float:
        """The mean over all tokens of all texts, so longer texts weigh more."""
        return (self.nats.sum() / self.tokens.sum()).item()

    @property
    def standard_error(self) -> float | None:
        """The standard error of the nats per token, clustered by text; None for a single text."""
        return ratio_error(self.nats, self.tokens)

    @property
    def perplexity(self) -> float:
        """exp of the nats per token."""
        return perplexity(self.nats_per_token)

    @property
    def perplexity_error(self) -> float | None:
        """The perplexity's standard error, by the delta method."""
        return None if self.standard_error is None else self.perplexity * self.standard_error

    @property
    def bits_per_character(self) -> float:
        """A figure for comparing judges with different tokenizers."""
        return self.nats.sum().item() / math.log(2) / self.characters


def _in_order(batches: Sequence[Sequence[Window]]) -> Iterable[Sequence[Window]]:
    return batches


def judge_texts(
    judge: Judge,
    texts: Sequence[Documents],
    *,
    given: Sequence[str] | None = None,
    window: int = 1024,
    stride: int = 512,
    batch_size: int = 8,
    watch: Callable[[Sequence[Sequence[Window]]], Iterable[Sequence[Window]]] = _in_order,
) -> Judgement:
    """Score texts, `batch_size` windows at a time, which affects only speed and memory.

    `given` are prompts that texts begin with. They are read but not scored, and are tokenized separately from
    the text after them. `watch` takes the batches and yields them one by one, for a progress bar.
    """
    check_windows(judge, window, stride)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    given = [""] * len(texts) if given is None else given
    if len(given) != len(texts):
        raise ValueError(f"given must have a prompt for each of {len(texts)} texts, got {len(given)}")
    rows_of = [_row(judge, documents, prompt) for documents, prompt in zip(texts, given, strict=True)]
    tokens, counts = [row for row, _ in rows_of], [scored for _, scored in rows_of]
    windows = [
        each for text, row in enumerate(tokens) for each in sliding_windows(text, len(row), window, stride)
    ]
    nats = torch.zeros(len(texts), dtype=torch.float64)
    scored = torch.zeros(len(texts), dtype=torch.long)
    for batch in watch([windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]):
        # Padding comes after all scored tokens, where a causal judge does not look.
        rows = pad_sequence([tokens[each.text][each.start : each.stop] for each in batch], batch_first=True)
        log_p = judge.log_p(rows).double().cpu()
        for row, each in enumerate(batch):
            new = slice(each.first - each.start, each.stop - each.start)
            is_scored = counts[each.text][each.first : each.stop]
            nats[each.text] -= log_p[row, new][is_scored].sum()
            scored[each.text] += is_scored.sum()
    if not scored.sum():
        raise ValueError("texts must hold at least one token to score, got none")
    if not nats.isfinite().all():
        raise FloatingPointError(f"{judge.name} gives probabilities that are not finite in {judge.dtype}")
    characters = sum(len(document) for documents in texts for document in documents)
    return Judgement(nats, scored, characters - sum(map(len, given)))


def check_windows(judge: Judge, window: int, stride: int) -> None:
    """Refuse a window that the judge cannot read, or a stride that leaves a token without context."""
    longest = math.inf if judge.context is None else judge.context
    if not 2 <= window <= longest:
        raise ValueError(f"window must be from 2 to {longest}, what {judge.name} can read, got {window}")
    if not 1 <= stride < window:
        raise ValueError(f"stride must be from 1 to {window - 1}, less than the window, got {stride}")


def judged_tokens(judge: Judge, documents: Documents, *, begun: bool = False) -> list[int]:
    """The judge's tokens of a text, with its end token before every document; if `begun`, the first document
    already has it."""
    return [
        token
        for place, document in enumerate(documents)
        if document
        for token in (*([] if begun and not place else [judge.eos_id]), *judge.encode(document))
    ]


def _row(judge: Judge, documents: Documents, prompt: str) -> tuple[Tensor, Tensor]:
    """The judge's tokens of a text, and flags for scored ones, which exclude end tokens and the prompt."""
    if prompt and not (documents and documents[0].startswith(prompt)):
        raise ValueError(f"a text must begin with its prompt {prompt!r:.80}, got {documents!r:.80}")
    known = [judge.eos_id, *judge.encode(prompt)] if prompt else []
    rest = [documents[0][len(prompt) :], *documents[1:]] if prompt else documents
    row = torch.tensor([*known, *judged_tokens(judge, rest, begun=bool(prompt))], dtype=torch.long)
    return row, (row != judge.eos_id) & (torch.arange(len(row)) >= len(known))


def sliding_windows(text: int, length: int, window: int, stride: int) -> Iterator[Window]:
    """The windows over a text of `length` tokens. All tokens except the first are scored, each once."""
    start, first = 0, 1
    while first < length:
        stop = min(start + window, length)
        yield Window(text, start, first, stop)
        start, first = start + stride, stop


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error, None for a single value."""
    spread = torch.tensor(values, dtype=torch.float64)
    error = None if len(values) < 2 else (spread.std() / math.sqrt(len(values))).item()
    return spread.mean().item(), error
