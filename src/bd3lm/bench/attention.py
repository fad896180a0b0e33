"""Attention alone, under the training layout: FlexAttention against a dense mask, forward and backward."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from bd3lm.bench.shapes import Shape
from bd3lm.bench.timing import Timing, time_calls
from bd3lm.models import Backend, Bidirectional, BlockDiffusion, Causal, Layout, attend, render


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One layer's attention over a batch, with one backend."""

    shape: Shape = field(default_factory=Shape)
    batch_size: int = 32
    backend: Backend = "auto"
    backward: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def title(self) -> str:
        shape = self.shape
        network = shape.network
        heads = f"{network.heads} heads of {network.head_dim}"
        if network.groups > 1:
            heads += f", {network.kv_heads} of keys and values"
        return f"{shape.method_title}, {heads}, context {shape.context:,}, batch {self.batch_size}"

    def as_computed(self, device: torch.device) -> Self:
        """Equal for cases that are the same computation on a device."""
        return replace(self, backend=self.shape.attention_on(device, self.backend))

    def layout(self) -> Layout:
        length = self.shape.context
        if self.shape.method == "ar":
            return Causal(length)
        if self.shape.one_block:
            return Bidirectional(length)
        joint = self.shape.method == "joint"
        return BlockDiffusion(length, self.shape.block_size, causal_clean=joint, read_clean=joint)


def measure_attention(
    case: AttentionCase, *, device: torch.device, warmup: int = 3, repeats: int = 20
) -> Timing:
    """Seconds per call for one layer, in bfloat16 on a GPU and float32 elsewhere."""
    if case.backend == "flex" and device.type == "cpu":
        raise ValueError("backend must be 'auto' or 'dense' on a CPU, where 'flex' has no backward pass")
    layout, shape = case.layout(), case.shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    network = shape.network

    def heads(number: int) -> Tensor:
        size = (case.batch_size, layout.size, number, network.head_dim)
        drawn = torch.randn(size, generator=generator, device=device).to(dtype)
        return drawn.transpose(1, 2).requires_grad_(case.backward)

    query, key, value = heads(network.heads), heads(network.kv_heads), heads(network.kv_heads)
    slope = heads(network.heads).detach()
    mask = render(layout, (0, layout.size), device, case.backend)

    def once() -> None:
        attended = attend(query, key, value, mask)
        if case.backward:
            torch.autograd.grad(attended, (query, key, value), slope)

    return time_calls(once, device=device, warmup=warmup, repeats=repeats)
