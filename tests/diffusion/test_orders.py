"""The order of reveal: Plackett–Luce, uniform without a lean, left to right with a large one."""

import math
from itertools import permutations

import pytest
import torch
from scipy import stats
from torch import Tensor

from bd3lm.diffusion import check_lean, log_reveal_rates, log_reveal_times
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


@pytest.mark.parametrize(("lean", "n"), [(50.0, 4), (1e6, 4), (1e6, 64), (1e300, 64)])
def test_a_large_lean_is_left_to_right(lean, n):
    times = log_reveal_times(uniform(1_000, n), lean)
    assert set(orders_of(times)) == {tuple(range(n))}
    assert times.isfinite().all()
    latest = torch.tensor([[2.0**-1074] + [1 - 2.0**-53] * (n - 1)], dtype=torch.float64)  # least likely
    assert orders_of(log_reveal_times(latest, lean)) == [tuple(range(n))]


def test_the_largest_of_all_numbers_is_no_nan():
    """Uniform numbers lie in (0, 1]; the clock of 1 rings at once."""
    times = log_reveal_times(torch.tensor([[0.5, 1.0, 2.0**-1074]], dtype=torch.float64), 0.7)
    assert orders_of(times)[0][0] == 1
    assert not times.isnan().any()


@pytest.mark.parametrize("lean", [-0.1, -1e-12, math.nan, math.inf, -math.inf])
def test_what_is_no_lean_is_refused(lean):
    for call in (check_lean, lambda lean: log_reveal_rates(4, lean)):
        with pytest.raises(ValueError, match=f"lean must be finite and not negative, got {lean}"):
            call(lean)


@pytest.mark.parametrize("lean", [0, 0.0, 1e-12, 2, 1e300])
def test_what_is_a_lean_is_not(lean):
    check_lean(lean)
