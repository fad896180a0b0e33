"""Sequences of one length, with several whole conversations in each that do not see each other.

Conversations are packed by best fit, the longest first: each goes where the least room is left behind it. A
method says of how many tokens a conversation must be a multiple (`Packing`); end tokens fill it up, and what
is left of a sequence is absent. Which conversations share a sequence depends on their lengths alone.

Where text is written in blocks, what stands behind an answer in its block is not there yet when the answer is
written. It is absent then, and is not learned: of several answers in one block the longest is.
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
    """What a method asks of conversations that share a sequence."""

    unit: int = 1
    """Each is filled up to a multiple of so many tokens, and so begins at one."""
    in_blocks: bool = False
    """Whether units are written whole: then the end tokens that fill the last are learned, and what stands
    behind an answer in its unit is hidden."""

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
        """One that is longer than the context is an error, or is left out with `skip_long`. With `alone` each
        has a sequence of its own, and what stands behind it there is neither hidden nor predicted: for what
        reads a text from left to right, and knows of one only."""
        self.shards, self.split, self.context = shards, split, context
        self.packing = packing or Packing()
        unit = self.packing.unit
        if context < 1 or context % unit:
            raise ValueError(
                f"context must be a multiple of {unit}, where every conversation begins, got {context}"
            )
        eos = shards.meta.inputs.eos_id
        if eos is None and unit > 1:
            raise ValueError("conversations in blocks need a tokenizer with an end token, to fill the last")
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
                f"context of {context:,}{others}: give a longer context, or leave out what does not fit with "
                "--data.skip_long true"
            )
        self.skipped = len(long)
        """How many conversations are too long, and left out."""
        self._alone = alone
        fitting = np.flatnonzero(sizes <= context).tolist()
        self._rows = [(document,) for document in fitting] if alone else pack(sizes, context)
        self.waste = 1 - float(lengths[sizes <= context].sum()) / max(1, len(self._rows) * context)
        """The share of the places that hold no token of a conversation."""

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
        """The numbers of the conversations of a sequence."""
        return self._rows[place]

    def _layout(self, place: int) -> Iterator[tuple[int, int, int]]:
        """Where each conversation of a sequence begins, where its fill ends, and its number."""
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
    """Which of some sizes share a sequence: best fit, the largest first. Those that do not fit are left out.

    The sequences come in the order of the first of their conversations, and these in their own order.
    """
    rooms: list[tuple[int, int]] = []  # what is left of each open sequence, sorted, and its number
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
    """In each unit of a conversation, of its runs of scored tokens keep the longest, the last of equal ones;
    what stands behind it is absent, and runs before it are given."""
    for begin in range(0, len(scored), unit):
        flags = scored[begin : begin + unit]
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
        if not len(edges):
            continue
        runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        first, last = max(runs, key=lambda run: (run[1] - run[0], run[0]))
        flags[:first] = flags[last:] = False
        absent[begin + last : begin + len(flags)] = True
