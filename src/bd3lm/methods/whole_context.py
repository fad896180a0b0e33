"""Methods of whole contexts: one block that slides, or noise of either kind over all of a text."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from bd3lm.diffusion import ForwardProcess, named_process
from bd3lm.evaluation import Estimator, Sampled
from bd3lm.methods.base import NELBOS, Frame, Method, NoisedTraining, only_estimator
from bd3lm.methods.settings import Settings
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import Objective
from bd3lm.sampling import SlidingWriter, UnmaskingRule, Writer

ProcessName = Literal["absorbing", "uniform"]


def whole_context_writer(
    network: Denoiser, reading: BlockReading, settings: Settings, unmasking: UnmaskingRule | None
) -> Writer:
    """What writes texts of one block; past the context it slides on."""
    settings.refuse("cache", why="a network of one block has nothing to cache")
    return SlidingWriter(
        network,
        reading=reading,
        context=reading.block_size,
        stride=settings.stride,
        unmasking=unmasking,
        sharpening=settings.sharpening(),
    )


@dataclass(frozen=True, kw_only=True)
class CorruptionMethod(Method):
    """What SEDD and D3PM share: a whole context under noise that masks tokens or replaces them."""

    Training: ClassVar[type[NoisedTraining]] = NoisedTraining
    paper_estimator = "nelbo"

    process: ProcessName = "absorbing"
    """Whether noise masks tokens or replaces them by random ones."""

    def forward_process(self, frame: Frame) -> ForwardProcess:
        return named_process(self.process, vocab_size=frame.vocab_size, mask_id=frame.mask_id)

    def validation(self, training: NoisedTraining, frame: Frame) -> Objective:
        """Its bound, for which noise levels are spread at random, however it is trained."""
        return self.objective(replace(training, strata="permuted"), frame)

    def estimator(self, name: str, frame: Frame) -> Estimator:
        only_estimator(NELBOS, name, f"method kind {self.kind}, whose likelihood is only bounded")
        known = "nelbo" if name == "auto" else name
        return Sampled(known, self.objective(self.Training(strata=NELBOS[known]), frame))

    @property
    def uncovers(self) -> bool:
        return self.process == "absorbing"

    @property
    def scores_whole_contexts(self) -> bool:
        """Under uniform noise: the sampler writes whole contexts, and so it must be asked."""
        return self.process == "uniform"

    def scoring_unit(self, context: int) -> int:
        return context if self.process == "absorbing" else 1

    def title_for(self, context: int) -> str:
        return f"{self.title}, uniform noise" if self.process == "uniform" else self.title
