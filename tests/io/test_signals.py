"""A signal stops a process however what it interrupts takes it."""

import os
import signal
from collections.abc import Iterator

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
