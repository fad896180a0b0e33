"""Sequences in the order in which they lie, in batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from bd3lm.data.wrap import WrappedTokens

if TYPE_CHECKING:
    from torch import Tensor


class OrderedBatches(Sequence["Tensor"]):
    """The first `limit` sequences in batches (rows, context), read when asked for. The last may be small."""

    def __init__(self, sequences: WrappedTokens, *, rows: int, limit: int | None = None) -> None:
        self._sequences, self._rows = sequences, rows
        self._starts = range(len(sequences))[:limit:rows]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> "Tensor": ...

    @overload
    def __getitem__(self, index: slice) -> "list[Tensor]": ...

    def __getitem__(self, index: int | slice) -> "Tensor | list[Tensor]":
        import torch  # not for the workers that prepare data

        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        start = self._starts[index]
        return torch.from_numpy(self._sequences[start : min(start + self._rows, self._starts.stop)])
