"""MAUVE: how far a model's texts are from human texts, in the feature space of the judge.

The package mauve-text does the clustering and computes the divergences. The features are the judge's last
hidden states at the last token. They are passed to the package, which otherwise would download a model of its
own.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bd3lm.evaluation.judging import Documents, Judge, judged_tokens
from bd3lm.io.extras import require


class FeatureJudge(Judge, Protocol):
    """A judge that also gives features of texts."""

    def features(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """A vector for each row of `tokens`, read up to its length: (rows, hidden)."""


def mauve_score(
    judge: FeatureJudge,
    texts: Sequence[Documents],
    reference: Iterable[str],
    *,
    window: int = 1024,
    batch_size: int = 8,
) -> float:
    """MAUVE in [0, 1], where 1 means that the texts are like the reference. It reads only `window` tokens.

    For every written text, a text of the same length is cut from the reference, and like the written one it
    starts where a document starts. Otherwise MAUVE would also measure differences in length and in
    beginnings.
    """
    package = require("mauve", "mauve", "MAUVE")
    written = [tokens[:window] for documents in texts if (tokens := judged_tokens(judge, documents))]
    if not written:
        raise ValueError("texts must hold at least one token to compare, got none")
    human = list(_pieces(judge, reference, [len(tokens) for tokens in written]))
    if len(human) < len(written):
        raise ValueError(
            f"the reference must hold {len(written)} texts of up to {max(map(len, written))} tokens, one for "
            f"each written text and each from the beginning of a document, got {len(human)}"
        )
    p, q = (_features(judge, each, batch_size).numpy() for each in (written, human))
    return float(package.compute_mauve(p_features=p, q_features=q, verbose=False).mauve)


def _pieces(judge: Judge, documents: Iterable[str], lengths: Sequence[int]) -> Iterator[list[int]]:
    """A text of each length, from the beginning of a document on into the next ones, while documents last."""
    tokens = (judged_tokens(judge, [document]) for document in documents)
    for length in lengths:
        piece: list[int] = []
        while len(piece) < length:
            more = next(tokens, None)
            if more is None:
                return
            piece += more
        yield piece[:length]


def _features(judge: FeatureJudge, texts: Sequence[list[int]], batch_size: int) -> Tensor:
    found = []
    for start in range(0, len(texts), batch_size):
        batch = [torch.tensor(tokens) for tokens in texts[start : start + batch_size]]
        lengths = torch.tensor([len(tokens) for tokens in batch])
        found.append(judge.features(pad_sequence(batch, batch_first=True), lengths))
    return torch.cat(found)
