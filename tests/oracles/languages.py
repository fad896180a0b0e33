"""Tiny languages whose every text has a known probability, and networks that are tables over all noisy texts.

A state is a text of n tokens out of V, the mask among them; tables have one entry a state, in the order of
`states`. Noise is given by a matrix M[x, y] = q(x_t = y | x_0 = x), the same for every token.
"""

from collections.abc import Callable
from functools import reduce
from itertools import product

import numpy as np
import torch
from torch import Tensor

from bd3lm.models import Layout

from .networks import CLEAN, Plain

Array = np.ndarray
Text = tuple[int, ...]
VOCAB = 4


def states(length: int, vocab: int = VOCAB) -> list[Text]:
    return list(product(range(vocab), repeat=length))


def random_language(length: int, seed: int, *, vocab: int = VOCAB, clean: tuple[int, ...] = CLEAN) -> Array:
    """Probabilities (V^n,), zero where a token is not clean; tokens depend on each other strongly."""
    rng = np.random.default_rng(seed)
    p = np.array(
        [0.05 + rng.exponential() ** 2 if set(x) <= set(clean) else 0.0 for x in states(length, vocab)]
    )
    return p / p.sum()


def spoken(language: Array, length: int) -> dict[Text, float]:
    """The texts that occur, with their probabilities."""
    return {x: float(p) for x, p in zip(states(length), language, strict=True) if p > 0}


def noisy(language: Array, length: int, matrix: Array) -> Array:
    """q_t over all states (V^n,): every text, corrupted token by token."""
    return language @ reduce(np.kron, [matrix] * length)


def guesses(language: Array, length: int, matrix: Array) -> Array:
    """p(x_0^i = v | x_t) (V^n, n, V), by Bayes; uniform for an x_t that cannot occur."""
    texts, vocab = states(length), len(matrix)
    forward = reduce(np.kron, [matrix] * length)
    table = np.full((len(texts), length, vocab), 1.0 / vocab)
    for t in range(len(texts)):
        joint = language * forward[:, t]
        if joint.sum() > 0:
            for i in range(length):
                weights = np.bincount([x[i] for x in texts], joint, minlength=vocab)
                table[t, i] = weights / joint.sum()
    return table


def ratios(q_t: Array, length: int, vocab: int = VOCAB) -> Array:
    """s[x, i, y] = q_t(x with its i-th token y) / q_t(x), the true score; 0 at an x that cannot occur."""
    q = q_t.reshape((vocab,) * length)
    table = np.zeros((len(q_t), length, vocab))
    for row, x in enumerate(states(length, vocab)):
        for i, y in product(range(length), range(vocab)):
            if q[x] > 0:
                table[row, i, y] = q[(*x[:i], y, *x[i + 1 :])] / q[x]
    return table


class TableNetwork(Plain):
    """Logits looked up in a table (V^n, n, V); with `uses_noise`, in that of the noise level it is told."""

    device = torch.device("cpu")

    def __init__(self, table: Callable[[float], Array], *, uses_noise: bool = False) -> None:
        self.table, self.uses_noise = table, uses_noise
        self.passes: list[int] = []  # how many rows each pass read

    def __call__(
        self, tokens: Tensor, *, layout: Layout, noise: Tensor | None = None, cache: object = None
    ) -> Tensor:
        rows, length = tokens.shape
        assert layout.length == length
        self.passes.append(rows)
        index = (tokens * VOCAB ** torch.arange(length - 1, -1, -1)).sum(1)
        if not self.uses_noise:
            return torch.from_numpy(self.table(0.0))[index]
        assert noise is not None
        assert noise.shape == (rows,)
        logits = torch.empty(rows, length, VOCAB, dtype=torch.float64)
        for level in noise.unique():
            told = noise == level
            logits[told] = torch.from_numpy(self.table(float(level)))[index[told]]
        return logits

    def head(self, states: Tensor) -> Tensor:
        return states


def fixed(table: Array) -> TableNetwork:
    """A network that ignores time."""
    return TableNetwork(lambda _: table)


def log(table: Array) -> Array:
    """Logarithms, with −1e3 for what is impossible: a network has finite logits."""
    return np.log(table, where=table > 0, out=np.full(table.shape, -1e3))
