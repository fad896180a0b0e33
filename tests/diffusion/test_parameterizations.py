"""What logits mean: SUBS, D3PM, and SEDD against the scores of an enumerable distribution."""

from itertools import product

import pytest
import torch

from bd3lm.diffusion import d3pm, sedd, subs, subs_at_masks

V, MASK = 6, 3
GENERATOR = torch.Generator()


def logits(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (3 * torch.randn(*shape, V, generator=GENERATOR.manual_seed(0), dtype=torch.float64)).to(dtype)


def normalised_without(x: torch.Tensor, token: int) -> torch.Tensor:
    """log softmax over the other tokens, written out."""
    p = x.double().exp()
    p[..., token] = 0.0
    return (p / p.sum(-1, keepdim=True)).log()


def test_subs_never_predicts_the_mask_and_copies_clean_tokens() -> None:
    x_t = torch.tensor([[0, MASK, 5, MASK], [MASK, 1, MASK, 2]])
    raw = logits(2, 4)
    log_p = subs(raw, x_t, MASK)
    expected = normalised_without(raw, MASK)
    for row, column in product(range(2), range(4)):
        token = int(x_t[row, column])
        if token == MASK:
            torch.testing.assert_close(log_p[row, column], expected[row, column])
            assert log_p[row, column, MASK] == -torch.inf
        else:
            assert log_p[row, column].exp().tolist() == [float(v == token) for v in range(V)]
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 4, dtype=torch.float64))


def test_subs_ignores_the_mask_logit_even_where_it_is_the_largest() -> None:
    raw = logits(2, 4)
    louder = raw.clone()
    louder[..., MASK] = 1e4
    x_t = torch.full((2, 4), MASK)
    assert torch.equal(subs(raw, x_t, MASK), subs(louder, x_t, MASK))


def test_subs_at_masks_is_subs_where_everything_is_masked() -> None:
    raw = logits(2, 4)
    assert torch.equal(subs_at_masks(raw, MASK), subs(raw, torch.full((2, 4), MASK), MASK))


def test_subs_gradient_is_finite_and_stays_off_the_mask_and_clean_positions() -> None:
    raw = logits(3).requires_grad_()
    x_t = torch.tensor([MASK, 1, MASK])
    subs(raw, x_t, MASK)[torch.arange(3), torch.tensor([0, 1, 2])].sum().backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()
    assert (raw.grad[:, MASK] == 0).all()
    assert (raw.grad[1] == 0).all()
    assert (raw.grad[0] != 0).sum() == V - 1


def test_d3pm_is_a_softmax_with_the_mask_left_out_on_request() -> None:
    raw = logits(2, 4)
    torch.testing.assert_close(d3pm(raw), torch.log(raw.exp() / raw.exp().sum(-1, keepdim=True)))
    torch.testing.assert_close(d3pm(raw, MASK), normalised_without(raw, MASK))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_logits_are_normalised_in_float32_at_least(dtype: torch.dtype) -> None:
    raw = logits(2, 4, dtype=dtype)
    x_t = torch.full((2, 4), MASK)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = normalised_without(raw, MASK)  # of the rounded logits
    for log_p in (subs(raw, x_t, MASK), subs_at_masks(raw, MASK), d3pm(raw, MASK)):
        assert log_p.dtype == wide
        torch.testing.assert_close(log_p.double(), exact, rtol=0, atol=1e-5)
    assert d3pm(raw).dtype == wide
    assert sedd(raw, x_t, torch.tensor(0.5)).dtype == wide


def joint_marginal(q_0: torch.Tensor, alpha: float) -> torch.Tensor:
    """q_t over two tokens of the absorbing process, by summing over every clean pair and every mask."""
    q_t = torch.zeros(V, V, dtype=torch.float64)
    for a, b in product(range(V), repeat=2):
        for hide_a, hide_b in product((False, True), repeat=2):
            chance = (1 - alpha if hide_a else alpha) * (1 - alpha if hide_b else alpha)
            q_t[MASK if hide_a else a, MASK if hide_b else b] += chance * q_0[a, b]
    return q_t


@pytest.mark.parametrize("alpha", [0.01, 0.5, 0.99])
def test_sedd_of_the_true_conditionals_is_the_true_score_at_every_mask(alpha: float) -> None:
    """log q_t(y)/q_t(x_t) where y fills one mask of x_t; log p(y | rest) + log(V − 1) are the true logits."""
    q_0 = torch.rand(V, V, generator=GENERATOR.manual_seed(1), dtype=torch.float64)
    q_0[MASK] = q_0[:, MASK] = 0.0
    q_0 /= q_0.sum()
    q_t = joint_marginal(q_0, alpha)
    clean = [v for v in range(V) if v != MASK]
    for other in range(V):  # the second token: each clean one, and the mask
        conditional = q_0.sum(1) if other == MASK else q_0[:, other] / q_0[:, other].sum()
        raw = conditional.log() + torch.tensor(V - 1.0).log()
        score = sedd(raw, torch.tensor(MASK), torch.tensor(alpha, dtype=torch.float64)).exp()
        torch.testing.assert_close(score[clean], q_t[clean, other] / q_t[MASK, other], rtol=1e-6, atol=0)
        assert score[MASK] == 1.0


def test_sedd_zero_logits_are_a_uniform_guess_at_each_positions_own_noise() -> None:
    alpha = torch.tensor([[0.2, 0.7]], dtype=torch.float64)
    score = sedd(torch.zeros(1, 2, V, dtype=torch.float64), torch.full((1, 2), MASK), alpha).exp()
    for position, a in enumerate((0.2, 0.7)):
        assert score[0, position, 0].item() == pytest.approx(a / (1 - a) / (V - 1))


def test_sedd_is_zero_at_the_token_itself_and_unscaled_on_request() -> None:
    raw, x_t = logits(2, 4), torch.tensor([[0, 1, 2, MASK], [4, 5, MASK, 0]])
    log_score = sedd(raw, x_t, torch.tensor(0.3), scale_by_noise=False)
    at_itself = torch.nn.functional.one_hot(x_t, V).bool()
    assert (log_score[at_itself] == 0).all()
    assert torch.equal(log_score[~at_itself], raw[~at_itself])
    assert (sedd(raw, x_t, torch.tensor(0.3))[at_itself] == 0).all()
