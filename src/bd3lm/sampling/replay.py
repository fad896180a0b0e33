"""Passes that are launched at once: recorded as CUDA graphs on a GPU, simply called elsewhere.

A pass over a few tokens is more than a hundred small kernels, which a host cannot launch as fast as a GPU
runs them. A graph launches them all together.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of every input in the buffer that they travel in
_recording = True


@contextmanager
def without_replays() -> Iterator[None]:
    """Inside, every pass is launched kernel by kernel: to debug, or to measure what replays gain."""
    global _recording
    before, _recording = _recording, False
    try:
        yield
    finally:
        _recording = before


class Replayed:
    """A function of small host tensors, always of the same shapes, that works on a device.

    It may read and write other tensors there, provided that they stay where they are in memory. The first
    call runs as it is, which also compiles what has to be; the second is recorded; later ones are replays,
    for which the host never waits. What it returned is overwritten by the next call.
    """

    def __init__(self, device: torch.device, pool: Any = None, *, records: bool = True) -> None:
        self._device, self._pool, self._records = device, pool, records
        self._buffer: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._output: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """The function is not kept, since it holds what holds this; it must be the same at every call."""
        if self._device.type != "cuda":
            return function(*(each.to(self._device) for each in inputs))
        with torch.cuda.device(self._device):
            is_first = self._buffer is None
            self._send(inputs)
            if is_first or not (_recording and self._records):
                return function(*self._inputs)
            if self._graph is None:
                self._graph = self._record(function)
            self._graph.replay()
            return self._output

    @property
    def is_ready(self) -> bool:
        """Whether the next call takes as long as all later ones."""
        if self._device.type != "cuda":
            return True
        return self._graph is not None if _recording and self._records else self._buffer is not None

    def _record(self, function: Callable[..., Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with (
            _nothing_collected(),
            torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=torch.cuda.Stream(self._device),  # torch's own may be another device's
                capture_error_mode="thread_local",  # what other threads do is no fault of ours
            ),
        ):
            self._output = function(*self._inputs)
        return graph

    def _send(self, inputs: tuple[Tensor, ...]) -> None:
        """All inputs in one copy, through pinned memory that the allocator keeps until it is done."""
        sizes = [-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in inputs]
        ends = list(accumulate(sizes, initial=0))[1:] or [0]
        if self._buffer is None:
            self._buffer = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
            self._inputs = [
                self._buffer[end - size :][: each.nbytes].view(each.dtype).view(each.shape)
                for each, size, end in zip(inputs, sizes, ends, strict=True)
            ]
        staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
        for each, size, end in zip(inputs, sizes, ends, strict=True):
            staged[end - size :][: each.nbytes].view(each.dtype).view(each.shape).copy_(each)
        self._buffer.copy_(staged, non_blocking=True)


class Replays:
    """The passes of one batch, by name: recorded anew when the batch's tensors are others.

    Without `records` they are launched kernel by kernel, for a network whose passes no graph may hold.
    """

    def __init__(self, device: torch.device, *, records: bool = True) -> None:
        self._device, self._records = device, records
        self._known: dict[Any, Replayed] = {}
        self.forget()

    def __call__(self, name: Any, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run a function, as it was recorded under this name once it is."""
        if name not in self._known:
            self._known[name] = Replayed(self._device, self._pool, records=self._records)
        return self._known[name](function, *inputs)

    def is_ready(self, name: Any) -> bool:
        """Whether a function runs under this name as fast as it will: nothing is compiled or recorded any
        more."""
        return name in self._known and self._known[name].is_ready

    def forget(self) -> None:
        """Drop all recordings: they are no longer valid."""
        self._known.clear()
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A graph that is freed while another is recorded spoils it, so garbage has to wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
