"""What the paper claims and does not hold (docs/mathematics.md, errata), shown by counterexample."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from bd3lm.diffusion import ClippedTimes
from bd3lm.evaluation import exact_likelihood
from bd3lm.objectives import BlockDiffusionLoss, TokenBatch
from tests.oracles.chains import divergence, keep_matrix, reverse_law
from tests.oracles.masking import (
    clipped_set_weights,
    discrete_nelbo,
    gauss_legendre,
    nelbo_by_orders,
    random_network,
    random_table,
    table_of,
)
from tests.oracles.networks import CLEAN, MASK, blocks_of, tiny_transformer

VOCAB = len(CLEAN) + 1


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_equation_3_counts_the_reconstruction_twice(steps: int) -> None:
    """Its sum begins with j = 1, where x_s is x itself: by matrices that divergence is the reconstruction."""
    alphas = [1 - j / steps for j in range(steps + 1)]
    for n in (1, 2, 3):
        rng = np.random.default_rng(10 * n + steps)
        network, x = random_network(n, VOCAB, MASK, rng), [CLEAN[i] for i in rng.integers(3, size=n)]
        reconstruction, later_steps = discrete_nelbo(network, x, alphas, MASK)
        first_step = _first_divergence(network, x, alphas[1])
        assert first_step == pytest.approx(reconstruction, rel=1e-12)
        if n == 1:  # where the bound is the likelihood, so what is printed is too much by 1/T of it
            nll = table_of(network, x)[1, 0]
            assert reconstruction + later_steps == pytest.approx(nll, rel=1e-12)
            printed = reconstruction + first_step + later_steps
            assert printed == pytest.approx((1 + 1 / steps) * nll, rel=1e-12)


def _first_divergence(network: np.ndarray, x: list[int], alpha: float) -> float:
    """E_q KL[q(x_0 | x_1, x) ‖ Σ_x' q(x_0 | x_1, x') p(x' | x_1)]."""
    one_hot = np.eye(VOCAB)
    step = keep_matrix(alpha, one_hot[MASK])
    total = 0.0
    for masked in range(2 ** len(x)):
        hidden = [bool(masked >> i & 1) for i in range(len(x))]
        chance = np.prod([1 - alpha if each else alpha for each in hidden])
        if chance == 0:
            continue
        for i, each in enumerate(hidden):
            x_t = MASK if each else x[i]
            guess = network[masked, i] if each else one_hot[x[i]]
            truth, model = (reverse_law(p, x_t, one_hot, step) for p in (one_hot[x[i]], guess))
            total += chance * divergence(truth, model)
    return total


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.8), (0.5, 1.0), (0.0, 0.5)])
def test_the_printed_slope_is_that_of_a_schedule_with_all_rates(low: float, high: float) -> None:
    """1/(β − ω) is the slope from time β to time ω of rates from 0 to 1, not of rates from β to ω."""
    table = random_table(4, np.random.default_rng(3))
    nelbo = nelbo_by_orders(table, range(4))

    times, dt = gauss_legendre(low, high)
    all_rates, slope = (times - low) / (high - low), 1 / (low - high)
    assert (dt * -slope / all_rates * _expected_nats(table, all_rates)).sum() == pytest.approx(nelbo)

    times, dt = gauss_legendre(0.0, 1.0)
    rates, slope = low + (high - low) * times, low - high
    part = (dt * -slope / rates * _expected_nats(table, rates)).sum()
    assert part < 0.9 * nelbo  # the part of the integral that lies in the range
    for weight, times_as_much in {"derivative": 1, "reference": -1 / slope, "paper": 1 / slope**2}.items():
        drawn = clipped_set_weights(4, low, high, weight, redraw=False) @ table.sum(-1)
        assert drawn == pytest.approx(times_as_much * part)


def _expected_nats(table: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Of the masked tokens of a block, at each mask rate."""
    n = table.shape[1]
    return sum(
        rates ** masked.bit_count() * (1 - rates) ** (n - masked.bit_count()) * table[masked].sum()
        for masked in range(1, 2**n)
    )


def test_nelbos_of_a_fixed_network_are_not_ordered_by_block_size() -> None:
    """Suppl. B.5 claims L_1 <= L_2 <= … for one network; here a larger block has the smaller bound."""
    found = False
    for seed in range(20):
        network = tiny_transformer(seed)
        batch = TokenBatch.of(_texts(16, seed), score_first=True)
        one, two = (exact_likelihood(network, batch, blocks_of(size)).nelbo.sum(1).mean() for size in (1, 2))
        found |= bool(two < one - 0.01)
    assert found


def test_no_step_of_equation_24_holds_but_its_inequality_which_is_an_equality() -> None:
    """Each line by enumeration, for a text of two tokens, with times from a floor to 1."""
    network = random_network(2, VOCAB, MASK, np.random.default_rng(0))
    first, second = (network[:, i, token] for i, token in enumerate((0, 3)))  # p(x_i | x outside M), by M
    first[[0b00, 0b10]] = second[[0b00, 0b01]] = 1.0  # a clean token is carried over
    both = first * second

    def lines(floor: float) -> list[float]:
        mean = _mean_over_masks(floor)
        return [
            -np.log(mean(lambda rate: both / rate)),  # after the first "="
            -np.log(mean(lambda rate: first / rate * second / rate)),
            -np.log(mean(lambda rate: first / rate) * mean(lambda rate: second / rate)),
            -np.log(mean(lambda rate: first / rate)) - np.log(mean(lambda rate: second / rate)),
        ]

    token_by_token = -np.log(network[0b11, 0, 0]) - np.log(network[0b10, 1, 3])  # L_1, where the chain begins
    one, two, three, four = lines(1e-3)
    assert len({round(each, 1) for each in (token_by_token, one, two, three)}) == 4
    assert four == pytest.approx(three, rel=1e-12)  # where the paper has ≤
    # Nor is there a value in the limit: every tenth of the floor adds log 10 to the mean of the first line.
    growth = np.exp(-lines(1e-9)[0]) - np.exp(-lines(1e-8)[0])
    assert growth == pytest.approx(np.log(10), rel=1e-6)


def _mean_over_masks(floor: float) -> Callable[[Callable[[float], np.ndarray]], float]:
    """E_t E_q of what is known for every set of masked tokens (of two), at mask rates t >= floor."""
    logs, width = gauss_legendre(np.log(floor), 0.0, 200)
    rates = np.exp(logs)
    law = np.stack([(1 - rates) ** 2, rates * (1 - rates), rates * (1 - rates), rates**2], 1)
    return lambda of: sum(
        w * rate / (1 - floor) * float(q @ of(rate)) for w, rate, q in zip(width, rates, law, strict=True)
    )


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.8), (0.5, 1.0)])
def test_no_weight_makes_a_clipped_range_the_nelbo(low: float, high: float) -> None:
    """Section 5.2's slope 1/(β − ω) is no better than the derivative's ω − β: neither gives the NELBO."""
    network, tokens = tiny_transformer(1), _texts(2, 5)
    many = TokenBatch.of(tokens.repeat_interleave(4_000, 0), score_first=True)
    truth = exact_likelihood(network, TokenBatch.of(tokens, score_first=True), blocks_of(4)).nelbo.squeeze(1)
    for weight in ("reference", "derivative", "paper", "flat"):
        objective = BlockDiffusionLoss(
            reading=blocks_of(4),
            masking=ClippedTimes(low=low, high=high, weight=weight),
        )
        with torch.no_grad():
            nats = objective(network, many, generator=torch.Generator().manual_seed(0)).nats.sum(1)
        nats = nats.double().view(2, -1)
        error = (nats.mean(1) - truth).abs()
        standard_error = nats.std(1) / nats.shape[1] ** 0.5
        assert (error > 6 * standard_error).any(), weight
        assert not objective.is_bound


def _texts(rows: int, seed: int) -> torch.Tensor:
    choice = torch.randint(len(CLEAN), (rows, 4), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(CLEAN)[choice]
