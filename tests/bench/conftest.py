"""A clock that is not one: benchmarks hand it what they would time, and tests look at that."""

from collections.abc import Callable

import pytest

from bd3lm.bench import Timing, attention, forward, sampling, training


@pytest.fixture
def timed(monkeypatch) -> list[Callable[[], object]]:
    """The calls that benchmarks hand to the clock, none of them made."""
    calls: list[Callable[[], object]] = []

    def remember(call, *, device, warmup, repeats):
        calls.append(call)
        return Timing((1.0,) * repeats, None)

    for module in (attention, forward, sampling, training):
        monkeypatch.setattr(module, "time_calls", remember)
    return calls
