"""AdamW, its learning rate as a function of the step, and one pass over the gradients before it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bd3lm.training.distributed import Engine, local

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s: a gradient of zero stays zero


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its rate. The paper prints 3e-4, constant after 2,500 steps of linear warm-up (Suppl. C.2).

    It leaves out the rest; betas, eps, weight decay and the clip norm are the reference implementation's.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only; never to embeddings, norms and biases."""
    warmup_steps: int = 2500
    decay: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: float = 0.1
    """Where a cosine or a line ends, as a part of lr."""
    decay_steps: int | None = None
    """How many last steps a line takes to fall, after a constant rate; by default all after the warm-up."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient; None leaves it alone."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be finite and not negative, got {self.weight_decay}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if self.decay not in ("constant", "cosine", "linear"):
            raise ValueError(f"decay must be 'constant', 'cosine' or 'linear', got {self.decay!r}")
        if self.decay_steps is not None and (self.decay != "linear" or self.decay_steps < 1):
            raise ValueError(
                f"decay_steps must be at least 1 and is for decay 'linear' only, "
                f"got {self.decay_steps} with decay {self.decay!r}"
            )
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio must lie in [0, 1], got {self.min_lr_ratio}")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive or None, got {self.clip_norm}")


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """The rate of update `step` = 0, 1, .. of `total_steps`.

    It rises linearly from 0 at step 0 to lr at step `warmup_steps`, then stays, or falls to lr · min_lr_ratio
    at step `total_steps`: along half a cosine, or along a line over the last `decay_steps`.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if step < settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.decay == "constant":
        return settings.lr
    steps = max(1, total_steps - settings.warmup_steps)
    if settings.decay_steps is not None:
        steps = min(steps, settings.decay_steps)
    progress = min(1.0, max(0.0, 1.0 - (total_steps - step) / steps))
    height = 1.0 - progress if settings.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    least = settings.min_lr_ratio
    return settings.lr * (least + (1.0 - least) * height)


def make_optimizer(
    settings: OptimizerSettings, parameters: Mapping[str, Tensor], device: torch.device
) -> torch.optim.AdamW:
    """AdamW over named parameters, in as few kernels as the device allows."""
    on_gpu = device.type == "cuda"
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for name, parameter in parameters.items():
        matrix = parameter.ndim >= 2 and "embedding" not in name.split(".")
        (decayed if settings.weight_decay and matrix else plain).append(parameter)
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in ((decayed, settings.weight_decay), (plain, 0.0))
        if members
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True if on_gpu else None,
        foreach=None if on_gpu else True,
    )


@torch.no_grad()
def apply_gradients(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    *,
    factor: Tensor,
    clip_norm: float | None,
    engine: Engine,
) -> Tensor:
    """Scale all gradients by `factor`, clip them, step, and drop them; the norm before clipping is returned.

    Scaling and clipping are one multiplication, and everything stays on the device: the host does not wait.
    A norm that is not finite spoils the parameters; check it before saving them.
    """
    norm = engine.grad_norm(parameters) * factor.abs()
    if clip_norm is not None:
        factor = factor * (clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
    # The kernel takes its factor as a plain tensor, which cannot be mixed with sharded ones.
    if optimizer.defaults.get("fused") and engine.parallel != "fsdp":
        _fused_step(optimizer, factor)
    else:
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def _fused_step(optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
    """Gradients are scaled inside the optimizer's kernel, which divides by what torch's GradScaler sets."""
    optimizer.grad_scale = factor.float().reciprocal()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
