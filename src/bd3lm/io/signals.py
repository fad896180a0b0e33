"""SIGTERM as an exception, as Ctrl-C is one: who is stopped cleans up, and says so in one line."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """What SIGTERM raises. It is a KeyboardInterrupt, so that whatever Ctrl-C cleans up this does too."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises `Terminated`, once: a second one ends the process at once, as without this.

    Where it is ignored or handled by others it is left to them, as it is outside of the main thread.
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Terminated


def line_and_status(stop: KeyboardInterrupt) -> tuple[str, int]:
    """What to say of a process that was stopped, and what its shell expects it to exit with."""
    if isinstance(stop, Terminated):
        return "terminated", 128 + signal.SIGTERM
    return "interrupted", 128 + signal.SIGINT
