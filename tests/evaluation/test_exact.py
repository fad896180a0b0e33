"""Exact likelihoods sum to one and are what the orders say; the bounds lie above, in their order."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Draws, LevelSampler
from bd3lm.evaluation import (
    draw_orders,
    exact_likelihood,
    exact_likelihoods,
    importance_weighted_nll,
    order_log_likelihood,
)
from bd3lm.objectives import TokenBatch
from tests.oracles.likelihood import (
    chain_rule_nats,
    every_text,
    importance_weighted,
    log_p_along,
    nelbo,
    nelbo_by_orders,
    nll,
    table,
)
from tests.oracles.networks import (
    CLEAN,
    MASK,
    AfterPrevious,
    blocks_of,
    clean_of,
    mask_of,
    network_of,
    tiny_transformer,
)
from tests.oracles.orders import law_of_orders

pytestmark = pytest.mark.sweep(3)

MODEL = tiny_transformer(31)
SHAPES = [(4, 1), (4, 2), (4, 4), (3, 3), (6, 2), (6, 3)]
EXACT = {"rtol": 0, "atol": 1e-10}


def exact(
    batch: TokenBatch,
    block_size: int,
    causal_clean: bool = False,
    previous_token: bool = False,
    lean: float = 0.0,
):
    return exact_likelihood(
        MODEL,
        batch,
        blocks_of(block_size, causal_clean=causal_clean, previous_token=previous_token),
        lean=lean,
    )


def probabilities(batch: TokenBatch, block_size: int, *how: bool, lean: float = 0.0) -> Tensor:
    return torch.exp(-exact(batch, block_size, *how, lean=lean).nll.sum(1))


def assert_one(total: Tensor) -> None:
    torch.testing.assert_close(total, torch.ones_like(total), **EXACT)


# --- it is a likelihood ---


@pytest.mark.parametrize(
    ("length", "block_size", "causal_clean", "previous_token"),
    [  # each shape has both of either, by turns together and apart
        (*shape, causal_clean, causal_clean != bool(turn % 2))
        for turn, shape in enumerate(SHAPES)
        for causal_clean in (False, True)
    ],
)
def test_it_sums_to_one_over_all_texts(length, block_size, causal_clean, previous_token):
    texts, how = every_text(CLEAN, length), (block_size, causal_clean, previous_token)
    assert_one(probabilities(TokenBatch.of(texts, score_first=True), *how).sum())
    given_first = probabilities(TokenBatch.of(texts), *how)
    assert_one(given_first.view(len(CLEAN), -1).sum(1))


@pytest.mark.parametrize("causal_clean", [False, True])
@pytest.mark.parametrize(
    ("length", "block_size", "prompt"), [(4, 4, 1), (4, 4, 2), (4, 4, 3), (6, 3, 2), (6, 3, 4)]
)
def test_continuations_of_a_prompt_that_ends_inside_a_block_sum_to_one(
    length, block_size, prompt, causal_clean
):
    texts = every_text(CLEAN, length)
    batch = TokenBatch.of(texts, prompts=torch.full((len(texts),), prompt))
    assert_one(probabilities(batch, block_size, causal_clean).view(len(CLEAN) ** prompt, -1).sum(1))


@pytest.mark.parametrize("causal_clean", [False, True])
@pytest.mark.parametrize(
    ("length", "block_size", "end"), [(4, 4, 1), (4, 4, 3), (6, 3, 4), (6, 3, 5), (6, 2, 3)]
)
def test_texts_that_end_inside_a_block_sum_to_one_whatever_stands_after_them(
    length, block_size, end, causal_clean
):
    texts = every_text(CLEAN, end)
    lengths = torch.full((len(texts),), end)
    results = []
    for seed, filler in enumerate((0, MASK, None)):
        generator = torch.Generator().manual_seed(seed)
        rest = torch.randint(0, 4, (len(texts), length - end), generator=generator)
        rest = rest if filler is None else torch.full_like(rest, filler)
        batch = TokenBatch.of(torch.cat((texts, rest), 1), score_first=True, lengths=lengths)
        results.append(exact(batch, block_size, causal_clean))
    assert_one(torch.exp(-results[0].nll.sum(1)).sum())
    assert results[0].tokens.sum(1).unique().tolist() == [end]
    for other in results[1:]:
        torch.testing.assert_close(other.nll, results[0].nll, **EXACT)
        torch.testing.assert_close(other.nelbo, results[0].nelbo, **EXACT)


# --- it is the right one ---


@pytest.mark.parametrize("causal_clean", [False, True])
@pytest.mark.parametrize(("length", "block_size"), SHAPES)
def test_every_block_has_the_sum_over_all_orders_and_the_integral_over_all_rates(
    length, block_size, causal_clean
):
    texts = every_text(CLEAN, length)[:: max(1, 3**length // 40)]
    for score_first in (False, True):
        found = exact(TokenBatch.of(texts, score_first=score_first), block_size, causal_clean)
        for block, start in enumerate(range(0, length, block_size)):
            scored = list(range(0 if start or score_first else 1, block_size))
            assert (found.tokens[:, block] == len(scored)).all()
            if not scored:
                assert not found.nll[:, block].any()
                assert not found.nelbo[:, block].any()
                continue
            truth = table(MODEL, texts, start, block_size, scored, causal_clean=causal_clean)
            torch.testing.assert_close(found.nll[:, block], nll(truth, scored), **EXACT)
            torch.testing.assert_close(found.nelbo[:, block], nelbo(truth, scored), **EXACT)


@pytest.mark.parametrize("score_first", [False, True])
def test_at_block_size_one_nelbo_and_nll_are_the_chain_rule(score_first):
    texts = every_text(CLEAN, 5)
    found = exact(TokenBatch.of(texts, score_first=score_first), 1)
    expected = chain_rule_nats(MODEL, texts)
    if not score_first:
        expected[:, 0] = 0
    torch.testing.assert_close(found.nelbo, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.nelbo, expected, **EXACT)
    torch.testing.assert_close(found.nll, expected, **EXACT)
    assert expected.std() > 0.5  # a network with opinions


# --- the bounds, in their order ---


def every_order_log_p(texts: Tensor, block_size: int, **options) -> Tensor:
    """order_log_likelihood along each order, the same in every block: (orders, rows, blocks)."""
    rows, length = texts.shape
    spare = torch.ones(rows, length // block_size, dtype=torch.float64)
    found = []
    for order in permutations(range(block_size)):
        when = torch.tensor([order.index(token) + 0.5 for token in range(block_size)]).double() / block_size
        draws = Draws(levels=spare, spare=spare, tokens=when.repeat(rows, length // block_size))
        batch = TokenBatch.of(texts, score_first=True)
        found.append(order_log_likelihood(MODEL, batch, blocks_of(block_size, **options), draws))
    return torch.stack(found)


@pytest.mark.parametrize("causal_clean", [False, True])
def test_the_likelihood_along_an_order_is_the_product_of_its_conditionals(causal_clean):
    texts = every_text(CLEAN, 6)[::90]
    found = every_order_log_p(texts, 3, causal_clean=causal_clean)
    for block, start in enumerate((0, 3)):
        truth = table(MODEL, texts, start, 3, range(3), causal_clean=causal_clean)
        expected = torch.stack([log_p_along(truth, order) for order in permutations(range(3))])
        torch.testing.assert_close(found[..., block], expected, **EXACT)
    assert found.std(0).min() > 0.01  # orders differ


@pytest.mark.parametrize(("length", "block_size"), [(6, 3), (4, 4)])
def test_expected_importance_weighted_bounds_fall_from_the_nelbo_towards_the_nll(length, block_size):
    """Over all K-tuples of orders: NLL < K = 3 < K = 2 < K = 1 = NELBO."""
    texts = every_text(CLEAN, length)[:: 3**length // 9]
    truth = exact(TokenBatch.of(texts, score_first=True), block_size)
    order_log_p = every_order_log_p(texts, block_size)
    one, two, three = (importance_weighted(order_log_p, k) for k in (1, 2, 3))
    torch.testing.assert_close(one, truth.nelbo, **EXACT)
    assert (two < one - 1e-6).all()
    assert (three < two - 1e-6).all()
    assert (truth.nll < three - 1e-6).all()


@pytest.mark.parametrize("orders", [1, 2, 4])
def test_mean_importance_weighted_nll_is_its_expectation(orders):
    text = every_text(CLEAN, 6)[[517]]
    expected = importance_weighted(every_order_log_p(text, 3), orders)[0]
    samples = importance_weighted_nll(
        MODEL,
        TokenBatch.of(text.repeat(1000, 1), score_first=True),
        blocks_of(3),
        draw_orders(orders, 1000, 6, 3, generator=torch.Generator().manual_seed(0)),
    )
    error = samples.std(0) / len(samples) ** 0.5
    assert (error < 0.02 * expected).all()
    assert ((samples.mean(0) - expected).abs() < 4 * error).all()


def test_one_order_of_a_batch_with_prompts_and_ends_reveals_each_rows_own_tokens():
    texts = every_text(CLEAN, 6)[[10, 300, 700]]
    prompts, lengths = torch.tensor([1, 4, 2]), torch.tensor([6, 6, 5])
    batch = TokenBatch.of(texts, prompts=prompts, lengths=lengths)
    draws = LevelSampler().draw(3, 6, 3, generator=torch.Generator().manual_seed(5))
    found = order_log_likelihood(MODEL, batch, blocks_of(3), draws)
    for row in range(3):
        for block, start in enumerate((0, 3)):
            scored = [p - start for p in range(start, start + 3) if prompts[row] <= p < lengths[row]]
            absent = [p - start for p in range(start, start + 3) if p >= lengths[row]]
            order = sorted(scored, key=lambda p: draws.tokens[row, start + p].item())
            expected = 0.0
            if scored:
                expected = log_p_along(
                    table(MODEL, texts[row : row + 1], start, 3, scored, absent=absent), order
                ).item()
            assert found[row, block].item() == pytest.approx(expected, abs=1e-10)


def test_the_bound_serves_blocks_too_large_to_enumerate():
    text = every_text(CLEAN, 4).flatten()[:32].unsqueeze(0)
    few, many = (
        importance_weighted_nll(
            MODEL,
            TokenBatch.of(text.repeat(16, 1)),
            blocks_of(16),
            draw_orders(orders, 16, 32, 16, generator=torch.Generator().manual_seed(0)),
        ).mean(0)
        for orders in (1, 8)
    )
    assert (many < few).all()


# --- orders that lean ---

LEANS = [0.6, 2.0]


@pytest.mark.parametrize("lean", LEANS)
@pytest.mark.parametrize(
    ("length", "block_size", "causal_clean", "previous_token"),
    [(4, 4, False, False), (4, 4, True, True), (6, 3, False, True), (6, 3, True, False)],
)
def test_leaning_likelihoods_sum_to_one_over_all_texts(
    length, block_size, lean, causal_clean, previous_token
):
    texts, how = every_text(CLEAN, length), (block_size, causal_clean, previous_token)
    whole = probabilities(TokenBatch.of(texts, score_first=True), *how, lean=lean)
    assert_one(whole.sum())
    given_first = probabilities(TokenBatch.of(texts), *how, lean=lean)
    assert_one(given_first.view(len(CLEAN), -1).sum(1))
    other = probabilities(TokenBatch.of(texts, score_first=True), *how)
    assert (whole - other).abs().sum() > 0.02  # another distribution


@pytest.mark.parametrize("causal_clean", [False, True])
@pytest.mark.parametrize("lean", [0.0, *LEANS])
@pytest.mark.parametrize(("length", "block_size"), [(4, 2), (4, 4), (6, 3)])
def test_leaning_blocks_have_the_sum_over_all_orders_by_their_probabilities(
    length, block_size, lean, causal_clean
):
    texts = every_text(CLEAN, length)[:: max(1, 3**length // 40)]
    for score_first in (False, True):
        batch = TokenBatch.of(texts, score_first=score_first)
        found = exact(batch, block_size, causal_clean, lean=lean)
        assert (found.nelbo >= found.nll - 1e-12).all()
        for block, start in enumerate(range(0, length, block_size)):
            scored = list(range(0 if start or score_first else 1, block_size))
            truth = table(MODEL, texts, start, block_size, scored, causal_clean=causal_clean)
            torch.testing.assert_close(found.nll[:, block], nll(truth, scored, lean), **EXACT)
            torch.testing.assert_close(found.nelbo[:, block], nelbo_by_orders(truth, scored, lean), **EXACT)


@pytest.mark.parametrize("lean", [0.0, *LEANS])
def test_prompts_and_ends_inside_blocks_leave_the_order_of_their_own_tokens(lean):
    """Rows of one batch that begin and end in different places."""
    texts = every_text(CLEAN, 8)[[100, 2000, 3000, 4000, 6000]]
    prompts, lengths = torch.tensor([1, 3, 4, 6, 5]), torch.tensor([8, 7, 6, 8, 5])
    found = exact(TokenBatch.of(texts, prompts=prompts, lengths=lengths), 4, lean=lean)
    for row in range(len(texts)):
        for block, start in enumerate((0, 4)):
            place = range(start, start + 4)
            scored = [p - start for p in place if prompts[row] <= p < lengths[row]]
            absent = [p - start for p in place if p >= lengths[row]]
            assert found.tokens[row, block] == len(scored)
            if not scored:
                assert found.nll[row, block] == found.nelbo[row, block] == 0
                continue
            truth = table(MODEL, texts[row : row + 1], start, 4, scored, absent=absent)
            torch.testing.assert_close(found.nll[row, block], nll(truth, scored, lean)[0], **EXACT)
            expected = nelbo_by_orders(truth, scored, lean)[0]
            torch.testing.assert_close(found.nelbo[row, block], expected, **EXACT)
            if not lean:
                torch.testing.assert_close(found.nelbo[row, block], nelbo(truth, scored)[0], **EXACT)


def test_several_leans_take_the_passes_of_one(monkeypatch):
    batch = TokenBatch.of(every_text(CLEAN, 6)[[100, 200]], prompts=torch.tensor([1, 4]))
    asked = [0.0, 0.7, 3.0]
    alone = [exact(batch, 3, lean=lean) for lean in asked]
    calls = []
    forward = type(MODEL).forward
    monkeypatch.setattr(type(MODEL), "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    found = exact_likelihoods(MODEL, batch, blocks_of(3), asked)
    together = len(calls)
    exact(batch, 3)
    assert together == len(calls) - together > 0
    for one, other in zip(found, alone, strict=True):
        assert torch.equal(one.nll, other.nll)
        assert torch.equal(one.nelbo, other.nelbo)


@pytest.mark.parametrize("lean", [50.0, 1e6])
def test_a_large_lean_is_the_likelihood_from_left_to_right(lean):
    """One order is all there is, so that the bound is the likelihood; it is the first of all orders."""
    texts = every_text(CLEAN, 6)[::90]
    found = exact(TokenBatch.of(texts, score_first=True), 3, lean=lean)
    along = -every_order_log_p(texts, 3)[0]
    torch.testing.assert_close(found.nll, along, **EXACT)
    torch.testing.assert_close(found.nelbo, along, **EXACT)
    drawn = draw_orders(1, len(texts), 6, 3, generator=torch.Generator().manual_seed(0))
    batch, how = TokenBatch.of(texts, score_first=True), blocks_of(3)
    one = importance_weighted_nll(MODEL, batch, how, drawn, lean=lean)
    torch.testing.assert_close(one, along, **EXACT)
    torch.testing.assert_close(-order_log_likelihood(MODEL, batch, how, drawn[0], lean=lean), along, **EXACT)


@pytest.mark.parametrize("lean", [0.0, 0.9])
def test_a_draw_is_turned_into_an_order_by_its_clock(lean):
    """The clock of a draw u rings at −log(1 − u)/w, so that without a lean the smallest draw is the first."""
    texts = every_text(CLEAN, 3)
    draws = LevelSampler().draw(len(texts), 3, 3, generator=torch.Generator().manual_seed(1))
    clocks = -torch.log1p(-draws.tokens) * torch.exp(lean * torch.arange(3))
    batch, how = TokenBatch.of(texts, score_first=True), blocks_of(3)
    found = order_log_likelihood(MODEL, batch, how, draws, lean=lean)
    expected = [
        log_p_along(table(MODEL, texts[[row]], 0, 3, range(3)), clocks[row].argsort().tolist()).item()
        for row in range(len(texts))
    ]
    assert found[:, 0].tolist() == pytest.approx(expected, abs=1e-10)
    if not lean:
        assert torch.equal(found, order_log_likelihood(MODEL, batch, how, draws))
    else:
        assert (clocks.argsort() != draws.tokens.argsort()).any()


def test_a_small_lean_is_nearly_none():
    batch = TokenBatch.of(every_text(CLEAN, 4), score_first=True)
    none, small = (exact(batch, 4, lean=lean) for lean in (0.0, 1e-9))
    torch.testing.assert_close(small.nll, none.nll, rtol=0, atol=1e-7)
    torch.testing.assert_close(small.nelbo, none.nelbo, rtol=0, atol=1e-7)


@pytest.mark.parametrize("orders", [1, 2])
def test_importance_weighted_nll_of_leaning_orders_is_its_expectation(orders):
    """Of one order that is the NELBO of the leaning order, and of no other."""
    lean, text, rows = 0.9, every_text(CLEAN, 6)[[230]], 4000
    order_log_p, law = every_order_log_p(text, 3), list(law_of_orders(range(3), lean).values())
    expected = importance_weighted(order_log_p, orders, law)[0]
    samples = importance_weighted_nll(
        MODEL,
        TokenBatch.of(text.repeat(rows, 1), score_first=True),
        blocks_of(3),
        draw_orders(orders, rows, 6, 3, generator=torch.Generator().manual_seed(0)),
        lean=lean,
    )
    error = samples.std(0) / rows**0.5
    assert ((samples.mean(0) - expected).abs() < 4 * error).all()
    without, backwards = (importance_weighted(order_log_p, orders, other)[0] for other in (None, law[::-1]))
    assert ((samples.mean(0) - without).abs() > 6 * error).all()
    assert ((samples.mean(0) - backwards).abs() > 6 * error).all()
    if orders == 1:
        truth = exact(TokenBatch.of(text, score_first=True), 3, lean=lean)
        torch.testing.assert_close(expected, truth.nelbo[0], **EXACT)


def test_orders_are_drawn_as_uniform_numbers():
    found = draw_orders(2, 5, 6, 3, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    for draws in found:
        assert torch.equal(draws.tokens, LevelSampler().draw(5, 6, 3, generator=generator).tokens)
        assert ((draws.tokens > 0) & (draws.tokens <= 1)).all()


@pytest.mark.parametrize("lean", [-0.5, float("nan"), float("inf")])
def test_what_is_no_lean_is_refused(lean):
    said = f"lean must be a number from 0 to 1e6, got {lean}"
    with pytest.raises(ValueError, match=said):
        exact(TokenBatch.of(every_text(CLEAN, 4)), 2, lean=lean)
    some = draw_orders(1, 81, 4, 2)
    with pytest.raises(ValueError, match=said):
        importance_weighted_nll(
            MODEL,
            TokenBatch.of(every_text(CLEAN, 4)),
            blocks_of(2),
            some,
            lean=lean,
        )


# --- networks of today, whose mask lies beside their vocabulary ---


@pytest.mark.parametrize(
    ("family", "length", "block_size", "causal_clean", "previous_token", "lean"),
    [
        ("Llama", 4, 4, False, True, 0.0),
        ("Llama", 6, 3, True, True, 0.9),
        ("Llama", 4, 1, True, False, 0.0),
        ("Qwen3", 6, 2, False, True, 0.0),
        ("Qwen3", 4, 1, False, False, 0.0),
        ("Qwen3", 6, 3, True, False, 0.9),
    ],
)
def test_likelihoods_of_networks_of_today_are_the_written_ones_and_sum_to_one(
    family, length, block_size, causal_clean, previous_token, lean
):
    model = network_of(family, 31)
    reading = blocks_of(
        block_size, mask_id=mask_of(model), causal_clean=causal_clean, previous_token=previous_token
    )
    texts = every_text(clean_of(model), length)
    whole, given_first = (
        exact_likelihood(model, TokenBatch.of(texts, score_first=first), reading, lean=lean)
        for first in (True, False)
    )
    assert_one(torch.exp(-whole.nll.sum(1)).sum())
    assert_one(torch.exp(-given_first.nll.sum(1)).view(3, -1).sum(1))
    asked = AfterPrevious(model) if previous_token else model
    some = slice(None, None, max(1, 3**length // 40))
    for block, start in enumerate(range(0, length, block_size)):
        scored = list(range(block_size))
        truth = table(asked, texts[some], start, block_size, scored, causal_clean=causal_clean)
        torch.testing.assert_close(whole.nll[some, block], nll(truth, scored, lean), **EXACT)
        expected = nelbo_by_orders(truth, scored, lean)
        torch.testing.assert_close(whole.nelbo[some, block], expected, **EXACT)
        if not lean:
            torch.testing.assert_close(whole.nelbo[some, block], nelbo(truth, scored), **EXACT)


# --- errors ---


def test_time_conditioned_networks_are_refused_with_the_reason():
    model = tiny_transformer(adaln=True, time_conditioning=True)
    batch = TokenBatch.of(every_text(CLEAN, 4))
    reason = "model is conditioned on the noise level, so its conditionals depend on when a token is revealed"
    with pytest.raises(ValueError, match=reason):
        exact_likelihood(model, batch, blocks_of(2))
    with pytest.raises(ValueError, match=reason):
        importance_weighted_nll(model, batch, blocks_of(2), draw_orders(1, 81, 4, 2))


def test_adaptive_norms_that_ignore_time_are_welcome():
    model = tiny_transformer(5, adaln=True)
    batch = TokenBatch.of(every_text(CLEAN, 4), score_first=True)
    assert_one(torch.exp(-exact_likelihood(model, batch, blocks_of(2)).nll.sum(1)).sum())


def test_blocks_too_large_to_enumerate_are_refused():
    batch = TokenBatch.of(torch.zeros(1, 64, dtype=torch.long))
    with pytest.raises(ValueError, match=r"block_size must be at most 12 .* got 64.* 2\^64 − 1 passes"):
        exact(batch, 64)


def test_bad_arguments_are_refused():
    batch = TokenBatch.of(every_text(CLEAN, 4))
    with pytest.raises(ValueError, match="orders must be at least 1, got 0"):
        draw_orders(0, 81, 4, 2)
    some = draw_orders(1, 81, 4, 2)
    for call in (exact_likelihood, lambda *asked: importance_weighted_nll(*asked, some)):
        with pytest.raises(
            ValueError, match=r"length must be a positive multiple .* length 4 and block_size 3"
        ):
            call(MODEL, batch, blocks_of(3))


def test_token_ids_out_of_range_are_refused():
    for block_size in (2, 4):
        with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.3"):
            exact(TokenBatch.of(torch.tensor([[0, 1, 3, 4]])), block_size)
