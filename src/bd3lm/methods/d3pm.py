"""D3PM: a whole context in T discrete steps, under noise of either kind (Austin et al. 2021)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from bd3lm.diffusion import Linear, NoiseSchedule, Uniform
from bd3lm.methods.base import Frame, NoisedTraining, at_least_one
from bd3lm.methods.settings import Settings
from bd3lm.methods.whole_context import CorruptionMethod, whole_context_writer
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import D3PM
from bd3lm.sampling import Ancestral, PosteriorWriter, Writer


@dataclass(frozen=True, kw_only=True)
class D3PMTraining(NoisedTraining):
    """How D3PM is trained."""

    auxiliary: float = 0.0
    """λ, the weight of a cross-entropy beside the bound."""

    def problems(self) -> Iterator[str]:
        if not 0.0 <= self.auxiliary < math.inf:
            yield f"auxiliary must be finite and not negative, got {self.auxiliary}"


@dataclass(frozen=True, kw_only=True)
class D3PMMethod(CorruptionMethod):
    """D3PM: the whole context in T discrete steps, under noise of either kind."""

    kind = "d3pm"
    title = "D3PM"
    Training = D3PMTraining
    default_steps = 1000

    steps: int = 1000
    """T, of the bound and of the sampler."""
    schedule: NoiseSchedule = field(default_factory=Linear)

    def problems(self) -> Iterator[str]:
        yield from at_least_one("steps", self.steps)

    def objective(self, training: D3PMTraining, frame: Frame) -> D3PM:
        return D3PM(
            process=self.forward_process(frame),
            mask_id=frame.mask_id,
            steps=self.steps,
            schedule=self.schedule,
            levels=training.levels,
            auxiliary=training.auxiliary,
        )

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        settings.refuse("unmasking", "projection", why="D3PM takes its own steps")
        steps = settings.steps or self.steps
        if self.process == "absorbing":  # revealing what falls into a step is its posterior
            reading = BlockReading(block_size=frame.context, mask_id=frame.mask_id)
            return whole_context_writer(network, reading, settings, Ancestral(steps, self.schedule))
        settings.refuse("stride", "cache", why="uniform noise is over a whole context")
        return PosteriorWriter(
            network,
            mask_id=frame.mask_id,
            context=frame.context,
            process=Uniform(frame.vocab_size),
            schedule=self.schedule,
            steps=steps,
            sharpening=settings.sharpening(),
        )

    @property
    def writes_past_context(self) -> bool:
        return self.process == "absorbing"
