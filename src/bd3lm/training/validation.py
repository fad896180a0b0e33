"""Measurements during training: held-out likelihood, the clip range, the variance of loss and gradient.

Every rank makes the same number of passes, because FSDP2 needs all ranks in each pass. A rank with a shorter
share evaluates a batch in which nothing is scored.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from bd3lm.diffusion import Draws
from bd3lm.evaluation import block_moments, gradient_variance, loss_sums, perplexity, variance
from bd3lm.models import Network
from bd3lm.objectives import Objective, TokenBatch
from bd3lm.training.clipping import choose_range, range_moments
from bd3lm.training.log_window import Metrics
from bd3lm.training.trainer import Trainer


class BatchWork(Protocol):
    """A function of the network, a batch and its draws."""

    def __call__(self, model: Network, /, *, batch: TokenBatch, draws: Draws | None) -> Tensor:
        """A tensor, to be summed over batches."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out sequences in batches, dealt out to ranks."""

    batches: Sequence[TokenBatch]

    def share(self, trainer: Trainer, limit: int | None = None) -> Iterator[tuple[int, TokenBatch]]:
        """(index, batch) for this rank. Every rank gets the same number of batches."""
        engine = trainer.engine
        total = len(self.batches) if limit is None else min(limit, len(self.batches))
        for step in range(math.ceil(total / engine.world)):
            index = step * engine.world + engine.rank
            batch = self.batches[min(index, total - 1)].to(engine.device)
            yield index, batch if index < total else replace(batch, scored=torch.zeros_like(batch.scored))

    def total(
        self,
        trainer: Trainer,
        objective: Objective,
        work: BatchWork,
        *seed: int | str,
        limit: int | None = None,
    ) -> Tensor:
        """The sum of `work` over all batches and ranks."""
        parts = []
        for index, batch in self.share(trainer, limit):
            draws = objective.seeded_draws(batch, *seed, index)
            parts.append(trainer.apply(partial(work, batch=batch, draws=draws)))
        return trainer.engine.all_reduce_sum(torch.stack(parts).sum(0))


@dataclass(frozen=True)
class LikelihoodValidator:
    """Perplexity of the held-out text: exact for AR, otherwise a bound, estimated with one draw of masks.

    If the objective's loss does not bound the likelihood, the nats are reported without a perplexity.
    """

    held_out: HeldOut
    objective: Objective
    seed: int = 0

    def __call__(self, trainer: Trainer) -> Metrics:
        names: list[str] = []
        work = partial(loss_sums, objective=self.objective, statistics=names)
        total = self.held_out.total(trainer, self.objective, work, self.seed, "validation").tolist()
        nats, tokens, *statistics = total
        mean = nats / tokens
        figures = self.objective.figures(dict(zip(names, statistics, strict=True)))
        metrics = {"valid_nats": mean, **{f"valid_{name}": value for name, value in figures.items()}}
        if self.objective.bounds(trainer.network):
            metrics["valid_perplexity"] = perplexity(mean)
        return metrics


@dataclass(frozen=True)
class ClipSearchValidator:
    """Searches the clip range as the objective defines it. Training continues with the range it finds."""

    held_out: HeldOut
    seed: int = 0

    def __call__(self, trainer: Trainer) -> Metrics:
        objective = trainer.objective
        search = objective.search
        if search is None:
            raise ValueError(f"objective must have a range of mask rates to search, got {objective}")
        if trainer.step % search.every:
            return {}
        ranges = search.ranges()
        work = partial(range_moments, objective=objective, ranges=ranges)
        seed = (self.seed, "clip search", trainer.step)
        moments = self.held_out.total(trainer, objective, work, *seed, limit=search.batches)
        variances = dict(zip(ranges, map(variance, moments), strict=True))
        choice = choose_range(ranges, variances.__getitem__)
        trainer.objective = objective.in_range(choice.low, choice.high)
        return {
            "clip_low": choice.low,
            "clip_high": choice.high,
            "clip_variance": choice.variances[choice.low, choice.high],
        }


@dataclass(frozen=True)
class NelboVarianceValidator:
    """The variance over blocks of the training loss (the paper's Var. NELBO), pooled over ranks."""

    held_out: HeldOut
    batches: int
    seed: int = 0

    def __call__(self, trainer: Trainer) -> Metrics:
        objective = trainer.objective
        block_size = objective.block_of(trainer.data.context)
        work = partial(block_moments, objective=objective, block_size=block_size)
        seed = (self.seed, "variance", trainer.step)
        moments = self.held_out.total(trainer, objective, work, *seed, limit=self.batches)
        return {"nelbo_variance": variance(moments)}


@dataclass(frozen=True)
class GradientVarianceValidator:
    """The variance of the training gradient over batches (eq. 10), on one process."""

    held_out: HeldOut
    batches: int

    def __call__(self, trainer: Trainer) -> Metrics:
        batches = [batch for _, batch in self.held_out.share(trainer, self.batches)]
        with torch.enable_grad():
            found = gradient_variance(trainer.network, trainer.objective, batches, seed=trainer.step)
        return {"gradient_variance": found.variance}
