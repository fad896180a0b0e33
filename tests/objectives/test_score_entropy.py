"""SEDD's loss is the score entropy of Lou et al., least at the true scores, never below the likelihood."""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch

from bd3lm.diffusion import (
    Absorbing,
    Cosine,
    Draws,
    Floored,
    LevelSampler,
    Linear,
    Square,
    SquareRoot,
    Times,
    Uniform,
)
from bd3lm.objectives import BlockDiffusionLoss, ScoreEntropy, TokenBatch
from tests.objectives.enumeration import continuous_levels, expected
from tests.oracles import scores as oracle
from tests.oracles.chains import keep_matrix
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
    spoken,
    states,
)
from tests.oracles.masking import nelbo_by_orders
from tests.oracles.networks import MASK, blocks_of, tiny_transformer

pytestmark = pytest.mark.sweep(3)

ABSORBING = ScoreEntropy(process=Absorbing(VOCAB, MASK), mask_id=MASK)
LEAST = 0.02
UNIFORM = ScoreEntropy(process=Uniform(VOCAB), mask_id=MASK, schedule=Floored(Linear(), LEAST))
LINEAR = continuous_levels(lambda t: t)
FLOORED = continuous_levels(lambda t: (1 - LEAST) * t, nodes=24, power=3)
TO_MASK = np.eye(VOCAB)[MASK]
RNG = np.random.default_rng


def conditionals(length: int, seed: int = 0) -> Array:
    """p(x_i | what is visible), the true ŝ; at visible tokens it means nothing."""
    return guesses(random_language(length, seed), length, keep_matrix(0.5, TO_MASK))


def knows_the_language(
    length: int, seed: int = 0, *, offset: float = 0.0, scale: float = 0.0
) -> TableNetwork:
    """The true scores, or others: `offset` multiplies them all, `scale` perturbs every one."""
    table = log(conditionals(length, seed)) + math.log(VOCAB - 1) + offset
    return fixed(table + scale * RNG(7).standard_normal(table.shape))


def true_uniform_score(length: int, seed: int, alpha: float) -> Array:
    q_t = noisy(random_language(length, seed), length, keep_matrix(alpha, np.full(VOCAB, 1 / VOCAB)))
    return ratios(q_t, length)


def knows_the_noise(length: int, seed: int = 0) -> TableNetwork:
    """The true scores of the uniform process, which change with the noise level."""
    return TableNetwork(
        lambda noise: np.log(true_uniform_score(length, seed, math.exp(-noise))), uses_noise=True
    )


def nll(length: int, seed: int = 0) -> Array:
    return -np.log(np.array(list(spoken(random_language(length, seed), length).values())))


def texts(length: int, seed: int = 0) -> list[tuple[int, ...]]:
    return list(spoken(random_language(length, seed), length))


def entropy(length: int, seed: int = 0) -> float:
    p = random_language(length, seed)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


# --- absorbing ---


@pytest.mark.parametrize("length", [1, 2, 3])
def test_true_scores_reach_the_likelihood_of_every_text(length):
    found = expected(ABSORBING, knows_the_language(length), texts(length), LINEAR).sum(1)
    np.testing.assert_allclose(found, nll(length), rtol=1e-6)


@pytest.mark.parametrize(
    "schedule", [Linear(), Square(), SquareRoot(), Cosine()], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_the_bound_is_the_definition_of_score_entropy_by_matrices(schedule, scale):
    """Every schedule, scores true and not, at matrix exponentials of the rates (Theorem 3.6)."""
    objective = ScoreEntropy(process=Absorbing(VOCAB, MASK), mask_id=MASK, schedule=schedule)
    as_tensor = lambda t: torch.tensor(t, dtype=torch.float64)  # noqa: E731
    levels = continuous_levels(lambda t: schedule.mask_rate(as_tensor(t)).numpy(), nodes=8)
    network, chosen = knows_the_language(2, scale=scale), texts(2)[::4]
    s_hat = np.exp(network.table(0.0)) / (VOCAB - 1)
    s_hat[..., MASK] = 0.0
    truth = np.zeros(len(chosen))
    for t, rate, share in levels:
        alpha = 1 - rate
        speed = float(schedule.mask_rate_prime(as_tensor(t))) / alpha
        for k, text in enumerate(chosen):
            terms = oracle.integrand(text, s_hat * alpha / rate, oracle.absorbing_rates(MASK), alpha)
            truth[k] += share * speed * terms
    np.testing.assert_allclose(expected(objective, network, chosen, levels).sum(1), truth, rtol=1e-5)


def test_normalised_scores_pay_the_nelbo_and_others_a_remainder():
    """Σ ŝ − log ŝ − 1 is −log p̂ + (Z − 1 − log Z): SEDD with Z = 1 is MDLM."""
    length, chosen = 3, texts(3)[::5]
    table = RNG(1).standard_normal((VOCAB**length, length, VOCAB))
    p_hat = np.exp(table)
    p_hat[..., MASK] = 0.0
    p_hat /= p_hat.sum(-1, keepdims=True)
    z = 1.7
    tables = [log(p_hat * factor) + math.log(VOCAB - 1) for factor in (1.0, z)]
    normalised, scaled = (expected(ABSORBING, fixed(t), chosen, LINEAR).sum(1) for t in tables)
    place = {x: row for row, x in enumerate(states(length))}
    for k, text in enumerate(chosen):
        entropies = np.zeros((2**length, length))
        for masked in range(1, 2**length):
            seen = tuple(MASK if masked >> i & 1 else text[i] for i in range(length))
            for i in range(length):
                if masked >> i & 1:
                    entropies[masked, i] = -math.log(p_hat[place[seen], i, text[i]])
        assert normalised[k] == pytest.approx(nelbo_by_orders(entropies, range(length)), rel=1e-6)
    # Each token is masked for a while: ∫ (1/t)·t dt = 1 remainder for each.
    np.testing.assert_allclose(scaled - normalised, length * (z - 1 - math.log(z)), rtol=1e-5)


@pytest.mark.parametrize("offset", [-0.5, 0.5])
def test_scores_too_large_or_too_small_cost_more(offset):
    found = expected(ABSORBING, knows_the_language(2, offset=offset), texts(2), LINEAR).sum(1)
    np.testing.assert_allclose(found - nll(2), 2 * (math.exp(offset) - 1 - offset), rtol=1e-5)


@pytest.mark.parametrize("scale", [0.01, 0.3, 2.0])
def test_perturbed_scores_cost_more_and_stay_above_the_likelihood_of_their_process(scale):
    network = knows_the_language(3, scale=scale)
    found = expected(ABSORBING, network, texts(3), LINEAR).sum(1)
    p = np.array(list(spoken(random_language(3, 0), 3).values()))
    assert p @ found > entropy(3) + 1e-5
    law = oracle.jump_law(np.exp(network.table(0.0)), 3, MASK)
    assert law.sum() == pytest.approx(1.0)
    own = -np.log([law[states(3).index(x)] for x in texts(3)])
    assert (found >= own - 1e-6).all()
    assert (found > own + 1e-4).any()  # the two are told apart


def test_a_floor_on_the_noise_level_would_print_a_figure_below_the_entropy():
    """SEDD integrates from ε on and leaves the rest out. That is why there is no floor here."""
    eps = 1e-3
    floored = continuous_levels(lambda t: t, low=eps)
    p = np.array(list(spoken(random_language(3, 0), 3).values()))
    network = knows_the_language(3)
    below = p @ expected(ABSORBING, network, texts(3), floored).sum(1)
    assert below < entropy(3) - 1e-4
    assert p @ expected(ABSORBING, network, texts(3), LINEAR).sum(1) == pytest.approx(entropy(3), rel=1e-6)


def test_the_loss_is_finite_at_full_masking_and_next_to_none():
    network = tiny_transformer(0, dtype=torch.float32)
    batch = TokenBatch.of(torch.tensor([[0, 3, 1], [1, 1, 0]]), score_first=True)
    levels = torch.tensor([[1.0], [2.0**-53]], dtype=torch.float64)  # the most and the least ever drawn
    tokens = torch.tensor([[1.0, 1.0, 1.0], [2.0**-53, 1.0, 2.0**-53]], dtype=torch.float64)
    loss = ABSORBING.loss(network, batch, Draws(levels=levels, spare=levels, tokens=tokens))
    assert loss.nats.isfinite().all()
    assert (loss.nats != 0).tolist() == [[True] * 3, [True, False, True]]
    loss.nats.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


def test_mdlm_and_sedd_share_masks_and_differ_in_their_remainder():
    """With one network and the same draws: SEDD pays more wherever MDLM pays."""
    network, batch = tiny_transformer(3), TokenBatch.of(torch.tensor([[0, 3, 1, 1, 0, 3]] * 40))
    mdlm = BlockDiffusionLoss(reading=blocks_of(6), masking=Times())
    draws = mdlm.seeded_draws(batch, 1)
    sedd, subs = (objective.loss(network, batch, draws).nats for objective in (ABSORBING, mdlm))
    assert torch.equal(sedd != 0, subs != 0)
    assert (sedd >= subs - 1e-6).all()


# --- uniform ---


@pytest.mark.parametrize("scale", [None, 0.0, 1.0])
def test_the_uniform_bound_is_the_definition_by_matrices(scale):
    """At random scores, at scores of 1, and at the true ones; the prior term included."""
    table = None if scale is None else scale * RNG(2).standard_normal((VOCAB**2, 2, VOCAB))
    network = knows_the_noise(2) if table is None else fixed(table)
    levels = continuous_levels(lambda t: (1 - LEAST) * t, nodes=6)
    chosen, rates = texts(2)[::4], oracle.uniform_rates()
    truth = np.array([oracle.prior_divergence(text, rates, LEAST) for text in chosen])
    for _t, rate, share in levels:
        alpha = 1 - rate
        s = true_uniform_score(2, 0, alpha) if table is None else np.exp(table)
        terms = np.array([oracle.integrand(text, s, rates, alpha) for text in chosen])
        truth += share * (1 - LEAST) / alpha * terms
    np.testing.assert_allclose(expected(UNIFORM, network, chosen, levels).sum(1), truth, rtol=1e-5)


def test_true_uniform_scores_reach_the_least_bound_there_is():
    """On average the entropy and KL(q_1 ‖ uniform): all that starting from the wrong prior costs."""
    p = np.array(list(spoken(random_language(2, 0), 2).values()))
    average = p @ expected(UNIFORM, knows_the_noise(2), texts(2), FLOORED).sum(1)
    q_1 = noisy(random_language(2, 0), 2, keep_matrix(LEAST, np.full(VOCAB, 1 / VOCAB)))
    prior = float((q_1 * np.log(q_1 * VOCAB**2)).sum())
    assert average == pytest.approx(entropy(2) + prior, rel=1e-5)


def test_scores_of_one_are_uniform_noise_running_backwards_and_pay_log_v_a_token():
    """The reverse of noise that began as noise: all that is paid is KL(x_0 ‖ uniform), for every text."""
    found = expected(UNIFORM, fixed(np.zeros((VOCAB**2, 2, VOCAB))), texts(2), FLOORED)
    np.testing.assert_allclose(found, math.log(VOCAB), rtol=1e-5)


@lru_cache
def perturbed_uniform(scale: float) -> tuple[Array, Array]:
    """(bound, −log p of the reverse process itself) of every text."""

    def table(alpha: float) -> Array:
        shift = scale * RNG(3).standard_normal((VOCAB**2, 2, VOCAB))
        return np.log(true_uniform_score(2, 0, alpha)) + shift

    network = TableNetwork(lambda noise: table(math.exp(-noise)), uses_noise=True)
    found = expected(UNIFORM, network, texts(2), FLOORED).sum(1)
    law = oracle.reverse_law(_with_ones(table), 2, oracle.uniform_rates(), LEAST)
    assert law.sum() == pytest.approx(1.0)
    return found, -np.log([law[states(2).index(x)] for x in texts(2)])


def _with_ones(table):
    """Scores from log scores; α is kept below 1, where some true scores are infinite."""
    return lambda alpha: np.exp(table(min(alpha, 1 - 1e-7)))


@pytest.mark.parametrize("scale", [0.0, 0.2, 0.7])
def test_the_uniform_bound_stays_above_the_likelihood_of_its_process(scale):
    found, own = perturbed_uniform(scale)
    assert (found >= own - 1e-4).all()
    p = np.array(list(spoken(random_language(2, 0), 2).values()))
    if scale:
        assert p @ found > p @ perturbed_uniform(0.0)[0] + 0.01


def test_without_the_prior_term_the_uniform_figure_falls_below_the_entropy():
    """At a high floor what is left of the text at t = 1 is worth much; it must be paid for."""
    least = 0.5
    objective = ScoreEntropy(process=Uniform(VOCAB), mask_id=MASK, schedule=Floored(Linear(), least))
    levels = continuous_levels(lambda t: (1 - least) * t, nodes=24, power=3)
    p = np.array(list(spoken(random_language(2, 0), 2).values()))
    found = p @ expected(objective, knows_the_noise(2), texts(2), levels).sum(1)
    assert found > entropy(2)
    assert found - 2 * Uniform(VOCAB).prior_divergence(least) < entropy(2) - 0.05


def test_uniform_gradients_are_finite_in_float32():
    network = tiny_transformer(0, dtype=torch.float32)
    batch = TokenBatch.of(torch.tensor([[0, 3, 1, 1]] * 64), score_first=True)
    loss = UNIFORM(network, batch, generator=torch.Generator().manual_seed(0))
    loss.mean().backward()
    assert loss.nats.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


# --- both ---


@pytest.mark.parametrize("objective", [ABSORBING, UNIFORM], ids=["absorbing", "uniform"])
def test_given_tokens_stay_clean_and_are_not_scored(objective):
    """The bound of the rest, given them: the true conditionals still reach −log p(rest | given)."""
    length, language = 3, random_language(3, 0)
    chosen = [x for x in texts(length) if x[1] == 3]
    given = torch.zeros(len(chosen), length, dtype=torch.bool)
    given[:, 1] = True
    if objective is ABSORBING:
        network, levels = knows_the_language(length), LINEAR
        found = expected(objective, network, chosen, levels, scored=~given)
        p = np.array([language[states(length).index(x)] for x in chosen])
        np.testing.assert_allclose(found.sum(1), -np.log(p / p.sum()), rtol=1e-6)
    else:
        table = RNG(4).standard_normal((VOCAB**length, length, VOCAB))
        levels = continuous_levels(lambda t: (1 - LEAST) * t, nodes=2)
        found = expected(objective, fixed(table), chosen, levels, scored=~given)
        inner = table.reshape(VOCAB, VOCAB, VOCAB, length, VOCAB)[:, 3][:, :, [0, 2]].reshape(
            VOCAB**2, 2, VOCAB
        )
        alone = expected(objective, fixed(inner), [(x[0], x[2]) for x in chosen], levels)
        np.testing.assert_allclose(found[:, [0, 2]], alone, rtol=1e-6)
    assert (found[:, 1] == 0).all()


def test_absent_tokens_are_masked_and_refused_under_uniform_noise():
    batch = TokenBatch.of(torch.tensor([[0, 3, 1], [1, 1, 0]]), lengths=torch.tensor([2, 2]))
    other = TokenBatch.of(torch.tensor([[0, 3, 0], [1, 1, 3]]), lengths=torch.tensor([2, 2]))
    network, draws = tiny_transformer(0), ABSORBING.seeded_draws(batch, 0)
    one, two = (ABSORBING.loss(network, b, draws) for b in (batch, other))
    assert torch.equal(one.nats, two.nats)
    assert (one.nats[:, 2] == 0).all()
    with pytest.raises(ValueError, match="absent tokens need the absorbing process"):
        UNIFORM(network, batch)


@pytest.mark.parametrize("objective", [ABSORBING, UNIFORM], ids=["absorbing", "uniform"])
def test_the_loss_of_a_global_batch_is_that_of_its_parts_and_of_its_draws_alone(objective):
    network = tiny_transformer(0, adaln=True, time_conditioning=True)
    batch = TokenBatch.of(torch.tensor(texts(3)))
    draws = objective.seeded_draws(batch, 5)
    whole = objective.loss(network, batch, draws).nats
    parts = [objective.loss(network, batch[s], draws[s]).nats for s in (slice(0, 4), slice(4, 27))]
    torch.testing.assert_close(whole, torch.cat(parts))
    assert torch.equal(whole, objective.loss(network, batch, draws).nats)
    assert objective.is_bound
    assert objective.bounds(network)


def test_what_makes_no_sense_is_refused():
    uniform, absorbing = Uniform(VOCAB), Absorbing(VOCAB, MASK)
    with pytest.raises(ValueError, match="schedule must end above α = 0 under the uniform process"):
        ScoreEntropy(process=uniform, mask_id=MASK)
    with pytest.raises(ValueError, match="schedule must end at α = 0 under the absorbing process"):
        ScoreEntropy(process=absorbing, mask_id=MASK, schedule=Floored(Linear(), 0.1))
    with pytest.raises(ValueError, match="mask_id must be the process's, 2, got 1"):
        ScoreEntropy(process=absorbing, mask_id=1)
    with pytest.raises(ValueError, match=r"mask_id must lie in 0..3, got 4"):
        ScoreEntropy(process=uniform, mask_id=4, schedule=Floored(Linear()))
    with pytest.raises(ValueError, match=r"least_alpha must lie in \(0, 1\), got 0"):
        Floored(Linear(), 0)
    with pytest.raises(ValueError, match="must not have a floor of its own"):
        Floored(Floored(Linear()))
    assert not ScoreEntropy(
        process=absorbing, mask_id=MASK, levels=LevelSampler(assignment="ordered")
    ).is_bound
    batch = TokenBatch.of(torch.tensor([[0, 3, 1]]))
    network = tiny_transformer(0)
    with pytest.raises(ValueError, match="draws must be given"):
        ABSORBING.loss(network, batch, None)
    with pytest.raises(ValueError, match="one block of 3 tokens"):
        ABSORBING.loss(network, batch, LevelSampler().draw(1, 3, 1))
    with pytest.raises(ValueError, match="must not be the mask 2"):
        ABSORBING(network, TokenBatch.of(torch.tensor([[0, MASK, 1]])))
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.3"):
        UNIFORM(network, TokenBatch.of(torch.tensor([[0, 7, 1]])))
    with pytest.raises(ValueError, match="process must be over the network's 4 tokens, got 5"):
        ScoreEntropy(process=Absorbing(5, MASK), mask_id=MASK)(network, batch)
