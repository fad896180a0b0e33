"""The distributed engine: this process's role, and how processes share parameters and gradients.

It uses torch.distributed as `torchrun` starts it; no other file of this package calls torch.distributed. A
network knows nothing about it: DDP copies the parameters to every process, FSDP2 shards each of them by rows.
After `wrap`, the same few methods work with either of them and on a single process.

Everything that processes must agree on (stopping, errors, short texts) goes through gloo on CPU tensors, so
it never waits for an accelerator. Objects travel as JSON, never as pickle.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistNetworkError, DistStoreError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from bd3lm.models.devices import pick_device

Parallel = Literal["none", "ddp", "fsdp"]
Precision = Literal["fp32", "bf16"]

# torchrun ends the survivors of a dead process within seconds, and gloo notices a closed connection at once.
# This timeout is the last resort, for a process that hangs. It must leave one process time to write a large
# checkpoint.
_TIMEOUT = timedelta(minutes=20)

_WANTED = "wanted: "  # precedes the name of a tensor that the main process requests

JOIN_TIMEOUT = timedelta(minutes=5)
"""How long the processes wait for one another at the start."""

# gloo's threads release the tensors of a collective only after it has returned, and need the interpreter for
# that. If the interpreter has ended by then, the process aborts after all its work is done.
_FAREWELL = 0.2  # seconds
_LOOK_AGAIN = 0.1  # seconds between two checks of who has joined
_LISTED = 8  # how many missing processes an error names


class FirstWeights(Protocol):
    """The first weights of a network. They need not all exist at once."""

    def names(self) -> Collection[str]:
        """The names of the parameters and buffers."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop − 1 of one of them; a scalar counts as one row."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One process among `world`; by default a single process on the CPU."""

    parallel: Parallel = "none"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(
        cls,
        *,
        parallel: Parallel = "none",
        device: torch.device | str | None = None,
        timeout: timedelta = _TIMEOUT,
        join_timeout: timedelta = JOIN_TIMEOUT,
    ) -> "Engine":
        """The process that torchrun's environment variables describe, or a single process if there are none.

        By default the device is this process's GPU, or the CPU if there is no GPU. A single process has
        nothing to share, so `parallel` becomes "none": a configuration for a cluster also runs on one device.
        If a process has not joined within `join_timeout`, an error names it.
        """
        if parallel not in ("none", "ddp", "fsdp"):
            raise ValueError(f"parallel must be 'none', 'ddp' or 'fsdp', got {parallel!r}")
        rank, world, local_rank = (
            _whole_number(name, least) for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        here = pick_device(device, local_rank)
        if here.type == "cuda":
            torch.cuda.set_device(here)
        if world == 1:
            return cls(device=here)
        if parallel == "none":
            raise ValueError(f"parallel must be 'ddp' or 'fsdp' with {world} processes, got 'none'")
        backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
        store = _joined(rank, world, join_timeout)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        return cls(parallel=parallel, device=here, rank=rank, world=world)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self.world > 1 and error is not None and _is_of_connection(error):
            raise ConnectionError(
                f"another of the {self.world} processes has ended or cannot be reached (noticed by process "
                f"{self.rank}); the checkpoints are intact: restart all processes with --resume"
            ) from error

    def close(self) -> None:
        """Leave the process group. This waits for nobody, since another process may have died."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(_FAREWELL)

    @property
    def is_main(self) -> bool:
        """Whether this process prints, and writes the files that all share."""
        return self.rank == 0

    @property
    def gradient_scale(self) -> float:
        """Multiply a loss by this number, and its gradients become sums over the processes.

        DDP and FSDP2 average gradients. Our losses are sums, divided once by a count over all processes, so a
        single process with the whole batch would compute the sum.
        """
        return float(self.world)

    def wrap(self, module: nn.Module, *, layers: Sequence[nn.Module], precision: Precision) -> nn.Module:
        """Move a module to the device and share its parameters. Call the module that this returns.

        Every use of a parameter must happen inside the wrapped module's `forward`. All processes start from
        the parameters of the first one. Under FSDP2 each of `layers`, and the rest as one unit, is gathered
        just before its use and freed after it. The parameters become sharded in place, so take them from the
        module after wrapping. There, `precision` "bf16" gathers parameters and computes in bfloat16, and adds
        gradients in float32. Otherwise the parameters stay as they are, and autocast sets the precision.

        Under FSDP2 the module may have been built without storage, on torch's device "meta". Each process
        then allocates only its own rows, which `fill` must write; nothing is sent.
        """
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be 'fp32' or 'bf16', got {precision!r}")
        if self.parallel == "fsdp":
            return self._shard(module, layers, precision)
        module.to(self.device)
        if self.parallel == "none":
            return module
        return DistributedDataParallel(
            module,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )

    def _shard(self, module: nn.Module, layers: Sequence[nn.Module], precision: Precision) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None,
            reduce_dtype=torch.float32,
            # Layers receive rotary angles besides hidden states; the angles must stay in float32.
            cast_forward_inputs=False,
        )
        is_empty = any(parameter.is_meta for parameter in module.parameters())
        for unit in (*layers, module):  # one at a time: the device never holds all of a large network
            if not is_empty:
                unit.to(self.device)
                for parameter in unit.parameters():
                    if not isinstance(parameter, DTensor):
                        dist.broadcast(parameter.detach(), src=0)
            # By default FSDP2 leaves the root's parameters whole after a forward pass without a backward
            # pass. The next pass would then miss weights exchanged in between (EMA).
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        if is_empty:
            valued = {name: each for name, each in module.named_buffers() if not each.is_meta}
            module.to_empty(device=self.device)
            for name, buffer in module.named_buffers():
                if name in valued:
                    buffer.copy_(valued[name])
        return module

    @contextmanager
    def accumulating(self, wrapped: nn.Module, *, last: bool) -> Iterator[None]:
        """One micro-batch, forward and backward. Gradients are exchanged only in the `last` micro-batch of a
        step."""
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
            yield
        elif isinstance(wrapped, DistributedDataParallel) and not last:
            with wrapped.no_sync():
                yield
        else:
            yield

    @torch.no_grad()
    def grad_norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The L2 norm of all gradients as a float32 tensor on the device, without waiting for it."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        shards = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        square = _sum_of_squares(whole, self.device)
        if shards:
            square = square + self.all_reduce_sum(_sum_of_squares(shards, self.device))
        return square.sqrt()

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place and on its own device, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def any_true(self, flag: bool) -> bool:
        """Whether the flag is true on any process. Every process gets the same answer."""
        if self.world == 1:
            return flag
        seen = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return bool(seen.item())

    def barrier(self) -> None:
        """Wait until every process is here (the host, not its accelerator)."""
        self.any_true(False)

    def with_whole(
        self, tensors: Mapping[str, Tensor], work: Callable[[Callable[[str], Tensor]], None]
    ) -> None:
        """Let the main process work with whole tensors, one at a time, requested by name.

        If tensors are sharded, all processes take part in gathering each one, so all must call this. A disk
        error on the main process is reported to all.
        """
        problem = ""

        def fetch(name: str) -> Tensor:
            self.broadcast_text(f"{_WANTED}{name}")
            return whole(tensors[name])

        if not self.is_main:
            while (asked := self.broadcast_text("")).startswith(_WANTED):
                whole(tensors[asked.removeprefix(_WANTED)])
            if asked:
                raise OSError(errno.EIO, asked)
            return
        try:
            work(fetch)
        except OSError as error:
            problem = f"the main process could not continue: {error.strerror or error}"
            raise
        finally:
            self.broadcast_text(problem)

    def gather_text(self, text: str) -> list[str]:
        """The texts of all processes, by rank, on every process."""
        if self.world == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)
        size = torch.tensor([len(text.encode())])
        sizes = [torch.zeros_like(size) for _ in range(self.world)]
        dist.all_gather(sizes, size)
        lengths = [int(size.item()) for size in sizes]
        mine = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        mine[: len(data)] = data
        parts = [torch.zeros_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        return [part[:length].numpy().tobytes().decode() for part, length in zip(parts, lengths, strict=True)]

    def broadcast_text(self, text: str) -> str:
        """The main process's text, on every process."""
        return self.gather_text(text if self.is_main else "")[0]


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, sharing memory: the whole tensor unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on the CPU. If it is sharded, every process must call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).cpu()


def held_rows(tensor: Tensor) -> tuple[int, int]:
    """The first row that this process holds, and the row after its last. A scalar counts as one row."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not isinstance(tensor, DTensor):
        return 0, rows
    if tensor.device_mesh.ndim != 1 or tensor.placements[0] != Shard(0):
        raise ValueError(f"a sharded tensor must be cut by rows over one mesh, got {tensor.placements}")
    each = -(-rows // tensor.device_mesh.size())  # as torch.chunk: the last processes may hold fewer, or none
    start = min(rows, each * tensor.device_mesh.get_local_rank())
    stop = min(rows, start + each)
    if local(tensor).shape[0] != stop - start:
        raise RuntimeError(f"expected to hold rows {start} to {stop}, but hold {local(tensor).shape[0]}")
    return start, stop


@torch.no_grad()
def fill(module: nn.Module, weights: FirstWeights) -> None:
    """Write the rows of a module's parameters and buffers that this process holds, tensor by tensor."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in weights.names():
            start, stop = held_rows(tensor)
            if start < stop:
                local(tensor).copy_(weights.rows(name, start, stop))


def _joined(rank: int, world: int, patience: timedelta) -> Store:
    """The store that all processes have joined. A TimeoutError names those that have not."""
    place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    address, _, port = place.rpartition(":")
    if not address or not port.isdecimal():
        raise ValueError(
            "the environment variables MASTER_ADDR and MASTER_PORT must say where processes meet (torchrun "
            f"sets them), got {place!r}"
        )
    until = time.monotonic() + patience.total_seconds()
    missing = [0]  # process 0 keeps the store, unless torchrun does
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(rendezvous("env://", rank, world, timeout=patience))
        else:
            if rank:
                _await_listener(address, int(port), until)
            store = TCPStore(address, int(port), world, rank == 0, timeout=patience, wait_for_workers=False)
        present = PrefixStore("bd3lm/present", store)
        present.set(str(rank), "")
        missing = list(range(world))
        while missing := [other for other in missing if not present.check([str(other)])]:
            if time.monotonic() > until:
                raise DistStoreError
            time.sleep(_LOOK_AGAIN)
    except DistError:
        named = ", ".join(map(str, missing[:_LISTED])) + (", .." if len(missing) > _LISTED else "")
        raise TimeoutError(
            f"all {world} processes must join at {place} within {patience.total_seconds():g} s "
            f"(--join-timeout), missing processes: {named}"
        ) from None
    return store


def _await_listener(address: str, port: int, until: float) -> None:
    """Wait until somebody listens there: a store that finds nobody prints a page about it."""
    while True:
        with suppress(OSError), socket.create_connection((address, port), timeout=_LOOK_AGAIN * 10):
            return
        if time.monotonic() > until:
            raise DistNetworkError
        time.sleep(_LOOK_AGAIN)


def _is_of_connection(error: BaseException) -> bool:
    """Whether an error is one that torch raises when another process is gone."""
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


def _sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    if not tensors:
        return torch.zeros((), device=device)
    return get_total_norm(tensors).to(device, torch.float32).square()


def _whole_number(name: str, least: int) -> int:
    text = os.environ.get(name, str(least))
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"the environment variable {name} must be a number from {least}, got {text!r}")
    return int(text)
