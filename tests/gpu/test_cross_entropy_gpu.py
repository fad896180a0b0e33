"""The fused head's kernel on CUDA: the plain reduction, for every edge that a row of logits has.

Run with `pytest --gpu -m gpu tests/gpu`.
"""

import pytest
import torch
from torch import Tensor

from bd3lm.models import cross_entropy
from bd3lm.models.cross_entropy import _Plain, weighted_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
TILE = 4096  # logits that the kernel looks at together
DTYPES = [torch.float32, torch.bfloat16]
# Slopes are rounded once, to the precision of the logits.
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _exact_float32():
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    yield
    torch.set_float32_matmul_precision(precision)


def rows_of_logits(
    targets: Tensor, vocabulary: int, *, excluded: int | None, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, some of them large, targets and weights; the third row weighs nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits = 8.0 * torch.randn(len(targets), vocabulary, generator=generator)
    if excluded is not None:
        logits[:, excluded] = -torch.inf
    weights = torch.rand(len(targets), generator=generator) + 0.1
    weights[2:3] = 0.0
    return logits.to(CUDA, dtype), targets.to(CUDA), weights.to(CUDA)


def reduced(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernel: totals, gradients (over the logits) and sums of gradients."""
    from bd3lm.models.kernels import cross_entropy

    totals = cross_entropy.log_totals(logits)
    return totals, *cross_entropy.grad_logits(logits, totals, targets, weights)


def assert_the_kernel_reduces(logits: Tensor, targets: Tensor, weights: Tensor) -> None:
    """Against the plain reduction of the same logits in double precision."""
    exact = logits.double()
    totals = _Plain.log_totals(exact)
    gradients, sums = _Plain.grad_logits(exact, totals, targets, weights.double())
    found_totals, found, found_sums = reduced(logits.clone(), targets, weights)
    assert (found_totals.dtype, found.dtype, found_sums.dtype) == (torch.float32, logits.dtype, torch.float32)
    torch.testing.assert_close(found_totals.double(), totals, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.double(), gradients, rtol=GRADIENT_TOLERANCE[logits.dtype], atol=1e-6)
    torch.testing.assert_close(found_sums.double(), sums, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [2, 63, 64, 65, 1000, TILE - 1, TILE, TILE + 1, 3 * TILE - 5, 50258])
def test_the_kernel_is_the_plain_reduction_for_any_vocabulary(vocabulary, dtype):
    """Targets at both ends of the row and of its tiles, and one that is excluded but weighs nothing."""
    last = vocabulary - 1
    edges = [0, last, last, 0, last // 2, *(at for at in (TILE - 1, TILE, 2 * TILE) if at < last)]
    given = rows_of_logits(torch.tensor(edges), vocabulary, excluded=None, dtype=dtype)
    assert_the_kernel_reduces(*given)
    targets = torch.tensor([0, 0, last, *(edge for edge in edges if edge < last)])
    given = rows_of_logits(targets, vocabulary, excluded=last, dtype=dtype)
    assert_the_kernel_reduces(*given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("excluded", [0, 1, 7, TILE, TILE + 88])
def test_the_excluded_token_has_no_probability_and_no_gradient(excluded, dtype):
    vocabulary = TILE + 89
    targets = torch.arange(20, 52)
    given = rows_of_logits(targets, vocabulary, excluded=excluded, dtype=dtype)
    assert_the_kernel_reduces(*given)
    totals, gradients, sums = reduced(*given)
    assert totals.isfinite().all()
    assert not gradients[:, excluded].any()
    assert sums[excluded] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 128, 257])
def test_the_kernel_takes_any_number_of_rows(rows, dtype):
    targets = torch.randint(300, (rows,), generator=torch.Generator().manual_seed(rows))
    assert_the_kernel_reduces(*rows_of_logits(targets, 321, excluded=300, dtype=dtype))


def test_rows_may_be_some_of_a_larger_matrix():
    logits, targets, weights = rows_of_logits(torch.arange(6), 130, excluded=9, dtype=torch.float32)
    matrix = torch.full((6, 192), 7.0, device=CUDA)
    matrix[:, :130] = logits
    expected = reduced(logits.clone(), targets, weights)
    found = reduced(matrix[:, :130], targets, weights)
    for mine, right in zip(found, expected, strict=True):  # how rows lie in memory orders the sums
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
    assert (matrix[:, 130:] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_launch_gives_the_same_numbers(dtype):
    vocabulary, rows = 50304, 1024
    targets = torch.randint(vocabulary - 1, (rows,), generator=torch.Generator().manual_seed(1))
    logits, targets, weights = rows_of_logits(targets, vocabulary, excluded=vocabulary - 1, dtype=dtype)
    first = reduced(logits.clone(), targets, weights)
    for _ in range(20):
        again = reduced(logits.clone(), targets, weights)
        assert all(torch.equal(mine, right) for mine, right in zip(again, first, strict=True))


# --- with the head around it ---


def head_inputs(positions: int, vocabulary: int, width: int = 64) -> list[Tensor]:
    """Hidden states, the head's weight and bias, targets and weights, in double precision on the CPU."""
    generator = torch.Generator().manual_seed(positions)
    states, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((positions, width), (vocabulary, width), (vocabulary,))
    )
    targets = torch.randint(vocabulary - 1, (positions,), generator=generator)
    weights = torch.rand(positions, generator=generator, dtype=torch.float64)
    return [states, 0.3 * weight, bias, targets, weights]


def loss_and_gradients(given: list[Tensor], *, excluded: int) -> list[Tensor]:
    states, weight, bias = (each.clone().requires_grad_() for each in given[:3])
    total, nats = weighted_cross_entropy(states, weight, bias, *given[3:], excluded=excluded)
    return [total.detach(), nats, *torch.autograd.grad(3.0 * total, (states, weight, bias))]


@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-5), (True, 2e-2)])
@pytest.mark.parametrize("chunk", [16, 8192])
@pytest.mark.parametrize(("positions", "vocabulary"), [(1, 65), (50, 1000), (129, TILE + 10)])
def test_loss_and_gradients_are_those_of_the_cpu(
    positions, vocabulary, chunk, autocast, tolerance, monkeypatch
):
    monkeypatch.setattr(cross_entropy, "_CHUNK", chunk)
    given = head_inputs(positions, vocabulary)
    expected = loss_and_gradients(given, excluded=vocabulary - 1)
    there = [each.to(CUDA, torch.float32 if each.is_floating_point() else None) for each in given]
    with torch.autocast(CUDA.type, torch.bfloat16, enabled=autocast):
        found = loss_and_gradients(there, excluded=vocabulary - 1)
    for name, mine, right in zip(("total", "nats", "states", "weight", "bias"), found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert mine.isfinite().all(), name
        error = (mine.double().cpu() - right).norm() / right.norm()
        assert error < tolerance, name


def test_no_positions_cost_nothing():
    given = [
        each.to(CUDA, torch.float32 if each.is_floating_point() else None) for each in head_inputs(0, 65)
    ]
    total, nats, *gradients = loss_and_gradients(given, excluded=64)
    assert (total.item(), nats.shape) == (0.0, (0,))
    assert not any(gradient.any() for gradient in gradients)
