"""Masks by count: unbiased exactly, by enumerating every count and every order of the tokens."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bd3lm.diffusion import Counts, Draws, LevelSampler, learned_proposal
from tests.diffusion.enumeration import (
    assert_mean,
    every_order,
    everything,
    losses,
    midpoints,
    product_draws,
    revealed_in,
    set_weights,
    set_weights_by_count_rule,
)
from tests.oracles.masking import Array, nelbo_by_orders, nelbo_set_weights, random_table
from tests.oracles.orders import law_of_orders

pytestmark = pytest.mark.sweep(3)

FLOAT32 = 1e-6  # weights are handed out in float32
both = pytest.mark.parametrize("complementary", [False, True])


@both
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_uniform_counts_expect_the_nelbo(n: int, complementary: bool) -> None:
    weights = set_weights_by_count_rule(Counts(complementary=complementary), n, midpoints(n))
    np.testing.assert_allclose(weights[1:], nelbo_set_weights(n)[1:], rtol=FLOAT32)


@both
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([1e-6, 1.0, 1e6]))
def test_any_proposal_expects_the_nelbo_in_any_scale(
    complementary: bool, proposal: list[int], scale: float
) -> None:
    """Whole-numbered proposals, so that a grid of levels hits each count exactly as often as it should."""
    rule = Counts(proposal=tuple(scale * q for q in proposal), complementary=complementary)
    weights = set_weights_by_count_rule(rule, len(proposal), midpoints(sum(proposal)))
    np.testing.assert_allclose(weights[1:], nelbo_set_weights(len(proposal))[1:], rtol=FLOAT32)


@both
@given(st.lists(st.integers(1, 9), min_size=4, max_size=4), st.sets(st.integers(0, 3)))
def test_a_proposal_is_cut_to_the_tokens_that_are_maskable(
    complementary: bool, proposal: list[int], tokens: set[int]
) -> None:
    """n is the block's own; the masked sets range over its maskable tokens and nothing else."""
    own, n = sorted(tokens), len(tokens)
    rule = Counts(proposal=tuple(map(float, proposal)), complementary=complementary)
    draws = product_draws(midpoints(sum(proposal[:n]) or 1), every_order(4))
    maskable = torch.zeros_like(draws.tokens, dtype=torch.bool)
    maskable[:, own] = True
    masks = rule(draws, maskable)
    table = random_table(4, np.random.default_rng(0))
    loss = losses(masks, table[None])
    assert loss.mean() == pytest.approx(nelbo_by_orders(table, own), rel=FLOAT32)
    assert masks.weight.isfinite().all()


@both
def test_a_real_proposal_expects_the_nelbo(complementary: bool) -> None:
    proposal = tuple(np.random.default_rng(0).exponential(size=3) + 0.05)
    rule = Counts(proposal=proposal, complementary=complementary)
    weights = set_weights_by_count_rule(rule, 3, midpoints(60_000))
    np.testing.assert_allclose(weights[1:], nelbo_set_weights(3)[1:], rtol=5e-4)


def test_the_weight_is_one_over_k_times_its_probability() -> None:
    draws = product_draws(midpoints(8), torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64))
    masks = Counts(proposal=(4.0, 1.0, 3.0))(draws, everything(draws))
    k = masks.masked[:, 0].sum(-1)
    assert k.tolist() == [1, 1, 1, 1, 2, 3, 3, 3]
    expected = {1: 8 / 4, 2: 8 / (2 * 1), 3: 8 / (3 * 3)}
    assert masks.weight[:, 0].amax(-1).tolist() == pytest.approx([expected[int(j)] for j in k])
    assert masks.mask_rate is None


def test_a_pair_hides_every_token_once_with_the_weights_of_the_design() -> None:
    """n/(2j) on a copy that hides j < n tokens, 1 on one that hides all n."""
    n = 4
    draws = product_draws(midpoints(n), every_order(n))
    masks = Counts(complementary=True)(draws, everything(draws))
    assert (masks.masked.sum(1) == 1).all()
    j = masks.masked.sum(-1)
    expected = torch.where(j == n, 1.0, n / (2 * j))
    assert torch.equal(masks.weight.amax(-1)[j > 0], expected[j > 0])
    assert (masks.weight[j == 0] == 0).all()


def test_averaging_the_two_copies_n_over_k_losses_would_be_biased() -> None:
    n = 3
    draws = product_draws(midpoints(n), every_order(n))
    masks = Counts(complementary=True)(draws, everything(draws))
    j = masks.masked.sum(-1, keepdim=True)
    naive = torch.where(masks.masked, n / (2 * j), 0.0)
    weights = set_weights(type(masks)(masked=masks.masked, weight=naive, mask_rate=None))
    assert abs(weights[-1] / nelbo_set_weights(n)[-1] - 1) > 0.4


@both
@pytest.mark.parametrize("proposal", [None, (3.0,)])
def test_one_token_is_always_hidden_with_weight_one(
    complementary: bool, proposal: tuple[float, ...] | None
) -> None:
    """The autoregressive loss: no variance over masks, and no second copy."""
    rule = Counts(proposal=proposal, complementary=complementary)
    draws = LevelSampler().draw(100, 7, 1, generator=torch.Generator().manual_seed(0))
    masks = rule(draws, everything(draws))
    assert rule.copies(1) == 1
    assert masks.masked.shape == (100, 1, 7)
    assert masks.masked.all()
    assert (masks.weight == 1).all()


def test_copies() -> None:
    assert [Counts(complementary=c).copies(4) for c in (False, True)] == [1, 2]
    assert all(Counts(complementary=c).is_unbiased(b) for c in (False, True) for b in (1, 2, 16))


def test_stratified_levels_give_each_count_its_share_of_a_batch() -> None:
    draws = LevelSampler().draw(8, 16, 4, generator=torch.Generator().manual_seed(0))
    masked = Counts()(draws, everything(draws)).masked[:, 0].unflatten(1, (4, 4)).sum(-1)
    assert masked.flatten().bincount().tolist() == [0, 8, 8, 8, 8]


def test_the_extreme_levels_give_the_extreme_counts() -> None:
    levels = torch.tensor([2.0**-60, 1.0], dtype=torch.float64)
    draws = product_draws(levels, every_order(5)[:1])
    for rule in (Counts(), Counts(proposal=(0.1, 0.2, 0.3, 0.7, 1e-3))):
        assert rule(draws, everything(draws)).masked.sum(-1).flatten().tolist() == [1, 5]


def test_counts_hide_the_tokens_of_the_smallest_draws() -> None:
    draws = Draws(
        levels=torch.tensor([[0.5, 1.0]], dtype=torch.float64),
        spare=torch.ones(1, 2, dtype=torch.float64),
        tokens=torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.4, 0.3]], dtype=torch.float64),
    )
    maskable = torch.tensor([[False, True, True, True, True, False]])
    masked = Counts()(draws, maskable).masked[0, 0]
    assert masked.tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("bad", [(1.0, 0.0), (1.0, -2.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_a_proposal_must_be_positive(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="proposal must hold a positive number for every count") as error:
        Counts(proposal=bad)
    assert str(bad) in str(error.value)


@pytest.mark.parametrize("proposal", [(1.0,), (1.0,) * 5, ()])
def test_a_proposal_must_have_one_entry_for_each_count(proposal: tuple[float, ...]) -> None:
    draws = LevelSampler().draw(1, 8, 4)
    message = rf"proposal must have one entry for each count 1..4 \(the block size\), got {len(proposal)}"
    with pytest.raises(ValueError, match=message):
        Counts(proposal=proposal)(draws, everything(draws))


# --- orders that lean ---

leans = pytest.mark.parametrize("lean", [0.3, 0.7, 2.0])


def mean_loss(rule: Counts, table: Array, own: Sequence[int], lean: float, levels: torch.Tensor) -> float:
    """The expected loss of one block whose tokens `own` are maskable: every count, every order by its law."""
    n, law = table.shape[1], law_of_orders(own, lean)
    draws = product_draws(levels, torch.stack([revealed_in(order, n, lean) for order in law]))
    maskable = torch.zeros_like(draws.tokens, dtype=torch.bool)
    maskable[:, list(own)] = True
    masks = rule(draws, maskable)
    assert not (masks.masked[:, 0] & ~maskable).any()
    assert masks.weight.isfinite().all()
    probability = np.tile(list(law.values()), len(levels)) / len(levels)
    return float((losses(masks, table[None])[:, 0] * probability).sum())


@leans
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_counts_expect_the_nelbo_of_an_order_that_leans(n: int, lean: float) -> None:
    table = random_table(n, np.random.default_rng(n))
    truth = nelbo_by_orders(table, range(n), lean)
    found = mean_loss(Counts(lean=lean), table, range(n), lean, midpoints(n))
    assert found == pytest.approx(truth, rel=FLOAT32)
    if n > 1:  # which is another than without
        assert truth != pytest.approx(nelbo_by_orders(table, range(n)), rel=1e-3)
        assert mean_loss(Counts(), table, range(n), lean, midpoints(n)) != pytest.approx(truth, rel=1e-3)


@leans
@pytest.mark.parametrize("own", [(), (2,), (0, 3), (1, 2), (0, 2, 3), (1, 2, 3)], ids=str)
def test_a_leaning_order_is_that_of_the_maskable_tokens(own: tuple[int, ...], lean: float) -> None:
    table = random_table(4, np.random.default_rng(0))
    found = mean_loss(Counts(lean=lean), table, own, lean, midpoints(len(own) or 1))
    assert found == pytest.approx(nelbo_by_orders(table, own, lean), rel=FLOAT32)


@leans
@pytest.mark.parametrize("own", [range(4), (0, 2, 3)], ids=str)
def test_any_proposal_expects_the_nelbo_of_an_order_that_leans(own: Sequence[int], lean: float) -> None:
    table = random_table(4, np.random.default_rng(1))
    proposal = (5, 1, 3, 2)
    rule = Counts(proposal=tuple(map(float, proposal)), lean=lean)
    found = mean_loss(rule, table, own, lean, midpoints(sum(proposal[: len(own)])))
    assert found == pytest.approx(nelbo_by_orders(table, own, lean), rel=FLOAT32)


def test_drawn_masks_expect_the_nelbo_of_an_order_that_leans() -> None:
    """Blocks of their own tables, with orders as they are drawn; the second has a token less."""
    rng = np.random.default_rng(3)
    tables = np.stack([random_table(3, rng) for _ in range(2)])
    draws = LevelSampler(stratified=False).draw(20_000, 6, 3, generator=torch.Generator().manual_seed(0))
    maskable = everything(draws)
    maskable[:, 4] = False
    loss = losses(Counts(lean=0.7)(draws, maskable), tables)
    for block, own in enumerate(([0, 1, 2], [0, 2])):
        assert_mean(loss[:, block], nelbo_by_orders(tables[block], own, 0.7), precision=0.02)


@pytest.mark.parametrize("proposal", [None, tuple(range(1, 17))], ids=["uniform", "rising"])
def test_without_a_lean_masks_are_what_they_were(proposal: tuple[float, ...] | None) -> None:
    """1/(k·q(k)) to the bit, also in blocks that are not whole, for every k."""
    draws = LevelSampler().draw(200, 64, 16, generator=torch.Generator().manual_seed(0))
    maskable = torch.rand(200, 64, generator=torch.Generator().manual_seed(1)) < 0.9
    masks = Counts(proposal=proposal)(draws, maskable)
    n = maskable.unflatten(1, (4, 16)).sum(-1, keepdim=True)
    k = masks.masked.unflatten(2, (4, 16)).sum(-1, keepdim=True)[:, 0]
    assert set(k.unique().tolist()) == set(range(1, 17))
    q = torch.tensor((0.0, *(proposal or (1.0,) * 16)), dtype=torch.float64)
    q = (q / q.max()).cumsum(0)
    weight = (1.0 / (k * ((q[k] - q[k - 1]) / q[n]))).float().expand(-1, -1, 16).flatten(1)
    assert torch.equal(masks.weight[:, 0], torch.where(masks.masked[:, 0], weight, 0.0))


def test_a_lean_too_small_to_matter_is_none() -> None:
    draws = LevelSampler().draw(40, 64, 16, generator=torch.Generator().manual_seed(0))
    maskable = torch.rand(40, 64, generator=torch.Generator().manual_seed(1)) < 0.9
    plain, small = (rule(draws, maskable) for rule in (Counts(), Counts(lean=1e-9)))
    assert torch.equal(small.masked, plain.masked)
    torch.testing.assert_close(small.weight, plain.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("lean", [50.0, 1e6])
def test_a_large_lean_hides_the_right_and_weighs_the_leftmost_alone(lean: float) -> None:
    """Left to right: of what is masked, the first is the next for sure, and each count has 1/n."""
    draws = product_draws(midpoints(5), every_order(5))
    masks = Counts(lean=lean)(draws, everything(draws))
    for masked, weight in zip(masks.masked[:, 0].tolist(), masks.weight[:, 0].tolist(), strict=True):
        first = masked.index(True)
        assert masked == [place >= first for place in range(5)]
        assert weight == pytest.approx([5.0 if place == first else 0.0 for place in range(5)], abs=1e-6)


@pytest.mark.parametrize("lean", [0.0, 0.7])
def test_a_token_of_the_largest_draw_is_hidden_and_its_neighbours_are_not(lean: float) -> None:
    """Draws lie in (0, 1]. What is not maskable is never masked, whatever is drawn."""
    tokens = torch.tensor([[0.3, 1.0, 0.6]], dtype=torch.float64)
    draws = product_draws(torch.ones(1, dtype=torch.float64), tokens)
    masks = Counts(lean=lean)(draws, torch.tensor([[False, True, False]]))
    assert masks.masked[0, 0].tolist() == [False, True, False]
    assert masks.weight[0, 0].tolist() == [0.0, 1.0, 0.0]


def test_a_lean_has_no_complementary_copies() -> None:
    with pytest.raises(ValueError, match=r"complementary=True needs lean 0, got 0\.7"):
        Counts(complementary=True, lean=0.7)
    Counts(complementary=True, lean=0.0)
    with pytest.raises(ValueError, match="lean must be a number from 0 to 1e6, got -1"):
        Counts(lean=-1.0)


def variance_by_count(table: np.ndarray, proposal: tuple[float, ...]) -> float:
    """The variance of one block's estimate: every count by its probability, every order."""
    n = len(proposal)
    total, q = 0.0, np.array(proposal) / sum(proposal)
    for k in range(n):
        level = torch.tensor([(q[:k].sum() + q[: k + 1].sum()) / 2])
        draws = product_draws(level, every_order(n))
        loss = losses(Counts(proposal=proposal)(draws, everything(draws)), table[None])
        total += q[k] * float((loss**2).mean())
    return total - nelbo_by_orders(table, range(n)) ** 2


def second_moments(table: np.ndarray) -> tuple[float, ...]:
    """E[S²] for each count, over all sets of that size."""
    n = table.shape[1]
    sums = {k: [table[m].sum() ** 2 for m in range(2**n) if m.bit_count() == k] for k in range(1, n + 1)}
    return tuple(float(np.mean(sums[k])) for k in range(1, n + 1))


@pytest.mark.parametrize("seed", range(5))
def test_the_learned_proposal_has_the_least_variance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = random_table(4, rng)
    best = learned_proposal(second_moments(table), uniform_share=1e-6)
    least = variance_by_count(table, best)
    for other in ((1.0,) * 4, *(tuple(np.array(best) * rng.uniform(0.7, 1.4, 4)) for _ in range(20))):
        assert least < variance_by_count(table, other)
    mixed = variance_by_count(table, learned_proposal(second_moments(table)))
    assert least < mixed < variance_by_count(table, (1.0,) * 4)


@given(
    st.lists(st.floats(-1.0, 1e6) | st.just(float("nan")) | st.just(float("inf")), min_size=1, max_size=6),
    st.floats(0.01, 1.0),
)
def test_a_learned_proposal_is_one_that_counts_accept(moments: list[float], uniform_share: float) -> None:
    proposal = learned_proposal(tuple(moments), uniform_share=uniform_share)
    Counts(proposal=proposal)
    assert sum(proposal) == pytest.approx(1.0)
    assert min(proposal) >= uniform_share / len(moments) * (1 - 1e-12)


def test_a_learned_proposal_without_knowledge_is_uniform() -> None:
    assert learned_proposal((0.0, 0.0)) == (0.5, 0.5)
    assert learned_proposal((3.0, 5.0), uniform_share=1.0) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_learned_proposal_needs_some_uniform_share(share: float) -> None:
    with pytest.raises(ValueError, match=rf"uniform_share must lie in \(0, 1\], got {share}"):
        learned_proposal((1.0, 1.0), uniform_share=share)


# --- flat weights ---


@both
@pytest.mark.parametrize("n", [1, 3, 4])
def test_flat_weights_are_one_on_the_same_masks(n: int, complementary: bool) -> None:
    draws = product_draws(midpoints(n), every_order(n))
    bound, flat = (
        Counts(complementary=complementary, weight=weight)(draws, everything(draws))
        for weight in ("nelbo", "flat")
    )
    assert torch.equal(flat.masked, bound.masked)
    assert torch.equal(flat.weight, bound.masked.float())
    if complementary and n > 1:
        assert (flat.weight.sum(1) == 1).all()  # every token once


def test_flat_weights_are_a_bound_of_single_tokens_alone() -> None:
    assert [Counts(weight="flat").is_unbiased(size) for size in (1, 2, 4)] == [True, False, False]
    assert Counts().is_unbiased(4)
    with pytest.raises(ValueError, match="weight must be 'nelbo' or 'flat', got 'even'"):
        Counts(weight="even")  # type: ignore[arg-type]


def test_flat_weights_may_lean() -> None:
    """All masked tokens of a leaning order count alike."""
    draws = LevelSampler().draw(50, 16, 4, generator=torch.Generator().manual_seed(3))
    flat, bound = (Counts(lean=1.0, weight=weight)(draws, everything(draws)) for weight in ("flat", "nelbo"))
    assert torch.equal(flat.masked, bound.masked)
    assert torch.equal(flat.weight, flat.masked.float())
