"""Triton: the Gumbel numbers of words of the counter, and what they are at most. Imported only by a test."""

import triton
import triton.language as tl

from bd3lm.models.kernels.drawing import _gumbel, _gumbel_bound


@triton.jit
def gumbel_and_bound(words, gumbels, bounds, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    word = tl.load(words + at)
    tl.store(gumbels + at, _gumbel(word))
    tl.store(bounds + at, _gumbel_bound(word))
