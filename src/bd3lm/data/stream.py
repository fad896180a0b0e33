"""Batches as a function of (seed, step) and nothing else.

There is no loader with a state to save. Epoch e is a pseudo-random permutation of the sequences, keyed by
(seed, e). A Feistel network computes it for single positions, without storing it. With the epochs laid end to
end, step s reads positions s·rows to (s + 1)·rows, after those that an earlier stage has read. A run can
resume at any step, on any number of devices: ranks and micro-batches take slices of the global batch.

torch is not imported here, so tokenizing workers do not load it.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.sequences import Sequences

if TYPE_CHECKING:
    from bd3lm.objectives import TokenBatch

Words = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_ROUNDS = 12
_SMALLEST_HALF = 3  # with 12 rounds; halves of two bits favor some permutations of five or six


def permute(places: NDArray[np.integer], size: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """Where a pseudo-random permutation of 0..size−1, chosen by `key`, sends each of `places`.

    A Feistel network is a bijection of 2h-bit numbers for any round function. Ours mixes one half with a key
    as in SplitMix64. h is the smallest number with 4^h ≥ size, and at least 3. A result outside 0..size−1
    goes through the network again until it lies inside (cycle walking). This takes fewer than four rounds on
    average unless size is tiny, and restricts the bijection to the numbers inside.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    values = np.asarray(places).astype(np.uint64)
    if (values >= size).any():
        raise ValueError(f"places must lie in 0..{size - 1}, got {values.max()}")
    half = max(_SMALLEST_HALF, -(-(size - 1).bit_length() // 2))
    keys = _round_keys(key)
    outside = np.ones(values.shape, bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= size
    return values.astype(np.int64)


class BatchStream:
    """The global batch of each step: `rows` sequences, each once per epoch, without gaps between epochs.

    The first `skip` sequences of the order are left out, because an earlier stage of training has read them.
    """

    def __init__(self, sequences: Sequences, *, rows: int, seed: int, skip: int = 0) -> None:
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        if skip < 0:
            raise ValueError(f"skip must not be negative, got {skip}")
        check_not_empty(sequences)
        self.sequences = sequences
        self.rows = rows
        self.seed = seed
        self.skip = skip

    @property
    def context(self) -> int:
        """Tokens in a sequence."""
        return self.sequences.context

    def batch(self, step: int, rows: slice | None = None) -> "TokenBatch":
        """The global batch of a step, or a slice of its rows."""
        return self.sequences.batch(self.indices(step, rows))

    def indices(self, step: int, rows: slice | None = None) -> NDArray[np.int64]:
        """The numbers of the sequences in `batch`."""
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        wanted = range(self.rows)[rows or slice(None)]
        read = self.skip + step * self.rows
        epochs, places = np.divmod(read + np.asarray(wanted, np.int64), len(self.sequences))
        for epoch in np.unique(epochs):
            now = epochs == epoch
            places[now] = permute(places[now], len(self.sequences), (self.seed, int(epoch)))
        return places


def check_not_empty(sequences: Sequences) -> None:
    if not len(sequences):
        raise ValueError(sequences.why_empty)


def _feistel(values: Words, half: int, keys: list[int]) -> Words:
    mask = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return left << np.uint64(half) | right


def _mix(x: Words) -> Words:
    """SplitMix64's finalizer; unsigned arithmetic wraps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(key: tuple[int, int]) -> list[int]:
    """SplitMix64's stream from a state that depends on both words of the key."""
    state = 0
    for word in key:
        state = _mix_int(state + (word + 1) * _GOLDEN)
    return [_mix_int(state + i * _GOLDEN) for i in range(1, _ROUNDS + 1)]


def _mix_int(x: int) -> int:
    return int(_mix(np.array([x & _WORD], np.uint64))[0])
