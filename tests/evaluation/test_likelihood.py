"""A corpus' likelihood is its summed nats over its scored tokens, and its stated errors are right."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, stdev

import pytest
import torch
from scipy import stats

from bd3lm.diffusion import Counts, Times
from bd3lm.evaluation import (
    CorpusLikelihood,
    Enumerated,
    Estimator,
    Figure,
    Sampled,
    corpus_likelihood,
    exact_likelihood,
    perplexity,
    ratio_error,
)
from bd3lm.models import Transformer
from bd3lm.objectives import Autoregressive, BlockDiffusionLoss, TokenBatch
from tests.oracles.likelihood import every_text
from tests.oracles.networks import CLEAN, MASK, blocks_of, tiny_transformer

MODEL = tiny_transformer(41)
SMALL = tiny_transformer(41, layers=1, hidden=8, heads=1)  # for many corpora
CHAIN = Sampled("exact", Autoregressive(mask_id=MASK))
ENUMERATED = Enumerated(reading=blocks_of(3))
NELBO, COUNTS = (
    Sampled(name, BlockDiffusionLoss(reading=blocks_of(3), masking=masking))
    for name, masking in (("nelbo", Times()), ("counts", Counts()))
)


def corpus() -> list[TokenBatch]:
    """Batches of unequal sizes, texts of unequal lengths."""
    texts = every_text(CLEAN, 6)
    return [
        TokenBatch.of(texts[:5]),
        TokenBatch.of(texts[300:303], lengths=torch.tensor([3, 6, 5])),
        TokenBatch.of(texts[700:701], prompts=torch.tensor([4])),
    ]


def only(estimator: Estimator, batches, *, model: Transformer = MODEL, **options) -> CorpusLikelihood:
    return corpus_likelihood(model, estimator, batches, **options)[0]


def test_it_is_the_nats_over_the_tokens_not_a_mean_of_means():
    found = only(CHAIN, corpus())
    losses = [Autoregressive(mask_id=MASK)(MODEL, batch) for batch in corpus()]
    tokens = sum(batch.scored.sum().item() for batch in corpus())
    assert found.tokens == tokens == 5 * 5 + (2 + 5 + 4) + 2
    assert found.sequences == 9
    assert found.nats == pytest.approx(sum(loss.nats.sum().item() for loss in losses) / tokens)
    assert found.perplexity == pytest.approx(math.exp(found.nats))
    assert found.bits_per_token == pytest.approx(found.nats / math.log(2))
    assert found.bits_per_byte(76) == pytest.approx(found.bits_per_token / 2)
    assert found.figure == Figure("exact", "exact")
    assert found.monte_carlo_error == 0.0


def test_a_seed_decides_the_figure_and_each_batch_draws_anew():
    batches = corpus()[:1] * 2
    one, same, other = (only(COUNTS, batches, seed=seed).nats for seed in (0, 0, 1))
    assert one == same != other
    assert only(COUNTS, batches[:1]).nats != one


@pytest.mark.slow
def test_over_many_draws_it_is_the_exact_bound():
    exact, bound = corpus_likelihood(MODEL, ENUMERATED, corpus())
    for estimator in (NELBO, COUNTS):
        found = only(estimator, corpus(), replicates=400)
        assert found.monte_carlo_error < 0.02 * bound.nats
        assert found.nats == pytest.approx(bound.nats, abs=4 * found.monte_carlo_error)
    assert exact.nats < bound.nats
    truth = [exact_likelihood(MODEL, batch, blocks_of(3)) for batch in corpus()]
    for figure, name in ((exact, "nll"), (bound, "nelbo")):
        total = sum(getattr(each, name).sum().item() for each in truth)
        assert figure.nats == pytest.approx(total / figure.tokens)


def test_replicates_are_averaged_and_tell_their_noise():
    """The mean of replicates is that of their figures, and the error the spread of those over √K."""
    found = only(NELBO, corpus(), replicates=2, seed=5)
    first = only(NELBO, corpus(), seed=5)
    assert first.monte_carlo_error is None
    second = 2 * found.nats - first.nats
    assert found.monte_carlo_error == pytest.approx(stdev([first.nats, second]) / math.sqrt(2))
    assert (found.tokens, found.replicates) == (first.tokens, 2)


def test_the_error_over_sequences_by_hand():
    found = only(CHAIN, corpus())
    nats, tokens = [], []
    for batch in corpus():
        loss = Autoregressive(mask_id=MASK)(MODEL, batch)
        nats += loss.nats.sum(1).tolist()
        tokens += batch.scored.sum(1).tolist()
    mean = sum(nats) / sum(tokens)
    squares = sum((n - mean * t) ** 2 for n, t in zip(nats, tokens, strict=True))
    alone = math.sqrt(squares * 9 / 8) / sum(tokens)
    assert found.standard_error >= alone * (1 - 1e-12)  # with two neighbours; equal but for rounding here
    expected = ratio_error(torch.tensor(nats), torch.tensor(tokens), neighbours=2)
    assert found.standard_error == pytest.approx(expected)
    assert ratio_error(torch.tensor(nats), torch.tensor(tokens)) == pytest.approx(alone)
    assert found.perplexity_error == pytest.approx(found.perplexity * found.standard_error)


def test_for_sequences_of_one_length_it_is_that_of_their_mean():
    nats = torch.tensor([3.0, 4.0, 7.0])
    assert ratio_error(nats, torch.full((3,), 5)) == pytest.approx(stdev([0.6, 0.8, 1.4]) / math.sqrt(3))
    assert ratio_error(nats[:1], torch.tensor([5])) is None
    assert ratio_error(nats, torch.tensor([5, 0, 0])) is None


def test_neighbours_that_are_alike_widen_the_error_and_nothing_narrows_it():
    """By hand for one neighbour: its products count half, twice."""
    e = [1.0, 2.0, -1.0, -2.0]
    sizes = torch.full((4,), 2.0)
    totals = 3.0 * sizes + torch.tensor(e)
    squares = sum(each**2 for each in e)
    products = sum(a * b for a, b in pairwise(e))
    assert products > 0
    expected = math.sqrt((squares + 2 * 0.5 * products) * 4 / 3) / 8
    assert ratio_error(totals, sizes, neighbours=1) == pytest.approx(expected)
    apart = 3.0 * sizes + torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert ratio_error(apart, sizes, neighbours=1) == ratio_error(apart, sizes)


def test_sequences_cut_from_one_document_do_not_make_the_error_too_small():
    """Documents of four sequences, each with a tone of its own: nine in ten intervals hold the mean, or more.

    Without neighbours fewer than eight in ten do.
    """
    generator = torch.Generator().manual_seed(7)
    number, runs, held = 240, 400, {0: 0, round(240 ** (1 / 3)): 0}
    sizes = torch.full((number,), 10.0)
    for _ in range(runs):
        tones = torch.randn(number // 4 + 1, generator=generator).repeat_interleave(4)
        shift = int(torch.randint(4, (1,), generator=generator))  # where the text is cut
        totals = 10 * (5 + tones[shift : shift + number] + torch.randn(number, generator=generator))
        for neighbours in held:
            error = ratio_error(totals, sizes, neighbours=neighbours)
            held[neighbours] += abs(totals.sum() / sizes.sum() - 5).item() < 1.65 * error
    blind, aware = held.values()
    assert blind < 0.8 * runs
    assert aware > 0.83 * runs


@pytest.mark.slow
def test_the_noise_of_draws_is_stated_rightly():
    """Over many seeds the interval of the replicates holds the corpus' NELBO as often as it says.

    Under uniform times the estimate has no finite variance (rates near 0 weigh 1/t), so only its intervals
    are checked; under counts the squared error itself is unbiased too.
    """
    truth = corpus_likelihood(SMALL, ENUMERATED, corpus())[1].nats
    width, runs = stats.t.ppf(0.95, df=4), 300
    for estimator in (NELBO, COUNTS):
        found = [only(estimator, corpus(), model=SMALL, seed=seed, replicates=5) for seed in range(runs)]
        held = sum(abs(each.nats - truth) < width * each.monte_carlo_error for each in found)
        low, high = stats.binom.interval(0.998, runs, 0.9)
        assert low <= held <= high, estimator.name
    spread = stdev(each.nats for each in found)
    assert fmean(each.monte_carlo_error**2 for each in found) == pytest.approx(spread**2, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [CHAIN, ENUMERATED, COUNTS, NELBO], ids=lambda each: each.name)
def test_the_error_is_right_for_texts_like_these(estimator):
    """Of corpora drawn from a known population, nine in ten intervals hold the population's own figure."""
    texts = every_text(CLEAN, 6)
    lengths = torch.randint(2, 7, (len(texts),), generator=torch.Generator().manual_seed(2))
    population = TokenBatch.of(texts, lengths=lengths)
    truth = corpus_likelihood(SMALL, estimator if estimator is CHAIN else ENUMERATED, [population])
    mean = truth[-1 if estimator.is_random else 0].nats
    size, runs, held = 60, 250, 0
    generator = torch.Generator().manual_seed(3)
    for seed in range(runs):
        chosen = torch.randint(len(texts), (size,), generator=generator)
        batch = TokenBatch.of(texts[chosen], lengths=lengths[chosen])
        found = only(estimator, [batch], model=SMALL, seed=seed)
        held += abs(found.nats - mean) < stats.t.ppf(0.95, df=size - 1) * found.standard_error
    low, high = stats.binom.interval(0.998, runs, 0.9)
    assert low <= held <= high


def test_a_corpus_without_scored_tokens_is_refused():
    nothing = TokenBatch.of(every_text(CLEAN, 3), prompts=torch.full((27,), 3))
    for batches in ([], [nothing]):
        with pytest.raises(ValueError, match="at least one scored token"):
            only(CHAIN, batches)


def test_a_hopeless_network_has_infinite_perplexity():
    figure = Figure("nelbo", "bound")
    found = CorpusLikelihood(figure, 1e4, None, None, tokens=1, sequences=1, replicates=1)
    assert found.perplexity == math.inf
    assert found.perplexity_error is None


def test_replicates_must_mean_something():
    with pytest.raises(ValueError, match="replicates must be at least 1, got 0"):
        only(COUNTS, corpus(), replicates=0)
    with pytest.raises(ValueError, match="replicates must be 1 for exact, which draws nothing, got 4"):
        only(CHAIN, corpus(), replicates=4)


@pytest.mark.parametrize("estimator", [CHAIN, ENUMERATED, COUNTS], ids=lambda each: each.name)
def test_nan_is_no_likelihood(estimator):
    broken = tiny_transformer(41)
    with torch.no_grad():
        broken.output.weight[0, 0] = torch.nan
    with pytest.raises(
        FloatingPointError, match=rf"nats by {estimator.name} must be numbers, got NaN for 5 of"
    ):
        corpus_likelihood(broken, estimator, corpus())


def test_perplexity_of_nan_is_not_infinite():
    found = CorpusLikelihood(Figure("exact", "exact"), math.nan, None, 0.0, 1, 1, 1)
    assert math.isnan(found.perplexity)


@pytest.mark.parametrize("nats", [0.0, 1.5, 705.0])
def test_a_perplexity_is_the_exponential_of_the_nats(nats):
    assert perplexity(nats) == math.exp(nats)


@pytest.mark.parametrize("nats", [710.0, 1e6, math.inf])
def test_a_perplexity_past_all_numbers_is_infinite(nats):
    assert perplexity(nats) == math.inf


@pytest.mark.parametrize("estimator", [CHAIN, ENUMERATED, COUNTS], ids=lambda each: each.name)
def test_a_network_whose_dropout_is_on_is_refused(estimator):
    model = Transformer(replace(MODEL.config, dropout=0.5)).double()
    model.load_state_dict(MODEL.state_dict())
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        corpus_likelihood(model, estimator, corpus())
    assert corpus_likelihood(model.eval(), estimator, corpus()) == corpus_likelihood(
        MODEL, estimator, corpus()
    )
