"""Sequences of one length that hold several whole conversations, which do not see each other.

Conversations are packed by best fit, the longest first: each goes where it leaves the least room. A method
may require the length of each conversation to be a multiple of some number (`Packing`); end tokens fill it
up. The rest of a sequence is absent. Which conversations share a sequence depends only on their lengths.

If a method writes text in blocks, whatever follows an answer in the same block does not exist yet when the
answer is written. So it is absent, and not learned: of several answers in one block, only the longest is
learned.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.sequences import Sequences
from bd3lm.data.shards import TokenShards

if TYPE_CHECKING:
    from bd3lm.objectives import TokenBatch


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What a method requires of conversations that share a sequence."""

    unit: int = 1
    """Each conversation is filled up to a multiple of this many tokens, so it begins at one."""
    in_blocks: bool = False
    """Units are written whole: the end tokens that fill the last unit are learned, and whatever follows an
    answer in its unit is hidden."""

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise ValueError(f"unit must be at least 1, got {self.unit}")


class PackedConversations(Sequences):
    """The conversations of a split, each once, as sequences of `context` tokens."""

    def __init__(
        self,
        shards: TokenShards,
        split: str,
        context: int,
        *,
        packing: Packing | None = None,
        skip_long: bool = False,
        alone: bool = False,
    ) -> None:
        """A conversation longer than the context is an error, or is left out with `skip_long`. With `alone`
        each conversation has a sequence of its own, and whatever follows it there is neither hidden nor
        predicted. That is for models that read a text from left to right, and can read only one at a time."""
        self.shards, self.split, self.context = shards, split, context
        self.packing = packing or Packing()
        unit = self.packing.unit
        if context < 1 or context % unit:
            raise ValueError(
                f"context must be a multiple of {unit}, where every conversation begins, got {context}"
            )
        eos = shards.meta.inputs.eos_id
        if eos is None and unit > 1:
            raise ValueError("conversations in blocks need a tokenizer with an end token, to fill blocks")
        self._fill = 0 if eos is None else eos
        lengths = shards.lengths(split).astype(np.int64)
        self._starts = np.concatenate(([0], np.cumsum(lengths)))
        sizes = -(-lengths // unit) * unit
        long = np.flatnonzero(sizes > context)
        if len(long) and not skip_long:
            first = int(long[0])
            others = {0: "", 1: ", and so has 1 more"}.get(
                len(long) - 1, f", and so have {len(long) - 1:,} more"
            )
            raise ValueError(
                f"conversation {first + 1:,} of split {split!r} has {lengths[first]:,} tokens, more than the "
                f"context of {context:,}{others}: use a longer context, or leave out long conversations with "
                "--data.skip_long true"
            )
        self.skipped = len(long)
        """How many conversations were left out as too long."""
        self._alone = alone
        fitting = np.flatnonzero(sizes <= context).tolist()
        self._rows = [(document,) for document in fitting] if alone else pack(sizes, context)
        self.waste = 1 - float(lengths[sizes <= context].sum()) / max(1, len(self._rows) * context)
        """The share of positions without a token of a conversation."""

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, index: Sequence[int] | NDArray[np.integer]) -> "TokenBatch":
        import torch

        from bd3lm.objectives import TokenBatch

        places = np.asarray(index, np.int64)
        self.check_places(places)
        shape = (len(places), self.context)
        tokens, documents = np.full(shape, self._fill, np.int64), np.zeros(shape, np.int64)
        scored, absent = np.zeros(shape, np.bool_), np.ones(shape, np.bool_)
        for row, place in enumerate(places):
            for number, (begin, end, document) in enumerate(self._layout(int(place))):
                here = slice(begin, end)
                first, last = (int(self._starts[document + step]) for step in (0, 1))
                length = last - first
                tokens[row, begin : begin + length] = self.shards.read(self.split, first, last)
                scored[row, begin : begin + length] = self.shards.answers(self.split, first, last)
                absent[row, here] = False
                if self.packing.in_blocks:
                    scored[row, begin + length : end] = True
                    hide_rests(scored[row, here], absent[row, here], self.packing.unit)
                documents[row, here] = number
                documents[row, end:] = number + 1
        if self._alone:
            return TokenBatch(torch.from_numpy(tokens), torch.from_numpy(scored))
        return TokenBatch(*map(torch.from_numpy, (tokens, scored, absent, documents)))

    def documents(self, place: int) -> tuple[int, ...]:
        """The numbers of the conversations in a sequence."""
        return self._rows[place]

    def _layout(self, place: int) -> Iterator[tuple[int, int, int]]:
        """For each conversation of a sequence: where it begins, where its fill ends, and its number."""
        begin, unit = 0, self.packing.unit
        for document in self._rows[place]:
            length = int(self._starts[document + 1] - self._starts[document])
            end = begin - (-length // unit) * unit
            yield begin, end, document
            begin = end

    @property
    def why_empty(self) -> str:
        return f"split {self.split!r} has no conversation that fits in a sequence of {self.context:,}"


def pack(sizes: NDArray[np.int64], context: int) -> list[tuple[int, ...]]:
    """Which conversations share a sequence: best fit, the largest first. Those that do not fit are left out.

    Sequences are ordered by their first conversation, and each lists its conversations in order.
    """
    rooms: list[tuple[int, int]] = []  # the room left in each open sequence, sorted, and its number
    found: list[list[int]] = []
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[place])
        if size > context:
            continue
        at = bisect_left(rooms, (size, -1))
        room, number = rooms.pop(at) if at < len(rooms) else (context, len(found))
        if number == len(found):
            found.append([])
        found[number].append(place)
        if room > size:
            insort(rooms, (room - size, number))
    return sorted(tuple(sorted(each)) for each in found)


def hide_rests(scored: NDArray[np.bool_], absent: NDArray[np.bool_], unit: int) -> None:
    """In each unit of a conversation keep the longest run of scored tokens, the last of equal ones. Whatever
    follows it becomes absent, and earlier runs become given."""
    for begin in range(0, len(scored), unit):
        flags = scored[begin : begin + unit]
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
        if not len(edges):
            continue
        runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        first, last = max(runs, key=lambda run: (run[1] - run[0], run[0]))
        flags[:first] = flags[last:] = False
        absent[begin + last : begin + len(flags)] = True
