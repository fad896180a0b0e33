"""What SEDD and D3PM share: noise of either kind, over a context or in blocks. Also writers for masked
text."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from bd3lm.diffusion import ForwardProcess, LevelSampler, named_process
from bd3lm.evaluation import Estimator, Sampled
from bd3lm.methods.base import (
    NELBOS,
    Frame,
    Method,
    NoisedTraining,
    at_least_one,
    needs_mask_among_tokens,
    only_estimator,
)
from bd3lm.methods.settings import Settings
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import Objective
from bd3lm.objectives.corruption import CorruptionObjective
from bd3lm.sampling import BlockWriter, SlidingWriter, UnmaskingRule, Writer

ProcessName = Literal["absorbing", "uniform"]


def masked_writer(
    network: Denoiser,
    reading: BlockReading,
    context: int,
    settings: Settings,
    unmasking: UnmaskingRule | None,
) -> Writer:
    """The writer for masked text: block by block, or for one block of the whole context, in strides."""
    if reading.block_size == context:
        settings.refuse("cache", why="a network of one block has nothing to cache")
        return SlidingWriter(
            network,
            reading=reading,
            context=context,
            stride=settings.stride,
            unmasking=unmasking,
        )
    settings.refuse("stride", why=f"this model writes blocks of {reading.block_size}")
    return BlockWriter(
        network,
        reading=reading,
        context=context,
        unmasking=unmasking,
        cache=settings.cache,
    )


@dataclass(frozen=True, kw_only=True)
class CorruptionMethod(Method):
    """What SEDD and D3PM share: noise that masks tokens or replaces them, over a whole context or in blocks.

    With blocks this is block diffusion of the process (section 3.1): each block is diffused given the clean
    text before it, bounds are sums over blocks, and texts can continue past the context.
    """

    Training: ClassVar[type[NoisedTraining]] = NoisedTraining
    paper_estimator = "nelbo"
    drawn_estimators: ClassVar[Mapping[str, LevelSampler]] = NELBOS
    """The estimators of its bound, and how each one draws noise levels."""

    process: ProcessName = "absorbing"
    """Whether noise masks tokens or replaces them by random tokens."""
    block_size: int | None = None
    """Tokens in a block. None is one block of the whole context."""

    def problems(self) -> Iterator[str]:
        if self.block_size is not None:
            yield from at_least_one("block_size", self.block_size)

    def conflicts(self, frame: Frame) -> Iterator[str]:
        yield from needs_mask_among_tokens(self.kind, frame)
        if frame.context % self.piece(frame.context):
            yield f"method.block_size must divide the context {frame.context}, got {self.block_size}"

    def resolved(self, context: int) -> Self:
        return replace(self, block_size=None) if self.block_size == context else self

    @abstractmethod
    def objective(self, training: Any, frame: Frame) -> CorruptionObjective:
        """The training loss, which with other noise levels is also the bound."""

    def forward_process(self, frame: Frame) -> ForwardProcess:
        return named_process(self.process, vocab_size=frame.vocab_size, mask_id=frame.mask_id)

    def validation(self, training: NoisedTraining, frame: Frame) -> Objective:
        """Its bound with noise levels assigned at random, however it is trained."""
        return self.objective(replace(training, strata="permuted"), frame)

    def estimator(self, name: str, frame: Frame) -> Estimator:
        drawn = self.drawn_estimators
        only_estimator(drawn, name, f"method kind {self.kind}, whose likelihood is only bounded")
        known = "nelbo" if name == "auto" else name
        return Sampled(known, replace(self.objective(self.Training(), frame), levels=drawn[known]))

    def piece(self, context: int) -> int:
        return context if self.block_size is None else self.block_size

    @property
    def writes_past_context(self) -> bool:
        return self.block_size is not None

    @property
    def uncovers(self) -> bool:
        return self.process == "absorbing"

    def scoring_unit(self, context: int) -> int:
        return self.piece(context) if self.process == "absorbing" else 1

    def scored_multiple(self, context: int) -> int:
        """Whole blocks under uniform noise: the sampler writes whole blocks, so only those have a
        likelihood."""
        return self.piece(context) if self.process == "uniform" else 1

    def title_for(self, context: int) -> str:
        noise = ", uniform noise" if self.process == "uniform" else ""
        blocks = "" if self.piece(context) == context else f", blocks of {self.block_size}"
        return f"{self.title}{noise}{blocks}"
