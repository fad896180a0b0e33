"""The order of reveal: Plackett–Luce, uniform without a lean, left to right with a large one."""

import math
import re
from itertools import permutations
from operator import eq

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from bd3lm.diffusion import Draws, check_lean, log_reveal_rates, log_reveal_times
from bd3lm.diffusion.masking import reveal_ranks
from bd3lm.methods import BlockDiffusionMethod
from tests.oracles.orders import law_of_orders

FITS, FAILS = 1e-3, 1e-6  # p-values of samples that follow a law, and of those that do not


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return 1.0 - torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orders_of(times: Tensor) -> list[tuple[int, ...]]:
    """The places of each row, the earliest first."""
    return [tuple(row) for row in times.argsort(-1).tolist()]


def p_value(orders: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    expected = [p * len(orders) for p in law.values()]
    assert min(expected) > 5
    return float(stats.chisquare([orders.count(order) for order in law], expected).pvalue)


def test_a_place_has_e_to_the_lean_times_the_rate_of_its_right_neighbour():
    rates = log_reveal_rates(4, 0.7).exp()
    assert rates.dtype == torch.float64
    assert rates.tolist() == pytest.approx([math.exp(2.1), math.exp(1.4), math.exp(0.7), 1.0])
    assert log_reveal_rates(1, 3.0).tolist() == [0.0]
    assert not log_reveal_rates(5, 0.0).any()


@pytest.mark.parametrize("lean", [0.0, 0.7, 2.0])
def test_a_place_is_hidden_at_time_t_with_probability_t_to_its_rate(lean):
    """Its clock, of time −log t, has not rung yet; linear at the last place."""
    u = uniform(200, 4)
    times = log_reveal_times(u, lean).exp()
    for t in (0.1, 0.5, 0.9):
        threshold = torch.tensor([t ** math.exp(lean * (3 - place)) for place in range(4)])
        assert torch.equal(times > -math.log(t), u < threshold)
        assert 0 < (times > -math.log(t)).sum() < u.numel()


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("lean", [0.0, 0.7])
def test_orders_are_plackett_luce(lean, n):
    law = law_of_orders(range(n), lean)
    assert sum(law.values()) == pytest.approx(1.0)
    assert set(law) == set(permutations(range(n)))
    assert (max(law.values()) > 2 * min(law.values())) == (lean > 0)
    drawn = orders_of(log_reveal_times(uniform(20_000, n), lean))
    assert p_value(drawn, law) > FITS
    assert p_value(drawn, law_of_orders(range(n), lean + 0.2)) < FAILS


def test_places_that_are_not_hidden_leave_the_law_of_the_others():
    """By a gap in the middle, its neighbours are two apart."""
    places = [0, 2, 3]
    times = log_reveal_times(uniform(20_000, 4), 0.7)[:, places]
    drawn = [tuple(places[i] for i in order) for order in orders_of(times)]
    assert p_value(drawn, law_of_orders(places, 0.7)) > FITS
    together = {tuple(places[i] for i in order): p for order, p in law_of_orders(range(3), 0.7).items()}
    assert p_value(drawn, together) < FAILS


def test_without_a_lean_the_largest_number_comes_first():
    u = uniform(100, 6)
    assert orders_of(log_reveal_times(u, 0.0)) == orders_of(-u)


@pytest.mark.parametrize(("lean", "n"), [(50.0, 4), (1e6, 4), (1e6, 64), (1e6, 4096)])
def test_a_large_lean_is_left_to_right(lean, n):
    times = log_reveal_times(uniform(64_000 // n, n), lean)
    assert set(orders_of(times)) == {tuple(range(n))}
    assert times.isfinite().all()
    latest = torch.tensor([[2.0**-1074] + [1 - 2.0**-53] * (n - 1)], dtype=torch.float64)  # least likely
    assert orders_of(log_reveal_times(latest, lean)) == [tuple(range(n))]


def test_the_largest_of_all_numbers_is_no_nan():
    """Uniform numbers lie in (0, 1]; the clock of 1 rings at once."""
    times = log_reveal_times(torch.tensor([[0.5, 1.0, 2.0**-1074]], dtype=torch.float64), 0.7)
    assert orders_of(times)[0][0] == 1
    assert not times.isnan().any()


def ranked(draws: Tensor, lean: float, maskable: Tensor | None = None) -> list[tuple[int, ...]]:
    """The places of each row's one block by `reveal_ranks`."""
    spare = torch.ones(len(draws), 1, dtype=torch.float64)
    every = torch.ones_like(draws, dtype=torch.bool) if maskable is None else maskable
    return orders_of(reveal_ranks(Draws(levels=spare, spare=spare, tokens=draws), every, lean=lean))


def test_ranks_of_reveal_follow_the_law_of_orders():
    u = uniform(20_000, 3)
    assert p_value(ranked(u, 0.7), law_of_orders(range(3), 0.7)) > FITS
    assert p_value(ranked(u, 0.7), law_of_orders(range(3), 0.9)) < FAILS


def test_the_smallest_draw_is_revealed_first_and_a_lean_changes_that_little_by_little():
    u = uniform(1_000, 6)
    assert ranked(u, 0.0) == orders_of(u)
    same = [sum(map(eq, ranked(u, lean), orders_of(u))) for lean in (1e-9, 0.1, 1.0)]
    assert 1_000 == same[0] > same[1] > same[2]
    assert set(ranked(u, 100.0)) == {tuple(range(6))}


@pytest.mark.parametrize("lean", [0.0, 0.7])
def test_what_is_not_maskable_is_revealed_last_also_beside_a_draw_of_one(lean):
    draws = torch.tensor([[0.1, 1.0, 0.5]], dtype=torch.float64)
    assert ranked(draws, lean, torch.tensor([[False, True, True]])) == [(2, 1, 0)]


NO_LEANS = [-0.1, -1e-12, 1.1e6, math.nan, math.inf, -math.inf, None, True, "2", "abc", [1.0]]


@pytest.mark.parametrize("lean", NO_LEANS)
def test_what_is_no_lean_is_refused(lean):
    said = re.escape(f"lean must be a number from 0 to 1e6, got {lean!r}")
    for call in (check_lean, lambda lean: log_reveal_rates(4, lean)):
        with pytest.raises(ValueError, match=said):
            call(lean)
    with pytest.raises(ValueError, match=said):  # a config has a check of its own
        BlockDiffusionMethod(block_size=4, lean=lean)


@pytest.mark.parametrize("lean", [0, 0.0, 1e-12, 2, np.float32(0.5), 1e6])
def test_what_is_a_lean_is_not(lean):
    check_lean(lean)
    BlockDiffusionMethod(block_size=4, lean=lean)
