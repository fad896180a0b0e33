"""Choosing a device, moving tensors between it and the host, and what it can do."""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from bd3lm.limits import check_device


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device, without waiting for the device: from a CPU to a GPU through pinned memory.

    Only a copy to the host waits: without that the host would read it too early.
    """
    device = torch.device(device)
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


@lru_cache(maxsize=64)
def runs_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run there: an NVIDIA GPU from Ampere on, where Triton is installed."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
    )


def pick_device(device: torch.device | str | None, local_rank: int | None = None) -> torch.device:
    """The device that was asked for, by default a GPU where there is one; a ValueError if it does not exist.

    A GPU without a number is that of the local rank, or torch's current one without a rank.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(str(device))
    asked = torch.device(device)
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where there is no GPU that torch can use, got {str(device)!r}")
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
            f"device 'cuda' needs a GPU for each process of this machine: there are "
            f"{torch.cuda.device_count()}, and LOCAL_RANK is {local_rank}"
        )
    return torch.device("cuda", local_rank)
