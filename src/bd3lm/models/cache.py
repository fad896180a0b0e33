"""Keys and values kept between passes: a ring for decoding, a tape for two-pass training.

The network uses both in the same way: each layer hands its new keys and values to `extend` and attends to the
result under the mask that `mask` returns.
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
    """What the network needs from a store of keys and values."""

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        """Rotary positions of the tokens of this pass: (segment,) or (rows, segment)."""

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        """Who may attend to whom, over the keys that `extend` returns."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; return everything its queries attend to."""


def check_fills(layout: Layout, tokens: Tensor) -> None:
    """Refuse tokens whose number differs from the layout's positions."""
    if tokens.shape[1] != layout.size:
        raise ValueError(f"tokens must have {layout.size} positions for {layout}, got {tokens.shape[1]}")
    check_rows(layout, tokens)


def check_rows(layout: Layout, tokens: Tensor) -> None:
    """Refuse tokens whose number of rows differs from the layout's, if the layout differs between rows."""
    if layout.rows not in (None, tokens.shape[0]):
        raise ValueError(f"tokens must have {layout.rows} rows for {layout}, got {tokens.shape[0]}")


class NoStore:
    """A pass on its own, which keeps nothing."""

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        check_fills(layout, tokens)
        return layout.text_positions(tokens.device)

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        return render(layout, queries, device, backend)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value


class KVTape(NoStore):
    """Records the keys and values of one pass, with gradients (the paper's Algorithm 1, first pass)."""

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
    """Holds the keys and values of one layer until the caller takes them (`pair`).

    Used for a layer that is recomputed in the backward pass: the second run must not record anything.
    """

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.pair = key, value
        return key, value


class KVReplay:
    """A pass over the first positions of a layout. Its last positions come from a tape."""

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
    """A KV cache: rotated keys and values of the text so far, in a preallocated ring. Each row has its own
    length.

    Position p of a row stays in one slot of the ring, so dropping old tokens moves nothing: `starts`
    advances, and new tokens overwrite their slots. Keys keep the rotation of their absolute position.
    Attention sees only differences of positions, so the kept keys stay valid forever.

    A pass of s tokens writes them after the text, at positions end..end + s − 1. They see the visible text,
    and each other as the layout of the pass says. They stay only after `advance`: a pass over a noisy block
    leaves no trace, and a pass over a finished block is followed by advance(s).

    The window: a token sees at most the `window` positions before the group it is written with (the token
    itself under a causal layout, its block under a block-causal one), whatever else the same pass holds. So
    the keys of a text are the same whether it came in one pass or in many. They were computed from the text
    that was visible then, so a token is still influenced, through these keys, by text that has left its own
    window. Recomputing the window would remove that influence.

    Nothing moves in memory, so a pass can be captured as a CUDA graph.
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
        self._slots: Tensor | None = None  # where the current pass writes: (rows, segment)
        self._touched = 0  # slots from this one on are empty

    @property
    def rows(self) -> int:
        """How many texts it holds."""
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
        """How many slots the ring of a row has."""
        return self.window + self.segment

    @property
    def lengths(self) -> Tensor:
        """How many positions of each row's text are visible."""
        return (self.ends - self.starts).clamp_min(0)

    def lead_in(self, tokens: Tensor) -> None:
        """Let the first pass of some empty rows begin this many positions before the text.

        This lets rows with a finished block to write share a pass with rows that have none yet. Nothing in
        the text sees the tokens that the latter pass in its place.
        """
        if bool((self.ends != 0).any()):
            raise ValueError(f"a lead-in needs an empty cache, got rows that end at {self.ends.tolist()}")
        if not 0 <= int(tokens.min()) <= int(tokens.max()) <= self.segment:
            raise ValueError(f"tokens of a lead-in must lie in 0..{self.segment}, got {tokens.tolist()}")
        self.ends.sub_(tokens)

    def check_pass(self, layout: Layout, tokens: Tensor) -> None:
        """Refuse a pass that does not fit this cache."""
        check_fills(layout, tokens)
        if layout.rows is not None:
            raise ValueError(
                f"layout must hold one text per row, because a cache holds no more, got {layout}"
            )
        if layout.size != layout.length:
            raise ValueError(f"layout must be one text that continues the cached positions, got {layout}")
        rows, segment = tokens.shape[:2]  # token ids or embedded tokens
        if rows != self.rows:
            raise ValueError(f"tokens must have {self.rows} rows, like the cache, got {rows}")
        if segment > self.segment:
            raise ValueError(f"a pass through this cache has at most {self.segment} tokens, got {segment}")

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        self.check_pass(layout, tokens)
        segment = tokens.shape[1]
        ends = self.ends.unsqueeze(1)
        self._slots = self._slot(ends + torch.arange(segment, device=self.ends.device))
        self._touched = self.capacity
        # On other devices the check would stall the pass, and shapes must not change.
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
        # A lead-in sees only itself: a softmax over nothing would be NaN, and would spread.
        place = layout.text_positions(self.ends.device)[slice(*queries)].unsqueeze(1)
        in_text = torch.where(ends + place >= starts, key >= starts, key >= ends)
        return AttentionMask(dense=(seen & in_text).unsqueeze(1))

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._slots is None:
            raise RuntimeError("call text_positions before extend, for the same pass")
        index = self._slots[:, None, :, None].expand_as(key)
        self.keys[layer].scatter_(2, index, key.to(self.keys.dtype))
        self.values[layer].scatter_(2, index, value.to(self.values.dtype))
        used = slice(0, self._touched)
        return self.keys[layer, :, :, used].to(key.dtype), self.values[layer, :, :, used].to(value.dtype)

    def advance(self, tokens: int | Tensor) -> None:
        """Keep the first `tokens` positions of the last pass (one number, or one per row)."""
        if isinstance(tokens, int) and tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        self.ends.add_(tokens)
        torch.maximum(self.starts, self.ends - self.window, out=self.starts)

    def advance_along(self, path: Tensor, tokens: Tensor) -> None:
        """Keep the positions `path` (rows, n) of the last pass as consecutive text: the first `tokens`
        (rows,) of each row. The path ascends, so no position comes before its new place."""
        device = self.ends.device
        to = self._slot(self.ends.unsqueeze(1) + torch.arange(path.shape[1], device=device))
        kept = self._slot(self.ends.unsqueeze(1) + path)
        for store in (self.keys, self.values):
            shape = (store.shape[0], -1, store.shape[2], -1, store.shape[4])
            moved = store.gather(3, kept[None, :, None, :, None].expand(shape))
            store.scatter_(3, to[None, :, None, :, None].expand(shape), moved)
        self.advance(tokens)

    def first(self, rows: int) -> "KVCache":
        """The first rows, as a view that shares memory with this cache."""
        view = copy(self)
        view.keys, view.values = self.keys[:, :rows], self.values[:, :rows]
        view.starts, view.ends = self.starts[:rows], self.ends[:rows]
        view._slots = None
        return view

    def empty(self, rows: int) -> "KVCache":
        """An empty cache of the same kind."""
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
        """Copy one row over another."""
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]
        for ends in (self.starts, self.ends):
            ends[target] = ends[source]

    def put_rows(self, rows: Tensor, other: "KVCache") -> None:
        """Replace some rows by the rows of another cache of the same kind."""
        if other.kind != self.kind or len(rows) != other.rows:
            raise ValueError(
                f"other must have {_described(self.kind)} and {len(rows)} rows, got "
                f"{_described(other.kind)} and {other.rows} rows"
            )
        self.keys[:, rows], self.values[:, rows] = other.keys, other.values
        self.starts[rows], self.ends[rows] = other.starts, other.ends
        self._slots = None

    def _slot(self, position: Tensor) -> Tensor:
        """The ring slot of a position, which is negative in a lead-in. Slots fill from the first on, so few
        are in use at first."""
        return (position + self.segment) % self.capacity


def _described(kind: dict[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in kind.items())
