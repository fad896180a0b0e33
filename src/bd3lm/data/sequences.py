"""A split as sequences of one length, which are read by number: what batches are made of."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.shards import TokenShards

if TYPE_CHECKING:
    from bd3lm.objectives import TokenBatch


class Sequences(ABC):
    """Sequences of `context` tokens of one split of some shards."""

    shards: TokenShards
    split: str
    context: int

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def batch(self, index: Sequence[int] | NDArray[np.integer]) -> "TokenBatch":
        """Some of them as a batch, with what of it is to be predicted."""

    @property
    @abstractmethod
    def why_empty(self) -> str:
        """Why there is none, if there is none."""

    def check_places(self, index: NDArray[np.integer]) -> None:
        """Refuse numbers of sequences that are not there."""
        wrong = (index < 0) | (index >= len(self))
        if wrong.any():
            raise IndexError(
                f"sequence {index[wrong].flat[0]} is not within the {len(self)} of split {self.split!r}"
            )
