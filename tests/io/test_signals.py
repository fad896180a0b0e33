"""A signal stops a process however what it interrupts takes it."""

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bd3lm.io.signals import Terminated, signals_raise, stop_behind


@pytest.fixture(autouse=True)
def _python_answers() -> Iterator[None]:
    """As in a process of its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_stop_is_known_whatever_becomes_of_its_exception(
    number: signal.Signals, kind: type[KeyboardInterrupt]
) -> None:
    """torch raises a ValueError without a cause where it is interrupted at some places in C."""
    with signals_raise():
        with pytest.raises(kind):
            os.kill(os.getpid(), number)
        found = stop_behind(ValueError("could not determine the shape of object type"))
        assert type(found) is kind
    assert stop_behind(ValueError("later")) is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_is_no_stop_where_no_signal_came() -> None:
    with signals_raise():
        assert stop_behind(ValueError("x")) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_dropped_comes_again_however_busy_the_machine_is(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where it comes before the place is left in which exceptions are dropped."""
    start = threading.Timer.start

    def slowly(timer: threading.Timer) -> None:
        start(timer)
        if len(starts) < 2:
            starts.append(timer)
            time.sleep(0.1)

    class Lost:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    starts: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", slowly)

    def work() -> None:
        Lost()
        time.sleep(5)

    with signals_raise(), pytest.raises(KeyboardInterrupt):
        work()
    assert len(starts) == 2
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_a_module_that_may_abort_is_imported(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of C++ that calls Python while it begins, as triton's does, aborts the process otherwise."""
    (tmp_path / "triton.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(0.1)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)

    def work() -> None:
        importlib.import_module("triton")
        time.sleep(5)

    with signals_raise(), pytest.raises(KeyboardInterrupt):
        work()
    assert sys.modules.pop("triton").whole
