"""AdamW, its learning rate per step, and one pass that scales and clips the gradients before it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bd3lm.training.distributed import Engine, local
from bd3lm.training.settings import OptimizerSettings

_CLIP_EPSILON = 1e-6  # same as torch.nn.utils.clip_grad_norm_: a gradient of zero stays zero


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """The rate of update `step` = 0, 1, .. of `total_steps`.

    It rises linearly from 0 at step 0 to lr at step `warmup_steps`. Then it stays constant or falls to lr ·
    min_lr_ratio at step `total_steps`: along half a cosine, or linearly over the last `decay_steps`.
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
    """Scale all gradients by `factor`, clip them, step and drop them. Returns the norm before clipping.

    Scaling and clipping are one multiplication, and everything stays on the device: the host does not wait. A
    norm that is not finite spoils the parameters, so check it before saving them.
    """
    norm = engine.grad_norm(parameters) * factor.abs()
    if clip_norm is not None:
        factor = factor * (clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
    # The fused kernel takes its factor as a plain tensor, which cannot be mixed with sharded ones.
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
    """Step with the gradients scaled inside the optimizer's kernel, which divides by the scale that torch's
    GradScaler would set."""
    optimizer.grad_scale = factor.float().reciprocal()  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
