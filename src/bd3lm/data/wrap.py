"""Sequences of one length: documents end to end, cut every `context` tokens, with no padding (Suppl. C.1).

The cut ignores documents: a sequence may hold the end of one and the start of the next, with EOS between them
if the shards have it. The tokens after the last whole sequence are left out.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.sequences import Sequences
from bd3lm.data.shards import TokenShards

if TYPE_CHECKING:
    from bd3lm.objectives import TokenBatch


class WrappedTokens(Sequences):
    """A split as sequences of `context` tokens, indexed like an array: [i], [start:stop], [[3, 1, 4]].

    With `bos_eos` each sequence is BOS, `context` − 2 tokens of text, EOS, as MDLM trains. A model trained
    this way ends every sample at its context length, which is why the paper does without.
    """

    def __init__(
        self,
        shards: TokenShards,
        split: str,
        context: int,
        *,
        bos_eos: bool = False,
        score_first: bool = False,
    ) -> None:
        """With `score_first` the first token of a sequence is predicted too."""
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
        self.score_first = score_first
        self._text = slice(0, context) if self._frame is None else slice(1, context - 1)
        self._stride = self._text.stop - self._text.start
        self._length = shards.split(split).tokens // self._stride

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int | slice | Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
        """Sequences (n, context) as int64, or one sequence (context,) for a single number."""
        if isinstance(index, slice):
            index = range(len(self))[index]
        indices = np.asarray(index, dtype=np.int64)
        self.check_places(indices)
        rows = np.empty((indices.size, self.context), np.int64)
        for row, i in zip(rows, indices.flat, strict=True):
            row[self._text] = self.shards.read(self.split, int(i) * self._stride, (int(i) + 1) * self._stride)
        if self._frame is not None:
            rows[:, 0], rows[:, -1] = self._frame
        return rows.reshape(*indices.shape, self.context)

    def batch(self, index: Sequence[int] | NDArray[np.integer]) -> "TokenBatch":
        import torch  # not needed by the workers that prepare data

        from bd3lm.objectives import TokenBatch

        return TokenBatch.of(torch.from_numpy(self[index]), score_first=self.score_first)

    @property
    def why_empty(self) -> str:
        frame = "" if self._frame is None else " without BOS and EOS"
        tokens = self.shards.split(self.split).tokens
        return (
            f"the {self.split} split has {tokens:,} tokens, less than one context of {self.context:,}{frame}"
        )
