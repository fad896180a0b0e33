"""Who may attend to whom: one rule per layout, as a dense mask or as a FlexAttention block mask.

A layout describes the positions of one pass through the network: how many there are, where each sits in the
text (its rotary position), which pairs may attend, and which outputs are read. A layout is a small frozen
value, so its masks are cached under it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Span = tuple[int, int]  # positions start..stop of a pass, stop excluded
MASK_GRANULARITY = 128  # FlexAttention's default


@dataclass(frozen=True)
class Layout(ABC):
    """The attention pattern of one pass over `length` text positions.

    At positions outside `read` the last layer computes only keys and values. A pass that only fills a cache
    is `keys_only`: nothing reads its outputs.
    """

    length: int
    keys_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")

    @property
    def size(self) -> int:
        """How many positions the pass has."""
        return self.length

    @property
    def read(self) -> Span:
        """The positions whose outputs are read."""
        return 0, 0 if self.keys_only else self.size

    @property
    def added(self) -> Span:
        """The positions at which the network's low-rank additions apply, if it has any."""
        return 0, 0

    @property
    def rows(self) -> int | None:
        """How many rows the layout is for; None if all rows are alike and any number will do."""
        return None

    @property
    def unit(self) -> int | None:
        """The size of a block: a row cut at a multiple of it gives two texts that can be read side by side
        (`Packed`). None if the layout does not describe one text from its first token on."""
        return 1

    @abstractmethod
    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether the query position may attend to the key position. Both are index tensors that
        broadcast."""

    def group_start(self, query: Tensor) -> Tensor:
        """The first of the positions that are written together with this one.

        A cache counts its window from there, so what a token sees does not depend on how the text was cut
        into passes.
        """
        return torch.zeros_like(query)

    def text_positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Where each position of the pass sits in its text: (size,), or (rows, size) if rows differ."""
        return torch.arange(self.size, device=device) % self.length

    def dense(self, queries: Span | None = None, device: torch.device | str = "cpu") -> Tensor:
        """The rule as a bool mask (queries, size), or (rows, queries, size) if rows differ."""
        return _dense(self, queries or (0, self.size), torch.device(device))

    def block_mask(
        self,
        queries: Span | None = None,
        device: torch.device | str = "cpu",
        *,
        granularity: int = MASK_GRANULARITY,
    ) -> BlockMask:
        """The rule as a FlexAttention block mask, which skips empty squares of `granularity`."""
        return _block_mask(self, queries or (0, self.size), torch.device(device), granularity)


@dataclass(frozen=True)
class Causal(Layout):
    """Each position sees itself and the positions before it."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def group_start(self, query: Tensor) -> Tensor:
        return query


@dataclass(frozen=True)
class Bidirectional(Layout):
    """Every position sees every other: a single block."""

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return (key >= 0) & (query >= 0)


@dataclass(frozen=True)
class BlockCausal(Layout):
    """Each position sees its own block and the blocks before it: M_BC (Suppl. B.6)."""

    block_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block_size(self.length, self.block_size)

    @property
    def unit(self) -> int:
        return _unit(self.length, self.block_size)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return _block(key, self.block_size) <= _block(query, self.block_size)

    def group_start(self, query: Tensor) -> Tensor:
        return query // self.block_size * self.block_size


@dataclass(frozen=True)
class BlockDecoding(BlockCausal):
    """Finished blocks, then the block being written, which sees everything. Only that block is read.

    With `keys_only` all blocks are finished. `causal_clean` as in `BlockDiffusion`.
    """

    causal_clean: bool = False

    @property
    def read(self) -> Span:
        return super().read if self.keys_only else (self.length - self.block_size, self.length)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        if not self.causal_clean:
            return super().allows(query, key)
        finished = self.length if self.keys_only else self.length - self.block_size
        return (key <= query) | (query >= finished)


@dataclass(frozen=True)
class BlockDiffusion(Layout):
    """x_t ⊕ x: noisy copies of the text, then the clean text (Suppl. B.6).

    A noisy token sees its own block of its own copy (M_BD) and the clean tokens of earlier blocks (M_OBC). A
    clean token sees only clean tokens: block-causally (M_BC), or causally with `causal_clean`. Positions are
    counted from 0 in each copy. Only the noisy outputs are read, unless `read_clean` is set. With `adds` the
    network's additions apply at the noisy positions.
    """

    block_size: int
    copies: int = 1
    causal_clean: bool = False
    read_clean: bool = False
    adds: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_block_size(self.length, self.block_size)
        if self.copies < 1:
            raise ValueError(f"copies must be at least 1, got {self.copies}")

    @property
    def noisy(self) -> int:
        """How many noisy positions come before the clean ones."""
        return self.copies * self.length

    @property
    def size(self) -> int:
        return self.noisy + self.length

    @property
    def read(self) -> Span:
        return super().read if self.keys_only or self.read_clean else (0, self.noisy)

    @property
    def added(self) -> Span:
        return 0, self.noisy if self.adds else 0

    @property
    def unit(self) -> int:
        return _unit(self.length, self.block_size)

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """Kernels compute this for every pair, so all but four operations use the query or the key alone."""
        clean = query >= self.noisy
        text = self._text(query)
        before = text - text % self.block_size
        own = text + 1 if self.causal_clean else before + self.block_size
        seen = self.noisy + torch.where(clean, own, before)  # the clean text up to this point: M_BC and M_OBC
        # Each copy numbers its blocks anew. Copies are a whole number of blocks apart.
        block = torch.where(clean, -1, _block(query, self.block_size))
        return ((key >= self.noisy) & (key < seen)) | (_block(key, self.block_size) == block)

    def _text(self, position: Tensor) -> Tensor:
        """position % length, without the division if there is one noisy copy."""
        if self.copies > 1:
            return position % self.length
        return torch.where(position >= self.length, position - self.length, position)


@dataclass(frozen=True)
class Drafting(Layout):
    """A pass over a cache that verifies drafts and makes the next ones, whichever drafts are accepted.

    The pass begins with the last token of the text and a tree of drafts. `parents` gives, for each draft, the
    position of the token it follows; 0 is the last token. Then comes a group of `masks` for the last token
    and one for each draft. A clean position sees the text and its own ancestors. A mask sees what its group
    follows, and its group. The network's additions apply at the masks. A cache may keep only clean positions.

    Use `Drafting.of`, which computes the length.
    """

    parents: tuple[int, ...]
    masks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not 0 <= parent <= index for index, parent in enumerate(self.parents)):
            raise ValueError(
                f"parents must be 0 (the last token) or positions of earlier drafts, got {self.parents}"
            )
        if self.masks < 0 or self.length != self.clean * (1 + self.masks):
            raise ValueError(
                f"length must be {self.clean} clean positions and {self.masks} masks behind each, got "
                f"{self.length}"
            )

    @classmethod
    def of(cls, parents: Sequence[int], masks: int) -> "Drafting":
        """The layout of this tree of drafts, with the length that it needs."""
        return cls((1 + len(parents)) * (1 + masks), tuple(parents), masks)

    @property
    def clean(self) -> int:
        """How many positions come before the masks."""
        return 1 + len(self.parents)

    @property
    def added(self) -> Span:
        return self.clean, self.size

    @property
    def unit(self) -> None:
        return None

    def behind(self) -> list[list[int]]:
        """For each clean position, the path from the last token to it, itself included."""
        paths = [[0]]
        for index, parent in enumerate(self.parents):
            paths.append([*paths[parent], index + 1])
        return paths

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        return _drafting(self, query.device).allowed[query, key]

    def group_start(self, query: Tensor) -> Tensor:
        return _drafting(self, query.device).groups[query]

    def text_positions(self, device: torch.device | str = "cpu") -> Tensor:
        return _drafting(self, torch.device(device)).places


@dataclass(frozen=True)
class BlockCopies(Layout):
    """A pass over a cache: a finished block, the next block, and copies of the finished block in other
    states.

    The finished block sees the text and itself, causally with `causal_clean`. The next block sees the text,
    the finished block and itself. Each copy has the positions of the finished block, and sees the text and
    itself. The next block and the copies are read. A cache may keep only the finished block.

    Use `BlockCopies.of`, which computes the length.
    """

    block_size: int
    copies: int
    causal_clean: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 1 or self.copies < 1 or self.length != (2 + self.copies) * self.block_size:
            raise ValueError(
                f"length must be {2 + self.copies} blocks of {self.block_size}, with at least 1 copy, got "
                f"{self.length}"
            )

    @classmethod
    def of(cls, block_size: int, copies: int, *, causal_clean: bool) -> "BlockCopies":
        """The layout of these blocks, with the length that it needs."""
        return cls((2 + copies) * block_size, block_size, copies, causal_clean)

    @property
    def read(self) -> Span:
        return self.block_size, self.size

    @property
    def unit(self) -> None:
        return None

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        n = self.block_size
        same = _block(query, n) == _block(key, n)
        if self.causal_clean:
            same = same & ((key <= query) | (query >= n))
        follows = (query >= n) & (query < 2 * n) & (key < n)
        return same | follows

    def group_start(self, query: Tensor) -> Tensor:
        n = self.block_size
        return torch.where((query >= n) & (query < 2 * n), n, 0)

    def text_positions(self, device: torch.device | str = "cpu") -> Tensor:
        n = self.block_size
        position = torch.arange(self.size, device=device)
        return torch.where(position < 2 * n, position, position % n)


def inside(span: Span, read: Span) -> Span:
    """The part of a span that is read, counted from the first position that is read. It may be empty, and
    then end before it begins."""
    start, stop = read
    return max(span[0], start) - start, min(span[1], stop) - start


def _block(position: Tensor, block_size: int) -> Tensor:
    """position // block_size, as a shift if block_size is a power of two."""
    if block_size & (block_size - 1):
        return position // block_size
    return position >> (block_size.bit_length() - 1)


def check_block_size(length: int, block_size: int) -> None:
    """Refuse a block size that does not divide the length."""
    if block_size < 1 or length % block_size:
        raise ValueError(f"block_size must be a positive divisor of the length {length}, got {block_size}")


def _unit(length: int, block_size: int) -> int:
    """Where a text may be cut: between blocks. A single block may be cut anywhere."""
    return block_size if block_size < length else 1


# Masks made in inference mode cannot be saved for a later backward pass, hence inference_mode(False).


class _DraftingTables(NamedTuple):
    """The rules of a `Drafting`, position by position."""

    allowed: Tensor  # (size, size)
    groups: Tensor  # (size,) where each position's group begins, counted from the last token
    places: Tensor  # (size,) where each sits in the text, counted from the last token


@cache  # never dropped: recorded passes read it at its address
def _drafting(layout: Drafting, device: torch.device) -> _DraftingTables:
    clean, n = layout.clean, layout.masks
    with torch.inference_mode(False):
        allowed = torch.zeros(layout.size, layout.size, dtype=torch.bool)
    groups, places = [0] * layout.size, [0] * layout.size
    for position, path in enumerate(layout.behind()):
        allowed[position, path] = True
        groups[position] = places[position] = len(path) - 1
        group = slice(clean + position * n, clean + (position + 1) * n)
        allowed[group, path] = True
        allowed[group, group] = True
        groups[group] = [len(path)] * n
        places[group] = range(len(path), len(path) + n)
    with torch.inference_mode(False):
        return _DraftingTables(
            allowed.to(device), torch.tensor(groups, device=device), torch.tensor(places, device=device)
        )


@lru_cache(maxsize=64)
def _dense(layout: Layout, queries: Span, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        query = torch.arange(*queries, device=device).unsqueeze(1)
        key = torch.arange(layout.size, device=device).unsqueeze(0)
        return layout.allows(query, key)


@lru_cache(maxsize=64)
def _block_mask(layout: Layout, queries: Span, device: torch.device, granularity: int) -> BlockMask:
    start, stop = queries

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return layout.allows(query + start, key)

    with torch.inference_mode(False):
        return create_block_mask(
            mask_mod, None, None, stop - start, layout.size, device=str(device), BLOCK_SIZE=granularity
        )
