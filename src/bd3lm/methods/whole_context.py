"""Methods of whole contexts: one block that slides, or noise of either kind over all of a text."""

from dataclasses import dataclass
from typing import Literal

from bd3lm.diffusion import ForwardProcess, named_process
from bd3lm.evaluation import Estimator, Sampled
from bd3lm.methods.base import Frame, Method, only_estimator
from bd3lm.methods.settings import Settings
from bd3lm.models import BlockReading, Denoiser
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

    paper_estimator = "nelbo"

    process: ProcessName = "absorbing"
    """Whether noise masks tokens or replaces them by random ones."""

    def forward_process(self, frame: Frame) -> ForwardProcess:
        return named_process(self.process, vocab_size=frame.vocab_size, mask_id=frame.mask_id)

    def estimator(self, name: str, frame: Frame) -> Estimator:
        only_estimator("nelbo", name, f"method kind {self.kind}, whose likelihood is only bounded")
        return Sampled("nelbo", self.validation(self.Training(), frame))

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
