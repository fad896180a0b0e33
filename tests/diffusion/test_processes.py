"""Forward processes against explicit matrices: Chapman–Kolmogorov, marginals, Bayes, frequencies."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bd3lm.diffusion import Absorbing, ForwardProcess, Uniform

V = 5
PROCESSES = [Absorbing(V, mask_id=4), Absorbing(V, mask_id=1), Uniform(V), Uniform(2)]
every_process = pytest.mark.parametrize("process", PROCESSES, ids=repr)
probabilities = st.floats(0.0, 1.0)
PAIRS = [(1.0, 0.0), (1.0, 0.4), (0.8, 0.3), (0.5, 0.0), (0.999, 0.001), (0.3, 0.3), (1.0, 1.0 - 1e-9)]


def explicit_matrix(process: ForwardProcess, alpha: float) -> torch.Tensor:
    """Q[i, j] = q(x_t = j | x_s = i), entry by entry (Suppl. B)."""
    v = process.vocab_size
    q = torch.zeros(v, v, dtype=torch.float64)
    for i, j in product(range(v), repeat=2):
        if isinstance(process, Absorbing):
            q[i, j] = (alpha if i == j else 0.0) + (1 - alpha if j == process.mask_id else 0.0)
        else:
            q[i, j] = (alpha if i == j else 0.0) + (1 - alpha) / v
    return q


def explicit_posterior(
    process: ForwardProcess, x_t: int, x_0: int, alpha_s: float, alpha_t: float
) -> torch.Tensor:
    joint = explicit_matrix(process, alpha_s)[x_0] * explicit_matrix(process, alpha_t / alpha_s)[:, x_t]
    return joint / joint.sum()  # NaN where x_0 cannot become x_t


@every_process
@given(probabilities)
def test_transition_matrix_is_the_written_one_and_its_rows_sum_to_one(
    process: ForwardProcess, alpha: float
) -> None:
    q = process.transition_matrix(alpha)
    torch.testing.assert_close(q, explicit_matrix(process, alpha), rtol=0, atol=1e-15)
    torch.testing.assert_close(q.sum(-1), torch.ones(process.vocab_size, dtype=torch.float64))
    assert torch.equal(q, process.transition_matrix(torch.tensor(alpha, dtype=torch.float64)))


@every_process
@given(probabilities, probabilities)
def test_chapman_kolmogorov(process: ForwardProcess, a: float, b: float) -> None:
    product_of_steps = process.transition_matrix(a) @ process.transition_matrix(b)
    torch.testing.assert_close(product_of_steps, process.transition_matrix(a * b), rtol=0, atol=1e-14)


@every_process
def test_many_small_steps_make_one_large_one(process: ForwardProcess) -> None:
    """α_{t|s} = α_t/α_s: a walk down any schedule ends in the marginal."""
    alphas = torch.linspace(1.0, 0.0, 21, dtype=torch.float64)
    walk = torch.eye(process.vocab_size, dtype=torch.float64)
    for alpha_s, alpha_t in pairwise(alphas):
        walk = walk @ process.transition_matrix(alpha_t / alpha_s)
        torch.testing.assert_close(walk, process.transition_matrix(alpha_t), rtol=0, atol=1e-13)


@every_process
def test_marginal_is_a_row_of_the_matrix_for_each_tokens_own_alpha(process: ForwardProcess) -> None:
    x0 = torch.arange(process.vocab_size).expand(3, -1)
    alpha = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)[:, None].expand_as(x0)
    expected = torch.stack([explicit_matrix(process, a) for a in (0.0, 0.3, 1.0)])
    torch.testing.assert_close(process.marginal(x0, alpha), expected, rtol=0, atol=1e-15)


@every_process
def test_the_marginal_at_the_end_is_the_prior_whatever_the_token(process: ForwardProcess) -> None:
    marginal = process.marginal(torch.arange(process.vocab_size), torch.tensor(0.0, dtype=torch.float64))
    torch.testing.assert_close(marginal, process.noise().expand_as(marginal))


@every_process
@pytest.mark.parametrize(("alpha_s", "alpha_t"), PAIRS)
def test_posterior_is_bayes_rule_for_every_pair_of_tokens(
    process: ForwardProcess, alpha_s: float, alpha_t: float
) -> None:
    v = process.vocab_size
    a_s, a_t = (torch.tensor(a, dtype=torch.float64) for a in (alpha_s, alpha_t))
    checked = 0
    for x_t, x_0 in product(range(v), repeat=2):
        if explicit_matrix(process, alpha_t)[x_0, x_t] == 0:
            continue
        point = torch.eye(v, dtype=torch.float64)[x_0]
        ours = process.posterior(point, torch.tensor(x_t), a_s, a_t)
        expected = explicit_posterior(process, x_t, x_0, alpha_s, alpha_t)
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-14)
        checked += 1
    assert checked >= v


@every_process
@pytest.mark.parametrize(("alpha_s", "alpha_t"), PAIRS)
def test_posterior_of_a_mixture_is_the_mixture_of_posteriors(
    process: ForwardProcess, alpha_s: float, alpha_t: float
) -> None:
    v = process.vocab_size
    p_x0 = torch.rand(v, v, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p_x0 /= p_x0.sum(-1, keepdim=True)
    x_t = torch.arange(v)
    if isinstance(process, Absorbing):  # a clean x_t came from itself alone
        p_x0 = torch.where((x_t == process.mask_id)[:, None], p_x0, torch.eye(v, dtype=torch.float64))
    alphas = [torch.full((v,), a, dtype=torch.float64) for a in (alpha_s, alpha_t)]
    ours = process.posterior(p_x0, x_t, *alphas)
    for row in range(v):
        if isinstance(process, Absorbing) and alpha_t == 0 and row != process.mask_id:
            continue  # at alpha_t = 0 everything is masked
        expected = sum(
            p_x0[row, x_0] * explicit_posterior(process, row, x_0, alpha_s, alpha_t)
            for x_0 in range(v)
            if p_x0[row, x_0] > 0
        )
        torch.testing.assert_close(ours[row], expected, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(ours.sum(-1), torch.ones(v, dtype=torch.float64))


def test_absorbing_posterior_keeps_a_clean_token_whatever_the_network_says() -> None:
    process, half = Absorbing(3, mask_id=2), torch.tensor(0.5)
    posterior = process.posterior(torch.tensor([0.1, 0.9, 0.0]), torch.tensor(0), half, half / 2)
    assert posterior.tolist() == [1.0, 0.0, 0.0]


@every_process
def test_posterior_treats_each_position_by_its_own_times(process: ForwardProcess) -> None:
    v = process.vocab_size
    x_t = torch.randint(v, (2, 3), generator=torch.Generator().manual_seed(1))
    p_x0 = torch.softmax(
        torch.randn(2, 3, v, generator=torch.Generator().manual_seed(2), dtype=torch.float64), -1
    )
    alpha_s = torch.linspace(0.5, 1.0, 6, dtype=torch.float64).view(2, 3)
    alpha_t = alpha_s * 0.7
    batch = process.posterior(p_x0, x_t, alpha_s, alpha_t)
    for i, j in product(range(2), range(3)):
        alone = process.posterior(p_x0[i, j], x_t[i, j], alpha_s[i, j], alpha_t[i, j])
        torch.testing.assert_close(batch[i, j], alone, rtol=1e-14, atol=0)


def uniform(*shape: int) -> torch.Tensor:
    """Numbers in (0, 1]."""
    return 1.0 - torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@every_process
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
def test_corrupted_tokens_are_draws_from_the_marginal(process: ForwardProcess, alpha: float) -> None:
    """At α = 0 from the noise, whatever the text."""
    count = 20_000
    x0 = torch.arange(process.vocab_size).repeat_interleave(count)
    mask_rate = torch.tensor(1.0 - alpha, dtype=torch.float64)
    x_t = process.corrupt_at(x0, mask_rate, uniform(*x0.shape)).view(-1, count)
    expected = explicit_matrix(process, alpha) * count
    for token in range(process.vocab_size):
        observed = x_t[token].bincount(minlength=process.vocab_size)
        possible = expected[token] > 0
        assert (observed[~possible] == 0).all()
        if possible.sum() > 1:
            assert stats.chisquare(observed[possible], expected[token][possible]).pvalue > 1e-4


@every_process
def test_each_token_is_corrupted_at_its_own_rate(process: ForwardProcess) -> None:
    x0 = torch.zeros(2, 5000, dtype=torch.long)
    x_t = process.corrupt_at(x0, torch.tensor([[0.0], [1.0]], dtype=torch.float64), uniform(2, 5000))
    assert torch.equal(x_t[0], x0[0])
    frequency = x_t[1].bincount(minlength=process.vocab_size) / 5000
    torch.testing.assert_close(frequency.double(), process.noise(), rtol=0, atol=0.04)


@every_process
@pytest.mark.parametrize("mask_rate", [1e-12, 0.3, 1.0])
def test_corrupt_at_splits_the_unit_interval_as_the_marginal_says(
    process: ForwardProcess, mask_rate: float
) -> None:
    """A grid of numbers in (0, 1], one a corruption: exactly the right share ends in each token."""
    v, x0 = process.vocab_size, 0
    cells = 60  # divisible by both vocabularies
    grid = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    rate = torch.tensor(mask_rate, dtype=torch.float64)
    corrupted = process.corrupt_at(torch.full((cells,), x0), rate, rate * grid)
    noise = process.noise()
    assert torch.bincount(corrupted, minlength=v).tolist() == [round(cells * float(p)) for p in noise]
    kept = process.corrupt_at(torch.full((cells,), x0), rate, rate + (1.0 - rate) * grid)
    assert mask_rate == 1.0 or (kept == x0).all()
    ends = process.corrupt_at(torch.zeros(2).long(), torch.ones(2).double(), torch.tensor([2.0**-53, 1.0]))
    assert ((ends >= 0) & (ends < v)).all()


@every_process
@pytest.mark.parametrize("alpha", [0.0, 1e-9, 0.2, 1.0])
def test_prior_divergence_is_that_of_the_last_marginal(process: ForwardProcess, alpha: float) -> None:
    q = explicit_matrix(process, alpha)[0]
    noise = process.noise()
    terms = torch.where(q > 0, q * (q / noise).log(), 0.0)
    assert process.prior_divergence(alpha) == pytest.approx(float(terms.sum()), rel=1e-6, abs=1e-12)


def test_absorbing_never_changes_a_mask() -> None:
    x0 = torch.full((1000,), 4)
    assert torch.equal(Absorbing(V, mask_id=4).corrupt_at(x0, torch.tensor(0.5), uniform(1000)), x0)


@pytest.mark.parametrize("tokens", [[0, 5], [-1, 2]])
@every_process
def test_ids_outside_the_vocabulary_are_refused(process: ForwardProcess, tokens: list[int]) -> None:
    message = (
        f"token ids must lie in 0..{process.vocab_size - 1}, got values from {min(tokens)} to {max(tokens)}"
    )
    with pytest.raises(ValueError, match=message):
        process.marginal(torch.tensor(tokens), torch.tensor(0.5))


def test_no_ids_are_no_error() -> None:
    Uniform(V).check_ids(torch.empty(0, dtype=torch.long))


@pytest.mark.parametrize("vocab_size", [1, 0, -3])
def test_a_vocabulary_needs_two_tokens(vocab_size: int) -> None:
    for build in (lambda: Uniform(vocab_size), lambda: Absorbing(vocab_size, mask_id=0)):
        with pytest.raises(ValueError, match=f"vocab_size must be at least 2, got {vocab_size}"):
            build()


@pytest.mark.parametrize("mask_id", [5, -1])
def test_the_mask_must_lie_in_the_vocabulary(mask_id: int) -> None:
    with pytest.raises(ValueError, match=f"mask_id must lie in 0..4, got {mask_id}"):
        Absorbing(5, mask_id=mask_id)
