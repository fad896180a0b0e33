"""The clip search: the ranges it tries, that it finds the best one, and that it always ends."""

from dataclasses import replace

import pytest
import torch

from bd3lm.diffusion import ClippedTimes, ClipSearch, Counts
from bd3lm.evaluation import nelbo_variance, variance
from bd3lm.objectives import BlockDiffusionLoss, TokenBatch
from bd3lm.training import ClipSearchValidator, choose_range, range_moments
from tests.oracles.likelihood import every_text
from tests.oracles.networks import CLEAN, CopyNetwork, blocks_of, tiny_transformer
from tests.training.tiny import CLIPPED, COUNTS, held_out, sentences, tiny_trainer

MODEL = tiny_transformer(43)


def clipped(low: float, high: float, **options) -> BlockDiffusionLoss:
    return BlockDiffusionLoss(reading=blocks_of(4), masking=ClippedTimes(low=low, high=high, **options))


# --- which ranges ---


def test_the_papers_ranges_written_out():
    """Widths 0.5, 0.6, .. 0.9 at every multiple of 0.05, and everything."""
    assert ClipSearch().ranges() == [
        *((0.0, 0.5), (0.0, 0.6), (0.0, 0.7), (0.0, 0.8), (0.0, 0.9), (0.0, 1.0)),
        *((0.05, 0.55), (0.05, 0.65), (0.05, 0.75), (0.05, 0.85), (0.05, 0.95)),
        *((0.1, 0.6), (0.1, 0.7), (0.1, 0.8), (0.1, 0.9), (0.1, 1.0)),
        *((0.15, 0.65), (0.15, 0.75), (0.15, 0.85), (0.15, 0.95)),
        *((0.2, 0.7), (0.2, 0.8), (0.2, 0.9), (0.2, 1.0)),
        *((0.25, 0.75), (0.25, 0.85), (0.25, 0.95)),
        *((0.3, 0.8), (0.3, 0.9), (0.3, 1.0)),
        *((0.35, 0.85), (0.35, 0.95)),
        *((0.4, 0.9), (0.4, 1.0)),
        (0.45, 0.95),
        (0.5, 1.0),
    ]


def test_the_papers_defaults():
    search = ClipSearch()
    assert (search.every, search.batches, search.step, search.full_range) == (5000, 100, 0.05, True)


def test_custom_ranges():
    assert ClipSearch(widths=(0.25,), step=0.5, full_range=False).ranges() == [(0.0, 0.25), (0.5, 0.75)]
    assert ClipSearch(widths=(1.0,), step=0.5).ranges() == [(0.0, 1.0)]  # only once
    assert ClipSearch(widths=()).ranges() == [(0.0, 1.0)]
    assert all(0.0 <= low < high <= 1.0 for low, high in ClipSearch(widths=(0.1, 1 / 3), step=0.03).ranges())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (0.5, 1.1)}, "widths must lie in"),
        ({"widths": (0.0,)}, "widths must lie in"),
        ({"step": 0.0}, "step must lie in"),
        ({"batches": 0}, "every and batches must be at least 1, got 5000 and 0"),
        ({"widths": (), "full_range": False}, "leave no range to try"),
    ],
)
def test_searches_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ClipSearch(**options)


# --- the choice ---


def test_the_least_variance_is_chosen():
    ranges = ClipSearch().ranges()
    choice = choose_range(ranges, lambda r: (r[0] - 0.27) ** 2 + (r[1] - 0.83) ** 2)
    assert (choice.low, choice.high) == (0.25, 0.85)
    assert list(choice.variances) == ranges
    assert choice.variances[0.25, 0.85] == pytest.approx(2 * 0.02**2)


def test_ties_go_to_the_widest_then_the_first_range():
    ranges = [(0.0, 0.5), (0.1, 0.8), (0.2, 0.9), (0.5, 1.0)]
    assert choose_range(ranges, lambda _: 1.0) == choose_range(ranges[::-1], lambda _: 1.0)
    choice = choose_range(ranges, lambda _: 1.0)
    assert (choice.low, choice.high) == (0.1, 0.8)
    quiet_and_narrow = choose_range(ranges, lambda r: float(r != (0.5, 1.0)))
    assert (quiet_and_narrow.low, quiet_and_narrow.high) == (0.5, 1.0)


def test_a_constructed_loss_has_its_known_optimum():
    """A network that knows that both tokens of a block are equal: it pays log 3 for each if both are masked,
    else 0."""
    model = CopyNetwork()
    objective = BlockDiffusionLoss(reading=blocks_of(2), masking=ClippedTimes(low=0.0, high=1.0))
    pairs = torch.tensor(CLEAN).repeat_interleave(2).repeat(4000).view(-1, 2)
    batch = TokenBatch.of(pairs, score_first=True)
    draws = objective.seeded_draws(batch, 0)
    ranges = ClipSearch(widths=(0.4, 0.6), step=0.2).ranges()
    moments = range_moments(model, objective, ranges, batch, draws)
    choice = choose_range(ranges, dict(zip(ranges, map(variance, moments), strict=True)).__getitem__)
    assert (choice.low, choice.high) == (0.6, 1.0)
    log_3 = torch.tensor(3.0).log().item()
    for (low, high), found in choice.variances.items():
        if low == 0.0:
            continue  # 1/r and so the fourth moment is unbounded there: the sample says little
        assert found == pytest.approx(log_3**2 * (1 - (low + high) ** 2 / 4), rel=0.05)


def test_the_chosen_range_is_the_one_that_variances_computed_apart_choose():
    objective = clipped(0.0, 1.0, redraw=True)
    batches = [TokenBatch.of(every_text(CLEAN, 4)[start::2].repeat(1, 2)) for start in (0, 1)]
    ranges = ClipSearch(widths=(0.5, 0.7), step=0.1).ranges()
    total = sum(
        range_moments(MODEL, objective, ranges, batch, objective.seeded_draws(batch, 5, index))
        for index, batch in enumerate(batches)
    )
    assert torch.is_tensor(total)
    apart = {
        (low, high): nelbo_variance(
            MODEL, clipped(low, high, redraw=True), batches, block_size=4, seed=5
        ).variance
        for low, high in ranges
    }
    assert dict(zip(ranges, map(variance, total), strict=True)) == pytest.approx(apart)
    choice = choose_range(ranges, apart.__getitem__)
    assert apart[choice.low, choice.high] == min(apart.values()) < max(apart.values())


@pytest.mark.parametrize("weight", ["derivative", "paper", "flat"])
def test_variances_are_compared_under_one_over_the_rate_whatever_trains(weight):
    batch = TokenBatch.of(every_text(CLEAN, 4).repeat(1, 2))
    ranges = [(0.0, 1.0), (0.3, 0.8), (0.5, 1.0)]
    objectives = [clipped(0.0, 1.0), clipped(0.2, 0.9, weight=weight)]
    draws = objectives[0].seeded_draws(batch, 0)
    one, other = (range_moments(MODEL, objective, ranges, batch, draws) for objective in objectives)
    assert torch.equal(one, other)


def test_the_auxiliary_loss_is_left_out():
    batch = TokenBatch.of(every_text(CLEAN, 4))
    plain = replace(clipped(0.0, 1.0), reading=blocks_of(4, causal_clean=True))
    draws = plain.seeded_draws(batch, 0)
    moments = [
        range_moments(MODEL, objective, [(0.2, 0.7)], batch, draws)
        for objective in (plain, replace(plain, next_token=1.0))
    ]
    assert torch.equal(*moments)


def test_infeasible_intervals_end():
    """No count of 4 tokens has a rate in [0.30, 0.45]: the reference would draw forever."""
    batch = TokenBatch.of(every_text(CLEAN, 4), score_first=True)
    objective = clipped(0.0, 1.0, redraw=True)
    ranges = ClipSearch(widths=(0.15, 0.2), step=0.05, full_range=False).ranges()
    assert (0.3, 0.45) in ranges
    moments = range_moments(MODEL, objective, ranges, batch, objective.seeded_draws(batch, 0))
    assert moments.isfinite().all()
    assert (moments[:, 0] == len(batch.tokens)).all()


def test_only_a_clipped_range_can_be_searched(tmp_path):
    batch = TokenBatch.of(every_text(CLEAN, 4))
    other = BlockDiffusionLoss(reading=blocks_of(4), masking=Counts())
    with pytest.raises(ValueError, match="Counts has no range of mask rates"):
        range_moments(MODEL, other, [(0.0, 1.0)], batch, other.seeded_draws(batch, 0))
    trainer = tiny_trainer(tmp_path, COUNTS)
    with pytest.raises(ValueError, match="objective must have a range of mask rates to search"):
        ClipSearchValidator(held_out(sentences(4, 1)))(trainer)


# --- in a run ---


def test_the_validator_chooses_by_all_batches_and_training_goes_on_with_it(tmp_path):
    texts = held_out(sentences(8, 70), sentences(3, 71), sentences(8, 72))
    search = ClipSearch(every=3, batches=2, widths=(0.5, 0.75), step=0.25)
    trainer = tiny_trainer(
        tmp_path, replace(CLIPPED, masking=replace(CLIPPED.masking, weight="flat", search=search))
    )
    trainer.network.eval()
    validator = ClipSearchValidator(texts, seed=4)
    metrics = validator(trainer)
    batches = texts.batches[:2]
    moments = torch.zeros(len(search.ranges()), 3, dtype=torch.float64)
    for index, batch in enumerate(batches):
        draws = CLIPPED.seeded_draws(batch, 4, "clip search", 0, index)
        moments += range_moments(trainer.network, CLIPPED, search.ranges(), batch, draws)
    variances = dict(zip(search.ranges(), map(variance, moments), strict=True))
    best = min(variances, key=variances.__getitem__)
    assert (metrics["clip_low"], metrics["clip_high"]) == best
    assert metrics["clip_variance"] == pytest.approx(variances[best])
    assert trainer.objective.masking == ClippedTimes(
        low=best[0], high=best[1], weight="flat", redraw=True, search=search
    )
    trainer.step = 4
    assert validator(trainer) == {}  # not one of its steps
