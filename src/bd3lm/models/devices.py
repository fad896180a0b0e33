"""Moving tensors between the host and a device, and what a device can do."""

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
