"""SIGTERM as an exception, as Ctrl-C is one: who is stopped cleans up, and says so in one line."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ExtensionFileLoader
from types import FrameType

_SOON = 0.01  # seconds
_IMPORTERS = ("importlib._bootstrap", "importlib._bootstrap_external")

_raised: list[KeyboardInterrupt] = []
"""What signals have raised, also where something on its way made another error of it and told nobody."""

_dropping: list[None] = []
"""Holds something while Python drops an exception, and whatever is raised then."""


class Terminated(KeyboardInterrupt):
    """What SIGTERM raises. It is a KeyboardInterrupt, so that whatever Ctrl-C cleans up this does too."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM raises `Terminated`, once: a second one ends the process at once, as without this.

    Where it is ignored or handled by others it is left to them, as it is outside of the main thread. What it
    or Ctrl-C raises in a place where Python drops exceptions, such as a `__del__`, is raised again elsewhere,
    and while a module written in C++ is loaded they wait: it may abort the process at an exception.
    """
    _raised.clear()
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    report = sys.unraisablehook
    answered = ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answered:
        signal.signal(signal.SIGINT, raise_stop)
    if ours:
        signal.signal(signal.SIGTERM, _raise_once)
        sys.unraisablehook = partial(_raise_again, report=report)
    try:
        yield
    finally:
        _raised.clear()
        if ours:
            sys.unraisablehook = report
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if answered:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_stops() -> None:
    """What was raised before is not what stops a command that begins now."""
    _raised.clear()


def raise_stop(number: int, frame: FrameType | None) -> None:
    """Raise what the signal stands for; where that might abort the process, or would be dropped, the signal
    comes again soon."""
    if _dropping or _loading_compiled(frame):
        _send_soon(number)
        return
    _raised.append(Terminated() if number == signal.SIGTERM else KeyboardInterrupt())
    raise _raised[-1]


def _raise_once(number: int, frame: FrameType | None) -> None:
    try:
        raise_stop(number, frame)
    except Terminated:
        signal.signal(number, signal.SIG_DFL)
        raise


def _loading_compiled(frame: FrameType | None) -> bool:
    """Whether a module written in C++ is being loaded, or one of Triton's, which call theirs as they load."""
    while frame is not None:
        if frame.f_globals.get("__name__") in _IMPORTERS:
            name = frame.f_locals.get("name")
            if isinstance(name, str) and name.partition(".")[0] == "triton":
                return True
            if isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
                return True
        frame = frame.f_back
    return False


def _raise_again(
    dropped: "sys.UnraisableHookArgs", report: Callable[["sys.UnraisableHookArgs"], object]
) -> None:
    """What Python calls with an exception that it drops: the signal comes again when that place is left.

    What is raised in here is dropped too, so that on a busy machine it may have to come more than once.
    """
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        report(dropped)
        return
    _dropping.append(None)
    number = signal.SIGINT
    if issubclass(dropped.exc_type, Terminated):
        number = signal.SIGTERM
        signal.signal(number, _raise_once)
    _send_soon(number)
    _dropping.clear()


def _send_soon(number: int) -> None:
    again = threading.Timer(_SOON, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def stop_behind(error: BaseException) -> KeyboardInterrupt | None:
    """What stopped the process, where an error is only what became of that on its way: torch, interrupted
    while it enters something, raises a RuntimeError when it leaves, and while it looks at what it is given, a
    ValueError that names no cause."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return seen
        seen = seen.__cause__ or seen.__context__
    return _raised[-1] if _raised else None


def line_and_status(stop: KeyboardInterrupt) -> tuple[str, int]:
    """What to say of a process that was stopped, and what its shell expects it to exit with."""
    if isinstance(stop, Terminated):
        return "terminated", 128 + signal.SIGTERM
    return "interrupted", 128 + signal.SIGINT
