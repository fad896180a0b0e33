"""Sequences of one length: documents end to end, cut every `context` tokens, with no padding (Suppl. C.1).

The cut does not respect documents: a sequence may hold the end of one and the start of the next, with EOS
between them where the shards have it. The tokens after the last whole sequence are left out.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.shards import TokenShards


class WrappedTokens:
    """A split as sequences of `context` tokens, indexed like an array: [i], [start:stop], [[3, 1, 4]].

    With `bos_eos` each sequence is BOS, `context` − 2 tokens of text, EOS, as MDLM trains; such a model ends
    every sample at its context length, which is why the paper does without.
    """

    def __init__(self, shards: TokenShards, split: str, context: int, *, bos_eos: bool = False) -> None:
        inputs = shards.meta.inputs
        self._frame: tuple[int, int] | None = None
        if bos_eos:
            if inputs.bos_id is None or inputs.eos_id is None:
                raise ValueError("bos_eos must be False for a tokenizer without BOS and EOS")
            self._frame = inputs.bos_id, inputs.eos_id
        smallest = 1 if self._frame is None else 3
        if context < smallest:
            raise ValueError(f"context must be at least {smallest}, got {context}")
        self.shards = shards
        self.split = split
        self.context = context
        self._text = slice(0, context) if self._frame is None else slice(1, context - 1)
        self._stride = self._text.stop - self._text.start
        self._length = shards.split(split).tokens // self._stride

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice | Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """Sequences (n, context) as int64; one sequence (context,) for one number."""
        if isinstance(index, slice):
            index = range(len(self))[index]
        indices = np.asarray(index, dtype=np.int64)
        wrong = (indices < 0) | (indices >= len(self))
        if wrong.any():
            raise IndexError(
                f"sequence {indices[wrong].flat[0]} is not within the {len(self)} of split {self.split!r}"
            )
        rows = np.empty((indices.size, self.context), np.int64)
        for row, i in zip(rows, indices.flat, strict=True):
            row[self._text] = self.shards.read(self.split, int(i) * self._stride, (int(i) + 1) * self._stride)
        if self._frame is not None:
            rows[:, 0], rows[:, -1] = self._frame
        return rows.reshape(*indices.shape, self.context)
