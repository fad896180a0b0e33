"""Every estimator's figures against enumeration, and what it says they mean."""

from functools import partial

import pytest
import torch

from bd3lm.diffusion import Absorbing, ClippedTimes, Counts, Times
from bd3lm.evaluation import Enumerated, Estimator, Figure, ImportanceWeighted, Sampled, exact_likelihood
from bd3lm.objectives import D3PM, Autoregressive, BlockDiffusionLoss, TokenBatch
from tests.oracles.likelihood import every_text, nelbo, nelbo_by_orders, nll, table
from tests.oracles.networks import CLEAN, MASK, blocks_of, tiny_transformer

pytestmark = pytest.mark.sweep(3)

MODEL = tiny_transformer(41)
BLOCK = 3
TEXTS = every_text(CLEAN, 6)[[17, 300, 517]]


def sampled(name: str, masking=None) -> Sampled:
    return Sampled(
        name,
        BlockDiffusionLoss(reading=blocks_of(BLOCK), masking=masking or Counts()),
    )


def by_brute_force(texts: torch.Tensor, of) -> torch.Tensor:
    """The sum over the blocks of each text, first token included."""
    return sum(of(table(MODEL, texts, start, BLOCK, range(BLOCK)), range(BLOCK)) for start in (0, BLOCK))


def mean_and_error(estimator: Estimator, text: torch.Tensor, times: int = 2000) -> tuple[float, float]:
    batch = TokenBatch.of(text.repeat(times, 1), score_first=True)
    draws = estimator.draw(
        times, len(text), generator=torch.Generator().manual_seed(1), device=torch.device("cpu")
    )
    (nats,) = estimator.nats(MODEL, batch, draws)
    return nats.mean().item(), (nats.std() / times**0.5).item()


def test_enumeration_gives_the_likelihood_and_its_bound():
    estimator = Enumerated(reading=blocks_of(BLOCK))
    exact, bound = estimator.nats(MODEL, TokenBatch.of(TEXTS, score_first=True), ())
    torch.testing.assert_close(exact, by_brute_force(TEXTS, nll))
    torch.testing.assert_close(bound, by_brute_force(TEXTS, nelbo))
    assert estimator.figures(MODEL) == (Figure("exact", "exact"), Figure("nelbo", "bound"))
    assert not estimator.is_random


@pytest.mark.parametrize(
    "estimator",
    [
        sampled("nelbo", Times()),
        sampled("counts"),
        ImportanceWeighted(reading=blocks_of(BLOCK), orders=1),
    ],
    ids=lambda estimator: estimator.name,
)
@pytest.mark.parametrize("row", range(len(TEXTS)))
def test_drawn_estimates_are_the_nelbo_on_average(estimator, row):
    mean, error = mean_and_error(estimator, TEXTS[row])
    truth = by_brute_force(TEXTS[[row]], nelbo).item()
    assert error < 0.05 * truth
    assert mean == pytest.approx(truth, abs=4 * error)
    assert estimator.figures(MODEL) == (Figure(estimator.name, "bound"),)
    assert estimator.is_random


@pytest.mark.parametrize("lean", [0.8, 2.0])
def test_enumeration_and_drawn_estimates_of_an_order_that_leans(lean):
    texts = every_text(CLEAN, 6)[::9]
    exact, bound = Enumerated(reading=blocks_of(BLOCK), lean=lean).nats(
        MODEL, TokenBatch.of(texts, score_first=True), ()
    )
    torch.testing.assert_close(exact, by_brute_force(texts, partial(nll, lean=lean)))
    truth = by_brute_force(texts, partial(nelbo_by_orders, lean=lean))
    torch.testing.assert_close(bound, truth)
    without = by_brute_force(texts, nelbo)
    row = ((truth - without).abs() / truth).argmax().item()  # where the order matters most
    for estimator in (
        sampled("counts", Counts(lean=lean)),
        ImportanceWeighted(reading=blocks_of(BLOCK), lean=lean, orders=1),
    ):
        mean, error = mean_and_error(estimator, texts[row])
        assert mean == pytest.approx(truth[row].item(), abs=4 * error)
        assert abs(mean - without[row].item()) > 6 * error
        assert estimator.figures(MODEL) == (Figure(estimator.name, "bound"),)


@pytest.mark.slow
def test_more_orders_are_tighter_and_stay_above():
    few, many = (
        mean_and_error(ImportanceWeighted(reading=blocks_of(BLOCK), orders=k), TEXTS[2]) for k in (1, 8)
    )
    truth = by_brute_force(TEXTS[[2]], nll).item()
    assert truth - 4 * many[1] < many[0] < few[0] - 4 * few[1]


def test_the_chain_rule_is_exact():
    estimator = Sampled("exact", Autoregressive(mask_id=MASK))
    assert not estimator.is_random
    assert estimator.figures(MODEL) == (Figure("exact", "exact"),)
    batch = TokenBatch.of(TEXTS)
    generator = torch.Generator()
    assert estimator.draw(3, 6, generator=generator, device=torch.device("cpu")) == ()
    expected = Autoregressive(mask_id=MASK)(MODEL, batch).nats.sum(1)
    torch.testing.assert_close(estimator.nats(MODEL, batch, ())[0], expected.double())


def test_next_token_prediction_on_random_tokens_is_drawn_and_no_likelihood():
    """It sums over the tokens that a draw keeps, so that its mean is below −log p."""
    estimator = Sampled("random", Autoregressive(mask_id=MASK, score_first=True, random_batch=True))
    mean, error = mean_and_error(estimator, TEXTS[0])
    exact = Sampled("exact", Autoregressive(mask_id=MASK, score_first=True))
    truth = exact.nats(MODEL, TokenBatch.of(TEXTS[:1], score_first=True), ()).item()
    assert mean < truth - 4 * error
    assert estimator.is_random
    assert estimator.figures(MODEL) == (Figure("random", "neither"),)


def test_what_bounds_nothing_says_so():
    assert sampled("clipped", ClippedTimes(low=0.3, high=0.8)).figures(MODEL) == (
        Figure("clipped", "neither"),
    )
    steps = D3PM(process=Absorbing(4, MASK), mask_id=MASK, steps=4)
    assert Sampled("nelbo", steps).figures(MODEL) == (Figure("nelbo", "bound"),)


@pytest.mark.parametrize(
    "name", ["nelbo", "counts", "iw:2", "exact", "counts, leaning", "iw:2, leaning", "exact, leaning"]
)
def test_estimates_are_functions_of_their_draws_and_rows_stand_alone(name):
    estimator = {
        "nelbo": sampled("nelbo", Times()),
        "counts": sampled("counts"),
        "iw:2": ImportanceWeighted(reading=blocks_of(BLOCK), orders=2),
        "exact": Enumerated(reading=blocks_of(BLOCK)),
        "counts, leaning": sampled("counts", Counts(lean=0.7)),
        "iw:2, leaning": ImportanceWeighted(reading=blocks_of(BLOCK), orders=2, lean=0.7),
        "exact, leaning": Enumerated(reading=blocks_of(BLOCK), lean=0.7),
    }[name]
    assert estimator.name == name.partition(",")[0]
    batch = TokenBatch.of(TEXTS, lengths=torch.tensor([6, 4, 2]), prompts=torch.tensor([1, 2, 1]))
    draws = estimator.draw(3, 6, generator=torch.Generator().manual_seed(3), device=torch.device("cpu"))
    together = estimator.nats(MODEL, batch, draws)
    assert together.shape == (len(estimator.figures(MODEL)), 3)
    for row in range(3):
        only = slice(row, row + 1)
        alone = estimator.nats(MODEL, batch[only], tuple(each[only] for each in draws))
        torch.testing.assert_close(alone, together[:, only])


def test_the_figures_agree_with_those_of_blocks():
    batch = TokenBatch.of(TEXTS)
    truth = exact_likelihood(MODEL, batch, blocks_of(BLOCK))
    found = Enumerated(reading=blocks_of(BLOCK)).nats(MODEL, batch, ())
    torch.testing.assert_close(found, torch.stack((truth.nll.sum(1), truth.nelbo.sum(1))))
