"""Choosing a device, moving tensors between it and the host, and what it can do."""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for the device: from a CPU to a GPU through pinned memory."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


@lru_cache(maxsize=64)
def runs_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run there: an NVIDIA GPU from Ampere on, where Triton is installed."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and find_spec("triton") is not None
    )


def pick_device(device: torch.device | str | None, local_rank: int = 0) -> torch.device:
    """The device that was asked for, or the best there is; a ValueError where it is not there."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {str(device)!r}") from None
    if asked.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {str(device)!r}")
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu where there is no GPU that torch can use, got {str(device)!r}")
    if asked.type != "cuda" or asked.index is not None:
        return asked
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"device 'cuda' needs a GPU for each process of this machine: there are "
            f"{torch.cuda.device_count()}, and LOCAL_RANK is {local_rank}"
        )
    return torch.device("cuda", local_rank)
