"""Masked diffusion within blocks, autoregression between them (eq. 8). One block of the context is MDLM."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from bd3lm.data.packed import Packing
from bd3lm.diffusion import ClipSearch, Counts, MaskingRule, Times, check_lean
from bd3lm.evaluation import (
    Drafts,
    Enumerated,
    EnumeratedFills,
    Estimator,
    ImportanceWeighted,
    OrderedFills,
    Sampled,
)
from bd3lm.evaluation.exact import MAX_EXACT_BLOCK
from bd3lm.methods.autoregressive import AutoregressiveMethod
from bd3lm.methods.base import NELBOS, Frame, Law, Method, NoisedTraining, only_estimator
from bd3lm.methods.corruption import masked_writer
from bd3lm.methods.settings import Settings
from bd3lm.models import BlockReading, Denoiser
from bd3lm.objectives import BlockDiffusionLoss
from bd3lm.objectives.denoising import Algorithm
from bd3lm.sampling import FillWeights, FirstHitting, Speculation, SpeculativeBlockWriter, Writer
from bd3lm.sampling.speculative_blocks import check_speculation

_NEXT_TOKEN = 4.0  # the weight with which a joint model is tuned
_LARGEST_EXACT = 8  # the largest block for which "auto" computes exactly: 255 passes


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionTraining(NoisedTraining):
    """The training options of block diffusion."""

    masking: MaskingRule = field(default_factory=Counts)
    """The rule that draws masks and weighs them."""
    next_token: float = 0.0
    """The weight of a next-token loss on the clean half, which must then be causal."""
    algorithm: Algorithm = "single_pass"
    validation: Literal["counts", "times"] = "counts"
    """How validation draws masks, which also decides which checkpoint is the best: by count ("counts"), or at
    uniformly drawn mask rates as in the paper ("times"), which is the same bound with more noise."""

    def problems(self) -> Iterator[str]:
        if not 0.0 <= self.next_token < math.inf:
            yield f"next_token must be finite and not negative, got {self.next_token}"

    @property
    def search(self) -> ClipSearch | None:
        return self.masking.search

    @property
    def mask_range(self) -> tuple[float, float] | None:
        return self.masking.mask_range

    @property
    def not_under_fsdp(self) -> str | None:
        two_pass = "objective.algorithm two_pass does not run with parallel fsdp, which frees keys early"
        return two_pass if self.algorithm == "two_pass" else None

    @property
    def variant(self) -> str:
        return self.masking.variant


@dataclass(frozen=True, kw_only=True)
class BlockDiffusionMethod(Method):
    """Masked diffusion within blocks, autoregression between them."""

    kind = "block_diffusion"
    title = "block diffusion"
    Training = BlockDiffusionTraining
    masks_by_rule = True
    paper_estimator = "nelbo"
    has_order = True
    concerns_release_only = frozenset({"law", "lean"})
    reference_lacks = frozenset({"score_first", "causal_clean", "previous_token", "joint", "law", "lean"})

    block_size: int | None = None
    """Tokens in a block. None is one block of the whole context (MDLM)."""
    causal_clean: bool = False
    """Whether clean tokens attend causally instead of block-causally."""
    previous_token: bool = False
    """Whether the network sees a masked token as the mask plus the token before it."""
    joint: bool = False
    """Whether the clean text was also trained to predict its next tokens, which makes the network an
    autoregressive model too. Training with `next_token` makes a model joint."""
    law: Law = "block"
    """For a joint model: whether it writes and is measured in blocks or token by token."""
    lean: float = 0.0
    """How much the order of reveal within a block leans to the left: a token is e^lean times as likely to
    come next as its right neighbor. 0 is the paper's uniformly random order. The model writes in this order,
    and its likelihoods and validation use it too. The masking rule decides how training draws masks."""

    def problems(self) -> Iterator[str]:
        if self.joint and not self.causal_clean:
            yield "joint needs causal_clean: otherwise tokens see what they predict"
        if self.law not in self.laws:
            yield f"law must be {' or '.join(self.laws)}, got {self.law!r}; a joint model has both"
        if self.block_size is not None and self.block_size < 1:
            yield f"block_size must be at least 1, got {self.block_size}"
        try:
            check_lean(self.lean)
        except ValueError as error:
            yield str(error)

    def conflicts(self, frame: Frame) -> Iterator[str]:
        if frame.context % self._size(frame):
            yield f"method.block_size must divide the context {frame.context}, got {self.block_size}"
        if self.lean and frame.told_noise:
            yield (
                "method.lean must be 0 for a network that is told the noise level, since the places of a "
                f"leaning order do not share one, got {self.lean:g}"
            )

    def training_conflicts(self, training: BlockDiffusionTraining, frame: Frame) -> Iterator[str]:
        if training.next_token and not self.causal_clean:
            yield "objective.next_token needs method.causal_clean: otherwise tokens see what they predict"
        if self.lean and training.validation == "times":
            yield (
                "objective.validation must be counts for an order that leans, whose places do not share a "
                f"mask rate, got times with method.lean {self.lean:g}"
            )
        if training.algorithm == "two_pass" and not frame.keeps_keys:
            yield "objective.algorithm must be single_pass for a network that keeps no keys, got two_pass"
        if frame.told_noise and not training.masking.draws_times:
            yield (
                "network.time_conditioning needs masks drawn by time: objective.masking.kind "
                f"{training.masking.kind} draws none"
            )

    def resolved(self, context: int) -> Self:
        return replace(self, block_size=context) if self.block_size is None else self

    @property
    def laws(self) -> tuple[Law, ...]:
        return ("block", "causal") if self.joint else ("block",)

    @property
    def default_law(self) -> Law:
        return self.law

    def under(self, law: Law) -> Method:
        super().under(law)
        if law == "causal":
            return CausalLaw(of=self)
        return replace(self, law="block")

    def after(self, training: BlockDiffusionTraining) -> Self:
        return replace(self, joint=self.joint or training.next_token > 0.0)

    def _size(self, frame: Frame) -> int:
        return frame.context if self.block_size is None else self.block_size

    def reading(self, frame: Frame) -> BlockReading:
        """How its network reads a text in blocks."""
        return BlockReading(
            block_size=self._size(frame),
            mask_id=frame.mask_id,
            causal_clean=self.causal_clean,
            previous_token=self.previous_token,
        )

    # --- what it is made of ---

    def objective(self, training: BlockDiffusionTraining, frame: Frame) -> BlockDiffusionLoss:
        return BlockDiffusionLoss(
            reading=self.reading(frame),
            masking=training.masking,
            levels=training.levels,
            algorithm=training.algorithm,
            next_token=training.next_token,
        )

    def validation(self, training: BlockDiffusionTraining, frame: Frame) -> BlockDiffusionLoss:
        """The paper's bound for the order in which the model writes, whatever masks it is trained with.

        By default masks are drawn by count. Uniformly drawn mask rates have the same mean but an infinite
        variance, which would leave the choice of the best checkpoint to luck. A network that is told the
        noise level needs a rate, and a model trained in T steps is validated in T steps.
        """
        if training.masking.in_discrete_steps:
            return self.judging(training.masking, frame)
        by_times = frame.told_noise or training.validation == "times"
        return self.judging(Times() if by_times else Counts(lean=self.lean), frame)

    def judging(self, masking: MaskingRule, frame: Frame) -> BlockDiffusionLoss:
        return BlockDiffusionLoss(reading=self.reading(frame), masking=masking)

    def writer(self, network: Denoiser, settings: Settings, frame: Frame) -> Writer:
        settings.refuse("projection", why="only SSD-LM has projections")
        unmasking = settings.unmasking
        if self.lean and unmasking is not None and not unmasking.can_lean:
            raise ValueError(
                f"unmasking {unmasking} has no order that leans, and the model's lean is {self.lean:g}: use "
                "with_lean(0), or --lean 0"
            )
        speculation = self.speculation(settings)
        if speculation is None:
            return masked_writer(network, self.reading(frame), frame.context, settings, unmasking)
        writer = SpeculativeBlockWriter(
            network,
            reading=self.reading(frame),
            context=frame.context,
            speculation=speculation,
            unmasking=unmasking,
            cache=settings.cache,
        )
        settings.refuse("stride", why=f"this model writes blocks of {self._size(frame)}")
        return writer

    def speculation(self, settings: Settings) -> Speculation | None:
        asked = settings.speculation
        if asked is None or not asked.is_on:
            return None
        rule = settings.by_rule(self.lean).unmasking
        check_speculation(asked, rule or FirstHitting(), cache=settings.cache)
        return asked

    def estimator(self, name: str, frame: Frame) -> Estimator:
        size = self._size(frame)
        if frame.told_noise:
            only_estimator(NELBOS, name, "a network that is told the noise level")
        if name == "exact" and size > MAX_EXACT_BLOCK:
            raise ValueError(
                f"estimator 'exact' takes 2^block_size − 1 passes, which is 2^{size} − 1 for blocks of "
                f"{size}; it is for blocks of at most {MAX_EXACT_BLOCK}. Use 'counts', a bound in one pass, "
                f"or 'iw:K', a tighter one in {size}·K passes"
            )
        if name == "auto":
            name = "nelbo" if frame.told_noise else "exact" if size <= _LARGEST_EXACT else "counts"
        if name == "exact":
            return Enumerated(reading=self.reading(frame), lean=self.lean)
        if (orders := re.fullmatch(r"iw:(\d+)", name)) is not None:
            return ImportanceWeighted(reading=self.reading(frame), lean=self.lean, orders=int(orders[1]))
        if name == "counts":
            return Sampled(name, self.judging(Counts(lean=self.lean), frame))
        if self.lean:
            raise ValueError(
                f"estimator must be exact, counts or iw:K for an order that leans (lean {self.lean:g}), got "
                f"{name!r}, which would need a schedule for each place; counts is the same bound"
            )
        return Sampled(name, replace(self.judging(Times(), frame), levels=NELBOS[name]))

    def one_pass_estimator(self, frame: Frame) -> str:
        return "nelbo" if frame.told_noise else "counts"

    def drafts(self, frame: Frame, masks: int | None = None) -> Drafts:
        """A masked block. Its first mask is for a token that the causal law gives without a draft."""
        if not self.joint:
            raise ValueError(
                "acceptance is of drafts that a causal law verifies, which only a joint model has (trained "
                f"with next_token), got {self.title} that is not joint"
            )
        if frame.told_noise:
            raise ValueError("acceptance is for networks that are not told the noise level, got one that is")
        number = self._size(frame) if masks is None else masks
        if not 2 <= number <= frame.context:
            raise ValueError(
                f"masks must be 2 to {frame.context}, since the first of a block drafts nothing, got {number}"
            )
        return Drafts(mask_id=frame.mask_id, masks=number, shifted=False, previous_token=self.previous_token)

    # --- how it writes, is scored, and is called ---

    def settled(self, settings: Settings) -> Settings:
        return super().settled(settings.by_rule(self.lean))

    def fill_weights(self, settings: Settings, frame: Frame) -> FillWeights | str:
        if frame.told_noise:
            return "for a network that is told the noise level, whose likelihood is only bounded"
        reading, lean = self.reading(frame), self.lean_of(settings)
        if reading.block_size <= _LARGEST_EXACT:
            return EnumeratedFills(reading=reading, lean=lean)
        if reading.block_size == frame.context:
            return "for a model of one block, which sees all given text while it fills a gap"
        return OrderedFills(reading=reading, lean=lean)

    def lean_of(self, settings: Settings) -> float:
        """The lean of the order in which texts are written: the unmasking rule's, if it has one."""
        rule = settings.unmasking
        return self.lean if rule is None or not rule.can_lean else getattr(rule, "lean", self.lean)

    def packing(self, context: int) -> Packing:
        return Packing(unit=self.piece(context), in_blocks=True)

    def tuned_by(self, frame: Frame) -> BlockDiffusionTraining:
        """As the recommended presets: both of two complementary masks, each masked token with weight 1."""
        masking = Times() if frame.told_noise else Counts(complementary=True, weight="flat")
        return BlockDiffusionTraining(masking=masking, next_token=_NEXT_TOKEN if self.joint else 0.0)

    def piece(self, context: int) -> int:
        return context if self.block_size is None else self.block_size

    @property
    def order_lean(self) -> float:
        return self.lean

    def with_lean(self, lean: float) -> Self:
        check_lean(lean)
        return replace(self, lean=float(lean))  # as config.json can hold it

    def scoring_unit(self, context: int) -> int:
        return self.piece(context)

    def unmasking(self, frame: Frame) -> BlockReading | None:
        return self.reading(frame)

    def title_for(self, context: int) -> str:
        leaning = f", lean {self.lean:g}" if self.lean else ""
        if self.piece(context) == context:
            return f"diffusion, one block (MDLM){leaning}"
        return f"{self.title}, blocks of {self.block_size}{leaning}"

    def in_reference(self, context: int) -> dict[str, Any]:
        size = self.piece(context)
        return {"block_size": size, "cross_attn": size < context, "causal": False}


@dataclass(frozen=True, kw_only=True)
class CausalLaw(AutoregressiveMethod):
    """The autoregressive model inside a joint one: its clean text, token by token. It is never saved itself;
    the joint model is."""

    of: BlockDiffusionMethod

    @property
    def laws(self) -> tuple[Law, ...]:
        return self.of.laws

    @property
    def default_law(self) -> Law:
        return "causal"

    def drafts(self, frame: Frame, masks: int | None = None) -> Drafts:
        return self.of.drafts(frame, masks)

    def speculation(self, settings: Settings) -> Speculation | None:
        asked = settings.speculation
        return asked if asked is not None and asked.is_on else None

    def under(self, law: Law) -> Method:
        return self.of.under(law)

    def title_for(self, context: int) -> str:
        return f"{self.of.title_for(context)}, causal law"
