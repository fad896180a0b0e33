"""The fused head and cross-entropy: the plain formula, values and gradients, in chunks of any size."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from bd3lm.models import cross_entropy
from bd3lm.models.cross_entropy import weighted_cross_entropy

EXCLUDED = 3


def inputs(
    positions: int, vocabulary: int = 11, width: int = 6, *, bias: bool = True, dtype=torch.float64
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(positions)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    targets = torch.randint(4, vocabulary, (positions,), generator=generator)
    weights = torch.rand(positions, generator=generator, dtype=dtype)
    return [
        normal(positions, width),
        normal(vocabulary, width),
        normal(vocabulary) if bias else None,
        targets,
        weights,
    ]


def plainly(states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor):
    logits = states @ weight.T + (0 if bias is None else bias)
    logits = logits.index_fill(1, torch.tensor([EXCLUDED]), -torch.inf)
    nats = -logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
    return (nats * weights).sum(), nats


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("positions", [1, 4, 13])
def test_values_and_gradients_are_those_of_the_formula(positions, chunk, bias, monkeypatch):
    monkeypatch.setattr(cross_entropy, "_CHUNK", chunk)
    given = inputs(positions, bias=bias)
    learned = [each for each in given[:3] if each is not None]
    total, nats = weighted_cross_entropy(*given, excluded=EXCLUDED)
    expected_total, expected = plainly(*given)
    torch.testing.assert_close(nats, expected)
    torch.testing.assert_close(total, expected_total)
    assert not nats.requires_grad
    gradients = torch.autograd.grad(3.0 * total, learned)
    for gradient, right in zip(gradients, torch.autograd.grad(3.0 * expected_total, learned), strict=True):
        torch.testing.assert_close(gradient, right)
        assert gradient.abs().max() > 0.01


def test_the_excluded_token_gets_no_gradient():
    states, weight, bias, targets, weights = inputs(5)
    total, _ = weighted_cross_entropy(states, weight, bias, targets, weights, excluded=EXCLUDED)
    of_weight, of_bias = torch.autograd.grad(total, (weight, bias))
    assert not of_weight[EXCLUDED].any()
    assert of_bias[EXCLUDED] == 0


def test_a_position_of_weight_zero_may_have_an_impossible_target():
    states, weight, bias, targets, weights = inputs(5)
    targets[2], weights[2] = EXCLUDED, 0.0
    total, nats = weighted_cross_entropy(states, weight, bias, targets, weights, excluded=EXCLUDED)
    assert nats[2] == torch.inf
    assert total.isfinite()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(total, (states, weight, bias)))


def test_no_positions_cost_nothing():
    given = inputs(0)
    total, nats = weighted_cross_entropy(*given, excluded=EXCLUDED)
    assert (total.item(), nats.shape) == (0.0, (0,))
    assert not any(gradient.any() for gradient in torch.autograd.grad(total, given[:3]))


def test_without_gradients_none_are_computed():
    given = inputs(5)
    with torch.no_grad():
        total, nats = weighted_cross_entropy(*given, excluded=EXCLUDED)
    torch.testing.assert_close((total, nats), plainly(*given))
    assert not total.requires_grad


def test_under_autocast_it_computes_in_half_precision_and_reduces_in_single():
    given = inputs(64, 500, 32, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, nats = weighted_cross_entropy(*given, excluded=EXCLUDED)
    assert (total.dtype, nats.dtype) == (torch.float32, torch.float32)
    expected, each = plainly(*given)
    torch.testing.assert_close(nats, each, rtol=0.05, atol=0.1)
    assert not torch.equal(nats, each)
    gradients = torch.autograd.grad(total, given[:3])
    for gradient, right in zip(gradients, torch.autograd.grad(expected, given[:3]), strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - right).norm() < 0.05 * right.norm()


def test_ids_outside_the_vocabulary_are_refused():
    states, weight, bias, targets, weights = inputs(4)
    for wrong in (-1, 11):
        targets[1] = wrong
        with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.10, got values from"):
            weighted_cross_entropy(states, weight, bias, targets, weights, excluded=EXCLUDED)


INTERPRETED = """
import torch
from bd3lm.models.kernels import cross_entropy as kernel
from bd3lm.models.cross_entropy import _Plain

kernel._PIECES, kernel._LANES, kernel._ROWS, kernel._ROWS_AT_ONCE, kernel._TOKENS = 2, 8, 4, 2, 16
torch.manual_seed(0)
for rows, tokens in ((1, 1), (3, 15), (4, 16), (5, 17), (9, 40), (0, 5)):
    matrix = 8 * torch.randn(rows, tokens + 3)
    logits = matrix[:, :tokens]  # rows of a larger matrix
    logits[:, -1:] = logits[:, -1:] if tokens == 1 else -torch.inf
    rest = matrix[:, tokens:].clone()
    targets, weights = torch.randint(max(tokens - 1, 1), (rows,)), torch.rand(rows)
    exact = logits.double()
    totals = _Plain.log_totals(exact)
    right = totals, *_Plain.grad_logits(exact, totals, targets, weights.double())
    found = kernel.log_totals(logits)
    found = found, *kernel.grad_logits(logits, found, targets, weights)
    for mine, expected in zip(found, right):
        torch.testing.assert_close(mine.double(), expected, rtol=1e-4, atol=1e-5)
    assert found[1].data_ptr() == logits.data_ptr() and torch.equal(matrix[:, tokens:], rest)
print("checked")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_is_the_plain_reduction():
    """In Triton's interpreter, which must be chosen before the import: the edges of rows and tiles."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "checked\n", done.stderr
