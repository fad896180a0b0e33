"""SIGTERM as an exception, like Ctrl-C: a stopped command cleans up and says so in one line."""

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
_LONG = 1.0  # seconds; a second signal this long after one that still waits ends the process at once
_STDERR = 2
_IMPORTERS = ("importlib._bootstrap", "importlib._bootstrap_external")
_COMPILED = frozenset({"torch", "functorch", "triton"})
"""Packages whose C++ calls Python. There an exception from a signal may be dropped, or abort the process."""

_raised: list[KeyboardInterrupt] = []
"""The exceptions that signals raised, even if they were turned into other errors on the way."""

_dropping: list[None] = []
"""The exception that Python is dropping, and anything raised meanwhile."""

_waiting: list[float] = []
"""The time since which a signal waits for code that can take exceptions."""


class Terminated(KeyboardInterrupt):
    """The exception for SIGTERM. It is a KeyboardInterrupt, so cleanup for Ctrl-C works for it too."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM raise `Terminated`, once; a second SIGTERM ends the process at once, as usual.

    If SIGTERM is ignored or has another handler, or outside the main thread, nothing changes. If the
    exception of SIGTERM or Ctrl-C is raised where Python drops exceptions, such as in a `__del__`, it is
    raised again elsewhere. Inside torch, and while a C++ module is loading, signals wait until the caller is
    back in control.
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
    """Forget earlier stops: they do not stop the command that starts now."""
    _raised.clear()


def raise_stop(number: int, frame: FrameType | None) -> None:
    """Raise the exception of a signal, here or as soon as code that can take exceptions is in control.

    A second signal long after one that still waits ends the process: the wait may take minutes.
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
    """Print the line of a signal and end the process at once, without cleanup."""
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
    """`raise_stop`, until it raises; then the system handles the signal again."""
    raise_stop(number, frame)


def _stop_of(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _takes_exceptions(frame: FrameType | None) -> bool:
    """Whether an exception may start in this frame.

    It may not inside a package of `_COMPILED`, in a call from there through Python's own library or this
    file, or while a C++ module is loading.
    """
    if _loading_compiled(frame):
        return False
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in sys.stdlib_module_names and frame.f_globals is not globals():
            return package not in _COMPILED
        frame = frame.f_back
    return True


def _loading_compiled(frame: FrameType | None) -> bool:
    """Whether a C++ module is loading, or one of Triton's, which call C++ modules as they load."""
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
    """Raise at the next line of the nearest caller that can take exceptions, or of a function it calls
    meanwhile.

    Python calls a trace function there. If another trace function is active, such as a debugger's, the signal
    is sent again until such a place is found.
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
    """Called by Python with an exception that it drops: the signal is sent again once that place is left.

    Exceptions raised in here are dropped too, so on a busy machine several attempts may be needed.
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
    """Hold signals back; processes started in here ignore them.

    Ctrl-C reaches every process, and one that is still importing would answer with a traceback.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # otherwise it would let signals through on first use
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The stop behind an error.

    Torch turns an interruption into other errors: into a RuntimeError when it leaves a context that it was
    entering, and into a ValueError without a cause while it inspects its arguments.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, KeyboardInterrupt):
            return seen
        seen = seen.__cause__ or seen.__context__
    return _raised[-1] if _raised else None


def line_and_status(stop: KeyboardInterrupt) -> tuple[str, int]:
    """The line for a stopped process, and the exit status that its shell expects."""
    if isinstance(stop, Terminated):
        return "terminated", 128 + signal.SIGTERM
    return "interrupted", 128 + signal.SIGINT
