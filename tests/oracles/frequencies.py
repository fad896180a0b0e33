"""Are these samples from that law? Pearson's χ²."""

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from .languages import VOCAB, Array

_FEWEST = 5  # expected of a cell on its own; rarer ones are pooled


def p_value(drawn: Tensor, law: Array) -> float:
    """Of texts (samples, n) under a law (V^n,); 0 where one was drawn that cannot be."""
    length = drawn.shape[1]
    index = (drawn * VOCAB ** torch.arange(length - 1, -1, -1)).sum(1).numpy()
    counts, wanted = np.bincount(index, minlength=len(law)), law * len(drawn)
    if counts[law <= 1e-12].any():
        return 0.0
    rare = wanted < _FEWEST
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
    keep = wanted > 1e-6
    wanted = wanted[keep] / wanted[keep].sum() * counts[keep].sum()
    return float(stats.chisquare(counts[keep], wanted).pvalue)
