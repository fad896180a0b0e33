"""Training and optimizer settings, as plain values that are checked without torch."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long to train, on how much at once, and how often to log, validate and save."""

    steps: int
    global_batch: int = 512
    """Sequences in a step, over all devices and micro-batches."""
    micro_batch: int | None = None
    """Sequences that a device processes at once; by default its whole share of the global batch."""
    seed: int = 0
    precision: Precision = "auto"
    """auto means bf16 on GPUs and fp32 on a CPU."""
    compile: Literal[True, False, "auto"] = "auto"
    """auto compiles on a GPU if at least 200 steps are left, enough to make up for the minute it takes."""
    recompute_activations: bool = False
    """Activation checkpointing: keep only the input of each layer and recompute the layer in the backward
    pass. It needs less memory and about a third more time; the gradients are the same."""
    ema_decay: float = 0.9999
    """Decay of the moving average of the weights. 0 keeps no average: the trained weights themselves are
    evaluated and released."""
    log_every: int = 10
    validate_every: int = 1000
    checkpoint_every: int = 1000
    adapt_every: int = 100
    """Steps between updates of an objective that learns (a proposal over counts)."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "global_batch",
            "log_every",
            "validate_every",
            "checkpoint_every",
            "adapt_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, got {self.micro_batch}")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ValueError(f"ema_decay must lie in [0, 1), got {self.ema_decay}")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision must be 'auto', 'fp32' or 'bf16', got {self.precision!r}")
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"compile must be true, false or 'auto', got {self.compile!r}")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning rate. The paper prints 3e-4, constant after 2,500 steps of linear warm-up
    (Suppl. C.2).

    It does not give the rest: betas, eps, weight decay and the clip norm come from the reference
    implementation.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only; never to embeddings, norms and biases."""
    warmup_steps: int = 2500
    """Steps in which the learning rate rises linearly from 0 to lr."""
    decay: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate falls after the warm-up."""
    min_lr_ratio: float = 0.1
    """The final learning rate of a cosine or linear decay, as a fraction of lr."""
    decay_steps: int | None = None
    """Length of a linear decay: how many of the last steps, after a constant rate. By default all steps after
    the warm-up."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient; None turns clipping off."""

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
                f"decay_steps must be at least 1 and needs decay 'linear', "
                f"got {self.decay_steps} with decay {self.decay!r}"
            )
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ValueError(f"min_lr_ratio must lie in [0, 1], got {self.min_lr_ratio}")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive or None, got {self.clip_norm}")
