"""SIGTERM and Ctrl-C as requests to stop after the step."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from bd3lm.io.signals import raise_stop

_STDERR = 2
_SAME_REQUEST = 1.0  # seconds


@contextmanager
def stop_requests(answer: Callable[[], str]) -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C ask the loop to stop after the step; a second one stops at once.

    The first is answered on standard error with `answer()`, where that says anything. A SIGTERM within a
    second of the first signal is the same request: a scheduler sends one to every process, and torchrun
    passes its own on.
    """
    asked_at: float | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            _write(answer())
        elif number == signal.SIGINT or now - asked_at > _SAME_REQUEST:
            raise_stop(number, frame)

    previous = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            previous[number] = signal.signal(number, ask)
        except ValueError:  # not in the main thread: whoever runs us there handles signals
            break
    try:
        yield lambda: asked_at is not None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write(text: str) -> None:
    """Write without Python's buffers, which the signal may have interrupted."""
    if text:
        before = "\n" if os.isatty(_STDERR) else ""  # a progress bar may stand there
        with suppress(OSError):
            os.write(_STDERR, f"{before}{text}\n".encode())
