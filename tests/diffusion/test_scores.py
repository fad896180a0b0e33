"""Score entropies and Tweedie steps of single tokens, against rate matrices and their exponentials."""

import numpy as np
import pytest
import torch

from bd3lm.diffusion import (
    score_entropy_at_masks,
    sedd,
    sedd_at_masks,
    tweedie_at_masks,
    uniform_score_entropy,
    uniform_tweedie,
)
from tests.oracles import scores as oracle
from tests.oracles.languages import states

V, MASK = 5, 3
RNG = np.random.default_rng(0)


def tensor(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.01, 0.4, 0.999])
def test_score_entropy_at_masks_is_its_definition(alpha):
    logits = RNG.standard_normal((V, V))
    x0 = torch.tensor([v for v in range(V) if v != MASK])
    log_s = sedd_at_masks(tensor(logits), MASK)[x0]
    found = score_entropy_at_masks(log_s, x0) * alpha / (1 - alpha)
    scores = log_s.exp().numpy() * alpha / (1 - alpha)
    rates = oracle.absorbing_rates(MASK, V)
    truth = [oracle.token_terms(int(x), MASK, s, rates, alpha) for x, s in zip(x0, scores, strict=True)]
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-7)


def test_sedd_at_masks_is_sedd_with_the_noise_taken_out():
    logits, alpha = tensor(RNG.standard_normal((3, V))), tensor([0.2, 0.5, 0.9])
    scaled = sedd(logits, torch.full((3,), MASK), alpha)
    clean = [v for v in range(V) if v != MASK]
    odds = (alpha / (1 - alpha)).log().unsqueeze(-1)
    torch.testing.assert_close(sedd_at_masks(logits, MASK)[:, clean] + odds, scaled[:, clean])
    assert (sedd_at_masks(logits, MASK)[:, MASK] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mask_rate", [1e-6, 0.01, 0.6, 0.99])
def test_uniform_score_entropy_is_its_definition_for_every_pair(mask_rate, dtype):
    pairs = torch.tensor(states(2, V))
    logits = tensor(RNG.standard_normal((V * V, V))).to(dtype)
    log_score = sedd(logits, pairs[:, 1], tensor(1 - mask_rate), scale_by_noise=False)
    found = uniform_score_entropy(log_score, pairs[:, 1], pairs[:, 0], tensor(mask_rate).expand(V * V))
    assert found.dtype == dtype
    scores = log_score.double().exp().numpy()
    truth = [
        oracle.token_terms(x0, x_t, s, oracle.uniform_rates(V), 1 - mask_rate)
        for (x0, x_t), s in zip(pairs.tolist(), scores, strict=True)
    ]
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-5 if dtype == torch.float32 else 1e-7)


def test_uniform_score_entropy_vanishes_at_the_true_ratios_and_nowhere_else():
    alpha = 0.3
    law = oracle.forward(oracle.uniform_rates(V), alpha)
    pairs = torch.tensor(states(2, V))
    log_ratio = tensor([np.log(law[x0] / law[x0, x_t]) for x0, x_t in pairs.tolist()])
    rate = tensor(1 - alpha).expand(V * V)
    at = lambda log_s: uniform_score_entropy(log_s, pairs[:, 1], pairs[:, 0], rate)  # noqa: E731
    torch.testing.assert_close(at(log_ratio), torch.zeros(V * V, dtype=torch.float64), rtol=0, atol=1e-12)
    other = torch.arange(V).eq(pairs[:, 1:]).logical_not() * 0.1
    assert (at(log_ratio + other) > 1e-4).all()
    assert (at(log_ratio - other) > 1e-4).all()


@pytest.mark.parametrize(("alpha_t", "alpha_s"), [(0.1, 0.2), (0.3, 0.9), (0.7, 1.0)])
def test_tweedie_at_masks_is_the_matrix_step(alpha_t, alpha_s):
    log_s = sedd_at_masks(tensor(RNG.standard_normal((4, V))) - 1.0, MASK)
    chance, log_p = tweedie_at_masks(log_s, tensor(alpha_s), tensor(alpha_t))
    for row in range(4):
        score = log_s[row].exp().numpy() * alpha_t / (1 - alpha_t)
        score[MASK] = 1.0
        p = matrix_step(oracle.absorbing_rates(MASK, V), score, MASK, alpha_t, alpha_s)
        found = chance[row].item() * log_p[row].exp().numpy()
        found[MASK] = 1 - chance[row].item()
        np.testing.assert_allclose(found, p, rtol=1e-9, atol=1e-12)


def test_tweedie_at_masks_starts_from_full_masking_and_never_exceeds_certainty():
    log_s = sedd_at_masks(tensor([[0.0] * V, [1.0] * V]), MASK)
    chance, _ = tweedie_at_masks(log_s, tensor(0.25), tensor(0.0))
    np.testing.assert_allclose(chance.numpy(), [0.25, 0.25 * np.e])
    assert tweedie_at_masks(log_s, tensor(1.0), tensor(0.5))[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("alpha_t", "alpha_s"), [(0.1, 0.2), (0.3, 0.9), (0.7, 1.0)])
def test_uniform_tweedie_is_the_matrix_step(alpha_t, alpha_s):
    x_t = torch.arange(V)
    log_score = sedd(tensor(RNG.standard_normal((V, V))), x_t, tensor(alpha_t), scale_by_noise=False)
    found = uniform_tweedie(log_score, x_t, tensor(alpha_s), tensor(alpha_t))
    for x in range(V):
        score = log_score[x].exp().numpy()
        p = matrix_step(oracle.uniform_rates(V), score, x, alpha_t, alpha_s)
        np.testing.assert_allclose(found[x].numpy(), p, rtol=1e-9, atol=1e-12)


def test_uniform_tweedie_of_the_true_scores_is_bayes_rule():
    q_0 = RNG.dirichlet(np.ones(V))
    rates = oracle.uniform_rates(V)
    q_s, q_t = (q_0 @ oracle.forward(rates, alpha) for alpha in (0.8, 0.3))
    x_t = torch.arange(V)
    found = uniform_tweedie(tensor(np.log(q_t / q_t[:, None])), x_t, tensor(0.8), tensor(0.3))
    joint = q_s[:, None] * oracle.forward(rates, 0.3 / 0.8)
    np.testing.assert_allclose(found.numpy(), (joint / joint.sum(0)).T, rtol=1e-9)


def matrix_step(rates, score, x_t, alpha_t, alpha_s):
    """Theorem 4.2 for one token."""
    back, forth = oracle.forward(rates, alpha_t / alpha_s), oracle.forward(rates, alpha_t / alpha_s)
    p = np.maximum(np.linalg.inv(back).T @ score, 0) * forth[:, x_t]
    return p / p.sum()
