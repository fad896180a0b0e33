"""D3PM's loss is L_vb with explicit matrices, for every T, and bounds the chain that takes T steps."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from bd3lm.diffusion import Absorbing, Cosine, DiscreteTimes, Floored, Linear, Square, Uniform
from bd3lm.objectives import D3PM, BlockDiffusionLoss, TokenBatch
from tests.objectives.enumeration import discrete_levels, expected, losses
from tests.oracles import chains
from tests.oracles.languages import (
    VOCAB,
    Array,
    TableNetwork,
    fixed,
    guesses,
    log,
    random_language,
    spoken,
    states,
)
from tests.oracles.masking import nelbo_by_orders
from tests.oracles.networks import MASK, blocks_of, tiny_transformer

pytestmark = pytest.mark.sweep(3)

TO_MASK = np.eye(VOCAB)[MASK]
TO_ALL = np.full(VOCAB, 1 / VOCAB)
PROCESSES = {"absorbing": (Absorbing(VOCAB, MASK), TO_MASK), "uniform": (Uniform(VOCAB), TO_ALL)}
BOTH = pytest.mark.parametrize("kind", PROCESSES)


def objective_of(kind: str, steps: int, **options) -> D3PM:
    return D3PM(process=PROCESSES[kind][0], mask_id=MASK, steps=steps, **options)


def mask_rates(schedule, steps: int) -> list[float]:
    t = torch.arange(steps, dtype=torch.float64) / steps
    return [*schedule.mask_rate(t).tolist(), 1.0 - schedule.last_alpha]


def random_logits(length: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((VOCAB**length, length, VOCAB))


def softmax_of_clean(logits: Array) -> Array:
    p = np.exp(logits)
    p[..., MASK] = 0.0
    return p / p.sum(-1, keepdims=True)


def texts(length: int) -> list[tuple[int, ...]]:
    return list(spoken(random_language(length, 0), length))


def probabilities(length: int) -> Array:
    return np.array(list(spoken(random_language(length, 0), length).values()))


# --- the bound ---


@BOTH
@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Square()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("steps", range(1, 9))
def test_the_loss_is_the_bound_by_explicit_matrices_and_enumeration(kind, steps, schedule):
    logits, noise, chosen = random_logits(2), PROCESSES[kind][1], texts(2)[::4]
    rates = mask_rates(schedule, steps)
    objective = objective_of(kind, steps, schedule=schedule)
    found = expected(objective, fixed(logits), chosen, discrete_levels(rates)).sum(1)
    network = [softmax_of_clean(logits)] * (steps + 1)
    for text, nats in zip(chosen, found, strict=True):
        terms = chains.bound(text, network, [1 - r for r in rates], noise)
        assert terms["prior"] == pytest.approx(0.0, abs=1e-12)
        assert nats == pytest.approx(sum(terms.values()), rel=1e-6)


@BOTH
def test_longer_texts_too(kind):
    logits, noise, chosen = random_logits(3), PROCESSES[kind][1], texts(3)[::11]
    found = expected(objective_of(kind, 3), fixed(logits), chosen, discrete_levels([0, 1 / 3, 2 / 3, 1])).sum(
        1
    )
    for text, nats in zip(chosen, found, strict=True):
        terms = chains.bound(text, [softmax_of_clean(logits)] * 4, [1, 2 / 3, 1 / 3, 0], noise)
        assert nats == pytest.approx(sum(terms.values()), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_uniform_chain_that_ends_above_alpha_zero_pays_its_prior(steps):
    schedule = Floored(Linear(), 0.3)
    logits, rates, chosen = random_logits(2), mask_rates(schedule, steps), texts(2)[::4]
    objective = objective_of("uniform", steps, schedule=schedule)
    found = expected(objective, fixed(logits), chosen, discrete_levels(rates)).sum(1)
    for text, nats in zip(chosen, found, strict=True):
        terms = chains.bound(text, [softmax_of_clean(logits)] * (steps + 1), [1 - r for r in rates], TO_ALL)
        assert terms["prior"] > 0.05
        assert nats == pytest.approx(sum(terms.values()), rel=1e-6)


@BOTH
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_bound_stays_above_the_likelihood_of_the_chain(kind, steps):
    logits, noise = random_logits(2), PROCESSES[kind][1]
    rates = mask_rates(Linear(), steps)
    found = expected(objective_of(kind, steps), fixed(logits), texts(2), discrete_levels(rates)).sum(1)
    law = chains.sampled([softmax_of_clean(logits)] * (steps + 1), [1 - r for r in rates], noise, 2)
    own = -np.log([law[states(2).index(x)] for x in texts(2)])
    assert law.sum() == pytest.approx(1.0)
    assert (found >= own - 1e-6).all()
    if kind == "absorbing" and steps == 1:  # nothing is seen, and the bound is the likelihood
        np.testing.assert_allclose(found, own, rtol=1e-6)
    else:
        assert (found > own + 1e-3).all()


def timed(kind: str, length: int) -> TableNetwork:
    """The true p(x_0 | x_t), which under uniform noise depends on the noise level too."""
    language, noise = random_language(length, 0), PROCESSES[kind][1]

    def table(level: float) -> Array:
        alpha = math.exp(-level) if kind == "uniform" else 0.5
        # At T steps the last level is α = 0, told as 1e-3.
        alpha = 0.0 if alpha < 1.1e-3 else alpha
        return log(guesses(language, length, chains.keep_matrix(alpha, noise)))

    return TableNetwork(table, uses_noise=True)


@BOTH
def test_with_the_true_conditionals_the_bound_falls_to_the_entropy_as_steps_grow(kind):
    p = probabilities(2)
    entropy = float(-(p * np.log(p)).sum())
    previous = math.inf
    for steps in (1, 2, 4, 8, 64):
        levels = discrete_levels(mask_rates(Linear(), steps))
        average = p @ expected(objective_of(kind, steps), timed(kind, 2), texts(2), levels).sum(1)
        assert entropy < average < previous
        previous = average
    assert previous == pytest.approx(entropy, rel=0.01)


def test_the_absorbing_bound_converges_to_the_continuous_nelbo_of_the_same_network():
    length, logits, chosen = 3, random_logits(3), texts(3)[::9]
    p_hat, place = softmax_of_clean(logits), {x: row for row, x in enumerate(states(3))}
    nelbo = []
    for text in chosen:
        entropies = np.zeros((2**length, length))
        for masked in range(1, 2**length):
            seen = tuple(MASK if masked >> i & 1 else text[i] for i in range(length))
            for i in range(length):
                if masked >> i & 1:
                    entropies[masked, i] = -math.log(p_hat[place[seen], i, text[i]])
        nelbo.append(nelbo_by_orders(entropies, range(length)))
    errors = []
    for steps in (4, 16, 64, 256):
        levels = discrete_levels(mask_rates(Linear(), steps))
        found = expected(objective_of("absorbing", steps), fixed(logits), chosen, levels).sum(1)
        errors.append(np.abs(found - nelbo).max())
    assert errors[0] > 0.01
    for coarse, fine in pairwise(errors):
        assert fine == pytest.approx(coarse / 4, rel=0.35)  # of the first order in 1/T


def test_absorbing_d3pm_is_masked_diffusion_in_discrete_time():
    network, batch = tiny_transformer(2), TokenBatch.of(torch.tensor([[0, 3, 1, 1, 0, 3]] * 20))
    mdlm = BlockDiffusionLoss(reading=blocks_of(6), masking=DiscreteTimes(steps=7))
    draws = mdlm.seeded_draws(batch, 0)
    ours = objective_of("absorbing", 7).loss(network, batch, draws)
    torch.testing.assert_close(ours.nats, mdlm.loss(network, batch, draws).nats)


# --- the hybrid loss ---


@BOTH
def test_the_auxiliary_loss_is_a_cross_entropy_outside_the_bound(kind):
    logits, chosen, levels = random_logits(2), texts(2)[::4], discrete_levels([0, 0.25, 0.5, 0.75, 1])
    plain, _, _ = losses(objective_of(kind, 4), fixed(logits), chosen, levels)
    hybrid, chances, owners = losses(objective_of(kind, 4, auxiliary=0.1), fixed(logits), chosen, levels)
    assert plain.auxiliary is None
    assert torch.equal(hybrid.nats, plain.nats)
    found = np.bincount(owners, chances * hybrid.auxiliary.sum(1).numpy())
    p, noise = softmax_of_clean(logits), PROCESSES[kind][1]
    for text, nats in zip(chosen, found, strict=True):
        truth = 0.0
        for _level, rate, share in levels:
            forward = chains.keep_matrix(1 - rate, noise)
            for row, x_t in enumerate(states(2)):
                chance = share * np.prod([forward[x, y] for x, y in zip(text, x_t, strict=True)])
                for i in range(2):
                    if kind == "uniform" or x_t[i] == MASK:
                        truth -= chance * math.log(p[row, i, text[i]])
        assert nats == pytest.approx(0.1 * truth, rel=1e-6)


# --- batches, prompts, errors ---


@BOTH
def test_given_tokens_stay_clean_and_are_not_scored(kind):
    chosen = [x for x in texts(3) if x[1] == 3]
    scored = torch.tensor([[True, False, True]] * len(chosen))
    logits, levels = random_logits(3), discrete_levels([0, 0.5, 1])
    found = expected(objective_of(kind, 2), fixed(logits), chosen, levels, scored=scored)
    inner = logits.reshape(VOCAB, VOCAB, VOCAB, 3, VOCAB)[:, 3][:, :, [0, 2]].reshape(VOCAB**2, 2, VOCAB)
    alone = expected(objective_of(kind, 2), fixed(inner), [(x[0], x[2]) for x in chosen], levels)
    np.testing.assert_allclose(found[:, [0, 2]], alone, rtol=1e-6)
    assert (found[:, 1] == 0).all()


@BOTH
def test_the_loss_of_a_global_batch_is_that_of_its_parts(kind):
    network = tiny_transformer(0, adaln=True, time_conditioning=True)
    objective, batch = objective_of(kind, 5, auxiliary=0.3), TokenBatch.of(torch.tensor(texts(3)))
    draws = objective.seeded_draws(batch, 5)
    whole = objective.loss(network, batch, draws)
    parts = [objective.loss(network, batch[s], draws[s]) for s in (slice(0, 4), slice(4, 27))]
    torch.testing.assert_close(whole.nats, torch.cat([part.nats for part in parts]))
    torch.testing.assert_close(whole.auxiliary, torch.cat([part.auxiliary for part in parts]))
    assert objective.is_bound
    assert objective.bounds(network)


@BOTH
def test_gradients_are_finite_in_float32_even_where_the_truth_is_thought_impossible(kind):
    network = tiny_transformer(0, dtype=torch.float32, gain=30.0)
    batch = TokenBatch.of(torch.tensor([[0, 3, 1, 1]] * 64), score_first=True)
    loss = objective_of(kind, 4, auxiliary=0.1)(network, batch, generator=torch.Generator().manual_seed(0))
    (loss.nats.sum() + loss.auxiliary.sum()).backward()
    assert loss.nats.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


def test_absent_tokens_are_masked_and_refused_under_uniform_noise():
    batch = TokenBatch.of(torch.tensor([[0, 3, 1], [1, 1, 0]]), lengths=torch.tensor([2, 2]))
    other = TokenBatch.of(torch.tensor([[0, 3, 0], [1, 1, 3]]), lengths=torch.tensor([2, 2]))
    network, objective = tiny_transformer(0), objective_of("absorbing", 3)
    one, two = (objective.loss(network, b, objective.seeded_draws(b, 0)) for b in (batch, other))
    assert torch.equal(one.nats, two.nats)
    with pytest.raises(ValueError, match="absent tokens need the absorbing process"):
        objective_of("uniform", 3)(network, batch)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        objective_of("uniform", 0)
    with pytest.raises(ValueError, match="auxiliary must be finite and not negative, got -1"):
        objective_of("uniform", 1, auxiliary=-1)
    with pytest.raises(ValueError, match="schedule must end at α = 0 under the absorbing process"):
        objective_of("absorbing", 1, schedule=Floored(Linear()))
    with pytest.raises(ValueError, match="draws must be given"):
        objective_of("uniform", 1).loss(tiny_transformer(0), TokenBatch.of(torch.tensor([[0, 1]])), None)
