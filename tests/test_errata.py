"""What the paper claims and does not hold (docs/mathematics.md, errata), shown by counterexample."""

import pytest
import torch

from bd3lm.diffusion import ClippedTimes
from bd3lm.evaluation import exact_likelihood
from bd3lm.objectives import BlockDiffusionLoss, TokenBatch
from tests.oracles.networks import CLEAN, blocks_of, tiny_transformer


def test_nelbos_of_a_fixed_network_are_not_ordered_by_block_size() -> None:
    """Suppl. B.5 claims L_1 <= L_2 <= … for one network; here a larger block has the smaller bound."""
    found = False
    for seed in range(20):
        network = tiny_transformer(seed)
        batch = TokenBatch.of(_texts(16, seed), score_first=True)
        one, two = (exact_likelihood(network, batch, blocks_of(size)).nelbo.sum(1).mean() for size in (1, 2))
        found |= bool(two < one - 0.01)
    assert found


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
