"""A table of texts with one writer: they enter, are written piece by piece, and end independently."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from bd3lm.diffusion import derive_seed
from bd3lm.models import send
from bd3lm.sampling.events import (
    BlockFinished,
    BlockStarted,
    Drafted,
    Event,
    Extended,
    Failed,
    Redrawn,
    Sample,
    Started,
    Stopped,
    Tell,
    TokenHidden,
    TokenRevealed,
)
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import TALLY, Reveal, Rows, read_at
from bd3lm.sampling.stopping import Ending, Stopping
from bd3lm.sampling.writer import FILL_CHUNK, Writer


class Cost(NamedTuple):
    """The cost of a text: passes of both kinds, and verified and right drafts by place."""

    evaluations: int = 0
    fill_passes: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def passes(self) -> int:
        return self.evaluations + self.fill_passes

    def plus(self, sample: Sample) -> "Cost":
        """The sum with the cost of another text."""
        drafts = (
            tuple(map(sum, zip_longest(mine, theirs, fillvalue=0)))
            for mine, theirs in ((self.drafted, sample.drafted), (self.accepted, sample.accepted))
        )
        return Cost(self.evaluations + sample.evaluations, self.fill_passes + sample.fill_passes, *drafts)


@dataclass(frozen=True)
class Seat:
    """What the host knows about a text without reading the device."""

    index: int
    request: Request
    tell: Tell = "end"
    start: int = 0
    begun: bool = False  # whether the start of the current piece is reported
    redraws: int = 0
    redrawn_passes: int = 0

    @property
    def watched(self) -> bool:
        return self.tell == "passes"

    def again(self, passes: int) -> "Seat":
        """The same text, to be drawn with a new seed."""
        redraws = self.redraws + 1
        return replace(
            self,
            request=replace(self.request, seed=derive_seed(self.request.seed, "redraw", redraws)),
            redraws=redraws,
            redrawn_passes=self.redrawn_passes + passes,
        )

    def finished(
        self, tokens: Tensor, cost: "Cost", ending: Ending, *, effective: float | None = None
    ) -> Sample:
        """The sample of a finished text. `effective` is for a text with several fills."""
        fills = self.request.fills
        # A template may end inside its last gap. A filled gap never holds the mask.
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
            evaluations=cost.evaluations,
            fill_passes=cost.fill_passes,
            drafted=cost.drafted,
            accepted=cost.accepted,
            stopped_by=ending.by,
            stop_string=ending.string,
            redraws=self.redraws,
            redrawn_passes=self.redrawn_passes,
            fills=1 if fills is None or effective is None else fills.number,
            effective_fills=1.0 if effective is None else effective,
        )


@dataclass(eq=False)
class _Entering:
    """Texts with given tokens that are read together before the texts are seated."""

    seats: list[Seat]
    rows: Rows
    reading: Iterator[None]

    def read_on(self) -> bool:
        """Read the given tokens with one more pass. Returns whether all are read."""
        return next(self.reading, self) is self


class Table:
    """Texts of one writer, each in its own row, and texts that wait for a row.

    Rows in use come first. On a CPU only these go through the network. On a GPU a pass is recorded for a
    fixed number of rows, so few numbers are used there, and some rows may be idle.
    """

    def __init__(self, writer: Writer, width: int, most: int, watch: bool) -> None:
        self.writer, self.width, self.most, self.watch = writer, width, most, watch
        self.waiting: deque[Seat] = deque()
        self.seats: list[Seat | None] = []
        self.whole: Rows | None = None
        self._entering: deque[_Entering] = deque()

    @property
    def taken(self) -> int:
        return sum(seat is not None for seat in self.seats)

    @property
    def claimed(self) -> int:
        """How many seats are taken or promised."""
        return self.taken + sum(len(each.seats) for each in self._entering) + len(self.waiting)

    @property
    def is_empty(self) -> bool:
        return self.claimed == 0

    def step(self) -> Iterator[Event]:
        """Seat waiting texts, or read more of their given tokens; then write a piece of every seated text.

        Texts being written wait for this reading, so it is bounded: long prompts take turns, with one pass of
        a few of them in each step. Short prompts do not wait for long ones.
        """
        short = [seat for seat in self.waiting if self._passes(seat) == 1]
        if short:
            entering = self._begun(short)
            while not entering.read_on():  # a network with a short context needs more passes
                pass
            yield from self._seat_entering(entering)
        while long := [seat for seat in self.waiting if self._passes(seat) > 1]:
            self._entering.append(self._begun(long))
        if self._entering:
            entering = self._entering.popleft()
            if entering.read_on():
                yield from self._seat_entering(entering)
            else:
                self._entering.append(entering)
        self._shrink()
        if self.taken and self.whole is not None:
            yield from self._write_piece(self.whole.first(len(self.seats)))

    def _passes(self, seat: Seat) -> int:
        """About how many passes it takes to read the given tokens."""
        return max(-(-self.writer.unread(seat.request) // FILL_CHUNK), 1)

    def _begun(self, seats: Sequence[Seat]) -> _Entering:
        """Begin reading the first of some waiting texts, together with others of about the same length, up to
        the limit of one pass."""
        passes, longest = self._passes(seats[0]), 0
        chosen: list[Seat] = []
        for seat in seats:
            if not passes <= 2 * self._passes(seat) <= 4 * passes:
                continue
            longest = max(longest, min(self.writer.unread(seat.request), FILL_CHUNK))
            if chosen and (len(chosen) + 1) * longest > _read_together(self.writer):
                break
            chosen.append(seat)
        held = {seat.index for seat in chosen}
        self.waiting = deque(seat for seat in self.waiting if seat.index not in held)
        rows = self.writer.begin([seat.request for seat in chosen], width=self.width)
        return _Entering(chosen, rows, self.writer.remember(rows))

    def _seat_entering(self, begun: _Entering) -> Iterator[Event]:
        entering, fresh = begun.seats, begun.rows
        places = [place for place, seat in enumerate(self.seats) if seat is None][: len(entering)]
        rows = self._with_room(fresh, len(self.seats) + len(entering) - len(places))
        places += range(len(self.seats), len(self.seats) + len(entering) - len(places))
        self.seats += [None] * (rows - len(self.seats))
        if self.whole is not fresh and self.whole is not None:
            self.whole.put(places, fresh)
        for place, seat, start in zip(places, entering, fresh.start.tolist(), strict=True):
            self.seats[place] = replace(seat, start=start, begun=False)
            if self.watch:
                yield Started(seat.index, seat.request)

    def _with_room(self, fresh: Rows, rows: int) -> int:
        """Make room for this number of rows, or a few more to match a recorded pass. Returns the number."""
        if self.whole is None:
            self.whole = self.writer.room(fresh)
            return rows
        if rows > len(self.seats) and _records(self.writer):
            rows = min(max(rows, 1 << (rows - 1).bit_length()), max(self.most, rows))
        if rows > len(self.whole):
            larger = self.whole.empty(max(rows, min(2 * len(self.whole), self.most)))
            if self.seats:
                larger.put(range(len(self.seats)), self.whole.first(len(self.seats)))
            self.whole.forget()
            self.whole = larger
        return rows

    def _shrink(self) -> None:
        """Remove empty rows if it pays off, by moving other rows into their places."""
        taken = self.taken
        rows = taken
        if _records(self.writer):  # a few empty rows cost less than recording again
            rows = len(self.seats)
            while taken and taken <= rows // 2:
                rows //= 2
        if self.whole is None or rows >= len(self.seats):
            return
        holes = [place for place in range(rows) if self.seats[place] is None]
        for place in range(rows, len(self.seats)):
            if self.seats[place] is not None:
                hole = holes.pop(0)
                self.whole.move(place, hole)
                self.seats[hole], self.seats[place] = self.seats[place], None
        del self.seats[rows:]

    def drop(self, indices: set[int]) -> None:
        """Drop canceled texts."""
        self.waiting = deque(seat for seat in self.waiting if seat.index not in indices)
        places = [
            place for place, seat in enumerate(self.seats) if seat is not None and seat.index in indices
        ]
        for place in places:
            self.seats[place] = None
        if places and self.whole is not None:
            self.whole.rest(places)
            self.writer.ended(self.whole, places)
        for begun in [each for each in self._entering if any(seat.index in indices for seat in each.seats)]:
            # Rows that began together are read together, so the remaining ones begin again.
            self.writer.ended(begun.rows, range(len(begun.seats)))
            self._entering.remove(begun)
            self.waiting.extendleft(reversed([seat for seat in begun.seats if seat.index not in indices]))

    def close(self) -> None:
        """Keep recordings for the writer's next texts, if that is worth it."""
        if self.whole is not None:
            self.writer.leave(self.whole)
        self.whole = None

    def forget(self) -> None:
        if self.whole is not None:
            self.whole.forget()
        self.whole = None

    def _write_piece(self, rows: Rows) -> Iterator[Event]:
        """Write one piece of every row, with speculation perhaps none or several, and report the results."""
        begin = rows.start.clone()
        taken = [place for place, seat in enumerate(self.seats) if seat is not None]
        later: dict[int, list[TokenRevealed | Drafted]] = {}
        if self.watch:
            for place in taken:
                yield from self._piece_begun(place)
        for reveal in self.writer.write(rows):
            if self.watch:
                yield from self._revealed(reveal, later)
        # Everything after the last gap is given and need not be read.
        end = torch.where(rows.start >= rows.written_to, rows.stop, rows.start)
        ends, until = self._endings(rows, begin, end, taken)
        written_to = rows.written_to.tolist() if self.watch else []
        ended = [place for place in taken if ends[place] is not None]
        finished = self._read(rows, ended) if ended else {}
        extended = self._extended(rows, begin, end, [place for place in taken if ends[place] is None])
        for place in taken:
            ending = ends[place]
            if self.watch:
                # Tokens and guesses past the end of a text are not reported.
                told = [
                    each for each in later.get(place, []) if ending is None or _reach(each) < until[place]
                ]
                for event in told:
                    if isinstance(event, TokenRevealed):  # drafts reach further and begin no piece
                        reached = event.position
                        yield from self._pieces_finished(place, reached, until[place], written_to[place])
                        yield from self._piece_begun(place)
                    yield event
                yield from self._pieces_finished(place, until[place], until[place], written_to[place])
            if ending is not None:
                yield self._end(place, self._seat(place), ending, *finished[place])
            elif place in extended:
                yield extended[place]

    def _endings(
        self, rows: Rows, begin: Tensor, end: Tensor, taken: list[int]
    ) -> tuple[list[Ending | None], list[int]]:
        """What ends the text of each row, and the end of the piece up to which it was checked. Rows with the
        same rules are checked together.

        With speculation several pieces may have been written; the first one with an end counts.
        """
        alike: dict[Stopping, list[int]] = {}
        for place in taken:
            alike.setdefault(self._seat(place).request.stopping, []).append(place)
        found: list[Ending | None] = [None] * len(self.seats)
        until = end.tolist()
        for stopping, places in alike.items():
            alone = len(alike) == 1
            some: list[int] | slice = slice(None) if alone else places
            pieces, text = [(begin, end)], rows.text
            if TALLY in rows.extras and (self.watch or not stopping.is_by_token):
                pieces, text = list(self._pieces(rows, begin, end, places)), rows.text.cpu()
            for first, last in pieces:
                starts, stops = first.tolist(), last.tolist()
                going_on = [p for p in places if found[p] is None and starts[p] < stops[p]]
                if not going_on:
                    continue
                ends = stopping.ends(
                    text[some],
                    written_from=rows.written_from[some],
                    piece_start=first[some],
                    piece_end=last[some],
                    stop=rows.stop[some],
                    taken=going_on if alone else [places.index(place) for place in going_on],
                )
                for place in going_on:
                    found[place] = ends[place if alone else places.index(place)]
                    if found[place] is not None:
                        until[place] = stops[place]
        return found, until

    def _pieces(
        self, rows: Rows, begin: Tensor, end: Tensor, places: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The starts and ends (rows,) of each row's first piece, then of each row's second, and so on. Rows
        with fewer pieces stay at their end."""
        first = begin
        while bool((first < end)[places].any()):
            ends = torch.tensor([self.writer.piece_end(start) for start in first.tolist()])
            last = torch.where(ends >= rows.written_to, end, torch.minimum(ends, end))
            yield first, last
            first = last

    def _read(self, rows: Rows, ended: list[int]) -> dict[int, tuple[Tensor, Cost]]:
        """The tokens and costs of ended texts, by place. Nothing more is written in their rows."""
        texts = rows.text[ended].cpu()
        passes = torch.stack((rows.evaluations[ended], rows.fill_passes[ended]), 1).tolist()
        tally = rows.extras.get(TALLY)
        drafts = [((), ())] * len(ended) if tally is None else tally[ended].tolist()
        rows.rest(ended)
        self.writer.ended(rows, ended)
        return {
            place: (text, Cost(*spent, *map(tuple, drafted)))
            for place, text, spent, drafted in zip(ended, texts.unbind(), passes, drafts, strict=True)
        }

    def _extended(self, rows: Rows, begin: Tensor, end: Tensor, going_on: list[int]) -> dict[int, Extended]:
        """The `Extended` events of continuing texts that report pieces."""
        places = [place for place in going_on if self._seat(place).tell == "pieces"]
        if not places:
            return {}
        size = int((end - begin)[places].max())
        tokens = read_at(rows.text[places], send(begin[places], rows.device), max(size, 1))[0].tolist()
        spans = zip(begin[places].tolist(), end[places].tolist(), strict=True)
        return {
            place: Extended(self._seat(place).index, first, tuple(found[: last - first]))
            for place, found, (first, last) in zip(places, tokens, spans, strict=True)
            if last > first
        }

    def _end(self, place: int, seat: Seat, ending: Ending, text: Tensor, cost: Cost) -> Event:
        """Clear a seat, for good or to write its text again."""
        self.seats[place] = None
        if ending.by == "entropy" and seat.redraws < seat.request.stopping.redraws:
            self.waiting.appendleft(seat.again(cost.passes))
            return Redrawn(seat.index)
        tokens = text[: ending.length].clone()
        if self.writer.mask_id in tokens.tolist():  # see `or_mask`
            return Failed(
                seat.index,
                f"text {seat.index} cannot be written: the model's probabilities are not finite; its weights "
                "may hold NaN, or a grammar allows nothing more",
            )
        return Stopped(seat.index, seat.finished(tokens, cost, ending))

    def _piece_begun(self, place: int) -> Iterator[Event]:
        """Report once that a piece is being written."""
        seat = self._seat(place)
        if not seat.begun:
            self.seats[place] = replace(seat, begun=True)
            stop = min(self.writer.piece_end(seat.start), seat.request.length)
            yield BlockStarted(seat.index, seat.start, stop)

    def _pieces_finished(self, place: int, position: int, until: int, written_to: int) -> Iterator[Event]:
        """Report the finished pieces before a position. All pieces up to `until` are finished."""
        while (seat := self._seat(place)).start < until:
            stop = self.writer.piece_end(seat.start)
            stop = until if stop >= written_to else min(stop, until)
            if stop > position:
                return
            yield from self._piece_begun(place)
            yield BlockFinished(seat.index, seat.start, stop)
            self.seats[place] = replace(seat, start=stop, begun=False)

    def _revealed(self, reveal: Reveal, later: dict[int, list[TokenRevealed | Drafted]]) -> Iterator[Event]:
        """The events of a pass. Those beyond the current piece go to `later`, until it is known that the text
        continues."""
        told: list[tuple[int, TokenRevealed | Drafted]] = []
        active = reveal.active
        places = active.nonzero()[:, 0].tolist()
        positions, tokens = (
            each[active.to(each.device)].tolist() for each in (reveal.positions, reveal.tokens)
        )
        chances = [(None, ())] * len(places) if reveal.chances is None else reveal.chances.told(active)
        for place, position, token, (log_p, others) in zip(places, positions, tokens, chances, strict=True):
            seat = self.seats[place]
            if seat is not None:
                revealed = TokenRevealed(seat.index, position, token, log_p=log_p, alternatives=others)
                told.append((place, revealed))
        if reveal.drafted is not None:
            told += self._drafted(*(each.cpu() for each in reveal.drafted))
        for place, event in told:
            if place in later or _reach(event) >= self.writer.piece_end(self._seat(place).start):
                later.setdefault(place, []).append(event)
            else:
                yield event
        if reveal.masked_again is not None:
            where, again = reveal.masked_again
            for place, offset in again.nonzero().tolist():
                yield TokenHidden(self._seat(place).index, int(where[place, offset]))

    def _drafted(self, positions: Tensor, tokens: Tensor, active: Tensor) -> Iterator[tuple[int, Drafted]]:
        for place, seat in enumerate(self.seats):
            if seat is not None:
                which = active[place]
                drafts = tuple(positions[place, which].tolist()), tuple(tokens[place, which].tolist())
                yield place, Drafted(seat.index, *drafts)

    def _seat(self, place: int) -> Seat:
        seat = self.seats[place]
        if seat is None:
            raise RuntimeError(f"seat {place} is empty")
        return seat


def _records(writer: Writer) -> bool:
    """Whether passes are recorded, each for a fixed number of rows."""
    return writer.model.device.type == "cuda"


def _read_together(writer: Writer) -> int:
    """How many given tokens one pass reads at most, since all texts being written wait for it."""
    return 8192 if _records(writer) else 256


def _reach(event: TokenRevealed | Drafted) -> int:
    """The last position of an event."""
    return event.position if isinstance(event, TokenRevealed) else max(event.positions, default=-1)
