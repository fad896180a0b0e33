"""SIGTERM as an exception, as Ctrl-C is one: who is stopped cleans up, and says so in one line."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any, NoReturn

_SOON = 0.01  # seconds
_LONG = 1.0  # seconds; a signal that comes so long after one that still waits ends the process at once
_STDERR = 2
_IMPORTERS = ("importlib._bootstrap", "importlib._bootstrap_external")
_COMPILED = frozenset({"torch", "functorch", "triton"})
"""Packages whose C++ calls Python. There an exception from nowhere may be dropped, or abort the process."""

_raised: list[KeyboardInterrupt] = []
"""What signals have raised, also where something on its way made another error of it and told nobody."""

_dropping: list[None] = []
"""Holds something while Python drops an exception, and whatever is raised then."""

_waiting: list[float] = []
"""Since when a signal waits until control is back in code that takes exceptions."""


class Terminated(KeyboardInterrupt):
    """What SIGTERM raises. It is a KeyboardInterrupt, so that whatever Ctrl-C cleans up this does too."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM raises `Terminated`, once: a second one ends the process at once, as without this.

    Where it is ignored or handled by others it is left to them, as it is outside of the main thread. What it
    or Ctrl-C raises in a place where Python drops exceptions, such as a `__del__`, is raised again elsewhere.
    Inside of torch, and while a module written in C++ is loaded, they wait until control is back with whoever
    called that.
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
        if _waiting:
            _stop_watching()
        if ours:
            sys.unraisablehook = report
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if answered:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def forget_stops() -> None:
    """What was raised before is not what stops a command that begins now."""
    _raised.clear()


def raise_stop(number: int, frame: FrameType | None) -> None:
    """Raise what the signal stands for, here or as soon as control is back in code that takes exceptions.

    A second signal long after one that still waits ends the process: what is waited for may take minutes.
    """
    if _waiting and time.monotonic() - _waiting[0] > _LONG:
        end_at_once(number)
    if _dropping:
        _send_soon(number)
    elif _takes_exceptions(frame):
        _raise(number)
    elif not _waiting:
        _raise_in_a_caller(number, frame)


def end_at_once(number: int) -> NoReturn:
    """Say what ends the process, and end it, whatever it is doing; nothing is cleaned up."""
    line, status = line_and_status(_stop_of(number))
    os.write(_STDERR, f"bd3lm: {line}\n".encode())
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


def _raise(number: int) -> NoReturn:
    if signal.getsignal(number) is _raise_once:
        signal.signal(number, signal.SIG_DFL)
    _raised.append(_stop_of(number))
    raise _raised[-1]


def _raise_once(number: int, frame: FrameType | None) -> None:
    """`raise_stop`, until it raises: then the signal is the system's again."""
    raise_stop(number, frame)


def _stop_of(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _takes_exceptions(frame: FrameType | None) -> bool:
    """Whether an exception may begin in this frame: it belongs neither to a package of `_COMPILED` nor, as
    one of Python's own library or of this file, to a call from there, and no module written in C++ is being
    loaded."""
    if _loading_compiled(frame):
        return False
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in sys.stdlib_module_names and frame.f_globals is not globals():
            return package not in _COMPILED
        frame = frame.f_back
    return True


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


def _raise_in_a_caller(number: int, frame: FrameType | None) -> None:
    """Raise at the next line of the nearest caller that takes exceptions, or of one that is called meanwhile.

    Python calls a trace function there. While another one traces, a debugger's say, the signal comes again
    until it finds such a place.
    """
    if sys.gettrace() is not None:
        _send_soon(number)
        return
    while frame is not None and not _takes_exceptions(frame):
        frame = frame.f_back

    def watch(traced: FrameType, event: str, value: object) -> Callable[..., Any] | None:
        if traced is frame or _takes_exceptions(traced):
            if frame is not None:
                frame.f_trace = None
            _waiting.clear()
            _raise(number)
        return None

    if frame is not None:
        frame.f_trace = watch
    _waiting.append(time.monotonic())
    sys.settrace(watch)


def _stop_watching() -> None:
    _waiting.clear()
    sys.settrace(None)


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


@contextmanager
def unheard(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals wait: processes that are started in here never hear of them. Ctrl-C reaches all there are,
    and one that is still importing what it needs would answer with a traceback."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which would let signals through when it is first needed
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
