"""Packed rows: any layout applied to several texts in one row, which do not see each other."""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from bd3lm.models.devices import send
from bd3lm.models.layouts import MASK_GRANULARITY, Layout, Span


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Packed(Layout):
    """Another layout, applied separately to each of the texts that a row holds one after another.

    A position may attend to another if the `inner` layout allows it and both belong to the same text.
    Positions are counted from 0 in each text. So each text is read as if it were alone; for this it must
    begin where a block begins. `documents` (rows, length) gives each token the number of its text, which
    grows along a row.

    A `Packed` holds tensors, so it equals only itself, and its masks are kept for as long as it lives.
    """

    inner: Layout
    documents: Tensor

    def __init__(self, inner: Layout, documents: Tensor) -> None:
        own = {"inner": inner, "documents": documents, "length": inner.length, "keys_only": inner.keys_only}
        for name, value in own.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        documents, unit = self.documents, self.inner.unit
        if unit is None:
            raise ValueError(f"inner must be a layout for one text from its first token on, got {self.inner}")
        if documents.ndim != 2 or documents.shape[1] != self.length or documents.dtype != torch.long:
            raise ValueError(
                f"documents must be an int64 tensor (rows, {self.length}), got {documents.dtype} of shape "
                f"{tuple(documents.shape)}"
            )
        if documents.device.type != "cpu":  # checking would stall the pass
            return
        if (documents[:, 1:] < documents[:, :-1]).any():
            raise ValueError("documents must not decrease along a row: each text is one piece")
        begins = document_begins(documents).nonzero()
        if (wrong := begins[begins[:, 1] % unit != 0]).numel():
            row, place = wrong[0].tolist()
            raise ValueError(
                f"documents must begin at multiples of the block size {unit}, got one that begins at "
                f"token {place} of row {row}"
            )

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Packed({self.inner}, {self.rows} rows)"

    def to(self, device: torch.device | str) -> "Packed":
        """The same layout with its tensors on a device."""
        documents = send(self.documents, device)
        return self if documents is self.documents else Packed(self.inner, documents)

    @property
    def rows(self) -> int:
        return self.documents.shape[0]

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def read(self) -> Span:
        return self.inner.read

    @property
    def added(self) -> Span:
        return self.inner.added

    @property
    def unit(self) -> None:
        return None

    def allows(self, query: Tensor, key: Tensor) -> Tensor:
        """As in any layout, with a leading dimension for the rows."""
        query, key = torch.broadcast_tensors(query, key)
        return self.inner.allows(query, key) & (self._owner[:, query] == self._owner[:, key])

    def group_start(self, query: Tensor) -> Tensor:
        return self.inner.group_start(query)

    def text_positions(self, device: torch.device | str = "cpu") -> Tensor:
        """(rows, size), counted from 0 in each text."""
        place = torch.arange(self.length, device=self.documents.device)
        starts = torch.where(document_begins(self.documents), place, 0).cummax(1).values
        within = (place - starts)[:, self.inner.text_positions(self.documents.device)]
        return within.to(device)

    def dense(self, queries: Span | None = None, device: torch.device | str = "cpu") -> Tensor:
        """The rule as a bool mask (rows, queries, size)."""
        start, stop = queries or (0, self.size)
        owner = self._owner.to(device)
        same = owner[:, start:stop].unsqueeze(2) == owner.unsqueeze(1)
        return same & self.inner.dense((start, stop), device)

    def block_mask(
        self,
        queries: Span | None = None,
        device: torch.device | str = "cpu",
        *,
        granularity: int = MASK_GRANULARITY,
    ) -> BlockMask:
        """The rule as a FlexAttention block mask, with one mask per row.

        Every batch needs a new mask, so we do not check pairs of positions. A square is empty if it is empty
        in the inner layout's mask, or if its queries and its keys have no text in common.
        """
        of_rows = (queries or (0, self.size), torch.device(device), granularity)
        if of_rows not in self._block_masks:
            self._block_masks[of_rows] = self._block_mask(*of_rows)
        return self._block_masks[of_rows]

    def _block_mask(self, queries: Span, device: torch.device, granularity: int) -> BlockMask:
        (start, stop), inner, owner = queries, self.inner, self._owner.to(device)

        # A compiled graph takes the tensor as an input and everything else as a constant, so one graph serves
        # all batches of a shape.
        def mask_mod(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            same = owner[batch, query + start] == owner[batch, key]
            return inner.allows(query + start, key) & same

        partial, full = _inner_tiles(inner, queries, device, granularity)
        first_q, last_q = (each.unsqueeze(2) for each in _tile_range(owner[:, start:stop], granularity))
        first_k, last_k = (each.unsqueeze(1) for each in _tile_range(owner, granularity))
        meet = (first_q <= last_k) & (first_k <= last_q)
        alone = (first_q == last_k) & (first_k == last_q)  # all queries and all keys belong to one text
        return BlockMask.from_kv_blocks(
            *_ordered(meet & (partial | (full & ~alone))),
            *_ordered(full & alone),
            BLOCK_SIZE=granularity,
            mask_mod=mask_mod,
            seq_lengths=(stop - start, self.size),
        )

    @cached_property
    def _owner(self) -> Tensor:
        """The text that each position of the pass belongs to, (rows, size) int32."""
        number = document_begins(self.documents).cumsum(1, dtype=torch.int32)
        return number[:, self.inner.text_positions(self.documents.device)]

    @cached_property
    def _block_masks(self) -> dict[tuple[Span, torch.device, int], BlockMask]:
        return {}


def packed(layout: Layout, documents: Tensor | None, device: torch.device | str) -> Layout:
    """The layout applied to each of some documents, which are checked on their own device and used on
    `device`. Without documents, the layout itself."""
    return layout if documents is None else Packed(layout, documents).to(device)


def document_begins(documents: Tensor) -> Tensor:
    """Whether each token (rows, length) is the first of its text."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)


@lru_cache(maxsize=64)
def _inner_tiles(
    layout: Layout, queries: Span, device: torch.device, granularity: int
) -> tuple[Tensor, Tensor]:
    """Which squares of a layout's block mask need a check of each pair, and which are full: (tiles,
    tiles)."""
    with torch.inference_mode(False):
        mask = layout.block_mask(queries, device, granularity=granularity)
        found = []
        for numbers, indices in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            if numbers is None or indices is None:
                raise RuntimeError("a block mask without full squares")
            # A row of indices lists every square; those that count come first.
            found.append((indices.argsort(-1) < numbers.unsqueeze(-1))[0, 0])
        return found[0], found[1]


def _tile_range(owner: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The first and the last text in each tile of positions, (rows, tiles)."""
    missing = -owner.shape[1] % size
    ends = torch.iinfo(owner.dtype)
    low = F.pad(owner, (0, missing), value=ends.max).unflatten(1, (-1, size)).amin(-1)
    high = F.pad(owner, (0, missing), value=ends.min).unflatten(1, (-1, size)).amax(-1)
    return low, high


def _ordered(squares: Tensor) -> tuple[Tensor, Tensor]:
    """How many squares (rows, tiles, tiles) count in each row of tiles, and all squares, with those first."""
    numbers = squares.sum(-1, dtype=torch.int32)
    indices = squares.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return numbers.unsqueeze(1), indices.unsqueeze(1)
