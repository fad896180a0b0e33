"""The base class of writers, which the engine uses for every method, and filling a cache with given text."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.models import Denoiser, KVCache, Layout, send
from bd3lm.models.devices import memory_of
from bd3lm.sampling.drawing import RowSharpening
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import Reveal, Rows

FILL_CHUNK = 128  # about how many given tokens a pass reads
_SHARE_LEFT = 8  # finished rows may hold one part in this many of a device's memory


class Writer(ABC):
    """Writes texts piece by piece: a token, a block or a stride at a time."""

    knows_chances: ClassVar[bool] = False
    """Whether each token is drawn from a distribution that the network gives in the same pass."""

    def __init__(self, model: Denoiser, mask_id: int) -> None:
        self.model, self.mask_id = model, mask_id
        self.alternatives: int | None = None
        """If set, passes report log-probabilities for the tokens that they reveal, and this many of the
        likeliest tokens. Set it before the first text begins, since passes are recorded with or without
        it."""
        self._left: list[tuple[Rows, object]] = []  # with the network's graph key at that time

    @abstractmethod
    def first_start(self, given: int) -> int:
        """The start of the piece with the first token after `given` given ones."""

    @abstractmethod
    def piece_end(self, start: int) -> int:
        """The end of the piece that begins at `start`. Both may be past the end of the text."""

    @abstractmethod
    def write(self, rows: Rows) -> Iterator[Reveal]:
        """Write the next piece of every row in place, and advance `start`."""

    def remember(self, rows: Rows) -> Iterator[None]:
        """Read the given text before the first piece, and yield between passes. Without a cache there is
        nothing to do."""
        yield from ()

    def unread(self, request: Request) -> int:
        """How many given tokens `remember` reads for a text: none without a cache."""
        return 0

    def check(self, request: Request) -> None:
        """Refuse a request that this writer cannot write."""
        return None

    def width(self, length: int) -> int:
        """The end of the piece with the last of `length` tokens."""
        return self.piece_end(self.first_start(length - 1)) if length else 0

    def begin(self, requests: Sequence[Request], *, width: int) -> Rows:
        """Rows with the given tokens, none of which have been read yet: see `remember`."""
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
        return Rows(
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
            sharpening=RowSharpening([each.sharpening for each in requests], self.model.device),
            records=self.model.recordable,
        )

    def ended(self, rows: Rows, places: Sequence[int]) -> None:
        """Called when nothing more is written in these rows: their texts are finished or canceled."""
        return

    def open(self, requests: Sequence[Request], *, width: int) -> Rows:
        """Rows that are ready for their first piece."""
        rows = self.begin(requests, width=width)
        for _ in self.remember(rows):
            pass
        return rows

    def room(self, fresh: Rows) -> Rows:
        """Finished rows that fit new ones and have recorded CUDA graphs; or the new ones themselves."""
        for place, (rows, weights) in enumerate(self._left):
            if weights == self.model.graph_key and len(rows) >= len(fresh) and rows.fits(fresh):
                del self._left[place]
                return rows
        return fresh

    def leave(self, rows: Rows) -> None:
        """Keep finished rows for later batches if their passes were recorded and there is memory."""
        key = self.model.graph_key
        if key is None or not _keeps_rows(rows):
            rows.forget()
            return
        self._left = [(each, of) for each, of in self._left if of == key]
        self._left.insert(0, (rows, key))
        while sum(each.nbytes for each, _ in self._left) > _most_left(rows.device):
            self._left.pop()[0].forget()


def _keeps_rows(rows: Rows) -> bool:
    """Whether passes over these rows were recorded."""
    return rows.device.type == "cuda"


def _most_left(device: torch.device) -> int:
    """How many bytes of finished rows a writer keeps for later batches."""
    return (memory_of(device) or 0) // _SHARE_LEFT


def _reads_whole_chunks(inputs: Tensor) -> bool:
    """Whether all passes that fill a cache have the same length: a GPU compiles a kernel for each length."""
    return inputs.is_cuda


def fill_cache(
    model: Denoiser,
    cache: KVCache,
    inputs: Tensor,
    counts: Tensor,
    *,
    chunk: int,
    layout: Callable[[int], Layout],
) -> Iterator[None]:
    """Write the first counts[r] tokens of each row into the cache, and yield between passes.

    `inputs` are on the device, `counts` on the host. A pass may read more tokens than the cache keeps.
    """
    longest = int(counts.max())
    whole = _reads_whole_chunks(inputs)
    there = send(counts, inputs.device)
    for start in range(0, longest, chunk):
        if start:
            yield
        tokens = inputs[:, start : start + chunk if whole else min(start + chunk, longest)]
        if whole:
            tokens = F.pad(tokens, (0, chunk - tokens.shape[1]))
        noise = torch.zeros(tokens.shape, device=tokens.device) if model.uses_noise else None
        model(tokens, layout=layout(tokens.shape[1]), noise=noise, cache=cache)
        cache.advance((there - start).clamp(0, tokens.shape[1]))
