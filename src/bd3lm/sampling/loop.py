"""Texts that are all known beforehand: loops over the engine."""

import atexit
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from weakref import WeakSet

from bd3lm.models import require_evaluation_mode
from bd3lm.sampling.engine import Engine, check_all, check_told
from bd3lm.sampling.events import Event, Failed, Sample, Stopped
from bd3lm.sampling.request import Request
from bd3lm.sampling.writer import Writer

_suspended: WeakSet[Generator[Event, None, None]] = WeakSet()


@atexit.register
def close_suspended() -> None:
    """Close what was never written to its end while torch is still there: the interpreter would do so later,
    and print that it could not."""
    for events in list(_suspended):
        with suppress(ValueError):  # another thread is in it just now
            events.close()


def sample(writer: Writer, requests: Sequence[Request], *, batch_size: int = 32) -> list[Sample]:
    """Write all texts, at most `batch_size` at a time; returned in the order of the requests."""
    events = write(writer, requests, batch_size=batch_size)
    return sorted((e.sample for e in events if isinstance(e, Stopped)), key=lambda sample: sample.index)


def write(
    writer: Writer, requests: Sequence[Request], *, batch_size: int = 32, watch: bool = False
) -> Iterator[Event]:
    """Write all texts, and yield events as they happen; without `watch` only `Redrawn` and `Stopped`.

    A text depends on its own request alone: neither on the batch it is written in nor on when a seat became
    free. With `watch` the device is asked after every pass what it revealed, otherwise once a piece.
    """
    require_evaluation_mode(writer.model)
    if not requests:
        raise ValueError("requests must hold at least one text to write, got none")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    check_all(writer, requests, min(batch_size, len(requests)))
    check_told(writer, is_watched=watch)
    events = _events(writer, requests, batch_size, watch)
    _suspended.add(events)
    return events


def _events(
    writer: Writer, requests: Sequence[Request], batch_size: int, watch: bool
) -> Generator[Event, None, None]:
    engine = Engine(seats=batch_size)
    engine.open_table(writer, length=max(request.length for request in requests), watch=watch)
    for request in requests:
        engine.submit(request, writer, tell="passes" if watch else "end")
    try:
        while len(engine):
            with closing(engine.events()) as events:
                for event in events:
                    if isinstance(event, Failed):
                        raise FloatingPointError(event.reason)
                    yield event
    finally:
        engine.close()  # before the end: these rows are not kept for a next batch
