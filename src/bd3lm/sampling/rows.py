"""Texts being written, one a row, and what a writer of any method must offer the loop."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import is_whole
from bd3lm.models import Denoiser, KVCache, Layout, send
from bd3lm.sampling.replay import Replays

FILL_CHUNK = 128  # given text is read in passes of about so many tokens
_MOST_LEFT = 2**28  # bytes of finished rows that are kept for the next batch


def equal_values(one: Any, other: object) -> bool:
    """True if both are the same dataclass type with equal fields, comparing tensors by value."""
    names = [each.name for each in fields(one)]
    if type(one) is not type(other):
        return False
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) else a == b for a, b in pairs)


@dataclass(frozen=True)
class Request:
    """A text to write: what is given of it, a seed, and the length it may reach.

    `given` (tokens,) holds the mask where a token is to be written. A prompt is a run of tokens without
    masks; a template has gaps. What is given in a later block does not touch the blocks before it.
    """

    given: Tensor = field(hash=False)
    seed: int
    length: int

    def __eq__(self, other: object) -> bool:
        return equal_values(self, other)

    def __post_init__(self) -> None:
        given: object = self.given
        if not isinstance(given, Tensor):
            raise ValueError(f"given must be a tensor of int64 token ids (tokens,), got {given!r:.80}")
        if given.ndim != 1 or given.dtype != torch.long:
            raise ValueError(
                f"given must be int64 token ids (tokens,), got {given.dtype} of shape {tuple(given.shape)}"
            )
        if not is_whole(self.seed) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number in 0..2^63 − 1, got {self.seed!r}")
        if not is_whole(self.length) or self.length < max(len(self.given), 1):
            raise ValueError(
                f"length must be a whole number from 1 on that holds the {len(self.given)} given tokens, "
                f"got {self.length!r}"
            )

    def is_full(self, mask_id: int) -> bool:
        """Whether nothing is left to write."""
        return len(self.given) == self.length and not bool((self.given == mask_id).any())


@dataclass(frozen=True)
class Reveal:
    """What one pass changed.

    Tokens are on the device and valid until the next pass; positions and flags are on the host.

    `masked_again` is positions (rows, n), and whether they were masked again.
    """

    positions: Tensor  # (rows, k) in the text
    tokens: Tensor  # (rows, k)
    active: Tensor  # (rows, k) whether the token was revealed
    masked_again: tuple[Tensor, Tensor] | None = None


@dataclass
class Rows:
    """The state of a batch: every row has its own text, place, seed and end.

    Texts are on the device. Everything that decides what is written when is on the host, so that no pass has
    to wait for the device.
    """

    text: Tensor  # (rows, width), on the device; the mask where nothing is written yet
    noise_seeds: Tensor  # (rows,), on the device: `seeds`, where tokens are drawn
    gaps: Tensor  # (rows, width) where a token is to be written
    start: Tensor  # (rows,) where the next piece begins
    stop: Tensor  # (rows,) the length at which a text ends
    written_from: Tensor  # (rows,) tokens from here on are not given ones
    written_to: Tensor  # (rows,) and tokens from here on are, up to the end
    seeds: Tensor  # (rows,)
    evaluations: Tensor  # (rows,) passes that revealed something
    fill_passes: Tensor  # (rows,) passes that only wrote given text into the cache
    cache: KVCache | None = None
    records: bool = True  # whether passes may be recorded

    def __post_init__(self) -> None:
        self.replays = Replays(self.device, records=self.records)

    @property
    def device(self) -> torch.device:
        return self.text.device

    def masked(self, begin: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Where tokens are to be written in pieces of `size` from `begin` on, and the positions (rows, size).

        What lies before `start` is written.
        """
        masked, positions = read_at(self.gaps, begin, size)
        return masked & (positions >= self.start.unsqueeze(1)), positions

    def write(self, positions: Tensor, tokens: Tensor, *, where: Tensor) -> None:
        """Put tokens (rows, k) at positions (rows, k) of the text, where they are to be written."""
        self.text.scatter_(1, positions, torch.where(where, tokens, self.text.gather(1, positions)))

    @property
    def nbytes(self) -> int:
        """Bytes on the device, about."""
        cache = self.cache
        return self.text.nbytes + (0 if cache is None else cache.keys.nbytes + cache.values.nbytes)

    def fits(self, fresh: "Rows") -> bool:
        """Whether fresh rows can take the place of all of these."""
        shapes = [
            (
                rows.text.shape,
                rows.device,
                rows.text.is_inference(),
                None if rows.cache is None else rows.cache.kind,
            )
            for rows in (self, fresh)
        ]
        return shapes[0] == shapes[1]

    def rest(self, rows: list[int]) -> None:
        """Write nothing more in these rows; they stay in the batch until others replace them."""
        self.gaps[rows] = False

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        for name in _PER_ROW:
            values: Tensor = getattr(self, name)
            setattr(self, name, values[rows.to(values.device)])
        if self.cache is not None:
            self.cache.keep_rows(rows.to(self.device))
        self.replays.forget()

    def put(self, rows: Tensor, fresh: "Rows") -> None:
        """Replace some rows by fresh ones."""
        for name in _PER_ROW:
            values: Tensor = getattr(self, name)
            values[rows.to(values.device)] = getattr(fresh, name)
        if self.cache is not None and fresh.cache is not None:
            self.cache.put_rows(rows.to(self.device), fresh.cache)


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


class Writer(ABC):
    """Writes texts piece by piece: a token, a block or a stride at a time."""

    def __init__(self, model: Denoiser, mask_id: int) -> None:
        self.model, self.mask_id = model, mask_id
        self._left: tuple[Rows, object] | None = None  # with the state of the network they were left by

    @abstractmethod
    def first_start(self, given: int) -> int:
        """Where the piece begins that holds the first token after `given` given ones."""

    @abstractmethod
    def piece_end(self, start: int) -> int:
        """Where the piece that begins at `start` ends; start and end may be past the end of the text."""

    @abstractmethod
    def write(self, rows: Rows) -> Iterator[Reveal]:
        """Write the next piece of every row in place, and move `start` on."""

    def remember(self, rows: Rows) -> None:
        """Take in the given text before the first piece: nothing to do without a cache."""
        return None

    def check(self, request: Request) -> None:
        """Refuse what this writer cannot write."""
        return None

    def width(self, length: int) -> int:
        """The end of the piece that holds the last of `length` tokens."""
        return self.piece_end(self.first_start(length - 1)) if length else 0

    def open(self, requests: Sequence[Request], *, width: int) -> Rows:
        """Fresh rows, ready for their first piece."""
        rows = len(requests)
        text = torch.full((rows, width), self.mask_id)
        starts, written_from, written_to = [], [], []
        for row, request in enumerate(requests):
            given = request.given.tolist()
            text[row, : len(given)] = request.given
            gaps = [place for place, token in enumerate(given) if token == self.mask_id]
            known = [place for place, token in enumerate(given) if token != self.mask_id]
            starts.append(self.first_start(gaps[0] if gaps else len(given)))
            written_from.append(known[-1] + 1 if known else 0)
            last_gap = gaps[-1] + 1 if gaps else 0
            written_to.append(last_gap if len(given) == request.length else request.length)
        stop = torch.tensor([request.length for request in requests])
        seeds = torch.tensor([request.seed for request in requests])
        fresh = Rows(
            text=text.to(self.model.device),
            noise_seeds=seeds.to(self.model.device),
            gaps=(text == self.mask_id) & (torch.arange(width) < stop.unsqueeze(1)),
            start=torch.tensor(starts),
            stop=stop,
            written_from=torch.tensor(written_from),
            written_to=torch.tensor(written_to),
            seeds=seeds,
            evaluations=torch.zeros(rows, dtype=torch.long),
            fill_passes=torch.zeros(rows, dtype=torch.long),
            records=self.model.recordable,
        )
        self.remember(fresh)
        return fresh

    def seat(self, requests: Sequence[Request], *, width: int) -> Rows:
        """Rows ready for their first piece.

        Reuses the previous batch's buffers when shapes match, so its CUDA graphs need not be recorded again.
        """
        fresh = self.open(requests, width=width)
        left, self._left = self._left, None
        if left is None:
            return fresh
        rows, weights = left
        if weights == self.model.graph_key and rows.fits(fresh):
            rows.put(torch.arange(len(requests)), fresh)
            return rows
        rows.replays.forget()
        return fresh

    def leave(self, rows: Rows) -> None:
        """Keep finished rows for the next batch, if their passes were recorded and they are small."""
        if self._left is not None:
            self._left[0].replays.forget()
        self._left = None
        key = self.model.graph_key
        if key is not None and _keeps_rows(rows):
            self._left = rows, key
        else:
            rows.replays.forget()


def _keeps_rows(rows: Rows) -> bool:
    """Whether passes over rows were recorded, and they are small."""
    return rows.device.type == "cuda" and rows.nbytes <= _MOST_LEFT


def _reads_whole_chunks(inputs: Tensor) -> bool:
    """Whether all passes that fill a cache have one length: on a GPU a kernel is compiled for each."""
    return inputs.is_cuda


def read_at(text: Tensor, start: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Tokens and positions (rows, size) from each row's own start on; a row at rest stays at its end."""
    positions = start.unsqueeze(1) + torch.arange(size, device=text.device)
    positions = positions.clamp_max(text.shape[1] - 1)
    return text.gather(1, positions), positions


def fill_cache(
    model: Denoiser,
    cache: KVCache,
    inputs: Tensor,
    counts: Tensor,
    *,
    chunk: int,
    layout: Callable[[int], Layout],
) -> Tensor:
    """Write the first counts[r] tokens of each row into the cache, and say in how many passes (rows,).

    `inputs` are on the device, `counts` and the result on the host. A pass may read more than is kept.
    """
    longest = int(counts.max())
    whole = _reads_whole_chunks(inputs)
    there = send(counts, inputs.device)
    for start in range(0, longest, chunk):
        tokens = inputs[:, start : start + chunk if whole else min(start + chunk, longest)]
        if whole:
            tokens = F.pad(tokens, (0, chunk - tokens.shape[1]))
        noise = torch.zeros(tokens.shape, device=tokens.device) if model.uses_noise else None
        model(tokens, layout=layout(tokens.shape[1]), noise=noise, cache=cache)
        cache.advance((there - start).clamp(0, tokens.shape[1]))
    return -(-counts // chunk)
