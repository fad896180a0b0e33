"""Gaussian diffusion on the simplex: its noise at every step, and the way back to almost one-hot vectors."""

import math

import pytest
import torch
from scipy import stats

from bd3lm.diffusion import (
    GreedyProjection,
    MultiHotProjection,
    SamplingProjection,
    SquaredCosine,
    add_noise,
    almost_one_hot,
)
from tests.oracles import simplex as oracle

V, K = 4, 5.0


def double(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 25, 5000])
@pytest.mark.parametrize("offset", [0.0, 1e-4, 0.008])
def test_the_schedule_is_its_formula(steps, offset):
    progress = torch.arange(steps + 1, dtype=torch.float64) / steps
    expected = double(*(oracle.alpha_bar(t, steps, offset) for t in range(steps + 1)))
    torch.testing.assert_close(SquaredCosine(offset).alpha_bar(progress), expected, rtol=0, atol=1e-14)


def test_the_schedule_falls_from_one_to_nothing():
    alpha_bar = SquaredCosine().alpha_bar(torch.arange(5001, dtype=torch.float64) / 5000)
    assert alpha_bar[0] == 1.0
    assert (alpha_bar.diff() < 0).all()
    assert 0.0 <= alpha_bar[-1] < 1e-30


def test_a_token_is_almost_one_hot():
    tokens = torch.tensor([[0, 3], [2, 2]])
    expected = [[oracle.logits_of_token(int(token), V, K) for token in row] for row in tokens]
    assert torch.equal(almost_one_hot(tokens, V, K), torch.tensor(expected))


@pytest.mark.parametrize("steps", [1, 7, 100])
def test_mean_and_variance_at_every_step_are_those_of_single_steps_composed(steps):
    """q(w̃_t | w̃_{t−1}) has mean √(ᾱ_t/ᾱ_{t−1}) w̃_{t−1} and variance (1 − ᾱ_t/ᾱ_{t−1}) K²."""
    schedule = SquaredCosine()
    alpha_bar = schedule.alpha_bar(torch.arange(steps + 1, dtype=torch.float64) / steps)
    w = almost_one_hot(torch.tensor(1), V, K, dtype=torch.float64)
    none, one = torch.zeros_like(w), torch.ones_like(w)
    mean, variance = w, torch.zeros_like(w)
    for t in range(1, steps + 1):
        alpha = alpha_bar[t] / alpha_bar[t - 1]
        spread = add_noise(none, alpha, one, K)  # what one unit of noise adds
        mean, variance = add_noise(mean, alpha, none, K), alpha * variance + spread.square()
        torch.testing.assert_close(add_noise(w, alpha_bar[t], none, K), mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(alpha_bar[t].sqrt() * w, mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            add_noise(none, alpha_bar[t], one, K).square(), variance, rtol=0, atol=1e-12
        )
        torch.testing.assert_close((1 - alpha_bar[t]) * K**2 * one, variance, rtol=0, atol=1e-12)


def test_one_jump_is_distributed_as_many_steps():
    steps, draws = 6, 20_000
    generator = torch.Generator().manual_seed(0)
    alpha_bar = SquaredCosine().alpha_bar(torch.arange(steps + 1, dtype=torch.float64) / steps)
    w0 = almost_one_hot(torch.zeros(draws, dtype=torch.long), 2, K, dtype=torch.float64)
    walked = w0
    for t in range(1, steps + 1):
        fresh, direct = torch.randn(2, draws, 2, generator=generator, dtype=torch.float64).unbind()
        walked = add_noise(walked, (alpha_bar[t] / alpha_bar[t - 1]).expand(draws), fresh, K)
        jumped = add_noise(w0, alpha_bar[t].expand(draws), direct, K)
        for entry, sign in ((0, 1), (1, -1)):
            law = stats.norm(sign * K * math.sqrt(alpha_bar[t]), K * math.sqrt(1 - alpha_bar[t]))
            assert stats.kstest(walked[:, entry].numpy(), law.cdf).pvalue > 1e-3
            assert stats.kstest(jumped[:, entry].numpy(), law.cdf).pvalue > 1e-3
        assert abs(torch.corrcoef(walked.T)[0, 1]) < 5 / math.sqrt(draws)  # entries are independent


def test_noise_is_added_with_each_tokens_own_alpha():
    generator = torch.Generator().manual_seed(1)
    tokens, alpha = torch.tensor([[0, 3, 1]]), double(0.0, 0.3, 1.0).view(1, 3)
    normal = torch.randn(1, 3, V, generator=generator, dtype=torch.float64)
    w = almost_one_hot(tokens, V, K, dtype=torch.float64)
    expected = [
        oracle.noised(oracle.logits_of_token(int(tokens[0, i]), V, K), float(alpha[0, i]), z.tolist(), K)
        for i, z in enumerate(normal[0])
    ]
    torch.testing.assert_close(add_noise(w, alpha, normal, K), double(*expected).view(1, 3, V))
    assert torch.equal(add_noise(w, alpha, normal, K)[0, 2], w[0, 2])  # no noise at all
    assert add_noise(w.float(), alpha, normal, K).dtype == torch.float32


def test_nothing_of_a_token_is_left_at_the_end():
    """What the network sees of two different tokens under the same noise draws together, until it is one."""
    normal = torch.randn(50, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    apart = []
    for t in range(11):
        alpha_bar = SquaredCosine().alpha_bar(double(t / 10)).expand(50)
        seen = [
            add_noise(
                almost_one_hot(torch.full((50,), token), V, K, dtype=torch.float64), alpha_bar, normal, K
            ).softmax(-1)
            for token in (0, 1)
        ]
        apart.append(float((seen[0] - seen[1]).abs().sum(-1).mean()))
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 1.99
    assert apart[-1] < 1e-12


# --- projections ---


def random_log_p(rows: int = 60, seed: int = 0) -> torch.Tensor:
    """Distributions that never predict the last token."""
    logits = 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits[:, -1] = -math.inf
    return logits.log_softmax(-1)


def test_the_greedy_projection_raises_the_likeliest():
    log_p = random_log_p()
    expected = [oracle.logits_of_token(max(range(V), key=lambda v, p=p: p[v]), V, K) for p in log_p.tolist()]
    assert torch.equal(GreedyProjection()(log_p, K), double(*expected).view(-1, V))


@pytest.mark.parametrize("share", [1e-6, 0.5, 0.95, 1.0])
def test_the_multi_hot_projection_raises_the_nucleus(share):
    log_p = random_log_p()
    raised = MultiHotProjection(share).raised(log_p)
    kept = [oracle.nucleus_of(p, share) for p in log_p.exp().tolist()]
    assert [row.nonzero().flatten().tolist() for row in raised] == [sorted(row) for row in kept]
    assert torch.equal(MultiHotProjection(share)(log_p, K), torch.where(raised, K, -K).double())
    assert not raised[:, -1].any()


def test_the_sampling_projection_draws_from_the_nucleus():
    draws, p = 20_000, (0.5, 0.3, 0.15, 0.05)
    uniform = torch.rand(draws, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    raised = SamplingProjection(0.8).raised(double(*p).log().expand(draws, V), uniform)
    assert (raised.sum(-1) == 1).all()
    counts = raised.sum(0).tolist()
    assert counts[2] == counts[3] == 0
    assert stats.chisquare(counts[:2], [draws * 0.5 / 0.8, draws * 0.3 / 0.8]).pvalue > 1e-3
    everything = SamplingProjection(1.0).raised(double(*p).log().expand(draws, V), uniform).sum(0)
    assert stats.chisquare(everything.numpy(), [draws * x for x in p]).pvalue > 1e-3


def test_only_the_sampling_projection_draws():
    assert (GreedyProjection().draws, MultiHotProjection().draws, SamplingProjection().draws) == (
        False,
        False,
        True,
    )
    with pytest.raises(ValueError, match="uniform must be given"):
        SamplingProjection()(random_log_p(), K)


def test_bad_settings_are_refused():
    for rule in (SamplingProjection, MultiHotProjection):
        for p in (0.0, 1.1, math.nan):
            with pytest.raises(ValueError, match=rf"top_p must lie in \(0, 1\], got {p}"):
                rule(p)
    for offset in (-0.1, math.inf):
        with pytest.raises(ValueError, match=f"offset must be finite and not negative, got {offset}"):
            SquaredCosine(offset)
