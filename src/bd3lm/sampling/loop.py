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
    """Close unfinished iterators while torch is still loaded. The interpreter would close them later, and
    print an error."""
    for events in list(_suspended):
        with suppress(ValueError):  # another thread is running it
            events.close()


def sample(writer: Writer, requests: Sequence[Request], *, batch_size: int = 32) -> list[Sample]:
    """Write all texts, at most `batch_size` at a time. Returns samples in the order of the requests."""
    events = write(writer, requests, batch_size=batch_size)
    return sorted((e.sample for e in events if isinstance(e, Stopped)), key=lambda sample: sample.index)


def write(
    writer: Writer, requests: Sequence[Request], *, batch_size: int = 32, watch: bool = False
) -> Iterator[Event]:
    """Write all texts, and yield events as they happen. Without `watch` these are `Redrawn` and `Stopped`
    only.

    A text depends on its own request alone, not on its batch or on when a seat became free. With `watch` the
    host reads every pass from the device, otherwise only every piece.
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
        engine.close()  # drops its rows: the next batch does not need them
