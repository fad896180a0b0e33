"""Keys and values kept between passes: a ring for decoding, a tape for two-pass training.

Both plug into the network at one place: each layer hands its new keys and values to `extend` and attends to
what comes back, under the mask that `mask` gives.
"""

import math
from copy import copy
from typing import Protocol

import torch
from torch import Tensor

from bd3lm.models.attention import AttentionMask, Backend, render
from bd3lm.models.devices import require_room
from bd3lm.models.layouts import Layout, Span


class KVStore(Protocol):
    """What the network needs of a store of keys and values."""

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        """Rotary positions of the tokens of this pass: (segment,) or (rows, segment)."""

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        """Who may attend to whom, over what `extend` returns."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; return all that its queries attend to."""


def check_fills(layout: Layout, tokens: Tensor) -> None:
    """Refuse tokens whose number differs from the layout's positions."""
    if tokens.shape[1] != layout.size:
        raise ValueError(f"tokens must have {layout.size} positions for {layout}, got {tokens.shape[1]}")
    check_rows(layout, tokens)


def check_rows(layout: Layout, tokens: Tensor) -> None:
    """Refuse tokens whose rows are not those of a layout that differs between them."""
    if layout.rows not in (None, tokens.shape[0]):
        raise ValueError(f"tokens must have {layout.rows} rows for {layout}, got {tokens.shape[0]}")


class NoStore:
    """A pass on its own: nothing kept, nothing remembered."""

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        check_fills(layout, tokens)
        return layout.text_positions(tokens.device)

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        return render(layout, queries, device, backend)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value


class KVTape(NoStore):
    """Records the keys and values of one pass, gradients and all (the paper's Algorithm 1, first pass)."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer != len(self.layers):
            raise RuntimeError("a KVTape records one pass; make a new one for each")
        self.layers.append((key, value))
        return key, value

    def replay(self) -> "KVReplay":
        """A store whose passes attend to their own tokens, then to the recorded ones."""
        return KVReplay(self)


class KVHanded(NoStore):
    """Holds what one layer hands over, until the layer's caller takes it (`pair`).

    For a layer that is computed a second time in the backward pass: the second time leaves nothing behind.
    """

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.pair = key, value
        return key, value


class KVReplay:
    """A pass over the first positions of a layout, whose last positions were recorded on a tape."""

    def __init__(self, tape: KVTape) -> None:
        self._tape = tape

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        segment, recorded = tokens.shape[1], self._tape.layers[0][0].shape[2]
        if segment + recorded != layout.size:
            raise ValueError(
                f"tokens and tape must fill the {layout.size} positions of {layout}, "
                f"got {segment} tokens and {recorded} recorded"
            )
        check_rows(layout, tokens)
        return layout.text_positions(tokens.device)[..., :segment]

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        return render(layout, queries, device, backend)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        past_key, past_value = self._tape.layers[layer]
        return torch.cat((key, past_key), dim=2), torch.cat((value, past_value), dim=2)


class KVCache:
    """Rotated keys and values of the text so far, in a preallocated ring, with its own length for each row.

    Position p of a row lives in one slot of the ring for good, so letting go of old tokens moves nothing:
    `starts` advances and their slots are written over. Keys keep the rotation of their absolute position, and
    attention sees only differences of positions, so what is kept stays valid for ever.

    A pass of s tokens writes them after the text, at positions end..end + s − 1, where they see each other
    as the pass's layout says, and the visible text. They stay only once `advance` says so: a pass over
    a noisy block leaves no trace, one over a finished block is followed by advance(s).

    The window: a token sees at most the `window` positions before the group it is written with (itself under
    a causal layout, its block under a block-causal one), whatever else the same pass holds. So the keys of a
    text are the same whether it came in one pass or in many. They were computed from what was visible then:
    through them a token is touched by text that has left its own window, which would not be so if the window
    were computed afresh.

    Everything stays where it is in memory: a pass can be captured as a CUDA graph.
    """

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        window: int,
        segment: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, size in (("rows", rows), ("window", window), ("segment", segment)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.window, self.segment = window, segment
        shape = (layers, rows, heads, window + segment, head_dim)
        require_room(
            2 * math.prod(shape) * dtype.itemsize,
            torch.device(device),
            what=f"a cache of {rows:,} texts of {window + segment:,} tokens",
        )
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.starts = torch.zeros(rows, device=device, dtype=torch.long)
        self.ends = torch.zeros(rows, device=device, dtype=torch.long)
        self._slots: Tensor | None = None  # where the pass in progress writes: (rows, segment)
        self._touched = 0  # slots from here on hold nothing yet

    @property
    def rows(self) -> int:
        return self.ends.shape[0]

    @property
    def kind(self) -> dict[str, object]:
        """What two caches must have in common to exchange rows."""
        layers, _, heads, _, head_dim = self.keys.shape
        return {
            "layers": layers,
            "heads": heads,
            "head_dim": head_dim,
            "window": self.window,
            "segment": self.segment,
            "dtype": self.keys.dtype,
        }

    @property
    def capacity(self) -> int:
        return self.window + self.segment

    @property
    def lengths(self) -> Tensor:
        """How many positions of each row's text are visible."""
        return (self.ends - self.starts).clamp_min(0)

    def lead_in(self, tokens: Tensor) -> None:
        """Let the first pass of some empty rows begin this many positions before the text.

        So rows that have a finished block to write can share a pass with rows that have none yet: whatever
        such a row passes in its place is seen by nothing in its text.
        """
        if bool((self.ends != 0).any()):
            raise ValueError(f"a lead-in is for an empty cache, got rows that end at {self.ends.tolist()}")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) <= self.segment:
            raise ValueError(f"tokens of a lead-in must lie in 0..{self.segment}, got {tokens.tolist()}")
        self.ends.sub_(tokens)

    def check_pass(self, layout: Layout, tokens: Tensor) -> None:
        """Refuse a pass that this cache has no room for."""
        check_fills(layout, tokens)
        if layout.rows is not None:
            raise ValueError(
                f"layout must be of one text a row, which is all that a cache holds, got {layout}"
            )
        if layout.size != layout.length:
            raise ValueError(
                f"layout must be of one text, whose positions follow the cached ones, got {layout}"
            )
        rows, segment = tokens.shape[:2]  # ids, or vectors that stand for them
        if rows != self.rows:
            raise ValueError(f"tokens must have {self.rows} rows, as the cache, got {rows}")
        if segment > self.segment:
            raise ValueError(f"a pass through this cache may have {self.segment} tokens, got {segment}")

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        self.check_pass(layout, tokens)
        segment = tokens.shape[1]
        ends = self.ends.unsqueeze(1)
        self._slots = self._slot(ends + torch.arange(segment, device=self.ends.device))
        self._touched = self.capacity
        # Elsewhere looking would stall the pass, and shapes must not change.
        if self.ends.device.type == "cpu":
            self._touched = min(self.segment + int(self.ends.max()) + segment, self.capacity)
        return ends + layout.text_positions(self.ends.device)

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        """(rows, 1, queries, slots in use): the visible text, and the pass itself by its layout."""
        ends, starts = self.ends.view(-1, 1, 1), self.starts.view(-1, 1, 1)
        slots = torch.arange(self._touched, device=self.ends.device)
        newest = ends + layout.size - 1
        key = newest - (self._slot(newest) - slots) % self.capacity  # the position that each slot holds
        query = torch.arange(*queries, device=self.ends.device).unsqueeze(1)
        within = (key - ends).clamp_min(0)
        seen = (key < ends) | layout.allows(query, within)
        seen = seen & (key >= ends + layout.group_start(query) - self.window)
        # A lead-in sees itself alone: a softmax over nothing would be no number, and would spread.
        place = layout.text_positions(self.ends.device)[slice(*queries)].unsqueeze(1)
        in_text = torch.where(ends + place >= starts, key >= starts, key >= ends)
        return AttentionMask(dense=(seen & in_text).unsqueeze(1))

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._slots is None:
            raise RuntimeError("extend comes after text_positions of the same pass")
        index = self._slots[:, None, :, None].expand_as(key)
        self.keys[layer].scatter_(2, index, key.to(self.keys.dtype))
        self.values[layer].scatter_(2, index, value.to(self.values.dtype))
        used = slice(0, self._touched)
        return self.keys[layer, :, :, used].to(key.dtype), self.values[layer, :, :, used].to(value.dtype)

    def advance(self, tokens: int | Tensor) -> None:
        """Keep the first `tokens` positions of the last pass (one number, or one a row)."""
        if isinstance(tokens, int) and tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        self.ends.add_(tokens)
        torch.maximum(self.starts, self.ends - self.window, out=self.starts)

    def advance_along(self, path: Tensor, tokens: Tensor) -> None:
        """Keep the positions `path` (rows, n) of the last pass, which follow one another in the text: of each
        row the first `tokens` (rows,). They ascend, and none comes before its place among the kept."""
        device = self.ends.device
        to = self._slot(self.ends.unsqueeze(1) + torch.arange(path.shape[1], device=device))
        kept = self._slot(self.ends.unsqueeze(1) + path)
        for store in (self.keys, self.values):
            shape = (store.shape[0], -1, store.shape[2], -1, store.shape[4])
            moved = store.gather(3, kept[None, :, None, :, None].expand(shape))
            store.scatter_(3, to[None, :, None, :, None].expand(shape), moved)
        self.advance(tokens)

    def first(self, rows: int) -> "KVCache":
        """The first rows: a view, which shares its memory with the whole."""
        view = copy(self)
        view.keys, view.values = self.keys[:, :rows], self.values[:, :rows]
        view.starts, view.ends = self.starts[:rows], self.ends[:rows]
        view._slots = None
        return view

    def empty(self, rows: int) -> "KVCache":
        """One of the same kind, with nothing in it."""
        layers, _, heads, _, head_dim = self.keys.shape
        return KVCache(
            layers=layers,
            rows=rows,
            heads=heads,
            head_dim=head_dim,
            window=self.window,
            segment=self.segment,
            device=self.keys.device,
            dtype=self.keys.dtype,
        )

    def move_row(self, source: int, target: int) -> None:
        """Copy a row to the place of another."""
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]
        for ends in (self.starts, self.ends):
            ends[target] = ends[source]

    def put_rows(self, rows: Tensor, other: "KVCache") -> None:
        """Replace some rows by those of another cache of the same kind."""
        if other.kind != self.kind or len(rows) != other.rows:
            raise ValueError(
                f"other must have {_described(self.kind)} and {len(rows)} rows, got "
                f"{_described(other.kind)} and {other.rows} rows"
            )
        self.keys[:, rows], self.values[:, rows] = other.keys, other.values
        self.starts[rows], self.ends[rows] = other.starts, other.ends
        self._slots = None

    def _slot(self, position: Tensor) -> Tensor:
        """A lead-in has negative positions; slots fill from the first on, so that few are in use at first."""
        return (position + self.segment) % self.capacity


def _described(kind: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in kind.items())
