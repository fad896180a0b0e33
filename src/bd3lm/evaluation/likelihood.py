"""The likelihood of a corpus: nats per token with a standard error."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Draws, derive_seed
from bd3lm.evaluation.estimators import Estimator, Figure
from bd3lm.models import Denoiser, require_evaluation_mode
from bd3lm.objectives import Objective, TokenBatch


def perplexity(nats: float) -> float:
    """exp of nats per token, or infinity if a float cannot hold it."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class CorpusLikelihood:
    """Nats per token of a corpus, Σ nats / Σ tokens.

    `standard_error` estimates how far the figure is from that of all similar texts. It is the error of a
    ratio estimator, clustered by sequence because tokens of one sequence are alike, and widened if
    neighboring sequences are alike, such as sequences cut from one document. It includes the noise of the
    draws. `monte_carlo_error` is that noise alone, for these very texts, from independent replicates: None
    with one replicate, 0 if nothing is drawn.
    """

    figure: Figure
    nats: float
    standard_error: float | None
    monte_carlo_error: float | None
    tokens: int
    sequences: int
    replicates: int

    @property
    def perplexity(self) -> float:
        """exp of the nats per token."""
        return perplexity(self.nats)

    @property
    def perplexity_error(self) -> float | None:
        """The perplexity's standard error, by the delta method."""
        return None if self.standard_error is None else self.perplexity * self.standard_error

    @property
    def bits_per_token(self) -> float:
        """The nats per token, in bits."""
        return self.nats / math.log(2)

    def bits_per_byte(self, text_bytes: int) -> float:
        """Bits per byte, if the text of the scored tokens has this many bytes."""
        return self.bits_per_token * self.tokens / text_bytes


def corpus_likelihood(
    model: Denoiser,
    estimator: Estimator,
    batches: Iterable[TokenBatch],
    *,
    seed: int = 0,
    replicates: int = 1,
) -> tuple[CorpusLikelihood, ...]:
    """Each figure of an estimator over a corpus: one draw a text (Suppl. C.4), or the mean of replicates.

    A replicate draws again for every batch, and spreads noise levels evenly within the batch. Batches must be
    in the order of the text, which determines the neighbors of sequences. The network must be in evaluation
    mode. NaN, which a diverged network gives, raises a FloatingPointError at the first batch that has one.
    """
    require_evaluation_mode(model)
    if replicates < 1:
        raise ValueError(f"replicates must be at least 1, got {replicates}")
    if replicates > 1 and not estimator.is_random:
        raise ValueError(f"replicates must be 1 for {estimator.name}, which draws nothing, got {replicates}")
    nats: list[Tensor] = []  # (replicates, figures, rows)
    tokens: list[Tensor] = []
    for index, batch in enumerate(batches):
        found = []
        for replicate in range(replicates):
            seeds = (seed, index) if not replicate else (seed, index, replicate)
            generator = torch.Generator(batch.tokens.device).manual_seed(derive_seed(*seeds))
            draws = estimator.draw(*batch.tokens.shape, generator=generator, device=batch.tokens.device)
            found.append(estimator.nats(model, batch, draws).cpu())
        nats.append(torch.stack(found))
        _check_numbers(nats[-1], estimator, index)
        tokens.append(batch.scored.sum(1).double().cpu())
    lengths = torch.cat(tokens) if tokens else torch.zeros(1)
    if not lengths.sum():
        raise ValueError("batches must hold at least one scored token, got none")
    each = torch.cat(nats, dim=2)
    return tuple(
        CorpusLikelihood(
            figure=figure,
            nats=(rows.sum(1).mean() / lengths.sum()).item(),
            standard_error=ratio_error(rows.mean(0), lengths, neighbours=round(len(lengths) ** (1 / 3))),
            monte_carlo_error=_spread_of_means(rows.sum(1) / lengths.sum()) if estimator.is_random else 0.0,
            tokens=int(lengths.sum()),
            sequences=int((lengths > 0).sum()),
            replicates=replicates,
        )
        for figure, rows in zip(estimator.figures(model), each.unbind(1), strict=True)
    )


def _check_numbers(nats: Tensor, estimator: Estimator, index: int) -> None:
    """Refuse NaN. Infinite nats are a likelihood of zero, but NaN is not a likelihood."""
    wrong = nats.isnan().flatten(0, 1).any(0)
    if wrong.any():
        raise FloatingPointError(
            f"nats by {estimator.name} must be numbers, got NaN for {wrong.sum()} of the {len(wrong)} "
            f"sequences of batch {index}: the network's weights or activations are not finite"
        )


def ratio_error(totals: Tensor, sizes: Tensor, *, neighbours: int = 0) -> float | None:
    """The standard error of m = Σ totals / Σ sizes over clusters; None for fewer than two.

    sqrt(R/(R−1) Σ_r e_r²) / Σ T with e_r = N_r − m T_r, by linearization. Clusters up to `neighbours` places
    apart may be alike: their products are added with Bartlett's weights (Newey and West 1987) if that makes
    the error larger.
    """
    counted = sizes > 0
    totals, sizes = totals[counted].double(), sizes[counted].double()
    error = clustered_error(totals - sizes * (totals.sum() / sizes.sum()), neighbours=neighbours)
    return None if error is None else error / sizes.sum().item()


def clustered_error(residuals: Tensor, *, neighbours: int = 0) -> float | None:
    """The standard error of a sum with these `residuals`, one for each cluster: the root of R/(R−1) Σ_r e_r²,
    with neighbors as in `ratio_error`. None for fewer than two clusters."""
    number = len(residuals)
    if number < 2:
        return None
    alone = residuals.square().sum()
    together = alone.clone()
    for lag in range(1, min(neighbours, number - 1) + 1):
        together += 2 * (1 - lag / (neighbours + 1)) * (residuals[lag:] * residuals[:-lag]).sum()
    return (torch.maximum(alone, together) * number / (number - 1)).sqrt().item()


def _spread_of_means(means: Tensor) -> float | None:
    return None if len(means) < 2 else (means.std() / math.sqrt(len(means))).item()


@torch.no_grad()
def loss_sums(
    model: Denoiser,
    objective: Objective,
    batch: TokenBatch,
    draws: Draws | None,
    statistics: list[str] | None = None,
) -> Tensor:
    """(nats, tokens) of a batch, float64. If a list of `statistics` is given, the values of all single-number
    statistics follow, and the list is filled with their names."""
    loss = objective.loss(model, batch, draws)
    parts = [loss.nats, loss.weight]
    if statistics is not None:
        single = {name: value for name, value in loss.statistics.items() if value.numel() == 1}
        statistics[:] = list(single)
        parts += single.values()
    return torch.stack([part.double().sum() for part in parts])
