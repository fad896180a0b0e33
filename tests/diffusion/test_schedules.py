"""Schedules: derivatives by autograd, inverses by round trip, weights against 60 digits."""

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bd3lm.diffusion import Cosine, Floored, Linear, Logarithmic, NoiseSchedule, Square, SquareRoot

SCHEDULES = [Linear(), Square(), SquareRoot(), Logarithmic(), Cosine()]
DEFINITION = {  # the mask rate 1 − alpha(t)
    Linear: lambda t: t,
    Square: lambda t: t**2,
    SquareRoot: lambda t: mpmath.sqrt(t),
    Logarithmic: lambda t: mpmath.log(1 + t, 2),
    Cosine: lambda t: 1 - mpmath.cos(mpmath.pi * t / 2),
}
NEAR_ZERO = {Linear: 1.0, Square: 2.0, SquareRoot: 0.5, Logarithmic: 1.0, Cosine: 2.0}  # weight · t, as t → 0
TIMES = [1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.37, 0.5, 0.9, 1.0]

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@every_schedule
def test_mask_rate_weight_and_derivative_agree_with_sixty_digits(schedule: NoiseSchedule) -> None:
    rate = DEFINITION[type(schedule)]
    for t in TIMES:
        with mpmath.workdps(60):
            exact_rate = rate(mpmath.mpf(t))
            exact_slope = mpmath.diff(rate, mpmath.mpf(t))
            exact = [float(x) for x in (exact_rate, exact_slope, exact_slope / exact_rate)]
        at = f64(t)
        ours = [schedule.mask_rate(at), schedule.mask_rate_prime(at), schedule.elbo_weight(at)]
        assert [x.item() for x in ours] == pytest.approx(exact, rel=1e-13)


@every_schedule
def test_mask_rate_prime_is_the_autograd_derivative_of_minus_alpha(schedule: NoiseSchedule) -> None:
    t = torch.linspace(0.001, 1.0, 500, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.mask_rate_prime(t), -slope, rtol=1e-10, atol=1e-12)


@every_schedule
def test_weight_is_minus_alpha_prime_over_one_minus_alpha(schedule: NoiseSchedule) -> None:
    t = torch.linspace(0.01, 1.0, 500, dtype=torch.float64)
    expected = schedule.mask_rate_prime(t) / (1 - schedule.alpha(t))
    torch.testing.assert_close(schedule.elbo_weight(t), expected, rtol=1e-10, atol=0)


@every_schedule
def test_weight_near_zero_has_the_right_constant(schedule: NoiseSchedule) -> None:
    """2/t for the cosine, not 1/t."""
    for dtype, t in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        at = torch.tensor(t, dtype=dtype)
        assert schedule.elbo_weight(at).item() * t == pytest.approx(NEAR_ZERO[type(schedule)], rel=2e-6)


def test_a_weight_from_a_rounded_alpha_would_be_lost() -> None:
    """Why schedules are written by their mask rate."""
    t = f64(1e-9)
    assert 1 - Cosine().alpha(t) == 0.0
    assert Cosine().mask_rate(t).item() == pytest.approx(math.pi**2 / 8 * 1e-18)


@every_schedule
def test_alpha_falls_strictly_from_one_to_zero(schedule: NoiseSchedule) -> None:
    alpha = schedule.alpha(torch.linspace(0.0, 1.0, 1001, dtype=torch.float64))
    assert alpha[0] == 1.0
    assert alpha[-1].item() == pytest.approx(0.0, abs=1e-15)
    assert (alpha.diff() < 0).all()
    assert (alpha >= 0).all()
    inside = torch.linspace(0.001, 1.0, 1000, dtype=torch.float64)
    assert (schedule.mask_rate_prime(inside) > 0).all()


@every_schedule
@given(st.floats(1e-12, 1.0))
def test_time_of_mask_rate_inverts_mask_rate(schedule: NoiseSchedule, t: float) -> None:
    at = f64(t)
    assert schedule.time_of_mask_rate(schedule.mask_rate(at)).item() == pytest.approx(t, rel=1e-12)
    assert schedule.mask_rate(schedule.time_of_mask_rate(at)).item() == pytest.approx(t, rel=1e-12)


@every_schedule
def test_the_inverse_keeps_its_precision_near_zero(schedule: NoiseSchedule) -> None:
    t = f64(*TIMES)
    torch.testing.assert_close(schedule.time_of_mask_rate(schedule.mask_rate(t)), t, rtol=1e-13, atol=0)
    torch.testing.assert_close(schedule.mask_rate(schedule.time_of_mask_rate(t)), t, rtol=1e-13, atol=0)


@every_schedule
def test_the_ends_are_each_others_inverse(schedule: NoiseSchedule) -> None:
    torch.testing.assert_close(schedule.time_of_mask_rate(f64(0.0, 1.0)), f64(0.0, 1.0), rtol=0, atol=1e-15)


@every_schedule
def test_a_floored_schedule_ends_above_zero_and_keeps_its_rules(schedule: NoiseSchedule) -> None:
    floored = Floored(schedule, 0.1)
    t = torch.linspace(0.0, 1.0, 101, dtype=torch.float64)
    alpha = floored.alpha(t)
    assert alpha[0] == 1.0
    assert float(alpha[-1]) == pytest.approx(floored.last_alpha) == pytest.approx(0.1)
    assert (alpha.diff() < 0).all()
    torch.testing.assert_close(floored.time_of_mask_rate(1.0 - alpha), t, rtol=0, atol=1e-7)
    inside = t[1:].clone().requires_grad_()
    (slope,) = torch.autograd.grad(floored.mask_rate(inside).sum(), inside)
    torch.testing.assert_close(floored.mask_rate_prime(t[1:]), slope)
    assert schedule.last_alpha == 0.0


def test_floored_linear_is_the_log_linear_noise_of_sedd() -> None:
    t = torch.linspace(0.0, 1.0, 11, dtype=torch.float64)
    torch.testing.assert_close(-Floored(Linear()).alpha(t).log(), -torch.log1p(-(1 - 1e-3) * t))
