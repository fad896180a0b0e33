"""SIGTERM and Ctrl-C as requests to stop after the current step."""

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
    """Let SIGTERM and Ctrl-C ask the loop to stop after the step; a second signal stops at once.

    The first one prints `answer()` on standard error, unless it is empty. A SIGTERM within a second of the
    first signal counts as the same request: a scheduler signals every process, and torchrun forwards its own
    signal.
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
        except ValueError:  # not in the main thread: the caller handles signals
            break
    try:
        yield lambda: asked_at is not None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write(text: str) -> None:
    """Write without Python's buffers, which the signal may have interrupted."""
    if text:
        before = "\n" if os.isatty(_STDERR) else ""  # a progress bar may be on this line
        with suppress(OSError):
            os.write(_STDERR, f"{before}{text}\n".encode())
