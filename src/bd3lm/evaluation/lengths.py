"""Lengths of documents: those that a model wrote, and those that it was trained on."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import ArrayLike

from bd3lm.sampling import StoppedBy


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of `number` documents, in tokens.

    A quantile is the smallest length that at least this share of the documents does not exceed. There is no
    interpolation, so it is always the length of one of the documents.
    """

    number: int
    median: int
    p90: int
    max: int
    mean: float

    @classmethod
    def of(cls, lengths: ArrayLike) -> "LengthStatistics":
        """The statistics of some lengths."""
        values = np.asarray(lengths)
        if values.ndim != 1 or not values.size or values.dtype.kind not in "iu" or values.min() < 0:
            raise ValueError(
                f"lengths must be whole numbers, not negative and at least one, got {lengths!r:.80}"
            )
        median, p90 = np.quantile(values, (0.5, 0.9), method="inverted_cdf").tolist()
        return cls(values.size, median, p90, int(values.max()), float(values.mean()))


def document_length(
    tokens: Sequence[int], *, given: int, stopped_by: StoppedBy, marks: Collection[int]
) -> int:
    """The length of the document in a sample, counted like the lengths of training documents.

    The tokens that mark where documents begin and end do not count: the first token, if it was given or if a
    model that predicts first tokens wrote it as a mark, and the end token that ended the text.
    """
    if given > 1:
        raise ValueError(f"a document must be written from nothing, got {given} given tokens")
    begins = given == 1 or (len(tokens) > 0 and tokens[0] in marks)
    ends = stopped_by == "eos"
    return len(tokens) - begins - ends


def stop_counts(reasons: Collection[StoppedBy]) -> dict[str, int]:
    """How many texts ended for each possible reason, including zeros."""
    counts = Counter(reasons)
    return {reason: counts[reason] for reason in get_args(StoppedBy)}


def evenly_spaced(lengths: ArrayLike, most: int) -> list[int]:
    """At most `most` of the lengths, sorted and evenly spaced in rank, enough to draw a histogram."""
    ordered = np.sort(np.asarray(lengths))
    kept = ordered[np.linspace(0, len(ordered) - 1, min(len(ordered), most)).round().astype(int)]
    return [int(length) for length in kept]
