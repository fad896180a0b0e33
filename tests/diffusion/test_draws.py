"""Draws: strata, marginals, slices, reproducibility."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bd3lm.diffusion import Draws, LevelSampler, blocks_in
from tests.diffusion.enumeration import replicates


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["permuted", "ordered"]), st.integers(0, 9))
def test_stratified_levels_fall_one_in_each_stratum(
    rows: int, blocks: int, assignment: str, seed: int
) -> None:
    levels = LevelSampler(assignment=assignment).sample(rows, blocks, generator=seeded(seed))
    strata = (levels.flatten() * rows * blocks).ceil() - 1
    assert strata.sort().values.tolist() == list(range(rows * blocks))


def test_ordered_strata_follow_the_place_in_the_batch() -> None:
    """t(k, b) in ((k−1)B + b − 1, (k−1)B + b] / KB (Suppl. C.4)."""
    levels = LevelSampler(assignment="ordered").sample(3, 4, generator=seeded())
    assert ((levels * 12).ceil().flatten() - 1).tolist() == list(range(12))


def test_permuted_strata_come_in_every_order_equally_often() -> None:
    draws = replicates(LevelSampler(), 6000, rows=1, length=3, block_size=1)
    strata = (draws.levels * 3).ceil().long() - 1
    frequency = torch.bincount((strata * torch.tensor([9, 3, 1])).sum(-1), minlength=27)
    assert int((frequency > 0).sum()) == 6
    assert stats.chisquare(frequency[frequency > 0]).pvalue > 1e-3


def test_each_level_alone_is_uniform_when_permuted_or_independent() -> None:
    for sampler in (LevelSampler(), LevelSampler(stratified=False)):
        draws = replicates(sampler, 3000, rows=1, length=4, block_size=2)
        for block in range(2):
            assert stats.kstest(draws.levels[:, block], "uniform").pvalue > 1e-3


def test_a_level_is_tied_to_its_place_when_ordered() -> None:
    draws = replicates(LevelSampler(assignment="ordered"), 100, rows=1, length=4, block_size=2)
    assert (draws.levels[:, 0] <= 0.5).all()
    assert (draws.levels[:, 1] > 0.5).all()


def test_without_strata_levels_are_independent() -> None:
    levels = LevelSampler(stratified=False).sample(4000, 2, generator=seeded())
    assert abs(torch.corrcoef(levels.T)[0, 1].item()) < 4 / 4000**0.5


def test_all_numbers_are_uniform_and_independent_of_the_levels() -> None:
    draws = LevelSampler().draw(4000, 1, 1, generator=seeded())
    columns = torch.cat([draws.levels, draws.spare, draws.tokens], 1)
    for column in columns.T:
        assert stats.kstest(column, "uniform").pvalue > 1e-3
    off_diagonal = torch.corrcoef(columns.T) - torch.eye(3, dtype=torch.float64)
    assert off_diagonal.abs().max() < 4 / 4000**0.5


@pytest.mark.parametrize("stratified", [True, False])
def test_draws_are_double_and_lie_above_zero_and_up_to_one(stratified: bool) -> None:
    draws = LevelSampler(stratified=stratified).draw(50, 64, 4, generator=seeded())
    for numbers, shape in ((draws.levels, (50, 16)), (draws.spare, (50, 16)), (draws.tokens, (50, 64))):
        assert numbers.shape == shape
        assert numbers.dtype == torch.float64
        assert (numbers > 0).all()
        assert (numbers <= 1).all()
    assert draws.block_size == 4


def test_zero_is_never_drawn_where_the_generator_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.zeros(*shape, dtype=kw["dtype"]))
    for stratified in (True, False):
        draws = LevelSampler(stratified=stratified).draw(2, 4, 2)
        for numbers in (draws.levels, draws.spare, draws.tokens):
            assert (numbers > 0).all()
            assert (numbers <= 1).all()


def test_a_slice_holds_the_rows_of_the_whole() -> None:
    draws = LevelSampler().draw(6, 8, 2, generator=seeded())
    part = draws[2:4]
    assert isinstance(part, Draws)
    for name in ("levels", "spare", "tokens"):
        assert torch.equal(getattr(part, name), getattr(draws, name)[2:4])
    assert part.block_size == 2


def test_the_generator_decides_everything() -> None:
    one, same, other = (LevelSampler().draw(3, 8, 4, generator=seeded(s)) for s in (1, 1, 2))
    for name in ("levels", "spare", "tokens"):
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))


def test_to_moves_every_number() -> None:
    moved = LevelSampler().draw(1, 2, 1).to("meta")
    assert {t.device.type for t in (moved.levels, moved.spare, moved.tokens)} == {"meta"}


def test_blocks_in_divides() -> None:
    assert blocks_in(12, 4) == 3
    assert blocks_in(4, 4) == 1


@pytest.mark.parametrize(
    ("length", "block_size", "message"),
    [
        (8, 0, "block_size must be at least 1, got 0"),
        (8, -2, "block_size must be at least 1, got -2"),
        (10, 4, "length must be a positive multiple of block_size, got length 10 and block_size 4"),
        (0, 4, "length must be a positive multiple of block_size, got length 0 and block_size 4"),
    ],
)
def test_a_length_that_blocks_do_not_fill_is_refused(length: int, block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks_in(length, block_size)
    with pytest.raises(ValueError, match=message):
        LevelSampler().draw(1, length, block_size)


def test_an_unknown_assignment_is_refused() -> None:
    with pytest.raises(ValueError, match="assignment must be 'permuted' or 'ordered', got 'sorted'"):
        LevelSampler(assignment="sorted")  # type: ignore[arg-type]


@pytest.mark.parametrize("stratified", [True, False])
def test_levels_have_no_floor(stratified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest level is the generator's own resolution: a floor would leave part of the integral out."""
    monkeypatch.setattr(
        torch, "rand", lambda *shape, **_: torch.full(shape, 1 - 2.0**-53, dtype=torch.float64)
    )
    levels = LevelSampler(stratified=stratified, assignment="ordered").sample(2, 3)
    assert levels.min().item() == (2.0**-53 / 6 if stratified else 2.0**-53)


@pytest.mark.parametrize("stratified", [True, False])
def test_a_least_level_is_asked_for_by_name_and_makes_no_bound(stratified: bool) -> None:
    """What the reference implementation does: all levels from it on alike, strata and all."""
    plain, cut = (
        LevelSampler(stratified=stratified, least=least).draw(5, 8, 4, generator=seeded())
        for least in (0.0, 0.2)
    )
    torch.testing.assert_close(cut.levels, 0.2 + 0.8 * plain.levels, rtol=0.0, atol=1e-15)
    assert torch.equal(cut.tokens, plain.tokens)
    assert LevelSampler(stratified=stratified).is_uniform
    assert not LevelSampler(stratified=stratified, least=0.2).is_uniform


@pytest.mark.parametrize("least", [-0.1, 1.0, float("nan")])
def test_a_least_level_lies_below_one(least: float) -> None:
    with pytest.raises(ValueError, match=f"least must lie in \\[0, 1\\), got {least}"):
        LevelSampler(least=least)


def test_a_floor_prints_a_figure_below_the_entropy() -> None:
    """Where the network is the truth the NELBO is the entropy; what a floor leaves out is positive."""
    entropy_a_token, n, grid = 1.0, 2, 100_000
    t = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    integrand = n * t * entropy_a_token / t  # expected masked tokens, each worth its entropy, times 1/t
    whole = integrand.mean().item()
    floored = integrand[t >= 1e-3].sum().item() / grid
    assert whole == pytest.approx(n * entropy_a_token, abs=1e-12)
    assert floored == pytest.approx(n * entropy_a_token * (1 - 1e-3), rel=1e-6)
    assert floored < n * entropy_a_token
