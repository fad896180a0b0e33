"""Dropout by a hash: the right distribution, no pattern a network could use, and the same when compiled."""

import math
import shutil

import pytest
import torch
from torch import Tensor

from bd3lm.models import BlockDiffusion, Causal
from bd3lm.models.dropout import Dropout, draw_seeds, dropout
from tests.oracles.networks import tiny_transformer

RATE = 0.1
ROWS, WIDTH = 1024, 768


def seeds(number: int, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    return draw_seeds(number, torch.device("cpu"))


def dropped(seed: Tensor, rate: float = RATE, *shape: int) -> Tensor:
    """1 where an element is dropped."""
    return (dropout(torch.ones(shape or (ROWS, WIDTH)), rate, seed) == 0).double()


def written_out(rows: int, width: int, rate: float, start: int, cycle: int) -> list[list[bool]]:
    """Which elements are kept, in Python's own integers."""
    kept = []
    for element in range(rows * width):
        x = (element * 0x9E3779B9 + start) % 2**32
        x = ((x ^ (x >> 16)) * 0x7FEB352D + cycle) % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        kept.append((x ^ 2**31) >= round(rate * 2**32))  # compared as signed numbers
    return [kept[start : start + width] for start in range(0, len(kept), width)]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [(0, 0), (-(2**31), 2**31 - 1), (123456789, -987654321)])
def test_the_hash_of_a_position_decides_what_is_kept(rate, seed):
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = dropout(x, rate, torch.tensor(seed, dtype=torch.int32))
    kept = torch.tensor(written_out(15, 7, rate, *seed)).view(3, 5, 7)
    torch.testing.assert_close(found, torch.where(kept, x / (1 - rate), 0.0))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_rate_is_right_and_the_mean_is_unchanged(rate):
    each = seeds(4)
    share = torch.stack([dropped(seed, rate).mean() for seed in each])
    error = math.sqrt(rate * (1 - rate) / (ROWS * WIDTH))
    assert (share - rate).abs().max() < 4 * error
    mean = dropout(torch.ones(ROWS, WIDTH), rate, each[0]).mean().item()
    assert mean == pytest.approx(1.0, abs=4 * error / (1 - rate))


def correlation(a: Tensor, b: Tensor) -> float:
    """In units of the standard deviation for independent elements."""
    variance = RATE * (1 - RATE)
    return ((a - RATE) * (b - RATE)).sum().item() / variance / math.sqrt(a.numel())


def test_neighbors_are_uncorrelated():
    """Neighbors in a row, in a column, and further away: 80 correlations, crossing each of 16 bits of a
    position."""
    distances = [1, 2, 3, 4, 7, 64, WIDTH - 1, WIDTH, WIDTH + 1, 4 * WIDTH, *(2**bit for bit in range(8, 18))]
    found = []
    for seed in seeds(4):
        flat = dropped(seed).flatten()
        found += [correlation(flat[distance:], flat[:-distance]) for distance in distances]
    assert max(map(abs, found)) < 4.0
    assert sum(z * z for z in found) / len(found) == pytest.approx(1.0, abs=0.6)


def test_rows_and_columns_are_dropped_as_evenly_as_by_chance():
    mask = dropped(seeds(1)[0])
    for direction, size in ((0, ROWS), (1, WIDTH)):
        counts = mask.sum(direction)
        spread = counts.var().item() / (size * RATE * (1 - RATE))
        assert spread == pytest.approx(1.0, abs=5 * math.sqrt(2 / counts.numel()))


def test_masks_of_different_seeds_are_uncorrelated():
    masks = [dropped(seed) for seed in seeds(8)]
    pairs = [correlation(a, b) for number, a in enumerate(masks) for b in masks[:number]]
    assert max(map(abs, pairs)) < 4.0


def test_two_seeds_do_not_share_a_cycle():
    """With `start` alone, the masks of all seeds were pieces of one sequence."""
    first, second = torch.tensor([[5, 1], [5, 1 << 20]], dtype=torch.int32)
    assert torch.equal(dropped(first), dropped(first))
    assert (dropped(first) != dropped(second)).double().mean() > RATE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_dropped_and_scaled_like_elements(dtype):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    seed, upstream = seeds(1)[0], torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    out = dropout(x, 0.25, seed)
    assert out.dtype == dtype
    (grad,) = torch.autograd.grad(out, x, upstream)
    kept = out != 0
    assert torch.equal(grad, torch.where(kept, upstream * (1 / 0.75), 0.0))
    assert 0.6 < kept.double().mean() < 0.9


def test_evaluation_mode_and_rate_zero_change_nothing():
    x = torch.randn(3, 4)
    assert Dropout(0.5).eval()(x, None) is x
    assert Dropout(0.0).train()(x, None) is x
    assert not torch.equal(Dropout(0.5).train()(x, seeds(1)[0]), x)


@pytest.mark.parametrize(
    ("rate", "training", "moves"), [(0.1, True, True), (0.0, True, False), (0.1, False, False)]
)
def test_a_network_draws_seeds_only_for_active_dropout(rate, training, moves):
    model = tiny_transformer(dropout=rate).train(training)
    before = torch.get_rng_state()
    model(torch.zeros(1, 4, dtype=torch.long), layout=Causal(4))
    assert torch.equal(before, torch.get_rng_state()) != moves


def test_each_layer_has_its_own_masks_for_both_branches(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "bd3lm.models.dropout.dropout", lambda x, rate, seed: seen.append((rate, *seed.tolist())) or x
    )
    tiny_transformer(layers=3, dropout=0.25).train()(torch.zeros(1, 4, dtype=torch.long), layout=Causal(4))
    assert len(set(seen)) == 6
    assert {rate for rate, *_ in seen} == {0.25}


# --- compiled ---


def losses_and_gradients(model, tokens: Tensor, layout) -> list[Tensor]:
    torch.manual_seed(3)
    states = model(tokens, layout=layout)
    total = states.square().mean() + states.mean()
    return [
        total.detach(),
        *torch.autograd.grad(total, [p for n, p in model.named_parameters() if "output" not in n]),
    ]


@pytest.mark.slow
def test_compiled_dropout_uses_the_same_mask_in_both_passes():
    """With torch's own compiler; without a C++ compiler, in the graphs that it would get."""
    compiles = shutil.which("g++") is not None
    layout = BlockDiffusion(16, 4)
    tokens = torch.randint(0, 4, (3, layout.size), generator=torch.Generator().manual_seed(0))
    model = tiny_transformer(layers=1, dropout=0.3, dtype=torch.float32).train()
    expected = losses_and_gradients(model, tokens, layout)
    backend = "inductor" if compiles else "aot_eager_decomp_partition"
    model._trunk = torch.compile(model._run_trunk, backend=backend, dynamic=False)
    for found, right in zip(losses_and_gradients(model, tokens, layout), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_dropout_stores_no_mask():
    """Compilers like to store shared values: the row numbers, which all layers share, made them store 23
    masks of 24."""
    model, layout = (
        tiny_transformer(layers=4, dropout=0.3, dtype=torch.float32).train(),
        BlockDiffusion(16, 4),
    )
    model._trunk = torch.compile(model._run_trunk, backend="aot_eager_decomp_partition", dynamic=False)
    stored: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: stored.append(tensor) or tensor, lambda t: t
    ):
        model(torch.zeros(3, layout.size, dtype=torch.long), layout=layout)
    elements = 3 * layout.size * model.config.hidden
    kinds = {tensor.dtype for tensor in stored if tensor.numel() >= elements // 2}
    assert kinds == {torch.float32}
