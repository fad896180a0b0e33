"""SIGTERM and Ctrl-C as requests to stop after the step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C ask the loop to stop after the step; a second Ctrl-C stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    previous = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            previous[number] = signal.signal(number, ask)
        except ValueError:  # not in the main thread: whoever runs us there handles signals
            break
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
