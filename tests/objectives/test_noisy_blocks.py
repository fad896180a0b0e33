"""Block diffusion under any noise (section 3.1): each block's bound by explicit matrices, all in one pass."""

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Absorbing, Cosine, DiscreteTimes, Draws, Floored, Linear, Uniform
from bd3lm.models import Bidirectional, Transformer
from bd3lm.objectives import D3PM, BlockDiffusionLoss, ScoreEntropy, TokenBatch
from bd3lm.objectives.corruption import CorruptionObjective
from tests.objectives.enumeration import continuous_levels, discrete_levels, expected_in_blocks
from tests.oracles import chains, scores
from tests.oracles.languages import VOCAB, Array, Text, states
from tests.oracles.networks import CLEAN, MASK, blocks_of, tiny_transformer
from tests.oracles.noisy_blocks import blocks_of_text, guesses_after, law_in_blocks, logits_after

pytestmark = pytest.mark.sweep(3)

LENGTH, LEAST = 4, 0.02
TO_MASK, TO_ALL = np.eye(VOCAB)[MASK], np.full(VOCAB, 1 / VOCAB)
PROCESSES = {"absorbing": (Absorbing(VOCAB, MASK), TO_MASK), "uniform": (Uniform(VOCAB), TO_ALL)}
BOTH = pytest.mark.parametrize("kind", PROCESSES)
SIZES = pytest.mark.parametrize("size", [1, 2, 4])
TEXTS: list[Text] = [(0, 3, 1, 1), (3, 0, 0, 3), (1, 1, 3, 0)]
PLAIN = tiny_transformer(1)
TOLD = tiny_transformer(1, adaln=True, time_conditioning=True)
NETWORKS = {"plain": PLAIN, "told": TOLD}


def d3pm(kind: str, size: int | None, steps: int = 3, **options) -> D3PM:
    return D3PM(process=PROCESSES[kind][0], mask_id=MASK, steps=steps, block_size=size, **options)


def sedd(kind: str, size: int | None) -> ScoreEntropy:
    schedule = Linear() if kind == "absorbing" else Floored(Linear(), LEAST)
    return ScoreEntropy(process=PROCESSES[kind][0], mask_id=MASK, schedule=schedule, block_size=size)


EITHER = pytest.mark.parametrize("make", [d3pm, sedd])


def rates_of(schedule, steps: int) -> list[float]:
    t = torch.arange(steps, dtype=torch.float64) / steps
    return [*schedule.mask_rate(t).tolist(), 1.0 - schedule.last_alpha]


# --- D3PM: T steps ---


@BOTH
@SIZES
@pytest.mark.parametrize(
    ("steps", "schedule"), [(1, Linear()), (3, Linear()), (2, Cosine())], ids=["1", "3", "2-cosine"]
)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_loss_is_the_bound_of_every_block_by_explicit_matrices(kind, size, steps, schedule, network):
    model, noise, rates = NETWORKS[network], PROCESSES[kind][1], rates_of(schedule, steps)
    objective = d3pm(kind, size, steps, schedule=schedule)
    found = expected_in_blocks(objective, model, TEXTS, discrete_levels(rates), size)
    for text, nats in zip(TEXTS, found, strict=True):
        for number, (past, block) in enumerate(blocks_of_text(text, size)):
            tables = [guesses_after(model, past, size, rate) for rate in rates]
            terms = chains.bound(block, tables, [1 - rate for rate in rates], noise)
            own = nats[number * size : (number + 1) * size].sum()
            assert own == pytest.approx(sum(terms.values()), rel=1e-5, abs=1e-9)


def test_every_block_pays_the_prior_of_a_chain_that_ends_above_alpha_zero():
    rates = rates_of(schedule := Floored(Linear(), 0.3), 2)
    found = expected_in_blocks(
        d3pm("uniform", 2, 2, schedule=schedule), PLAIN, TEXTS, discrete_levels(rates), 2
    )
    for text, nats in zip(TEXTS, found, strict=True):
        truth = 0.0
        for past, block in blocks_of_text(text, 2):
            tables = [guesses_after(PLAIN, past, 2, 0.0)] * 3
            terms = chains.bound(block, tables, [1 - rate for rate in rates], TO_ALL)
            assert terms["prior"] > 0.05
            truth += sum(terms.values())
        assert nats.sum() == pytest.approx(truth, rel=1e-5)


@BOTH
@SIZES
@pytest.mark.parametrize("steps", [1, 3])
def test_the_bound_stays_above_the_likelihood_of_the_sampler_in_blocks(kind, size, steps):
    noise, rates = PROCESSES[kind][1], rates_of(Linear(), steps)
    alphas = [1 - rate for rate in rates]

    def block_law(past: Text, start: Array, kept: tuple[bool, ...]) -> Array:
        tables = [guesses_after(TOLD, past, size, rate) for rate in rates]
        return chains.sampled(tables, alphas, noise, size, start, kept=kept)

    law = law_in_blocks(block_law, noise, LENGTH, size)
    assert law.sum() == pytest.approx(1.0)
    own = -np.log([law[states(LENGTH).index(text)] for text in TEXTS])
    found = expected_in_blocks(d3pm(kind, size, steps), TOLD, TEXTS, discrete_levels(rates), size).sum(1)
    assert (found >= own - 1e-6).all()
    if kind == "absorbing" and steps == 1:  # nothing is seen of a block, and the bound is the likelihood
        np.testing.assert_allclose(found, own, rtol=1e-5)
    elif kind == "uniform":
        assert (found > own + 1e-3).all()


@SIZES
@pytest.mark.parametrize("network", NETWORKS)
def test_absorbing_noise_in_t_steps_is_block_diffusion_in_discrete_time(size, network):
    """Loss by loss, and so bound by bound; with prompts and ends inside blocks."""
    model = NETWORKS[network]
    tokens = torch.tensor([[0, 3, 1, 1, 0, 3, 3, 1]] * 20)
    batch = TokenBatch.of(tokens, prompts=torch.arange(20) % 6, lengths=6 + torch.arange(20) % 3)
    masked = BlockDiffusionLoss(reading=blocks_of(size), masking=DiscreteTimes(steps=7))
    draws = masked.seeded_draws(batch, 0)
    ours = d3pm("absorbing", size, 7).loss(model, batch, draws)
    torch.testing.assert_close(ours.nats, masked.loss(model, batch, draws).nats)
    assert ours.nats.sum() > 1


# --- between the two ---


def implied_scores(guesses: Array, kind: str, size: int, alpha: float) -> Array:
    """The scores that a guess p(x_0 | x_t) stands for: Σ_x p(x) q(y | x)/q(x_t | x), by matrices."""
    law, table = scores.forward(rate_matrix(kind), alpha), np.zeros_like(guesses)
    for row, x in enumerate(states(size)):
        for i in range(size):
            possible = law[:, x[i]] > 1e-14
            guess = guesses[row, i][possible]
            table[row, i] = guess @ (law[possible] / law[possible, x[i]][:, None]) / guess.sum()
    return table


@BOTH
@SIZES
@pytest.mark.parametrize("network", NETWORKS)
def test_the_term_of_a_step_becomes_the_score_entropy_of_what_the_guess_stands_for(kind, size, network):
    """Continuous time is SEDD's: as steps grow shorter, to the first order, at one noise level."""
    model, rate = NETWORKS[network], 0.5
    limits = []
    for text in TEXTS:
        tables = [
            (block, implied_scores(guesses_after(model, past, size, rate), kind, size, 1 - rate))
            for past, block in blocks_of_text(text, size)
        ]
        limits.append(
            sum(scores.integrand(x, table, rate_matrix(kind), 1 - rate) for x, table in tables) / (1 - rate)
        )
    errors = []
    for steps in (16, 64, 256):
        level = [((steps / 2 - 0.5) / steps, rate, 1.0)]  # step T/2, which ends there
        found = expected_in_blocks(d3pm(kind, size, steps), model, TEXTS, level, size).sum(1)
        errors.append(np.abs(found - limits).max())
    assert min(limits) > 0.1
    if kind == "absorbing":  # whose terms are alike in every step but the first
        assert max(errors) < 1e-5
    else:
        for coarse, fine in pairwise(errors):
            assert fine == pytest.approx(coarse / 4, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_over_uniform_noise_a_guess_that_ignores_time_has_no_bound_in_the_limit(size):
    """It would change a text that is all but clean at a rate of (1 − p)/t, so the bound grows like log T.

    Scores, which need not grow there, have one: hence SEDD in continuous time, and few steps for D3PM.
    """
    bounds = []
    for steps in (64, 256, 1024):
        levels = discrete_levels(rates_of(Linear(), steps))
        bounds.append(expected_in_blocks(d3pm("uniform", size, steps), PLAIN, TEXTS, levels, size).sum(1))
    doubt = np.zeros(len(TEXTS))
    for row, text in enumerate(TEXTS):
        for past, block in blocks_of_text(text, size):
            guesses = guesses_after(PLAIN, past, size, 0.0)[states(size).index(block)]
            doubt[row] += sum(1 - guesses[i, token] for i, token in enumerate(block))
    assert doubt.min() > 0.1
    for coarse, fine in pairwise(bounds):
        np.testing.assert_allclose(fine - coarse, math.log(4) * doubt, rtol=0.1, atol=0.05)


# --- SEDD: continuous time ---


def score_table(kind: str, model, past: Text, size: int, alpha: float) -> Array:
    """The network's scores of a block after its past, at any noise level."""
    table = np.exp(logits_after(model, past, size, 1 - alpha))
    if kind == "absorbing":
        table = table / (VOCAB - 1) * alpha / (1 - alpha)
        table[..., MASK] = 0.0
    for row, x in enumerate(states(size)):
        for i in range(size):
            if kind == "absorbing" and x[i] != MASK:
                table[row, i] = 0.0  # a clean token came from itself
            table[row, i, x[i]] = 1.0
    return table


def rate_matrix(kind: str) -> Array:
    return scores.absorbing_rates(MASK) if kind == "absorbing" else scores.uniform_rates()


def levels_of(kind: str, nodes: int, power: int = 1):
    return continuous_levels(
        lambda t: t if kind == "absorbing" else (1 - LEAST) * t, nodes=nodes, power=power
    )


@BOTH
@SIZES
@pytest.mark.parametrize("network", NETWORKS)
def test_score_entropy_is_its_definition_in_every_block_by_matrices(kind, size, network):
    model, levels = NETWORKS[network], levels_of(kind, nodes=4)
    found = expected_in_blocks(sedd(kind, size), model, TEXTS[:2], levels, size)
    for text, nats in zip(TEXTS, found, strict=False):
        for number, (past, block) in enumerate(blocks_of_text(text, size)):
            prior = 0.0 if kind == "absorbing" else scores.prior_divergence(block, rate_matrix(kind), LEAST)
            truth = prior
            for _t, rate, share in levels:
                table = score_table(kind, model, past, size, 1 - rate)
                speed = (1.0 if kind == "absorbing" else 1 - LEAST) / (1 - rate)
                truth += share * speed * scores.integrand(block, table, rate_matrix(kind), 1 - rate)
            assert nats[number * size : (number + 1) * size].sum() == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@BOTH
def test_score_entropy_stays_above_the_likelihood_of_its_reverse_process_in_blocks(kind, size):
    """Jumps over masks, the equation of the reverse process over uniform noise: each after its past."""
    found = expected_in_blocks(sedd(kind, size), PLAIN, TEXTS, levels_of(kind, 24, power=3), size).sum(1)

    @cache
    def law_after(past: Text) -> Array:
        table = logits_after(PLAIN, past, size, 0.0)
        if kind == "absorbing":
            return scores.jump_law(np.exp(table), size, MASK)
        ones = score_table(kind, PLAIN, past, size, 0.5)
        return scores.reverse_law(lambda _: ones, size, rate_matrix(kind), LEAST)

    own = [
        -sum(math.log(law_after(past)[states(size).index(block)]) for past, block in blocks_of_text(x, size))
        for x in TEXTS
    ]
    assert (found >= np.array(own) - 1e-4).all()
    assert (found > np.array(own) + 1e-3).any()


# --- both ---


@EITHER
@BOTH
@pytest.mark.parametrize("network", NETWORKS)
def test_one_block_is_the_whole_context_to_the_last_bit(make, kind, network):
    model, batch = NETWORKS[network], TokenBatch.of(torch.tensor([[0, 3, 1, 1, 3, 0]] * 9))
    whole, one = make(kind, None), make(kind, 6)
    assert whole.seeded_draws(batch, 3).levels.equal(one.seeded_draws(batch, 3).levels)
    losses = [each.loss(model, batch, each.seeded_draws(batch, 3)).nats for each in (whole, one)]
    assert torch.equal(*losses)


class Asked:
    """A network that keeps what it is asked."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.calls = model, []

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, **how) -> Tensor:
        self.calls.append((tuple(tokens.shape), how["layout"], tuple(how["noise"].shape)))
        return self.model(tokens, **how)


@EITHER
@BOTH
@pytest.mark.parametrize("size", [None, 6])
def test_one_block_is_asked_as_before_there_were_blocks(make, kind, size):
    """Without clean text, and with one noise level a text: so its numbers are those of before, to the bit."""
    network, batch = Asked(TOLD), TokenBatch.of(torch.tensor([[0, 3, 1, 1, 3, 0]] * 9))
    objective = make(kind, size)
    objective.loss(network, batch, objective.seeded_draws(batch, 3))
    assert network.calls == [((9, 6), Bidirectional(6), (9,))]


@EITHER
@BOTH
def test_a_block_depends_on_its_own_noise_and_the_text_before_it_alone(make, kind):
    objective, batch = make(kind, 2), TokenBatch.of(torch.tensor([[0, 3, 1, 1, 3, 0]] * 40))
    draws, other = (objective.seeded_draws(batch, seed) for seed in (0, 1))
    mixed = Draws(
        levels=torch.cat((other.levels[:, :1], draws.levels[:, 1:2], other.levels[:, 2:]), 1),
        spare=draws.spare,
        tokens=torch.cat((other.tokens[:, :2], draws.tokens[:, 2:4], other.tokens[:, 4:]), 1),
    )
    one, two = (objective.loss(TOLD, batch, each).nats for each in (draws, mixed))
    torch.testing.assert_close(one[:, 2:4], two[:, 2:4])
    assert not torch.allclose(one[:, :2], two[:, :2])
    later = TokenBatch.of(torch.tensor([[0, 3, 1, 1, 0, 1]] * 40))
    torch.testing.assert_close(objective.loss(TOLD, later, draws).nats[:, :4], one[:, :4])
    earlier = TokenBatch.of(torch.tensor([[3, 3, 1, 1, 3, 0]] * 40))
    assert not torch.allclose(objective.loss(TOLD, earlier, draws).nats[:, 2:], one[:, 2:])


@EITHER
@BOTH
def test_given_tokens_stay_clean_inside_a_block(make, kind):
    """Whatever their numbers say; and they are not scored."""
    objective = make(kind, 2)
    batch = TokenBatch.of(torch.tensor([[0, 3, 1, 1]] * 40), prompts=torch.full((40,), 3))
    draws = objective.seeded_draws(batch, 0)
    moved = Draws(levels=draws.levels, spare=draws.spare, tokens=draws.tokens.clone())
    moved.tokens[:, :3] = 1e-9
    one, two = (objective.loss(TOLD, batch, each).nats for each in (draws, moved))
    assert torch.equal(one, two)
    assert (one[:, :3] == 0).all()
    assert (one[:, 3] != 0).any()


@EITHER
def test_a_text_may_end_inside_a_block_of_masks_and_not_of_uniform_noise(make):
    ends = [
        TokenBatch.of(torch.tensor([[0, 3, 1, 1, other, 3]]), lengths=torch.tensor([4])) for other in (0, 1)
    ]
    objective = make("absorbing", 3)
    one, two = (objective.loss(TOLD, batch, objective.seeded_draws(batch, 0)).nats for batch in ends)
    assert torch.equal(one, two)
    assert (one[:, 4:] == 0).all()
    with pytest.raises(ValueError, match="absent tokens need the absorbing process"):
        make("uniform", 3)(TOLD, ends[0])


@EITHER
@BOTH
def test_the_loss_of_a_global_batch_is_that_of_its_parts(make, kind):
    objective, batch = make(kind, 2), TokenBatch.of(torch.tensor(states(4, 2)))
    draws = objective.seeded_draws(batch, 5)
    parts = [objective.loss(TOLD, batch[s], draws[s]).nats for s in (slice(0, 5), slice(5, 16))]
    torch.testing.assert_close(objective.loss(TOLD, batch, draws).nats, torch.cat(parts))
    assert objective.is_bound
    assert objective.block_of(64) == 2
    assert make(kind, None).block_of(64) == 64


@EITHER
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        make("uniform", 0)
    objective: CorruptionObjective = make("uniform", 2)
    odd, even = (TokenBatch.of(torch.tensor([list(CLEAN[:2]) * 2 + [0] * more])) for more in (1, 0))
    with pytest.raises(ValueError, match="length must be a positive multiple of block_size, got length 5"):
        objective(PLAIN, odd)
    with pytest.raises(ValueError, match=r"1 rows of 4 tokens in blocks of 2.*got levels of shape \(1, 1\)"):
        objective.loss(PLAIN, even, make("uniform", None).seeded_draws(even, 0))
