"""The training loss is in expectation what it says it is, and exactly the NLL where it can be."""

import json
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import (
    ClippedTimes,
    Cosine,
    Counts,
    DiscreteTimes,
    Draws,
    LearnedCounts,
    LevelSampler,
    Linear,
    Logarithmic,
    MaskingRule,
    Masks,
    Square,
    SquareRoot,
    Times,
)
from bd3lm.objectives import Autoregressive, BlockDiffusionLoss, TokenBatch
from tests.oracles.likelihood import (
    block_nats,
    chain_rule_nats,
    discrete_nelbo,
    discrete_nll,
    every_text,
    nelbo,
    table,
)
from tests.oracles.networks import CLEAN, MASK, CopyNetwork, blocks_of, tiny_transformer

pytestmark = pytest.mark.sweep(3)

SCHEDULES = [Linear(), Square(), SquareRoot(), Logarithmic(), Cosine()]
SMALL = tiny_transformer(1, layers=1, hidden=8, heads=1, gain=2.0)  # for many replicates
TEXTS = torch.tensor([[0, 3, 1, 1, 0, 3], [3, 3, 0, 1, 3, 0], [1, 0, 3, 3, 3, 1]])


def loss_of(
    masking: MaskingRule, block_size: int, *, causal_clean: bool = False, **options
) -> BlockDiffusionLoss:
    reading = blocks_of(block_size, causal_clean=causal_clean)
    return BlockDiffusionLoss(reading=reading, masking=masking, **options)


# --- one token a block ---


@pytest.mark.parametrize("score_first", [False, True])
@pytest.mark.parametrize("causal_clean", [False, True])
@pytest.mark.parametrize(
    "masking",
    [
        ClippedTimes(low=1, high=1),
        ClippedTimes(low=1, high=1, weight="flat"),
        Counts(),
        Counts(complementary=True),
    ],
)
def test_at_block_size_one_every_draw_gives_the_chain_rule_token_by_token(masking, causal_clean, score_first):
    model = tiny_transformer(20)
    batch = TokenBatch.of(TEXTS, score_first=score_first)
    objective = loss_of(masking, 1, causal_clean=causal_clean)
    losses = [objective(model, batch, generator=torch.Generator().manual_seed(s)).nats for s in range(5)]
    expected = chain_rule_nats(model, TEXTS) * batch.scored
    assert all(torch.equal(loss, losses[0]) for loss in losses)  # no variance at all
    torch.testing.assert_close(losses[0], expected, rtol=0, atol=1e-10)
    assert objective.is_bound


def test_at_block_size_one_times_do_vary():
    """What full masking and counts are for."""
    objective, batch = loss_of(Times(), 1), TokenBatch.of(TEXTS)
    one, other = (objective(SMALL, batch, generator=torch.Generator().manual_seed(s)).nats for s in (0, 1))
    assert not torch.allclose(one, other)


# --- any block size: unbiased ---


@lru_cache
def many_draws(levels: LevelSampler, rows: int, count: int, block_size: int) -> Draws:
    """`count` independent batches of `rows` texts, one below the other."""
    generator = torch.Generator().manual_seed(0)
    batches = [levels.draw(rows, 6, block_size, generator=generator) for _ in range(count)]
    return Draws(*(torch.cat([getattr(d, f) for d in batches]) for f in ("levels", "spare", "tokens")))


def replicated(objective: BlockDiffusionLoss, rows: int, count: int) -> Tensor:
    """The loss of `count` independent batches of `rows` texts, block by block: (count, blocks)."""
    draws = many_draws(objective.levels, rows, count, objective.reading.block_size)
    with torch.no_grad():
        loss = objective.loss(SMALL, TokenBatch.of(TEXTS[:rows].repeat(count, 1)), draws)
    return loss.nats.view(count, rows, -1, objective.reading.block_size).sum((1, 3))


def truths(measure, rows: int, block_size: int, *arguments) -> Tensor:
    """The same by brute force: (blocks,). The first token of a text is given."""
    found = []
    for start in range(0, 6, block_size):
        scored = list(range(0 if start else 1, block_size))
        entropies = table(SMALL, TEXTS[:rows], start, block_size, scored)
        found.append(measure(entropies, scored, *arguments).sum() if scored else torch.zeros(()).double())
    return torch.stack(found)


def assert_mean(samples: Tensor, truth: Tensor, precision: float) -> None:
    """Each mean within 4 standard errors, which are small enough for that to mean something."""
    error = samples.std(0) / len(samples) ** 0.5
    assert (error <= precision * truth).all()
    assert ((samples.mean(0) - truth).abs() <= 4 * error + 1e-9).all()


RULES = {
    **{f"times-{type(s).__name__}": Times(s) for s in SCHEDULES},
    "clipped-not-at-all": ClippedTimes(low=0, high=1, weight="paper"),
    "counts": Counts(),
    "counts-proposal": Counts(proposal=(1.0, 3.0, 0.5)),
    "complementary": Counts(complementary=True),
    "complementary-proposal": Counts(complementary=True, proposal=(1.0, 3.0, 0.5)),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_mean_loss_is_the_nelbo(rule, rows):
    objective = loss_of(RULES[rule], 3)
    assert objective.is_bound
    light = isinstance(objective.masking, Counts)  # the weight 1/t has infinite variance
    samples = replicated(objective, rows, 4_500 // rows)
    assert_mean(samples, truths(nelbo, rows, 3), precision=0.02 if light else 0.1)


@pytest.mark.parametrize("levels", [LevelSampler(), LevelSampler(stratified=False)])
@pytest.mark.parametrize(
    ("block_size", "masking"),
    [
        (1, Times()),
        (1, ClippedTimes(low=0.2, high=0.9)),
        (2, Times()),
        (2, Counts()),
        (2, ClippedTimes(low=0.25, high=0.75)),
        (6, Times()),
        (6, Counts()),
    ],
)
def test_mean_loss_is_the_nelbo_at_batch_one_for_other_block_sizes(block_size, masking, levels):
    objective = loss_of(masking, block_size, levels=levels)
    assert objective.is_bound
    count = 9_000 if isinstance(masking, Times) else 4_500  # the weight 1/t has infinite variance
    assert_mean(replicated(objective, 1, count), truths(nelbo, 1, block_size), precision=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("steps", [1, 4])
def test_mean_loss_in_discrete_time_is_the_sum_over_its_steps(steps, schedule):
    objective = loss_of(DiscreteTimes(steps=steps, schedule=schedule), 3)
    rates = [
        schedule.mask_rate(torch.tensor(j / steps, dtype=torch.float64)).item() for j in range(steps + 1)
    ]
    truth = truths(discrete_nelbo, 1, 3, rates)
    assert objective.is_bound
    assert (truth > truths(discrete_nll, 1, 3, rates) - 1e-9).all()
    assert truth.sum() > 1.02 * truths(nelbo, 1, 3).sum()  # so the two are told apart
    if steps == 1:  # everything is masked, every time
        torch.testing.assert_close(replicated(objective, 1, 5), truth.expand(5, 2))
    else:
        assert_mean(replicated(objective, 1, 4_500), truth, precision=0.02)


# --- what may be called a bound ---


@pytest.mark.parametrize(
    ("masking", "levels"),
    [
        (ClippedTimes(low=0.1, high=0.4), LevelSampler()),
        (ClippedTimes(low=0.1, high=0.4, weight="derivative"), LevelSampler()),
        (ClippedTimes(low=0.1, high=0.6, weight="flat"), LevelSampler()),
        (ClippedTimes(low=0.1, high=0.5, redraw=True), LevelSampler()),
        (Times(Square()), LevelSampler(assignment="ordered")),
        (Counts(), LevelSampler(assignment="ordered")),
    ],
)
def test_what_can_fall_below_the_nll_is_not_called_a_bound(masking, levels):
    """A network that knows the two tokens of a block are equal: log 3 nats, all for the first revealed."""
    batch = TokenBatch.of(torch.tensor([[3, 3, 1, 1]]), prompts=torch.tensor([0]), lengths=torch.tensor([2]))
    objective = loss_of(masking, 2, levels=levels)
    generator = torch.Generator().manual_seed(0)
    losses = torch.stack(
        [objective(CopyNetwork(), batch, generator=generator).nats.sum() for _ in range(250)]
    )
    assert losses.mean() + 4 * losses.std() / len(losses) ** 0.5 < math.log(3)
    assert not objective.is_bound


@pytest.mark.parametrize("masking", [Times(), Counts(), Counts(complementary=True)])
def test_the_bound_of_that_network_is_tight(masking):
    batch = TokenBatch.of(torch.tensor([[3, 3, 1, 1]] * 3000), score_first=True)
    losses = loss_of(masking, 2)(CopyNetwork(), batch, generator=torch.Generator().manual_seed(0)).nats.sum(1)
    assert_mean(losses, torch.tensor(2 * math.log(3)), precision=0.03)


@pytest.mark.parametrize(
    ("masking", "at_one", "at_two", "at_four"),
    [
        (Times(), True, True, True),
        (DiscreteTimes(steps=3), True, True, True),
        (Counts(complementary=True), True, True, True),
        (ClippedTimes(low=0.3, high=0.8), True, False, False),
        (ClippedTimes(low=0.25, high=0.75), True, True, False),
        (ClippedTimes(low=1, high=1), True, False, False),
        (ClippedTimes(low=1, high=1, weight="flat"), True, False, False),
        (ClippedTimes(low=0.3, high=1, redraw=True), False, False, False),
        (ClippedTimes(low=0.3, high=0.8, weight="paper"), False, False, False),
        (ClippedTimes(low=0.3, high=0.8, weight="derivative"), False, False, False),
        (ClippedTimes(low=0, high=1, weight="flat"), False, False, False),
    ],
)
def test_which_rules_are_bounds(masking, at_one, at_two, at_four):
    assert [loss_of(masking, n).is_bound for n in (1, 2, 4)] == [at_one, at_two, at_four]


# --- ranks, micro-batches, prompts ---


@pytest.mark.parametrize(
    "masking", [Times(), ClippedTimes(low=0.3, high=0.8, redraw=True), Counts(complementary=True)]
)
def test_the_loss_of_a_global_batch_is_that_of_its_parts(masking):
    texts = every_text(CLEAN, 6)[::80]
    lengths = torch.tensor([6, 5, 6, 4, 6, 6, 3, 6, 6, 6])
    batch = TokenBatch.of(texts, lengths=lengths)
    objective = loss_of(masking, 3)
    draws = objective.draw(len(texts), 6, generator=torch.Generator().manual_seed(0), device="cpu")
    whole = objective.loss(SMALL, batch, draws)
    parts = [objective.loss(SMALL, batch[s], draws[s]) for s in (slice(0, 4), slice(4, 5), slice(5, 10))]
    assert whole.nats.sum() > 0
    torch.testing.assert_close(torch.cat([p.nats for p in parts]), whole.nats, rtol=0, atol=1e-12)
    assert torch.equal(torch.cat([p.weight for p in parts]), whole.weight)
    total = sum(p.nats.sum() for p in parts) / sum(p.weight.sum() for p in parts)
    torch.testing.assert_close(total, whole.mean())


@pytest.mark.parametrize("masking", [Times(), Counts(), Counts(complementary=True)])
def test_given_and_absent_tokens_cost_nothing_and_the_weight_counts_the_others(masking):
    batch = TokenBatch.of(TEXTS, prompts=torch.tensor([6, 2, 0]), lengths=torch.tensor([6, 5, 1]))
    loss = loss_of(masking, 3)(SMALL, batch, generator=torch.Generator().manual_seed(0))
    assert not loss.nats[~batch.scored].any()
    assert torch.equal(loss.weight, batch.scored.to(torch.float64))


def test_one_seed_is_one_loss():
    objective, batch = loss_of(Counts(), 3), TokenBatch.of(TEXTS)
    one, same, other = (
        objective(SMALL, batch, generator=torch.Generator().manual_seed(s)).nats for s in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_mask_is_never_predicted_and_the_first_token_is_scored_alike():
    """Full masking of one token a block is autoregression over masks: over all texts it sums to one."""
    for score_first in (False, True):
        batch = TokenBatch.of(every_text(CLEAN, 3), score_first=score_first)
        loss = loss_of(Counts(), 1)(SMALL, batch)
        probability = torch.exp(-loss.nats.sum(1)).sum()
        assert probability.item() == pytest.approx(1.0 if score_first else 3.0, abs=1e-10)
        assert torch.equal(
            loss.weight, Autoregressive(mask_id=MASK, score_first=score_first)(SMALL, batch).weight
        )


# --- the learned proposal over counts ---


def test_count_moments_are_summed_block_by_block():
    objective, batch = loss_of(LearnedCounts(), 3), TokenBatch.of(TEXTS)
    draws = objective.draw(3, 6, generator=torch.Generator().manual_seed(0), device="cpu")
    masks = objective.masking(draws, batch.scored)
    moments = objective.loss(SMALL, batch, draws).statistics["count_moments"]
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for row in range(3):
        for start in (0, 3):
            masked = masks.masked[row, 0, start : start + 3].nonzero().flatten().tolist()
            nats = block_nats(SMALL, TEXTS[row : row + 1], start, 3, masked).sum()
            expected[:, len(masked) - 1] += torch.stack((nats**2, torch.ones_like(nats))).detach()
    torch.testing.assert_close(moments, expected)


def test_a_learned_proposal_lowers_the_variance_and_keeps_the_mean():
    objective = loss_of(LearnedCounts(), 3)
    draws = many_draws(LevelSampler(stratified=False), 1, 4_500, 3)
    batch = TokenBatch.of(TEXTS[:1].repeat(4_500, 1))
    with torch.no_grad():
        before = objective.loss(SMALL, batch, draws)
        learned = objective.adapt(before.statistics)
        after = learned.loss(SMALL, batch, draws)
    assert learned.masking.counts.proposal != objective.masking.counts.proposal
    assert learned.is_bound
    before, after = (loss.nats.view(-1, 2, 3).sum(2) for loss in (before, after))
    assert after[:, 1].var() < 0.9 * before[:, 1].var()  # the block with all its counts
    assert_mean(after, truths(nelbo, 1, 3), precision=0.02)


def test_what_an_objective_has_learned_can_be_saved():
    objective, batch = loss_of(LearnedCounts(), 3), TokenBatch.of(TEXTS)
    assert objective.state() == {}
    learned = objective.adapt(objective(SMALL, batch).statistics)
    again = learned.adapt(learned(SMALL, batch).statistics)
    assert objective.restore(json.loads(json.dumps(again.state()))) == again != learned
    clipped = loss_of(ClippedTimes(low=0.3, high=0.8), 3)
    moved = loss_of(ClippedTimes(low=0.1, high=0.5), 3)
    assert clipped.restore(moved.state()) == moved
    assert loss_of(Times(), 3).adapt({}) == loss_of(Times(), 3)


@dataclass(frozen=True)
class Alternating(MaskingRule):
    """A rule of a user that learns: which of the tokens of a block, by turns, to hide in every block."""

    turn: int = 0

    def is_unbiased(self, block_size: int) -> bool:
        return block_size == 1

    def __call__(self, draws: Draws, maskable: Tensor) -> Masks:
        place = torch.arange(maskable.shape[1]) % draws.block_size
        masked = (maskable & (place == self.turn)).unsqueeze(1)
        return Masks(masked=masked, weight=masked.float(), mask_rate=None)

    def statistics(self, nats, weight, block_size):
        return {"masked": (weight > 0).sum()}

    def adapt(self, statistics):
        return replace(self, turn=self.turn + int(statistics["masked"] > 0))

    def state(self):
        return {"turn": self.turn}

    def restore(self, state):
        return replace(self, **state)


def test_a_rule_of_ones_own_learns_and_is_saved():
    objective, batch = loss_of(Alternating(turn=1), 3), TokenBatch.of(TEXTS)
    learned = objective.adapt(objective(SMALL, batch).statistics)
    assert learned == loss_of(Alternating(turn=2), 3)
    assert objective.restore(json.loads(json.dumps(learned.state()))) == learned


def test_what_a_rule_does_not_know_is_not_restored():
    for masking in (Times(), Counts(), LearnedCounts(), ClippedTimes(low=0.1, high=0.5)):
        with pytest.raises(ValueError, match=f"{type(masking).__name__} has nothing to restore"):
            loss_of(masking, 3).restore({"low": 0.1})
    assert loss_of(LearnedCounts(), 3).restore({}) == loss_of(LearnedCounts(), 3)


# --- errors ---


def test_bad_objectives_are_refused():
    with pytest.raises(ValueError, match="algorithm must be 'single_pass' or 'two_pass', got 'one_pass'"):
        BlockDiffusionLoss(reading=blocks_of(1), algorithm="one_pass")
    with pytest.raises(ValueError, match="draws must be given"):
        loss_of(Counts(), 3).loss(SMALL, TokenBatch.of(TEXTS), None)


@pytest.mark.parametrize("block_size", [4, 5, 12])
def test_a_length_that_the_block_size_does_not_divide_is_refused(block_size):
    message = f"length must be a positive multiple of block_size, got length 6 and block_size {block_size}"
    with pytest.raises(ValueError, match=message):
        loss_of(Counts(), block_size)(SMALL, TokenBatch.of(TEXTS))


def test_a_proposal_for_another_block_size_is_refused():
    with pytest.raises(ValueError, match=r"proposal must have one entry for each count 1..3 .* got 2"):
        loss_of(Counts(proposal=(1.0, 2.0)), 3)(SMALL, TokenBatch.of(TEXTS))


def test_counts_have_no_time_to_tell_a_time_conditioned_network():
    model = tiny_transformer(adaln=True, time_conditioning=True)
    with pytest.raises(
        ValueError, match="draws no time, which a network conditioned on the noise level needs"
    ):
        loss_of(Counts(), 3)(model, TokenBatch.of(TEXTS))


@pytest.mark.parametrize("algorithm", ["single_pass", "two_pass"])
@pytest.mark.parametrize("block_size", [1, 3, 6])
def test_token_ids_out_of_range_are_refused_hidden_or_not(block_size, algorithm):
    texts = TEXTS.clone()
    texts[1, 5] = 9
    objective = loss_of(ClippedTimes(low=1, high=1), block_size, algorithm=algorithm)
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.3"):
        objective(SMALL, TokenBatch.of(texts))


def test_draws_of_other_rows_or_blocks_are_refused():
    objective, batch = loss_of(Counts(), 3), TokenBatch.of(TEXTS)
    with pytest.raises(ValueError, match=r"of shape \(2, 6\), got .* \(3, 6\)"):
        objective.loss(SMALL, batch, LevelSampler().draw(2, 6, 3))
    with pytest.raises(ValueError, match="block"):
        objective.loss(SMALL, batch, LevelSampler().draw(3, 6, 2))
