"""A second signal stops a loop at once, wherever the loop is."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from bd3lm.io.signals import Terminated, stop_behind
from bd3lm.training.signals import stop_requests


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception raised here must not stop a later test."""
    monkeypatch.setattr("bd3lm.io.signals._raised", [])


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_second_signal_waits_until_a_module_that_may_abort_is_imported(
    number: signal.Signals, kind: type[KeyboardInterrupt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first compiled step imports triton, and an exception in its C++ code aborts the process."""
    (tmp_path / "triton.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(0.1)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr("bd3lm.training.signals._SAME_REQUEST", 0.0)

    def step() -> None:
        os.kill(os.getpid(), number)
        importlib.import_module("triton")
        time.sleep(5)

    with stop_requests(lambda: ""), pytest.raises(kind):
        step()
    assert sys.modules.pop("triton").whole


def test_a_second_signal_is_known_whatever_becomes_of_its_exception() -> None:
    with stop_requests(lambda: ""):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as stopped:
            os.kill(os.getpid(), signal.SIGINT)
    assert stop_behind(ValueError("could not determine the shape of object type")) is stopped.value
