"""A signal stops a process however what it interrupts takes it."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("waiter", ["torch.lost", "enum"])
def test_a_signal_waits_until_torch_has_returned(number: signal.Signals, waiter: str) -> None:
    """Torch's C++ calls Python and may drop what comes of it, or abort: here a caller that drops it, and one
    of Python's own library that torch called. Control comes back in the middle of a line."""
    lost: Any = {"__name__": "torch.lost", "kill": partial(os.kill, os.getpid(), number)}
    waits: Any = {**lost, "__name__": waiter}
    exec("def wait():\n    kill()\n    return True", waits)
    lost["wait"] = waits["wait"]
    exec("def call():\n    try:\n        return wait()\n    except BaseException:\n        return None", lost)
    returned = []

    def work() -> None:
        returned.append(lost["call"]())
        returned.append("later")

    with signals_raise(), pytest.raises(KeyboardInterrupt):
        work()
    assert returned == [True]
    assert sys.gettrace() is None


def test_a_signal_that_waits_stops_what_torch_calls_of_ours() -> None:
    """A pass through a network is one call of torch's, and may take long."""
    torch: Any = {"__name__": "torch.nn"}
    exec("def call(kill, layers):\n    kill()\n    for layer in layers:\n        layer()", torch)
    called = []

    def work() -> None:
        torch["call"](partial(os.kill, os.getpid(), signal.SIGINT), [lambda: called.append(1)] * 3)

    with signals_raise(), pytest.raises(KeyboardInterrupt):
        work()
    assert called == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_long_after_one_that_waits_ends_the_process(number: signal.Signals) -> None:
    """Torch may compile for a minute."""
    script = f"""
import os, time
from functools import partial
from bd3lm.io import signals
signals._LONG = 0.0
torch = dict(__name__="torch.compile", kill=partial(os.kill, os.getpid(), {int(number)}), sleep=time.sleep)
exec("def call():\\n    kill()\\n    kill()\\n    sleep(9)", torch)
with signals.signals_raise():
    torch["call"]()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number
    assert done.stderr == f"bd3lm: {'interrupted' if number == signal.SIGINT else 'terminated'}\n"


def test_while_a_debugger_traces_the_signal_comes_until_it_can_be_taken() -> None:
    done: list[bool] = []
    torch: Any = {"__name__": "torch.nn", "time": time, "done": done}
    torch["kill"] = partial(os.kill, os.getpid(), signal.SIGINT)
    exec("def call():\n    kill()\n    time.sleep(0.1)\n    done.append(True)", torch)

    def work() -> None:
        torch["call"]()
        time.sleep(5)

    before = sys.gettrace()
    sys.settrace(lambda frame, event, value: None)
    try:
        with signals_raise(), pytest.raises(KeyboardInterrupt):
            work()
    finally:
        sys.settrace(before)
    assert done == [True]
