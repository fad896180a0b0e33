"""Triton: kernels that start while the previous one still runs. Imported only with CUDA.

In a chain of small kernels most of the time passes between them. A kernel launched with `overlap` may begin
as soon as all programs of the previous kernel have begun. It must call `start` first, and `wait` before it
touches anything but weights. After `wait` all earlier kernels are done, since each waits for the one before
it. Weights are safe to load early: no kernel of this kind writes them, and torch's own kernels let nothing
overtake them.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl


@lru_cache(maxsize=16)
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch options: whether the kernel may start before the previous one has finished."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if can else {"OVERLAP": False}


@triton.jit
def start(OVERLAP: tl.constexpr):
    """Let the next kernel load its weights. It waits for the end of this kernel before it reads anything
    else."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until earlier kernels have written all their results and no longer read anything."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
