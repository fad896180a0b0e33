"""A corpus' likelihood is its summed nats over its scored tokens, by draws that a seed decides."""

import math

import pytest
import torch

from bd3lm.diffusion import ClippedTimes, Counts
from bd3lm.evaluation import Likelihood, exact_likelihood, monte_carlo_likelihood
from bd3lm.objectives import Autoregressive, BlockDiffusionLoss, TokenBatch
from tests.oracles.likelihood import every_text
from tests.oracles.networks import CLEAN, MASK, tiny_transformer

MODEL = tiny_transformer(41)


def corpus() -> list[TokenBatch]:
    """Batches of unequal sizes, texts of unequal lengths."""
    texts = every_text(CLEAN, 6)
    return [
        TokenBatch.of(texts[:5]),
        TokenBatch.of(texts[300:303], lengths=torch.tensor([3, 6, 5])),
        TokenBatch.of(texts[700:701], prompts=torch.tensor([4])),
    ]


def test_it_is_the_nats_over_the_tokens_not_a_mean_of_means():
    objective = Autoregressive(mask_id=MASK)
    found = monte_carlo_likelihood(MODEL, objective, corpus())
    losses = [objective(MODEL, batch) for batch in corpus()]
    tokens = sum(batch.scored.sum().item() for batch in corpus())
    assert found.tokens == tokens == 5 * 5 + (2 + 5 + 4) + 2
    assert found.nats == pytest.approx(sum(loss.nats.sum().item() for loss in losses) / tokens)
    assert found.perplexity == pytest.approx(math.exp(found.nats))


def test_a_seed_decides_the_figure_and_each_batch_draws_anew():
    objective = BlockDiffusionLoss(block_size=3, mask_id=MASK)
    batches = corpus()[:1] * 2
    one, same, other = (monte_carlo_likelihood(MODEL, objective, batches, seed=s).nats for s in (0, 0, 1))
    assert one == same != other
    assert monte_carlo_likelihood(MODEL, objective, batches[:1]).nats != one


def test_over_many_draws_it_is_the_exact_bound():
    batch = TokenBatch.of(every_text(CLEAN, 6)[[517]].repeat(500, 1))
    found = monte_carlo_likelihood(MODEL, BlockDiffusionLoss(block_size=3, mask_id=MASK), [batch] * 10)
    exact = exact_likelihood(MODEL, batch[:1], block_size=3, mask_id=MASK)
    assert found.nats == pytest.approx(exact.nelbo.sum().item() / 5, rel=0.02)
    assert found.is_bound


def test_what_is_no_bound_does_not_become_one():
    for masking, is_bound in ((Counts(), True), (ClippedTimes(low=0.3, high=0.8), False)):
        objective = BlockDiffusionLoss(block_size=3, mask_id=MASK, masking=masking)
        assert monte_carlo_likelihood(MODEL, objective, corpus()).is_bound == is_bound


def test_a_corpus_without_scored_tokens_is_refused():
    nothing = TokenBatch.of(every_text(CLEAN, 3), prompts=torch.full((27,), 3))
    for batches in ([], [nothing]):
        with pytest.raises(ValueError, match="at least one scored token"):
            monte_carlo_likelihood(MODEL, Autoregressive(mask_id=MASK), batches)


def test_a_hopeless_network_has_infinite_perplexity():
    assert Likelihood(nats=1e4, tokens=1.0, is_bound=True).perplexity == math.inf


def test_several_draws_are_averaged():
    objective = BlockDiffusionLoss(block_size=3, mask_id=MASK)
    one, many = (monte_carlo_likelihood(MODEL, objective, corpus(), draws=draws) for draws in (1, 400))
    assert one == monte_carlo_likelihood(MODEL, objective, corpus())
    nelbo = sum(
        exact_likelihood(MODEL, batch, block_size=3, mask_id=MASK).nelbo.sum().item() for batch in corpus()
    )
    assert many.tokens == pytest.approx(one.tokens)
    assert many.nats == pytest.approx(nelbo / many.tokens, rel=0.03)
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        monte_carlo_likelihood(MODEL, objective, corpus(), draws=0)
