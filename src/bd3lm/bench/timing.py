"""Measures how long calls take on a device, the memory they use, and the device's peak speed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from bd3lm.bench.profile import Profile


@dataclass(frozen=True)
class Timing:
    """Seconds of each of several calls, and the peak memory meanwhile, in bytes (GPU only).

    `profile` says where the time of further calls went, if requested.
    """

    seconds: tuple[float, ...]
    peak_bytes: int | None
    profile: Profile | None = None

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.seconds), max(self.seconds)


def time_calls(call: Callable[[], object], *, device: torch.device, warmup: int, repeats: int) -> Timing:
    """Time consecutive calls, as in a loop: on a GPU the host runs ahead.

    Peak memory includes the warm-up, whose first call may compile.
    """
    if warmup < 0 or repeats < 1:
        raise ValueError(f"warmup must be at least 0 and repeats at least 1, got {warmup} and {repeats}")
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(warmup):
        call()
    seconds = _on_gpu(call, repeats) if on_gpu else _on_host(call, repeats)
    return Timing(tuple(seconds), torch.cuda.max_memory_allocated(device) if on_gpu else None)


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product, bfloat16 on a GPU and float32 elsewhere: the peak in this run."""
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    timing = time_calls(lambda: a @ b, device=device, warmup=3, repeats=10)
    return 2.0 * size**3 / timing.median


def _on_gpu(call: Callable[[], object], repeats: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in pairwise(marks)]


def _on_host(call: Callable[[], object], repeats: int) -> Sequence[float]:
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds
