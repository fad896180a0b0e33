"""D3PM: T discrete steps under noise of either kind, over a context or in blocks (Austin et al. 2021)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from bd3lm.diffusion import LevelSampler, Linear, NoiseSchedule, Uniform
from bd3lm.methods.base import NELBOS, Frame, NoisedTraining, at_least_one
from bd3lm.methods.corruption import CorruptionMethod, masked_writer
from bd3lm.methods.settings import UNMASKING, Settings
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import D3PM
from bd3lm.sampling import Ancestral, PosteriorWriter, Writer


@dataclass(frozen=True, kw_only=True)
class D3PMTraining(NoisedTraining):
    """The training options of D3PM."""

    auxiliary: float = 0.0
    """λ, the weight of a cross-entropy that is added to the bound."""

    def problems(self) -> Iterator[str]:
        if not 0.0 <= self.auxiliary < math.inf:
            yield f"auxiliary must be finite and not negative, got {self.auxiliary}"


@dataclass(frozen=True, kw_only=True)
class D3PMMethod(CorruptionMethod):
    """D3PM: T discrete steps under noise of either kind, over a whole context or in blocks.

    Uniform noise in blocks of 4: `--method.kind d3pm --method.process uniform --method.block_size 4`.
    Absorbing noise in blocks is block diffusion in discrete time, with its bound and its sampler. For uniform
    noise in continuous time use SEDD (`score_entropy`).
    """

    kind = "d3pm"
    title = "D3PM"
    Training = D3PMTraining
    default_steps = 1000
    weighs_in_steps = True
    drawn_estimators: ClassVar[Mapping[str, LevelSampler]] = {  # its noise levels are steps
        name: levels for name, levels in NELBOS.items() if not levels.least
    }

    steps: int = 1000
    """T, for the bound and for the sampler."""
    schedule: NoiseSchedule = field(default_factory=Linear)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from at_least_one("steps", self.steps)

    def objective(self, training: D3PMTraining, frame: Frame) -> D3PM:
        return D3PM(
            process=self.forward_process(frame),
            mask_id=frame.mask_id,
            steps=self.steps,
            schedule=self.schedule,
            levels=training.levels,
            auxiliary=training.auxiliary,
            block_size=self.block_size,
        )

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        settings.refuse(*UNMASKING, "projection", why="D3PM takes its own steps")
        steps = settings.steps or self.steps
        size = self.piece(frame.context)
        if self.process == "absorbing":  # revealing each step's tokens is the posterior
            reading = BlockReading(block_size=size, mask_id=frame.mask_id)
            return masked_writer(network, reading, frame.context, settings, Ancestral(steps, self.schedule))
        if size == frame.context:
            settings.refuse("stride", "cache", why="uniform noise covers a whole context")
        settings.refuse("stride", why=f"this model writes blocks of {size}")
        return PosteriorWriter(
            network,
            mask_id=frame.mask_id,
            context=frame.context,
            block_size=size,
            process=Uniform(frame.vocab_size),
            schedule=self.schedule,
            steps=steps,
            cache=settings.cache,
        )

    @property
    def writes_past_context(self) -> bool:
        return self.process == "absorbing" or super().writes_past_context
