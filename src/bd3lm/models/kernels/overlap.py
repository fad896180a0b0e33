"""Triton: kernels that start while the one before them still runs. Imported only where there is CUDA.

In a chain of small kernels most of the time is spent between them. A kernel that is launched with `overlap`,
calls `start` first and `wait` before it touches anything but weights may begin as soon as all programs of the
one before it have begun. After `wait` all earlier kernels are done, since each waits for the one before it.
Weights are what no such kernel writes; what torch's own kernels wrote is there, as they let nothing overtake.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl


@lru_cache(maxsize=16)
def overlap(device: torch.device) -> dict[str, Any]:
    """Options of every launch: whether it may start before the launch before it has finished."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if can else {"OVERLAP": False}


@triton.jit
def start(OVERLAP: tl.constexpr):
    """Let the next kernel load its weights; it waits for all of this one before it looks at anything else."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Until all that earlier kernels write is there, and nothing they read is needed any more."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
