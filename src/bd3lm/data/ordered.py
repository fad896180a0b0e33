"""Batches of sequences in their order on disk."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from bd3lm.data.sequences import Sequences

if TYPE_CHECKING:
    from bd3lm.objectives import TokenBatch


class OrderedBatches(Sequence["TokenBatch"]):
    """The first `limit` sequences in batches (rows, context), each read on access. The last batch may be
    smaller."""

    def __init__(self, sequences: Sequences, *, rows: int, limit: int | None = None) -> None:
        self._sequences, self._rows = sequences, rows
        self._starts = range(len(sequences))[:limit:rows]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> "TokenBatch": ...

    @overload
    def __getitem__(self, index: slice) -> "list[TokenBatch]": ...

    def __getitem__(self, index: int | slice) -> "TokenBatch | list[TokenBatch]":
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        start = self._starts[index]
        return self._sequences.batch(range(start, min(start + self._rows, self._starts.stop)))
