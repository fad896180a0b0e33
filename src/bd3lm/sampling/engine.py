"""The engine: requests come and go at any time, and share passes while they are written.

`Engine.submit` takes a request, `Engine.step` writes a piece of every active text, and `Handle.abort` cancels
a request. Requests with the same writer and similar lengths share a table of rows; tables take turns. A text
depends on its own request alone.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import get_args

import torch

from bd3lm.models import require_evaluation_mode
from bd3lm.sampling.chances import ChanceNotes
from bd3lm.sampling.events import Event, Failed, Started, Stopped, Tell
from bd3lm.sampling.fills import Fillings
from bd3lm.sampling.request import Request
from bd3lm.sampling.stopping import Ending
from bd3lm.sampling.table import Cost, Seat, Table
from bd3lm.sampling.writer import Writer

_MOST_TOKENS = 2**27  # in all rows together: 1 GiB of ids
_LEAST_WIDTH = 64


@dataclass(frozen=True, eq=False)
class Handle:
    """A submitted request. All events of its text have its `index`."""

    index: int
    request: Request
    _engine: "Engine"

    def abort(self) -> None:
        """Stop writing it. Its seat is free at the next step, and no more events of it follow."""
        self._engine._abort(self.index)


class Engine:
    """Writes texts together, with any mix of writers, lengths and settings.

    It writes at most `seats` texts at a time; the others wait in the order of submission. `submit`, `abort`
    and `step` may be called from any thread. Steps run one at a time.
    """

    def __init__(self, *, seats: int = 32) -> None:
        if seats < 1:
            raise ValueError(f"seats must be at least 1, got {seats}")
        self.seats = seats
        self._numbers = count()
        self._inbox: deque[tuple[Writer, Seat]] = deque()
        self._aborted: set[int] = set()
        self._inbox_lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._tables: list[Table] = []
        self._under_way: set[int] = set()
        self._fillings = Fillings()
        self._chances = ChanceNotes()

    def submit(self, request: Request, writer: Writer, *, tell: Tell = "end") -> Handle:
        """Submit a text. A request that cannot be written is refused at once.

        `tell` chooses the events. "pieces" reads from the device after each piece, and "passes" after each
        pass.
        """
        if tell not in get_args(Tell):
            raise ValueError(f"tell must be one of {', '.join(get_args(Tell))}, got {tell!r}")
        check(writer, request)
        check_told(writer, is_watched=tell == "passes")
        with self._inbox_lock:
            handle = Handle(next(self._numbers), request, self)
            self._under_way.add(handle.index)
            seats = self._fillings.seats(Seat(handle.index, request, tell), writer)
            self._inbox.extend((writer, seat) for seat in seats)
        return handle

    def open_table(self, writer: Writer, *, length: int, watch: bool = False) -> None:
        """Make a table for texts of up to this length, no wider than needed. For requests that are all known
        before the first is submitted."""
        self._tables.append(Table(writer, writer.width(length), self.seats, watch))

    def __len__(self) -> int:
        """How many requests are waiting or being written."""
        with self._inbox_lock:
            return len(self._under_way)

    @property
    def written(self) -> int:
        """How many texts have a seat."""
        return sum(table.taken for table in self._tables)

    def _abort(self, index: int) -> None:
        with self._inbox_lock:
            if index in self._under_way:
                self._aborted.add(index)

    def step(self) -> list[Event]:
        """Seat waiting texts, write one piece of every text, and return what happened."""
        return list(self.events())

    @torch.no_grad()
    def events(self) -> Generator[Event, None, None]:
        """Like `step`, but yields events as they happen. No other step begins until this one is done or
        closed."""
        with self._step_lock:
            yield from self._events()

    def _events(self) -> Iterator[Event]:
        self._drop_aborted()
        yield from self._assign()
        for table in self._tables:
            for event in table.step():
                yield from self._told(event)
        for table in self._tables:
            if table.is_empty:
                table.close()
        self._tables = [table for table in self._tables if not table.is_empty]

    def _told(self, event: Event) -> Iterator[Event]:
        """The events to report for an event, which may belong to one of several fills of a text."""
        told, following = self._fillings.pass_on(event)
        with self._inbox_lock:
            self._inbox.extendleft(following)
            self._under_way -= {each.index for each in told if isinstance(each, Stopped | Failed)}
            self._aborted |= {each.index for each in told if isinstance(each, Failed)}  # with all its fills
        for each in told:
            yield self._chances.noted(each)

    def _drop_aborted(self) -> None:
        with self._inbox_lock:
            gone, self._aborted = self._aborted, set()
            self._under_way -= gone
            gone |= self._fillings.drop(gone)
            self._chances.drop(gone)
            if gone:
                self._inbox = deque(each for each in self._inbox if each[1].index not in gone)
        if gone:
            for table in self._tables:
                table.drop(gone)

    def _assign(self) -> Iterator[Event]:
        """Assign waiting texts to tables while there are free seats."""
        free = self.seats - sum(table.claimed for table in self._tables)
        while True:
            with self._inbox_lock:
                if not self._inbox:
                    return
                writer, seat = self._inbox[0]
                is_full = seat.request.is_full(writer.mask_id)
                if not is_full and free < 1:
                    return
                self._inbox.popleft()
            if is_full:
                yield from _already_written(seat)
                with self._inbox_lock:
                    self._under_way.discard(seat.index)
                continue
            self._table_for(writer, seat).waiting.append(seat)
            free -= 1

    def _table_for(self, writer: Writer, seat: Seat) -> Table:
        """The narrowest table that fits this text, or a new one."""
        length = seat.request.length
        need = max(writer.width(length), length)
        fitting = [
            each
            for each in self._tables
            if each.writer is writer and each.width >= need and each.watch == seat.watched
        ]
        if fitting:
            return min(fitting, key=lambda table: table.width)
        width = max(_bucket(need), writer.width(_bucket(need)))
        self._tables.append(Table(writer, width, self.seats, seat.watched))
        return self._tables[-1]

    def close(self) -> None:
        """Drop all texts, and free all memory and recordings."""
        with self._step_lock, self._inbox_lock:
            for table in self._tables:
                table.forget()
            self._tables.clear()
            self._inbox.clear()
            self._under_way.clear()
            self._fillings.clear()
            self._chances.clear()


def _bucket(width: int) -> int:
    """The width of a table, so that texts of similar lengths share one: a power of two or three quarters of
    it."""
    whole = max(_LEAST_WIDTH, 1 << (width - 1).bit_length())
    return whole * 3 // 4 if width <= whole * 3 // 4 else whole


def _already_written(seat: Seat) -> Iterator[Event]:
    if seat.watched:
        yield Started(seat.index, seat.request)
    ending = Ending("length", seat.request.length)
    yield Stopped(seat.index, seat.finished(seat.request.given.cpu().clone(), Cost(), ending))


def check(writer: Writer, request: Request, *, side_by_side: int = 1) -> None:
    """Refuse a request that cannot be written."""
    require_evaluation_mode(writer.model)
    writer.check(request)
    writer.model.check_room(1, writer.piece_end(0))  # before rows are made: a piece may be a whole context
    most = _MOST_TOKENS // side_by_side
    width = max(request.length, writer.width(request.length))
    if width > most:
        row = "" if width == request.length else f", which is written in a row of {width:,}"
        raise ValueError(
            f"length must be at most {most:,}, or rows for {side_by_side} texts at once do not fit, "
            f"got {request.length:,}{row}"
        )


def check_told(writer: Writer, *, is_watched: bool) -> None:
    """Refuse chances that nobody would get to see."""
    if writer.alternatives is not None and not is_watched:
        raise ValueError(
            "alternatives are reported for each pass, so the text must be submitted with tell='passes', got "
            f"{writer.alternatives} for a text that is not"
        )


def check_all(writer: Writer, requests: Sequence[Request], side_by_side: int) -> None:
    """Refuse all requests if one cannot be written, and say which."""
    for index, request in enumerate(requests):
        try:
            check(writer, request, side_by_side=side_by_side)
        except ValueError as error:
            raise ValueError(f"request {index}: {error}") from None
