"""Training steps as the trainer runs them: forward, backward, clipping, AdamW and EMA, on random tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Self

import torch
from torch import Tensor

from bd3lm.bench.profile import profile_calls
from bd3lm.bench.shapes import Shape
from bd3lm.bench.timing import Timing, time_calls
from bd3lm.diffusion import Counts, MaskingRule, Times
from bd3lm.methods import AutoregressiveTraining, BlockDiffusionTraining, Training
from bd3lm.models import Backend, Transformer
from bd3lm.objectives import Objective, TokenBatch
from bd3lm.training import CheckpointStore, Engine, OptimizerSettings, Trainer, TrainSettings

PROFILED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """One way to train: a shape, a batch, and the implementations to use."""

    shape: Shape = field(default_factory=Shape)
    batch_size: int = 32
    compile: bool = True
    algorithm: Literal["single_pass", "two_pass"] = "single_pass"
    attention: Backend = "auto"
    ema: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.algorithm == "two_pass" and (self.shape.method == "ar" or self.shape.one_block):
            raise ValueError(
                f"two passes need a clean text before the block, and {self.shape.method_title} has none"
            )

    def as_computed(self, device: torch.device) -> Self:
        """Equal for cases that are the same computation on a device."""
        return replace(self, attention=self.shape.attention_on(device, self.attention))

    def objective(self) -> Objective:
        config = self.shape.config()
        training: Training = AutoregressiveTraining()
        if self.shape.method != "ar":
            masking: MaskingRule = Times() if self.shape.method == "mdlm" else Counts()
            joint = self.shape.method == "joint"
            training = BlockDiffusionTraining(
                masking=masking, algorithm=self.algorithm, next_token=1.0 if joint else 0.0
            )
        return config.method.objective(training, config.frame)


class _RandomTokens:
    """The same random tokens for every step; their values do not change the cost of a step."""

    def __init__(self, rows: int, shape: Shape) -> None:
        self.context = shape.context
        self._tokens = random_tokens(rows, shape)

    def batch(self, step: int, rows: slice | None = None) -> TokenBatch:
        return TokenBatch.of(self._tokens[rows or slice(None)])


def random_tokens(rows: int, shape: Shape) -> Tensor:
    """Tokens (rows, context) of every kind but the mask, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, shape.vocabulary - 1, (rows, shape.context), generator=generator)


def measure_training(
    case: TrainingCase, *, device: torch.device, warmup: int = 3, steps: int = 20, profile: bool = False
) -> Timing:
    """Seconds of each step, and the memory of training; a profile covers three more steps."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    with training_step(case, device=device, steps=warmup + steps) as step:
        timing = time_calls(step, device=device, warmup=warmup, repeats=steps)
        if profile:
            found = profile_calls(step, device=device, calls=PROFILED_STEPS, seconds=timing.median)
            timing = replace(timing, profile=found)
    return timing


@contextmanager
def training_step(case: TrainingCase, *, device: torch.device, steps: int) -> Iterator[Callable[[], None]]:
    """A function that runs a step of a run of `steps`; it may run more often. At the end an error if one was
    not finite."""
    torch.manual_seed(0)
    network = Transformer(case.shape.network)
    network.attention_backend = case.attention
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            network=network,
            objective=case.objective(),
            data=_RandomTokens(case.batch_size, case.shape),
            settings=TrainSettings(
                steps=steps,
                global_batch=case.batch_size,
                compile=case.compile,
                ema_decay=0.9999 if case.ema else 0.0,
            ),
            optimizer=OptimizerSettings(),
            engine=Engine(device=device),
            store=CheckpointStore(Path(folder)),
        )
        yield trainer.train_step
        try:
            trainer.require_finite()
        except FloatingPointError:  # its message is for a run with checkpoints
            raise FloatingPointError(
                f"the loss of {case.shape.title} or its gradient is not finite, so its time means nothing"
            ) from None
