"""The loop around a writer: rows enter, are written piece by piece, stop on their own, and make room."""

import atexit
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch
from torch import Tensor

from bd3lm.diffusion import derive_seed
from bd3lm.models import require_evaluation_mode
from bd3lm.sampling.events import (
    BlockFinished,
    BlockStarted,
    Event,
    Redrawn,
    Sample,
    Started,
    Stopped,
    TokenHidden,
    TokenRevealed,
)
from bd3lm.sampling.rows import Request, Reveal, Rows, Writer
from bd3lm.sampling.stopping import Ending, Stopping

_MOST_TOKENS = 2**27  # of all rows together: 1 GiB of ids


_suspended: WeakSet[Generator[Event, None, None]] = WeakSet()


@atexit.register
def close_suspended() -> None:
    """Close what was never written to its end while torch is still there: the interpreter would do so later,
    and print that it could not."""
    for events in list(_suspended):
        with suppress(ValueError):  # another thread is in it just now
            events.close()


@dataclass(frozen=True)
class _Seat:
    """What the loop knows of a row without asking the device."""

    index: int
    request: Request
    start: int = 0
    redraws: int = 0
    redrawn_passes: int = 0

    def again(self, passes: int) -> "_Seat":
        """The same text to be drawn from a new seed."""
        redraws = self.redraws + 1
        return replace(
            self,
            request=replace(self.request, seed=derive_seed(self.request.seed, "redraw", redraws)),
            redraws=redraws,
            redrawn_passes=self.redrawn_passes + passes,
        )

    def finished(self, tokens: Tensor, evaluations: int, fill_passes: int, ending: Ending) -> Sample:
        # A template may end inside its last gap; a gap never holds the mask any more.
        is_given = [
            one == other for one, other in zip(self.request.given.tolist(), tokens.tolist(), strict=False)
        ]
        return Sample(
            index=self.index,
            tokens=tokens,
            seed=self.request.seed,
            given=sum(is_given),
            prompt=is_given.index(False) if False in is_given else len(is_given),
            written_from=max((place + 1 for place, known in enumerate(is_given) if known), default=0),
            evaluations=evaluations,
            fill_passes=fill_passes,
            stopped_by=ending.by,
            stop_string=ending.string,
            redraws=self.redraws,
            redrawn_passes=self.redrawn_passes,
        )


def sample(
    writer: Writer,
    requests: Sequence[Request],
    *,
    stopping: Stopping | None = None,
    batch_size: int = 32,
) -> list[Sample]:
    """Write all texts, at most `batch_size` at a time; returned in the order of the requests."""
    events = write(writer, requests, stopping=stopping, batch_size=batch_size)
    return sorted((e.sample for e in events if isinstance(e, Stopped)), key=lambda sample: sample.index)


def write(
    writer: Writer,
    requests: Sequence[Request],
    *,
    stopping: Stopping | None = None,
    batch_size: int = 32,
    watch: bool = False,
) -> Iterator[Event]:
    """Write all texts, and yield events as they happen; without `watch` only `Redrawn` and `Stopped`.

    A text depends on its own request alone: neither on the batch it is written in nor on when a seat became
    free. With `watch` the device is asked after every pass what it revealed, otherwise once a piece.
    """
    _check(writer, requests, batch_size)
    table = _Table(writer, requests, stopping or Stopping(), batch_size, watch)
    events = table.events()
    _suspended.add(events)
    return events


class _Table:
    """The rows being written, the texts in them, and the texts that wait for one."""

    def __init__(
        self,
        writer: Writer,
        requests: Sequence[Request],
        stopping: Stopping,
        batch_size: int,
        watch: bool,
    ) -> None:
        self.writer, self.stopping, self.watch = writer, stopping, watch
        self.width = writer.width(max(request.length for request in requests))
        self.waiting = deque(_Seat(index, request) for index, request in enumerate(requests))
        self.seats: list[_Seat | None] = [None] * min(batch_size, len(requests))
        self.rows: Rows | None = None

    @torch.no_grad()
    def events(self) -> Generator[Event, None, None]:
        """Everything that happens, until all texts are written or the iterator is closed."""
        try:
            while True:
                yield from self._seat_waiting()
                if self.rows is None:
                    return
                yield from self._write_piece(self.rows)
        finally:
            if self.rows is not None:  # closed before the end: these rows are not kept for a next batch
                self.rows.replays.forget()

    def _seat_waiting(self) -> Iterator[Event]:
        """Give empty seats to waiting texts, and remove seats that stay empty."""
        empty = [place for place, seat in enumerate(self.seats) if seat is None]
        entering: list[_Seat] = []
        while self.waiting and len(entering) < len(empty):
            seat = self.waiting.popleft()
            if seat.request.is_full(self.writer.mask_id):
                if self.watch:
                    yield Started(seat.index, seat.request)
                ending = Ending("length", seat.request.length)
                yield Stopped(seat.index, seat.finished(seat.request.given.cpu().clone(), 0, 0, ending))
            else:
                entering.append(seat)
        if entering:
            requests = [seat.request for seat in entering]
            make = self.writer.seat if self.rows is None else self.writer.open
            fresh = make(requests, width=self.width)
            places = empty[: len(entering)]
            for place, seat, start in zip(places, entering, fresh.start.tolist(), strict=True):
                self.seats[place] = replace(seat, start=start)
                if self.watch:
                    yield Started(seat.index, seat.request)
            if self.rows is None:
                self.rows = fresh
            else:
                self.rows.put(torch.tensor(places), fresh)
        kept = [place for place, seat in enumerate(self.seats) if seat is not None]
        if not kept and self.rows is not None:
            self.writer.leave(self.rows)
            self.rows = None
        elif self.rows is not None and self._should_shrink_batch(len(kept)):
            self.rows.keep(torch.tensor(kept))
            self.seats = [self.seats[place] for place in kept]

    def _should_shrink_batch(self, kept: int) -> bool:
        """True if dropping the empty rows is worth it.

        On a GPU a pass is recorded for a number of rows, and a few empty rows cost less than recording again.
        """
        recorded = self.writer.model.device.type == "cuda"
        return kept <= len(self.seats) // 2 if recorded else kept < len(self.seats)

    def _write_piece(self, rows: Rows) -> Iterator[Event]:
        """One piece of every row, and what became of it."""
        begin = rows.start
        taken = [place for place, seat in enumerate(self.seats) if seat is not None]
        if self.watch:
            yield from map(self._block_started, taken)
        for reveal in self.writer.write(rows):
            if self.watch:
                yield from self._revealed(reveal)
        # After the last gap everything is given, and need not be read.
        end = torch.where(rows.start >= rows.written_to, rows.stop, rows.start)
        ends = self.stopping.ends(
            rows.text,
            written_from=rows.written_from,
            piece_start=begin,
            piece_end=end,
            stop=rows.stop,
            taken=taken,
        )
        until = end.tolist() if self.watch else []
        ended = [place for place in taken if ends[place] is not None]
        finished = self._read(rows, ended) if ended else {}
        for place in taken:
            seat, ending = self._seat(place), ends[place]
            if self.watch:
                yield BlockFinished(seat.index, seat.start, until[place])
                self.seats[place] = seat = replace(seat, start=until[place])
            if ending is not None:
                yield self._end(place, seat, ending, *finished[place])

    def _read(self, rows: Rows, ended: list[int]) -> dict[int, tuple[Tensor, int, int]]:
        """Texts that have ended, by their places, with their passes; nothing more is written there."""
        texts = rows.text[ended].cpu()
        passes = torch.stack((rows.evaluations[ended], rows.fill_passes[ended]), 1).tolist()
        rows.rest(ended)
        return {
            place: (text, *spent) for place, text, spent in zip(ended, texts.unbind(), passes, strict=True)
        }

    def _end(
        self, place: int, seat: _Seat, ending: Ending, text: Tensor, evaluations: int, fill_passes: int
    ) -> Event:
        """Clear a seat, for good or to write the text again."""
        self.seats[place] = None
        if ending.by == "entropy" and seat.redraws < self.stopping.redraws:
            self.waiting.appendleft(seat.again(evaluations + fill_passes))
            return Redrawn(seat.index)
        tokens = text[: ending.length].clone()
        if self.writer.mask_id in tokens.tolist():  # see `or_mask`
            raise FloatingPointError(
                f"text {seat.index} cannot be written: the model's probabilities are not finite; its weights "
                "may hold NaN"
            )
        return Stopped(seat.index, seat.finished(tokens, evaluations, fill_passes, ending))

    def _block_started(self, place: int) -> BlockStarted:
        seat = self._seat(place)
        stop = min(self.writer.piece_end(seat.start), seat.request.length)
        return BlockStarted(seat.index, seat.start, stop)

    def _revealed(self, reveal: Reveal) -> Iterator[Event]:
        for place, token in reveal.active.nonzero().tolist():
            position = int(reveal.positions[place, token])
            yield TokenRevealed(self._seat(place).index, position, int(reveal.tokens[place, token]))
        if reveal.masked_again is not None:
            positions, again = reveal.masked_again
            for place, offset in again.nonzero().tolist():
                yield TokenHidden(self._seat(place).index, int(positions[place, offset]))

    def _seat(self, place: int) -> _Seat:
        seat = self.seats[place]
        if seat is None:
            raise RuntimeError(f"seat {place} is empty")
        return seat


def _check(writer: Writer, requests: Sequence[Request], batch_size: int) -> None:
    require_evaluation_mode(writer.model)
    if not requests:
        raise ValueError("requests must hold at least one text to write, got none")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    for index, request in enumerate(requests):
        try:
            writer.check(request)
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from None
    writer.model.check_room(1, writer.piece_end(0))  # before a row is made: a piece may be a whole context
    side_by_side = min(batch_size, len(requests))
    most = _MOST_TOKENS // side_by_side
    for index, request in enumerate(requests):
        width = max(request.length, writer.width(request.length))
        if width > most:
            row = "" if width == request.length else f", which is written in a row of {width:,}"
            raise ValueError(
                f"request {index}: length must be at most {most:,}, or rows for {side_by_side} texts side by "
                f"side cannot be held, got {request.length:,}{row}"
            )
