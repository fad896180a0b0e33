"""A split as sequences of one length, read by number: the source of batches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.shards import TokenShards

if TYPE_CHECKING:
    from bd3lm.objectives import TokenBatch


class Sequences(ABC):
    """Sequences of `context` tokens from one split of some shards."""

    shards: TokenShards
    split: str
    context: int

    @abstractmethod
    def __len__(self) -> int:
        """How many sequences there are."""

    @abstractmethod
    def batch(self, index: Sequence[int] | NDArray[np.integer]) -> "TokenBatch":
        """Some of the sequences as a batch, with a mark on the tokens to predict."""

    @property
    @abstractmethod
    def why_empty(self) -> str:
        """The reason, if there is no sequence."""

    def check_places(self, index: NDArray[np.integer]) -> None:
        """Refuse numbers of sequences that do not exist."""
        wrong = (index < 0) | (index >= len(self))
        if wrong.any():
            raise IndexError(
                f"sequence {index[wrong].flat[0]} is not within the {len(self)} of split {self.split!r}"
            )
