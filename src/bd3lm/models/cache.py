"""Keys and values kept between passes: a ring for decoding, a tape for two-pass training.

Both plug into the network at one place: each layer hands its new keys and values to `extend` and attends to
what comes back, under the mask that `mask` gives.
"""

from typing import Protocol

import torch
from torch import Tensor

from bd3lm.models.attention import AttentionMask, Backend, render
from bd3lm.models.layouts import Layout, Span


class KVStore(Protocol):
    """What the network asks of anything that keeps keys and values."""

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        """Rotary positions of the tokens of this pass: (segment,) or (rows, segment)."""

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        """Who may attend to whom, over what `extend` returns."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values; return all that its queries attend to."""


def check_fills(layout: Layout, tokens: Tensor) -> None:
    """Refuse tokens that are not as many as the layout has positions."""
    if tokens.shape[1] != layout.size:
        raise ValueError(f"tokens must have {layout.size} positions for {layout}, got {tokens.shape[1]}")


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
        return layout.text_positions(tokens.device)[:segment]

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        return render(layout, queries, device, backend)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        past_key, past_value = self._tape.layers[layer]
        return torch.cat((key, past_key), dim=2), torch.cat((value, past_value), dim=2)


class KVCache:
    """Rotated keys and values of the text so far, in a preallocated ring, with its own length for each row.

    Position p of a row lives in slot p mod capacity, so letting go of old tokens moves nothing: `starts`
    advances and their slots are written over. Keys keep the rotation of their absolute position, and
    attention sees only differences of positions, so what is kept stays valid for ever.

    A pass of s tokens writes them after the text, at positions end..end + s − 1, where they see each other
    as the pass's layout says and the whole visible text. They stay only once `advance` says so: a pass over
    a noisy block leaves no trace, one over a finished block is followed by advance(s). At most the last
    `window` positions of the text remain visible.
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
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.starts = torch.zeros(rows, device=device, dtype=torch.long)
        self.ends = torch.zeros(rows, device=device, dtype=torch.long)
        self._slots: Tensor | None = None  # where the pass in progress writes: (rows, segment)

    @property
    def rows(self) -> int:
        return self.ends.shape[0]

    @property
    def capacity(self) -> int:
        return self.window + self.segment

    @property
    def lengths(self) -> Tensor:
        """How many positions of each row's text are visible."""
        return self.ends - self.starts

    def text_positions(self, layout: Layout, tokens: Tensor) -> Tensor:
        check_fills(layout, tokens)
        if layout.size != layout.length:
            raise ValueError(
                f"layout must be of one text, whose positions follow the cached ones, got {layout}"
            )
        rows, segment = tokens.shape
        if rows != self.rows:
            raise ValueError(f"tokens must have {self.rows} rows, as the cache, got {rows}")
        if segment > self.segment:
            raise ValueError(f"a pass through this cache may have {self.segment} tokens, got {segment}")
        positions = self.ends.unsqueeze(1) + torch.arange(segment, device=self.ends.device)
        self._slots = positions % self.capacity
        return positions

    def mask(self, layout: Layout, queries: Span, device: torch.device, backend: Backend) -> AttentionMask:
        """(rows, 1, queries, capacity): the visible text, and the pass itself by its layout."""
        newest = (self.ends + layout.size - 1).unsqueeze(1)
        slots = torch.arange(self.capacity, device=self.ends.device)
        position = newest - (newest - slots) % self.capacity  # what each slot holds
        text = (position >= self.starts.unsqueeze(1)) & (position < self.ends.unsqueeze(1))
        within = (position - self.ends.unsqueeze(1)).unsqueeze(1)
        query = torch.arange(*queries, device=self.ends.device).unsqueeze(1)
        own = (within >= 0) & layout.allows(query, within.clamp_min(0))
        return AttentionMask(dense=(text.unsqueeze(1) | own).unsqueeze(1))

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self._slots is None:
            raise RuntimeError("extend comes after text_positions of the same pass")
        index = self._slots[:, None, :, None].expand_as(key)
        self.keys[layer].scatter_(2, index, key.to(self.keys.dtype))
        self.values[layer].scatter_(2, index, value.to(self.values.dtype))
        return self.keys[layer].to(key.dtype), self.values[layer].to(value.dtype)

    def advance(self, tokens: int | Tensor) -> None:
        """Keep the first `tokens` positions of the last pass (one number, or one a row)."""
        _check_count(tokens)
        self.ends = self.ends + tokens
        self.starts = torch.maximum(self.starts, self.ends - self.window)

    def evict(self, tokens: int | Tensor) -> None:
        """Let go of the oldest `tokens` visible positions (one number, or one a row)."""
        _check_count(tokens)
        self.starts = torch.minimum(self.starts + tokens, self.ends)

    def keep_rows(self, rows: Tensor) -> None:
        """Go on with some rows only, in the order given."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.starts, self.ends = self.starts[rows], self.ends[rows]
        self._slots = None


def _check_count(tokens: int | Tensor) -> None:
    if isinstance(tokens, int) and tokens < 0:
        raise ValueError(f"tokens must not be negative, got {tokens}")
