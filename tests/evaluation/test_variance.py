"""Variances by one pass are those of all the numbers at once."""

from functools import partial

import numpy as np
import pytest
import torch

from bd3lm.diffusion import ClippedTimes, Counts, Times
from bd3lm.evaluation import block_moments, gradient_variance, nelbo_variance, variance
from bd3lm.objectives import Autoregressive, BlockDiffusionLoss, TokenBatch
from tests.oracles.likelihood import every_text
from tests.oracles.networks import CLEAN, MASK, blocks_of, tiny_transformer

MODEL = tiny_transformer(43)


def corpus() -> list[TokenBatch]:
    texts = every_text(CLEAN, 6)
    return [TokenBatch.of(texts[:7]), TokenBatch.of(texts[300:304], lengths=torch.tensor([6, 2, 4, 6]))]


def losses(objective: BlockDiffusionLoss):
    for index, batch in enumerate(corpus()):
        yield batch, objective.loss(MODEL, batch, objective.seeded_draws(batch, 0, index))


@pytest.mark.parametrize("masking", [Times(), Counts()])
def test_nelbo_variance_is_that_of_the_blocks_mean_nats(masking):
    objective = BlockDiffusionLoss(reading=blocks_of(3), masking=masking)
    means = []
    for batch, loss in losses(objective):
        for row in range(len(batch.tokens)):
            for start in (0, 3):
                tokens = batch.scored[row, start : start + 3].sum().item()
                if tokens:
                    means.append(loss.nats[row, start : start + 3].sum().item() / tokens)
    found = nelbo_variance(MODEL, objective, corpus(), block_size=3)
    assert len(means) == 7 * 2 + 2 + 1 + 2 + 2
    assert found.variance == pytest.approx(np.var(means, ddof=1))
    without = [np.var(means[14:], ddof=1), np.var(means[:14], ddof=1)]
    assert found.error == pytest.approx(np.sqrt(1 / 2 * np.square(without - np.mean(without)).sum()))


def test_moments_add_over_batches():
    objective = BlockDiffusionLoss(reading=blocks_of(3))
    batch = corpus()[0]
    draws = objective.seeded_draws(batch, 0)
    whole = block_moments(MODEL, objective, batch, draws, block_size=3)
    parts = [
        block_moments(MODEL, objective, batch[s], draws[s], block_size=3) for s in (slice(3), slice(3, 7))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("conditioning", [{}, {"adaln": True}])
def test_gradient_variance_is_the_scatter_around_the_mean_gradient(conditioning):
    model = tiny_transformer(43, **conditioning)
    objective = BlockDiffusionLoss(reading=blocks_of(3))
    batches = [TokenBatch.of(every_text(CLEAN, 6)[i : i + 4]) for i in (0, 100, 300, 500)]
    gradients = []
    for index, batch in enumerate(batches):
        model.zero_grad()
        objective.loss(model, batch, objective.seeded_draws(batch, 0, index)).mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
    scatter = torch.stack(gradients) - torch.stack(gradients).mean(0)
    found = gradient_variance(model, objective, batches)
    assert found.variance == pytest.approx(scatter.square().sum().item() / 3, rel=1e-9)
    without = [torch.stack(gradients[:i] + gradients[i + 1 :]).var(0).sum().item() for i in range(4)]
    assert found.error == pytest.approx(
        np.sqrt(3 / 4 * np.square(without - np.mean(without)).sum()), rel=1e-9
    )


def test_full_masking_at_block_size_one_has_no_variance_over_masks():
    """The same text again and again: all variance left is that of its tokens."""
    batch = TokenBatch.of(every_text(CLEAN, 2)[[5]].repeat(8, 1))  # one scored token a row
    for masking, none in ((ClippedTimes(low=1, high=1), True), (Counts(), True), (Times(), False)):
        objective = BlockDiffusionLoss(reading=blocks_of(1), masking=masking)
        found = nelbo_variance(MODEL, objective, [batch], block_size=1)
        assert (found.variance < 1e-20) == none
        assert found.error is None  # of one batch


@pytest.mark.slow
def test_the_errors_are_as_large_as_the_variances_scatter():
    """Over many sets of batches."""
    objective = BlockDiffusionLoss(reading=blocks_of(3), masking=Counts())
    texts = every_text(CLEAN, 6)

    def batches(seed: int) -> list[TokenBatch]:
        picked = torch.randint(len(texts), (48,), generator=torch.Generator().manual_seed(seed))
        return [TokenBatch.of(texts[some]) for some in picked.split(4)]

    for measure in (partial(nelbo_variance, block_size=3), gradient_variance):
        found = [measure(MODEL, objective, batches(seed), seed=seed) for seed in range(40)]
        scatter = np.std([each.variance for each in found], ddof=1)
        stated = np.sqrt(np.mean([each.error**2 for each in found]))
        assert 0.75 < stated / scatter < 1.35


def test_too_few_batches_have_no_error():
    objective = BlockDiffusionLoss(reading=blocks_of(6))
    alone = [TokenBatch.of(every_text(CLEAN, 6)[[row]]) for row in (1, 2)]  # without one, one block is left
    assert nelbo_variance(MODEL, objective, alone, block_size=6).error is None
    assert gradient_variance(MODEL, objective, alone).error is None


def test_variances_of_too_little_are_refused():
    with pytest.raises(ValueError, match="a variance needs at least 2 blocks, got 1"):
        variance(torch.tensor([1.0, 2.0, 4.0]))
    with pytest.raises(ValueError, match="batches must hold at least 2 batches, got 1"):
        gradient_variance(MODEL, BlockDiffusionLoss(reading=blocks_of(3)), corpus()[:1])
    with pytest.raises(ValueError, match="Autoregressive draws nothing"):
        nelbo_variance(MODEL, Autoregressive(mask_id=MASK), corpus(), block_size=3)


def test_what_is_not_finite_has_no_small_variance():
    """A range whose loss overflows must not be the quietest of all in the clip search."""
    for bad in (float("nan"), float("inf")):
        found = variance(torch.tensor([4.0, bad, bad], dtype=torch.float64))
        assert not found < 1e300
