"""How long documents are: those a model wrote until something ended them, and those it was trained on."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bd3lm.sampling import StoppedBy


@dataclass(frozen=True)
class LengthStatistics:
    """Lengths of `number` documents, in tokens.

    A quantile is the smallest length that at least this share of the documents does not exceed, so it is the
    length of one of them; nothing is interpolated.
    """

    number: int
    median: int
    p90: int
    max: int
    mean: float

    @classmethod
    def of(cls, lengths: ArrayLike) -> "LengthStatistics":
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
    """How many tokens of a sample are its document's own, counted as those of a training document are.

    The tokens that mark where documents begin and end do not count: the one that was given to begin with (or
    that a model which predicts first tokens began with by itself), and the end token that ended the text.
    """
    if given > 1:
        raise ValueError(f"a document must be written from nothing, got {given} given tokens")
    begins = given == 1 or (len(tokens) > 0 and tokens[0] in marks)
    ends = stopped_by == "eos"
    return len(tokens) - begins - ends


def stop_counts(reasons: Collection[StoppedBy]) -> dict[str, int]:
    """How many texts each rule ended, none included."""
    counts = Counter(reasons)
    return {reason: counts[reason] for reason in ("eos", "entropy", "length")}


def evenly_spaced(lengths: ArrayLike, most: int) -> list[int]:
    """At most so many of the lengths, sorted and evenly spaced in rank: enough to draw their histogram."""
    ordered = np.sort(np.asarray(lengths))
    kept = ordered[np.linspace(0, len(ordered) - 1, min(len(ordered), most)).round().astype(int)]
    return [int(length) for length in kept]
