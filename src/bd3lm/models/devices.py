"""Choosing a device, moving tensors to and from it, and what it can run and hold."""

import os
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from bd3lm.limits import check_device


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without waiting for the device; from a CPU to a GPU through pinned memory.

    Only a copy to the host waits: otherwise the host would read the tensor too early.
    """
    device = torch.device(device)
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


@lru_cache(maxsize=64)
def memory_of(device: torch.device) -> int | None:
    """The bytes of a device's memory, used or free; None if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def require_room(least: int, device: torch.device, *, what: str) -> None:
    """Refuse something that needs at least this many bytes if the device has fewer.

    The system might grant the memory anyway, and kill the process once it writes to it.
    """
    memory = memory_of(device) if device.type in ("cpu", "cuda") else None
    if memory is not None and least > memory:
        raise ValueError(
            f"{what} must fit in memory: it needs at least {least / 2**30:,.1f} GiB, and {device} has "
            f"{memory / 2**30:,.1f} GiB"
        )


@lru_cache(maxsize=64)
def runs_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on this device: an NVIDIA GPU from Ampere on, with Triton installed."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
    )


def pick_device(device: torch.device | str | None, local_rank: int | None = None) -> torch.device:
    """The requested device, by default a GPU if there is one. Raises a ValueError if it does not exist.

    A GPU without a number means the GPU of the local rank, or torch's current GPU if there is no rank.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(str(device))
    asked = torch.device(device)
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu, because torch finds no GPU it can use, got {str(device)!r}")
    if asked.type != "cuda":
        return asked
    if asked.index is not None:
        if asked.index >= torch.cuda.device_count():
            raise ValueError(
                f"device must be one of the GPUs cuda:0 to cuda:{torch.cuda.device_count() - 1}, got {asked}"
            )
        return asked
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"device 'cuda' needs a GPU for each process on this machine: there are "
            f"{torch.cuda.device_count()}, and LOCAL_RANK is {local_rank}"
        )
    return torch.device("cuda", local_rank)
