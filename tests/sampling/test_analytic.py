"""SEDD's sampler follows the law of its steps, and the language itself as steps grow."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Absorbing, Floored, Linear, Square, Uniform
from bd3lm.sampling import AnalyticWriter, Request, Sharpening, TokenRevealed, sample, write
from tests.oracles import scores as oracle
from tests.oracles.chains import keep_matrix
from tests.oracles.frequencies import p_value
from tests.oracles.languages import (
    VOCAB,
    Array,
    TableNetwork,
    fixed,
    guesses,
    log,
    noisy,
    random_language,
    ratios,
    states,
)
from tests.oracles.networks import MASK, tiny_transformer
from tests.sampling.asking import drawn_by

pytestmark = pytest.mark.sweep(2)

ROWS = 4000
LEAST = 1e-3
TO_MASK, TO_ALL = np.eye(VOCAB)[MASK], np.full(VOCAB, 1 / VOCAB)
FLOORED = Floored(Linear(), LEAST)
SURE = 1e-3  # a p-value above it is agreement, one below 1e-8 is none


def absorbing(network, *, context: int, steps: int, **options) -> AnalyticWriter:
    return AnalyticWriter(
        network, process=Absorbing(VOCAB, MASK), mask_id=MASK, context=context, steps=steps, **options
    )


def uniform(network, *, context: int, steps: int, **options) -> AnalyticWriter:
    return AnalyticWriter(
        network,
        process=Uniform(VOCAB),
        mask_id=MASK,
        context=context,
        steps=steps,
        schedule=FLOORED,
        **options,
    )


def request(seed: int, length: int, given: tuple[int, ...] = ()) -> Request:
    return Request(torch.tensor(given, dtype=torch.long), seed, length)


def drawn(
    writer: AnalyticWriter,
    length: int,
    *,
    given: tuple[int, ...] = (),
    rows: int = ROWS,
    how: Sharpening | None = None,
) -> Tensor:
    requests = [request(seed, length, given) for seed in range(rows)]
    samples = sample(writer, drawn_by(requests, how), batch_size=rows)
    return torch.stack([s.tokens for s in samples])


def conditionals(length: int) -> Array:
    return guesses(random_language(length, 0), length, keep_matrix(0.5, TO_MASK))


def masked_logits(length: int, *, offset: float = 0.0, scale: float = 0.0) -> Array:
    """Of true scores, or perturbed ones that do not sum to 1."""
    table = log(conditionals(length)) + math.log(VOCAB - 1) + offset
    return table + scale * np.random.default_rng(5).standard_normal(table.shape)


def masked_scores(logits: Array, length: int):
    """The scores that logits stand for, at any noise level."""
    s_hat = np.exp(logits) / (VOCAB - 1)

    def scores(alpha: float) -> Array:
        s = s_hat * alpha / (1 - alpha)
        for row, x in enumerate(states(length)):
            for i in range(length):
                s[row, i] *= x[i] == MASK  # a clean token came from itself
                s[row, i, MASK] = 0.0
                s[row, i, x[i]] = 1.0
        return s

    return scores


def masked_law(logits: Array, length: int, steps: int, schedule=None) -> Array:
    times = torch.linspace(1, 0, steps + 2, dtype=torch.float64)
    alphas = (schedule or Linear()).alpha(times).tolist()
    alphas[0], alphas[-1] = 1e-10, 1.0  # not 0, whose σ is infinite
    start = np.array([float(set(x) == {MASK}) for x in states(length)])
    rates = oracle.absorbing_rates(MASK)
    return oracle.tweedie_law(masked_scores(logits, length), alphas, rates, length, start=start, mask_id=MASK)


def true_uniform_logits(alpha: float, length: int) -> Array:
    return np.log(ratios(noisy(random_language(length, 0), length, keep_matrix(alpha, TO_ALL)), length))


def knows_the_noise(length: int) -> TableNetwork:
    return TableNetwork(lambda noise: true_uniform_logits(math.exp(-noise), length), uses_noise=True)


def uniform_law(logits, length: int, steps: int) -> Array:
    """`logits` as a function of α."""
    times = torch.linspace(1, 0, steps + 2, dtype=torch.float64)
    alphas = FLOORED.alpha(times).tolist()
    alphas[-1] = 1.0

    def scores(alpha: float) -> Array:
        s = np.exp(logits(alpha))
        for row, x in enumerate(states(length)):
            s[row, np.arange(length), x] = 1.0
        return s

    start = np.full(VOCAB**length, VOCAB**-length)
    return oracle.tweedie_law(scores, alphas, oracle.uniform_rates(), length, start=start, mask_id=MASK)


def distance(p: Array, q: Array) -> float:
    return float(np.abs(p - q).sum() / 2)


# --- absorbing ---


@pytest.mark.parametrize(
    ("steps", "offset", "scale"),
    [
        *((steps, 0.0, 0.0) for steps in (1, 3)),
        *((steps, offset, 0.7) for steps in (2, 7) for offset in (0.4, -0.8)),
    ],
)
def test_masked_samples_follow_the_law_of_their_steps(steps, offset, scale):
    """True scores, scores that sum to more than 1 and scores that sum to less, by matrix exponentials."""
    logits = masked_logits(2, offset=offset, scale=scale)
    texts = drawn(absorbing(fixed(logits), context=2, steps=steps), 2)
    assert p_value(texts, masked_law(logits, 2, steps)) > SURE


def test_masked_samples_follow_another_schedule_too():
    logits, square = masked_logits(3, scale=0.5), Square()
    texts = drawn(absorbing(fixed(logits), context=3, steps=2, schedule=square), 3)
    assert p_value(texts, masked_law(logits, 3, 2, square)) > SURE
    assert p_value(texts, masked_law(logits, 3, 2)) < 0.05  # the schedule matters


@pytest.mark.slow
def test_as_steps_grow_masked_samples_are_of_the_language_and_few_steps_are_not():
    language, logits = random_language(3, 0), masked_logits(3)
    writer = absorbing(fixed(logits), context=3, steps=256)
    assert p_value(drawn(writer, 3), language) > SURE
    for steps in (1, 2):
        assert p_value(drawn(absorbing(fixed(logits), context=3, steps=steps), 3), language) < 1e-8
    errors = [distance(masked_law(logits, 3, steps), language) for steps in (1, 4, 16, 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 20


def test_as_steps_grow_scores_that_do_not_sum_to_one_lead_to_their_own_jump_process():
    logits = masked_logits(3, offset=0.3, scale=0.7)
    law = oracle.jump_law(np.exp(logits), 3, MASK)
    texts = drawn(absorbing(fixed(logits), context=3, steps=256), 3)
    assert p_value(texts, law) > SURE
    assert p_value(texts, random_language(3, 0)) < 1e-8


# --- uniform ---


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_uniform_samples_follow_the_law_of_their_steps(steps):
    """Scores that are far from any distribution's, so that some steps would have negative entries."""
    table = 0.8 * np.random.default_rng(1).standard_normal((VOCAB**2, 2, VOCAB))
    texts = drawn(uniform(fixed(table), context=2, steps=steps), 2)
    assert p_value(texts, uniform_law(lambda _: table, 2, steps)) > SURE
    assert (texts != MASK).all()


@pytest.mark.slow
def test_as_steps_grow_uniform_samples_are_of_the_language_and_few_steps_are_not():
    language = random_language(2, 0)
    assert p_value(drawn(uniform(knows_the_noise(2), context=2, steps=128), 2), language) > SURE
    for steps in (1, 2):
        texts = drawn(uniform(knows_the_noise(2), context=2, steps=steps), 2)
        assert p_value(texts, uniform_law(lambda alpha: true_uniform_logits(alpha, 2), 2, steps)) > SURE
        assert p_value(texts, language) < 1e-8
    laws = [uniform_law(lambda alpha: true_uniform_logits(alpha, 2), 2, steps) for steps in (1, 4, 16, 64)]
    errors = [distance(law, language) for law in laws]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


# --- given tokens, ends, batches ---


@pytest.mark.parametrize("kind", [absorbing, uniform])
def test_given_tokens_are_kept_and_the_rest_follows_its_law_given_them(kind):
    table = 0.7 * np.random.default_rng(2).standard_normal((VOCAB**3, 3, VOCAB))
    texts = drawn(kind(fixed(table), context=3, steps=2), 3, given=(MASK, 3))
    assert (texts[:, 1] == 3).all()
    inner = table.reshape(VOCAB, VOCAB, VOCAB, 3, VOCAB)[:, 3][:, :, [0, 2]].reshape(VOCAB**2, 2, VOCAB)
    law = masked_law(inner, 2, 2) if kind is absorbing else uniform_law(lambda _: inner, 2, 2)
    assert p_value(texts[:, [0, 2]], law) > SURE


@pytest.mark.parametrize("kind", [absorbing, uniform])
def test_a_text_may_end_inside_the_context(kind):
    """What lies past its end stays masked; uniform noise writes it too, and cuts."""
    table = 0.7 * np.random.default_rng(3).standard_normal((VOCAB**3, 3, VOCAB))
    texts = drawn(kind(fixed(table), context=3, steps=2), 2)
    assert texts.shape == (ROWS, 2)
    assert (texts != MASK).all()
    shape = (VOCAB,) * 3 + (3, VOCAB)
    if kind is absorbing:
        inner = table.reshape(shape)[:, :, MASK][:, :, :2].reshape(VOCAB**2, 2, VOCAB)
        law = masked_law(inner, 2, 2)
    else:
        law = uniform_law(lambda _: table, 3, 2).reshape(VOCAB, VOCAB, VOCAB).sum(2).ravel()
    assert p_value(texts, law) > SURE


@pytest.mark.parametrize("kind", [absorbing, uniform])
@pytest.mark.parametrize("timed", [False, True])
def test_a_batch_equals_its_rows_alone(kind, timed):
    network = tiny_transformer(4, adaln=timed, time_conditioning=timed)
    writer = kind(network, context=5, steps=6)
    requests = [request(seed, 3 + seed % 3, (1, MASK, 3)[: seed % 4]) for seed in range(12)]
    requests = drawn_by(requests, Sharpening(top_p=0.9))
    together = sample(writer, requests, batch_size=12)
    seats = sample(writer, requests, batch_size=5)
    for seed, one in enumerate(requests):
        (alone,) = sample(writer, [one])
        for other in (together[seed], seats[seed]):
            assert torch.equal(alone.tokens, other.tokens)
            assert alone.evaluations == other.evaluations
            assert other.stopped_by == "length"


# --- what a sample costs, and how it is watched ---


def test_a_network_that_ignores_time_is_asked_only_about_texts_that_changed():
    network = fixed(masked_logits(3))
    writer = absorbing(network, context=3, steps=200)
    (one,) = sample(writer, [request(0, 3)])
    assert one.evaluations == len(network.passes) <= 3
    timed = TableNetwork(network.table, uses_noise=True)
    (same,) = sample(absorbing(timed, context=3, steps=200), [request(0, 3)])
    assert torch.equal(one.tokens, same.tokens)  # nothing was lost
    assert 3 < same.evaluations == len(timed.passes) <= 201


def test_uniform_noise_takes_all_steps_and_the_last():
    network = knows_the_noise(2)
    (one,) = sample(uniform(network, context=2, steps=10), [request(0, 2)])
    assert one.evaluations == len(network.passes) == 11


@pytest.mark.parametrize("kind", [absorbing, uniform])
def test_what_is_watched_is_what_is_written(kind):
    table = 0.7 * np.random.default_rng(2).standard_normal((VOCAB**3, 3, VOCAB))
    events = list(write(kind(fixed(table), context=3, steps=8), [request(1, 3, (MASK, 3))], watch=True))
    seen = {1: 3}
    for event in events:
        if isinstance(event, TokenRevealed):
            assert event.position != 1
            seen[event.position] = event.token
    assert [seen[i] for i in range(3)] == events[-1].sample.tokens.tolist()


def test_sharpening_is_of_what_a_token_becomes_not_of_whether():
    """With top_k=1 a masked text is the likeliest token's, revealed at the same steps as ever."""
    table = masked_logits(2)
    writer = absorbing(fixed(table), context=2, steps=50)
    texts = drawn(writer, 2, rows=400, how=Sharpening(top_k=1))
    place = {x: row for row, x in enumerate(states(2))}
    clean = [v for v in range(VOCAB) if v != MASK]
    best = lambda x, i: max(clean, key=lambda v: table[place[x], i, v])  # noqa: E731
    first, second = (best((MASK, MASK), i) for i in range(2))
    possible = {(first, best((first, MASK), 1)), (best((MASK, second), 0), second), (first, second)}
    assert set(map(tuple, texts.tolist())) <= possible
    frozen = drawn(uniform(knows_the_noise(2), context=2, steps=100), 2, how=Sharpening(top_p=0.9))
    # A nucleus over the whole step would never let a token change: all texts would be uniform noise.
    assert p_value(frozen, np.array([float(MASK not in x) for x in states(2)]) / 9) < 1e-8


def test_what_makes_no_sense_is_refused():
    network = fixed(masked_logits(2))
    with pytest.raises(ValueError, match="length must be at most 2, the network's whole context, got 3"):
        sample(absorbing(network, context=2, steps=1), [request(0, 3)])
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        absorbing(network, context=2, steps=0)
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        absorbing(network, context=0, steps=1)
    with pytest.raises(ValueError, match="schedule must end at α = 0 under the absorbing process"):
        absorbing(network, context=2, steps=1, schedule=FLOORED)
    with pytest.raises(ValueError, match="above it \\(Floored\\) under the uniform one"):
        AnalyticWriter(network, process=Uniform(VOCAB), mask_id=MASK, context=2)
    with pytest.raises(ValueError, match="mask_id must be the process's, 2, got 1"):
        AnalyticWriter(network, process=Absorbing(VOCAB, MASK), mask_id=1, context=2)
    with pytest.raises(ValueError, match="process must be over the network's 4 tokens, got 5"):
        sample(AnalyticWriter(network, process=Absorbing(5, MASK), mask_id=MASK, context=2), [request(0, 2)])
