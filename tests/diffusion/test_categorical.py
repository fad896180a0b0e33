"""Categorical draws: Gumbel-max in 64 bits against 32, nucleus, top-k and temperature against plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit

from bd3lm.diffusion import gumbel, gumbel_max, nucleus, temper, top_k

GRID = 2**52  # the counter's uniforms are (k + 1/2) / 2^52


def on_grid(k: torch.Tensor) -> torch.Tensor:
    return (k.double() + 0.5) / GRID


def log(*p: float) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64).log()


# --- Gumbel-max ---


def test_gumbel_max_draws_from_the_softmax() -> None:
    log_p = torch.tensor([1.0, -1.0, 0.0, 2.5, -3.0])
    uniform = torch.rand(100_000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    observed = gumbel_max(log_p, uniform).bincount(minlength=5)
    assert stats.chisquare(observed, torch.softmax(log_p.double(), -1) * 100_000).pvalue > 1e-3


def test_gumbel_max_never_draws_an_impossible_token() -> None:
    log_p = torch.tensor([-math.inf, 0.0, -math.inf])
    extreme = torch.tensor([1 - 2.0**-53, 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert gumbel_max(log_p, extreme) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gumbel_max_works_in_64_bits_whatever_the_logits(dtype: torch.dtype) -> None:
    """A noise of 36.7 lifts a token 30 below; in 32 bits this uniform would round to 1."""
    log_p = torch.tensor([0.0, -30.0], dtype=dtype)
    assert gumbel_max(log_p, torch.tensor([0.5, 1 - 2.0**-53], dtype=torch.float64)) == 1
    assert gumbel(torch.tensor([0.5], dtype=torch.float32)).dtype == torch.float64


def test_gumbel_max_tells_apart_what_32_bits_cannot() -> None:
    uniform = torch.tensor([0.5, 0.5 + 1e-12], dtype=torch.float64)
    assert gumbel_max(torch.zeros(2), uniform) == 1
    assert gumbel_max(torch.tensor([1e-11, 0.0], dtype=torch.float64), uniform) == 0


def naive_probability(gap: float) -> float:
    """How often 32-bit noise draws the unlikelier of two tokens `gap` apart: all pairs of 2^24 uniforms each.

    As in torch.distributions, u = 0 is first raised to the smallest positive float.
    """
    u = torch.arange(2**24, dtype=torch.float32).mul_(2.0**-24).clamp_min_(torch.finfo(torch.float32).tiny)
    likely = u.log_().neg_().log_().neg_()  # ascending
    unlikely = likely - gap
    contenders = unlikely[unlikely > likely[0]]  # a few hundred; the others never win
    wins = torch.searchsorted(likely, contenders)  # how many draws of the likely token each one beats
    return wins.double().sum().item() / 2.0**48


def our_probability(gap: float) -> float:
    """The same for `gumbel` on the 2^52 uniforms of the counter, exactly on its grid.

    Every k (in strides, where more than 2^15 of them matter: a mid-point sum) that can win with the unlikely
    token, counted from the top; for each, by bisection, the number of draws of the likely token it beats.
    """
    matter = 40 * math.exp(-gap) * GRID  # beyond, a win has probability e^-40
    stride = max(1, int(matter) >> 15)
    top = torch.arange(int(matter / stride)) * stride + stride // 2
    unlikely = gumbel(on_grid(GRID - 1 - top)) - gap
    low, high = torch.zeros_like(top), torch.full_like(top, GRID)
    while (low < high).any():
        middle = (low + high) // 2
        beaten = gumbel(on_grid(middle)) < unlikely
        low, high = torch.where(beaten, middle + 1, low), torch.where(beaten, high, middle)
    return (low.double() / GRID).sum().item() * stride / GRID


def test_naive_32_bit_noise_starves_unlikely_tokens() -> None:
    """The wrong temperature of Suppl. C.5: 3 % off at a gap of 14, a quarter at 16, more than half at 17."""
    relative = {gap: naive_probability(gap) / expit(-gap) for gap in (14.0, 15.0, 16.0, 17.0, 22.0)}
    assert 0.95 < relative[14.0] < 0.975
    assert 0.88 < relative[15.0] < 0.93
    assert 0.70 < relative[16.0] < 0.80
    assert 0.40 < relative[17.0] < 0.50
    assert relative[22.0] == 0.0


@pytest.mark.parametrize("gap", [14.0, 15.0, 16.0, 17.0, 20.0, 25.0, 28.0, 30.0])
def test_our_noise_is_right_to_a_millionth_up_to_a_gap_of_30(gap: float) -> None:
    assert our_probability(gap) == pytest.approx(expit(-gap), rel=1e-6)


# --- nucleus ---


def plain_nucleus(p: list[float], threshold: float, rule: str) -> list[bool]:
    """Walk from the likeliest token down, lower index first among equals."""
    if threshold == 1.0:
        return [True] * len(p)
    keep, total = [False] * len(p), 0.0
    for place, i in enumerate(sorted(range(len(p)), key=lambda i: (-p[i], i))):
        if rule == "inclusive":
            keep[i] = total < threshold
        else:
            keep[i] = total + p[i] <= threshold
        keep[i] = keep[i] or place == 0
        total += p[i]
    return keep


@st.composite
def dyadic(draw: st.DrawFn) -> list[float]:
    """Probabilities that are multiples of 1/64, with ties and zeros."""
    cuts = sorted(draw(st.lists(st.integers(0, 64), min_size=1, max_size=7)))
    return [(b - a) / 64 for a, b in zip([0, *cuts], [*cuts, 64], strict=True)]


@given(dyadic(), st.integers(1, 64), st.sampled_from(["inclusive", "exclusive"]))
def test_nucleus_equals_a_plain_loop(p: list[float], threshold: int, rule: str) -> None:
    # exp(log p) is p up to rounding: aim between the multiples of 1/64, where no rounding can decide
    aim = (threshold - 0.5) / 64 if threshold < 64 else 1.0
    kept = nucleus(log(*p), aim, rule).exp()
    expected = torch.tensor(p, dtype=torch.float64) * torch.tensor(plain_nucleus(p, aim, rule))
    torch.testing.assert_close(kept, expected / expected.sum(), rtol=1e-12, atol=0)


def test_the_token_that_crosses_is_kept_or_dropped_by_name() -> None:
    p = log(0.5, 0.3, 0.2)
    torch.testing.assert_close(nucleus(p, 0.6).exp(), torch.tensor([0.625, 0.375, 0.0]).double())
    assert nucleus(p, 0.6, "exclusive").exp().tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", ["inclusive", "exclusive"])
def test_a_set_that_holds_exactly_p_is_enough(rule: str) -> None:
    log_p = log(0.5, 0.3, 0.2)
    exactly = float(log_p.exp()[0])
    assert nucleus(log_p, exactly, rule).exp().tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", ["inclusive", "exclusive"])
def test_a_dominant_token_is_kept_alone(rule: str) -> None:
    assert nucleus(log(0.01, 0.97, 0.02), 0.9, rule).exp().tolist() == [0.0, 1.0, 0.0]
    assert nucleus(log(0.01, 0.97, 0.02), 1e-9, rule).exp().tolist() == [0.0, 1.0, 0.0]


def test_ties_go_to_the_lower_index() -> None:
    quarter = log(0.25, 0.25, 0.25, 0.25)
    assert nucleus(quarter, 0.4).exp().tolist() == [0.5, 0.5, 0.0, 0.0]
    assert nucleus(quarter, 0.4, "exclusive").exp().tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("rule", ["inclusive", "exclusive"])
def test_a_nucleus_of_one_changes_nothing(rule: str) -> None:
    p = torch.log_softmax(torch.randn(3, 100, generator=torch.Generator().manual_seed(0)), -1)
    assert torch.equal(nucleus(p, 1.0, rule), p)


def test_nucleus_treats_each_row_alone() -> None:
    rows = torch.log_softmax(3 * torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), -1)
    batch = nucleus(rows, 0.8)
    for row, kept in zip(rows, batch, strict=True):
        assert torch.equal(nucleus(row, 0.8), kept)
    assert (batch == -math.inf).any()
    assert torch.allclose(batch.exp().sum(-1), torch.ones(4))


# --- top-k and temperature ---


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 10))
def test_top_k_keeps_the_k_likeliest_lower_index_first(scores: list[int], k: int) -> None:
    log_p = torch.log_softmax(torch.tensor(scores, dtype=torch.float64), -1)
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    expected = torch.zeros(len(scores), dtype=torch.float64)
    expected[best] = log_p[best].exp()
    torch.testing.assert_close(top_k(log_p, k).exp(), expected / expected.sum())


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_temper_raises_to_the_power(temperature: float) -> None:
    p = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    expected = p ** (1 / temperature)
    torch.testing.assert_close(temper(p.log(), temperature).exp(), expected / expected.sum())


@pytest.mark.parametrize("p", [0.0, -0.1, 1.0001, math.nan])
def test_nucleus_refuses_p_outside_the_half_open_interval(p: float) -> None:
    with pytest.raises(ValueError, match=rf"nucleus must lie in \(0, 1\], got {p}"):
        nucleus(log(0.5, 0.5), p)


def test_nucleus_refuses_an_unknown_rule() -> None:
    with pytest.raises(ValueError, match="rule must be 'inclusive' or 'exclusive', got 'strict'"):
        nucleus(log(0.5, 0.5), 0.5, "strict")  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, -1])
def test_top_k_refuses_less_than_one(k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k must be at least 1, got {k}"):
        top_k(log(0.5, 0.5), k)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temper_refuses_what_is_not_positive_and_finite(temperature: float) -> None:
    with pytest.raises(ValueError, match=f"temperature must be positive and finite, got {temperature}"):
        temper(log(0.5, 0.5), temperature)
