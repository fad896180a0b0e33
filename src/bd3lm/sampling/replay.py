"""Passes that launch at once: recorded as CUDA graphs on a GPU, and called normally elsewhere.

A pass over a few tokens takes more than a hundred small kernels, which a GPU runs faster than a host can
launch them. A graph launches them all together.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, of each input in the buffer that carries them
_recording = True


@contextmanager
def without_replays() -> Iterator[None]:
    """Launch every pass kernel by kernel inside this context: to debug, or to measure the gain of replays."""
    global _recording
    before, _recording = _recording, False
    try:
        yield
    finally:
        _recording = before


class Replayed:
    """A function of small host tensors, always of the same shapes, that computes on a device.

    It may read and write other tensors there, if they stay at the same address. The first call runs normally
    and compiles what it needs. The second call is recorded. Later calls are replays, for which the host never
    waits. Each call overwrites the output of the call before.
    """

    def __init__(self, device: torch.device, pool: Any = None, *, records: bool = True) -> None:
        self._device, self._pool, self._records = device, pool, records
        self._buffer: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._output: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Call the function. It must be the same in every call. It is not kept, to avoid a reference
        cycle."""
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
        """Whether the next call is as fast as all later ones."""
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
                stream=torch.cuda.Stream(self._device),  # torch's own may belong to another device
                capture_error_mode="thread_local",  # ignore what other threads do
            ),
        ):
            self._output = function(*self._inputs)
        return graph

    def _send(self, inputs: tuple[Tensor, ...]) -> None:
        """Send all inputs in one copy, through pinned memory that the allocator keeps until it is done."""
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
    """The passes of one batch, by name. A new batch with other tensors must be recorded again.

    With `records=False` passes are launched kernel by kernel, for a network that no graph can record.
    """

    def __init__(self, device: torch.device, *, records: bool = True) -> None:
        self._device, self._records = device, records
        self._known: dict[Any, Replayed] = {}
        self.forget()

    def __call__(self, name: Any, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run a function, as a replay once it is recorded under this name."""
        if name not in self._known:
            self._known[name] = Replayed(self._device, self._pool, records=self._records)
        return self._known[name](function, *inputs)

    def is_ready(self, name: Any) -> bool:
        """Whether the function under this name runs at full speed, with everything compiled and recorded."""
        return name in self._known and self._known[name].is_ready

    def forget(self) -> None:
        """Drop all recordings, which are no longer valid."""
        self._known.clear()
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection: freeing a graph while another is being recorded spoils the recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
