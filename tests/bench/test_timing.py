"""Clocks: what is timed, what is not, and that the numbers are those of the clock."""

from types import SimpleNamespace

import pytest
import torch

from bd3lm.bench import Timing, matrix_rate, timing
from bd3lm.bench.timing import time_calls

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Clock:
    """A clock that only work moves: each call takes the next of some durations, in seconds."""

    def __init__(self, *durations: float) -> None:
        self.now, self.durations, self.calls = 100.0, list(durations), 0

    def perf_counter(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self.durations[self.calls]
        self.calls += 1


def test_calls_after_the_warm_up_are_timed_one_by_one(monkeypatch):
    clock = Clock(50.0, 40.0, 0.25, 1.0, 0.5)
    monkeypatch.setattr(timing, "time", clock)
    found = time_calls(clock.work, device=CPU, warmup=2, repeats=3)
    assert found == Timing(seconds=(0.25, 1.0, 0.5), peak_bytes=None)
    assert (found.median, found.spread) == (0.5, (0.25, 1.0))
    assert clock.calls == 5


@pytest.mark.parametrize(("warmup", "repeats"), [(-1, 1), (0, 0)])
def test_at_least_one_call_is_timed(warmup, repeats):
    with pytest.raises(ValueError, match=f"repeats at least 1, got {warmup} and {repeats}"):
        time_calls(lambda: None, device=CPU, warmup=warmup, repeats=repeats)


def test_a_gpu_is_waited_for_only_around_all_calls(monkeypatch):
    """Between calls the host runs ahead; events on the device keep the time."""
    clock, happened = Clock(9.0, 0.25, 1.0), []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("mark")
            self.at = clock.now

        def elapsed_time(self, end: "Event") -> float:
            return 1e3 * (end.at - self.at)

    def call() -> None:
        happened.append("call")
        clock.work()

    fakes = {
        "Event": Event,
        "synchronize": lambda: happened.append("wait"),
        "empty_cache": lambda: happened.append("empty"),
        "reset_peak_memory_stats": lambda device: happened.append("reset"),
        "max_memory_allocated": lambda device: 12345,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    found = time_calls(call, device=CUDA, warmup=1, repeats=2)
    assert found.seconds == pytest.approx((0.25, 1.0))
    assert found.peak_bytes == 12345
    assert happened == ["empty", "reset", "call", "wait", "mark", "call", "mark", "call", "mark", "wait"]


def test_the_matrix_rate_is_two_n_cubed_a_product(monkeypatch):
    def half_a_second(call, **options):
        assert call().shape == (1024, 1024)
        return SimpleNamespace(median=0.5)

    monkeypatch.setattr(timing, "time_calls", half_a_second)
    assert matrix_rate(CPU) == 2 * 1024**3 / 0.5
