"""The rows of a batch: each holds a text that is being written."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bd3lm.models import KVCache
from bd3lm.sampling.chances import Chances
from bd3lm.sampling.drawing import RowSharpening, Sharpening
from bd3lm.sampling.replay import Replays

TALLY = "tally"
"""The name of a speculative writer's extra (rows, 2, places): counts of verified and of right drafts."""


@dataclass(frozen=True)
class Reveal:
    """What one pass changed.

    Tokens are on the device and valid until the next pass. Positions and flags are on the host, except for a
    speculative writer, which has them on the device too.

    `masked_again` has positions (rows, n) and flags for those that were masked again. `drafted` has
    positions, guessed tokens (rows, n) and flags for those that were drafted. `chances` are for all tokens,
    on the device, if the writer is asked for them.
    """

    positions: Tensor  # (rows, k) in the text
    tokens: Tensor  # (rows, k)
    active: Tensor  # (rows, k) whether the token was revealed
    masked_again: tuple[Tensor, Tensor] | None = None
    drafted: tuple[Tensor, Tensor, Tensor] | None = None
    chances: Chances | None = None


@dataclass
class Rows:
    """The state of a batch. Every row has its own text, place, seed and end.

    Texts are on the device. Everything that decides what is written when is on the host, so that no pass
    waits for the device.
    """

    text: Tensor  # (rows, width), on the device; the mask where nothing is written yet
    noise_seeds: Tensor  # (rows,) on the device: `seeds`, for drawing tokens
    gaps: Tensor  # (rows, width) whether a token is to be written
    start: Tensor  # (rows,) where the next piece begins
    stop: Tensor  # (rows,) the length at which a text ends
    written_from: Tensor  # (rows,) the end of the last given token
    written_to: Tensor  # (rows,) everything from here to the end is given
    seeds: Tensor  # (rows,)
    evaluations: Tensor  # (rows,) passes that revealed something
    fill_passes: Tensor  # (rows,) passes that only read given text into the cache
    sharpening: RowSharpening
    cache: KVCache | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)  # (rows, ...) on the device, a writer's own
    records: bool = True  # whether passes can be recorded

    def __post_init__(self) -> None:
        self.replays = Replays(self.device, records=self.records)
        self._views: dict[int, Rows] = {}

    def __len__(self) -> int:
        return len(self.start)

    @property
    def device(self) -> torch.device:
        return self.text.device

    def masked(self, begin: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Where tokens are to be written in pieces of `size` from `begin`, and the positions (rows, size).

        Everything before `start` is already written.
        """
        masked, positions = read_at(self.gaps, begin, size)
        return masked & (positions >= self.start.unsqueeze(1)), positions

    def replay(self, name: object, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run a pass, as a replay once it is recorded under this name for these kinds of sharpening."""
        return self.replays((name, self.sharpening.kinds), function, *inputs)

    def is_ready(self, name: object) -> bool:
        """Whether a pass with this name runs at full speed."""
        return self.replays.is_ready((name, self.sharpening.kinds))

    def write(self, positions: Tensor, tokens: Tensor, *, where: Tensor) -> None:
        """Put tokens (rows, k) at positions (rows, k) of the text where `where` is True."""
        self.text.scatter_(1, positions, torch.where(where, tokens, self.text.gather(1, positions)))

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes on the device."""
        cache = self.cache
        own = sum(each.nbytes for each in self.extras.values())
        return self.text.nbytes + own + (0 if cache is None else cache.keys.nbytes + cache.values.nbytes)

    def fits(self, fresh: "Rows") -> bool:
        """Whether new rows can replace some of these."""
        shapes = [
            (
                rows.text.shape[1],
                rows.device,
                rows.text.is_inference(),
                None if rows.cache is None else rows.cache.kind,
                {name: (each.shape[1:], each.dtype) for name, each in rows.extras.items()},
            )
            for rows in (self, fresh)
        ]
        return shapes[0] == shapes[1]

    def empty(self, rows: int) -> "Rows":
        """This number of rows of the same kind, with nothing to write."""
        tensors: dict[str, Any] = {name: _zeros(getattr(self, name), rows) for name in _PER_ROW}
        return replace(
            self,
            **tensors,
            sharpening=Sharpening().rows(rows, self.device),
            cache=None if self.cache is None else self.cache.empty(rows),
            extras={name: _zeros(each, rows) for name, each in self.extras.items()},
        )

    def first(self, rows: int) -> "Rows":
        """A view of the first rows. It shares their memory but has its own recordings."""
        if rows == len(self):
            return self
        if rows not in self._views:
            tensors: dict[str, Any] = {name: getattr(self, name)[:rows] for name in _PER_ROW}
            self._views[rows] = replace(
                self,
                **tensors,
                sharpening=self.sharpening.first(rows),
                cache=None if self.cache is None else self.cache.first(rows),
                extras={name: each[:rows] for name, each in self.extras.items()},
            )
        return self._views[rows]

    def forget(self) -> None:
        """Drop all recordings, including those of views."""
        for each in (self, *self._views.values()):
            each.replays.forget()

    def rest(self, rows: list[int]) -> None:
        """Write nothing more in these rows. They stay in the batch until others replace them."""
        self.gaps[rows] = False

    def put(self, rows: Sequence[int], fresh: "Rows") -> None:
        """Replace some rows by new ones."""
        places = torch.tensor(rows)
        for mine, theirs in self._pairs(fresh):
            mine[places.to(mine.device)] = theirs
        self.sharpening.put(rows, fresh.sharpening)
        if self.cache is not None and fresh.cache is not None:
            self.cache.put_rows(places.to(self.device), fresh.cache)

    def move(self, source: int, target: int) -> None:
        """Copy a row to another place."""
        for mine, _ in self._pairs(self):
            mine[target] = mine[source]
        self.sharpening.move(source, target)
        if self.cache is not None:
            self.cache.move_row(source, target)

    def _pairs(self, other: "Rows") -> Iterator[tuple[Tensor, Tensor]]:
        """All per-row tensors except sharpening and cache, paired with those of other rows."""
        for name in _PER_ROW:
            yield getattr(self, name), getattr(other, name)
        for name, each in self.extras.items():
            yield each, other.extras[name]


def _zeros(like: Tensor, rows: int) -> Tensor:
    return like.new_zeros((rows, *like.shape[1:]))


_PER_ROW = (
    "text",
    "noise_seeds",
    "gaps",
    "start",
    "stop",
    "written_from",
    "written_to",
    "seeds",
    "evaluations",
    "fill_passes",
)


def read_at(text: Tensor, start: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions (rows, size) from each row's start on. An idle row stays at its end."""
    positions = start.unsqueeze(1) + torch.arange(size, device=text.device)
    positions = positions.clamp_max(text.shape[1] - 1)
    return text.gather(1, positions), positions
