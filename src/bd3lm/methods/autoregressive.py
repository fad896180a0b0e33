"""Next-token prediction (eq. 1)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from bd3lm.data.packed import Packing
from bd3lm.evaluation import CausalFills, Estimator, Sampled
from bd3lm.methods.base import Frame, Law, Method, Training, only_estimator
from bd3lm.methods.settings import UNMASKING, Settings
from bd3lm.models import Denoiser
from bd3lm.objectives import Autoregressive, Objective
from bd3lm.sampling import AutoregressiveWriter, FillWeights, GuidedWriter, SpeculativeWriter, Writer


@dataclass(frozen=True, kw_only=True)
class AutoregressiveTraining(Training):
    """The training options of next-token prediction."""

    random_batch: bool = False
    """The paper's case study: keep each token's loss with a probability drawn for its sequence."""

    @property
    def variant(self) -> str:
        return ", random batch size" if self.random_batch else ""


@dataclass(frozen=True, kw_only=True)
class AutoregressiveMethod(Method):
    """Next-token prediction. The mask token is never predicted."""

    kind = "autoregressive"
    title = "autoregressive"
    Training: ClassVar[type[Any]] = AutoregressiveTraining
    paper_estimator = "exact"

    @property
    def laws(self) -> tuple[Law, ...]:
        return ("causal",)

    def conflicts(self, frame: Frame) -> Iterator[str]:
        if frame.told_noise:
            yield "network.time_conditioning must be false for an autoregressive method, which has no noise"

    def objective(self, training: Any, frame: Frame) -> Objective:
        return Autoregressive(
            mask_id=frame.mask_id, score_first=self.score_first, random_batch=training.random_batch
        )

    def validation(self, training: Any, frame: Frame) -> Objective:
        return self._likelihood(frame)

    def _likelihood(self, frame: Frame) -> Autoregressive:
        return Autoregressive(mask_id=frame.mask_id, score_first=self.score_first)

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        settings.refuse(
            *UNMASKING,
            "stride",
            "steps",
            "projection",
            why="an autoregressive model writes token by token",
        )
        if settings.is_guided:
            return self._guided(network, settings, frame)
        biased = settings.logit_bias is not None
        if biased:
            _without_speculation(settings, "with logit_bias, with which no guess can be verified")
        speculation = self.speculation(settings)
        if speculation is None:
            return AutoregressiveWriter(
                network,
                mask_id=frame.mask_id,
                context=frame.context,
                score_first=self.score_first,
                cache=settings.cache,
                biased=biased,
            )
        if not settings.cache:
            raise ValueError("cache must be on for speculation, which needs it to verify drafts, got False")
        return SpeculativeWriter(
            network,
            reading=self.drafts(frame),
            speculation=speculation,
            context=frame.context,
            score_first=self.score_first,
        )

    def _guided(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        _without_speculation(
            settings, "for a text with a grammar, since every token decides what may come next"
        )
        if not settings.cache:
            raise ValueError("cache must be on for a text with a grammar, got False")
        return GuidedWriter(
            network,
            mask_id=frame.mask_id,
            context=frame.context,
            score_first=self.score_first,
            biased=settings.logit_bias is not None,
        )

    @property
    def can_be_guided(self) -> bool:
        return True

    def settled(self, settings: Settings) -> Settings:
        if settings.tokens_per_pass == 1:  # which it does anyway
            settings = replace(settings, tokens_per_pass=None)
        return super().settled(settings)

    def estimator(self, name: str, frame: Frame) -> Estimator:
        only_estimator(["exact"], name, "an autoregressive model, whose likelihood needs no bound")
        return Sampled("exact", self._likelihood(frame))

    def fill_weights(self, settings: Settings, frame: Frame) -> FillWeights | str:
        if settings.sharpening().is_greedy:
            return "if the likeliest token is always taken, since all fills would be equal"
        return CausalFills(mask_id=frame.mask_id, score_first=self.score_first)

    def packing(self, context: int) -> Packing:
        return Packing()

    def piece(self, context: int) -> int:
        return 1

    @property
    def is_causal_lm(self) -> bool:
        return not self.score_first  # others do not read a mask first

    def in_reference(self, context: int) -> dict[str, Any]:
        return {"block_size": 1, "cross_attn": False, "causal": True}


def _without_speculation(settings: Settings, when: str) -> None:
    if settings.speculation is not None and settings.speculation.is_on:
        raise ValueError(f"speculation must be off {when}, got {settings.speculation}")
