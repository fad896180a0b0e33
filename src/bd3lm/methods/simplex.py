"""SSD-LM: Gaussian diffusion of a block on the simplex, after clean text (Han et al., arXiv 2210.17432)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from bd3lm.evaluation import Estimator
from bd3lm.methods.base import Frame, Method, Training, at_least_one, needs_mask_among_tokens
from bd3lm.methods.settings import SHARPENING, UNMASKING, Settings
from bd3lm.models import Denoiser
from bd3lm.objectives import SimplexDiffusionLoss
from bd3lm.sampling import SimplexWriter, Writer


@dataclass(frozen=True, kw_only=True)
class SimplexTraining(Training):
    """The training options of SSD-LM."""

    steps: int = 5000
    """The number of steps in the grid from which times are drawn."""

    def problems(self) -> Iterator[str]:
        yield from at_least_one("steps", self.steps)


@dataclass(frozen=True, kw_only=True)
class SimplexMethod(Method):
    """SSD-LM: Gaussian diffusion of a block on the simplex, after clean text. It has no likelihood."""

    kind = "simplex"
    title = "SSD-LM"
    Training = SimplexTraining
    default_top_p = 0.95
    default_steps = 1000
    greedy: ClassVar[Mapping[str, Any]] = MappingProxyType({"projection": "greedy"})
    no_likelihood = "SSD-LM (method kind simplex) has neither a likelihood nor a bound on one"

    block_size: int = 25
    """Tokens in a block. The last block of a sequence ends where the sequence ends."""
    simplex_scale: float = 5.0
    """K, the scale of the almost one-hot vectors: their entries are ±K."""

    def problems(self) -> Iterator[str]:
        yield from at_least_one("block_size", self.block_size)
        if not 0.0 < self.simplex_scale < math.inf:
            yield f"simplex_scale must be positive and finite, got {self.simplex_scale}"

    writer_draws = frozenset(SHARPENING)

    def conflicts(self, frame: Frame) -> Iterator[str]:
        yield from needs_mask_among_tokens(self.kind, frame)
        if self.block_size > frame.context:
            yield f"method.block_size must be at most the context {frame.context}, got {self.block_size}"

    def objective(self, training: SimplexTraining, frame: Frame) -> SimplexDiffusionLoss:
        return SimplexDiffusionLoss(
            block_size=self.block_size,
            mask_id=frame.mask_id,
            steps=training.steps,
            simplex_scale=self.simplex_scale,
        )

    def validation(self, training: SimplexTraining, frame: Frame) -> SimplexDiffusionLoss:
        """Its cross-entropy on pure noise, where nothing can be copied."""
        return replace(self.objective(training, frame), pure_noise=True)

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        settings.refuse(
            *UNMASKING,
            "stride",
            "temperature",
            "top_k",
            "top_p_rule",
            why="SSD-LM draws with its projection",
        )
        if settings.projection == "greedy":
            settings.refuse("top_p", why="the greedy projection takes the likeliest token")
        return SimplexWriter(
            network,
            mask_id=frame.mask_id,
            context=frame.context,
            block_size=self.block_size,
            simplex_scale=self.simplex_scale,
            steps=settings.steps or self.default_steps,
            projection=settings.projection_rule(),
            cache=settings.cache,
        )

    def settled(self, settings: Settings) -> Settings:
        return settings if settings.projection == "greedy" else super().settled(settings)

    def estimator(self, name: str, frame: Frame) -> Estimator:
        raise ValueError(self.no_likelihood)

    @property
    def uncovers(self) -> bool:
        return False
