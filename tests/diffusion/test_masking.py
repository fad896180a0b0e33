"""Rules that draw a mask rate: the NELBO is one number, and each rule estimates what it says it does.

A rule is proved for every network at once: its expected loss is Σ_M v(M) Σ_{i in M} c(M, i), so it is the
NELBO for all tables c exactly when the expected weight v(M) of every masked set is the NELBO's.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bd3lm.diffusion import (
    ClippedTimes,
    Cosine,
    Counts,
    DiscreteTimes,
    Draws,
    Floored,
    LevelSampler,
    Linear,
    Logarithmic,
    MaskingRule,
    NoiseSchedule,
    Square,
    SquareRoot,
    Times,
)
from tests.diffusion.enumeration import (
    assert_mean,
    every_order,
    everything,
    hidden_bits,
    losses,
    midpoints,
    product_draws,
    replicates,
    set_weights,
    set_weights_by_rate_rule,
)
from tests.oracles.masking import (
    clipped_set_weights,
    count_law,
    discrete_nelbo,
    gauss_legendre,
    nelbo_by_counts,
    nelbo_by_orders,
    nelbo_by_times,
    nelbo_set_weights,
    random_network,
    random_table,
    table_of,
)

pytestmark = pytest.mark.sweep(3)

SCHEDULES = [Linear(), Square(), SquareRoot(), Logarithmic(), Cosine()]
UNBIASED: list[MaskingRule] = [
    *map(Times, SCHEDULES),
    ClippedTimes(low=0.0, high=1.0),
    ClippedTimes(low=0.0, high=1.0, weight="paper", redraw=True),
    Counts(),
    Counts(proposal=(1.0, 5.0, 2.0)),
    Counts(complementary=True),
    Counts(complementary=True, proposal=(3.0, 0.5, 4.0)),
]
RULES: list[MaskingRule] = [
    *UNBIASED,
    DiscreteTimes(steps=3),
    *(
        ClippedTimes(low=0.3, high=0.8, weight=w, redraw=r)
        for w in ("reference", "flat")
        for r in (False, True)
    ),
    ClippedTimes(low=1.0, high=1.0),
]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
FLOAT32 = 1e-6  # weights are handed out in float32


def batch_of_one(sampler: LevelSampler, count: int = 8000) -> Draws:
    """Independent batches, each one sequence of three blocks of three tokens."""
    return replicates(sampler, count, rows=1, length=9, block_size=3)


@pytest.fixture(scope="module")
def permuted() -> Draws:
    return batch_of_one(LevelSampler())


@pytest.fixture(scope="module")
def tables() -> np.ndarray:
    """A different network for each block, and one block much harder than the others."""
    rng = np.random.default_rng(0)
    return np.stack([random_table(3, rng) * scale for scale in (1.0, 0.2, 3.0)])


# --- the NELBO is one number ---


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_nelbo_is_the_same_over_times_orders_and_counts(n: int) -> None:
    for seed in range(3):
        table = random_table(n, np.random.default_rng(seed))
        expected = nelbo_by_orders(table, range(n))
        assert nelbo_by_counts(table, range(n)) == pytest.approx(expected, rel=1e-12)
        for schedule in SCHEDULES:
            by_times = nelbo_by_times(
                table,
                range(n),
                lambda t, s=schedule: s.mask_rate(torch.from_numpy(t)).numpy(),
                lambda t, s=schedule: s.elbo_weight(torch.from_numpy(t)).numpy(),
            )
            assert by_times == pytest.approx(expected, rel=1e-10), schedule
        assert nelbo_set_weights(n) @ table.sum(-1) == pytest.approx(expected, rel=1e-12)


# --- Times ---


@every_schedule
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_times_expects_the_nelbo_under_every_schedule(schedule: NoiseSchedule, n: int) -> None:
    u, du = gauss_legendre(0.0, 1.0)
    levels, probability = torch.from_numpy(u**2), 2 * u * du
    weights = set_weights_by_rate_rule(Times(schedule), n, levels, probability)
    np.testing.assert_allclose(weights[1:], nelbo_set_weights(n)[1:], rtol=FLOAT32)


@every_schedule
def test_times_hides_at_the_schedules_rate_with_its_weight(schedule: NoiseSchedule) -> None:
    draws = LevelSampler().draw(50, 8, 4, generator=torch.Generator().manual_seed(0))
    masks = Times(schedule)(draws, everything(draws))
    assert masks.mask_rate is not None
    torch.testing.assert_close(masks.mask_rate, schedule.mask_rate(draws.levels))
    rate = masks.mask_rate.repeat_interleave(4, 1)
    assert torch.equal(masks.masked[:, 0], draws.tokens <= rate)
    weight = schedule.elbo_weight(draws.levels).repeat_interleave(4, 1).float()
    assert torch.equal(masks.weight[:, 0], torch.where(masks.masked[:, 0], weight, 0.0))


# --- every unbiased rule, by chance ---


@pytest.mark.parametrize("rule", UNBIASED, ids=repr)
def test_unbiased_at_batch_one_with_strata_and_different_blocks(
    rule: MaskingRule, permuted: Draws, tables: np.ndarray
) -> None:
    assert rule.is_unbiased(3)
    truth = sum(nelbo_by_orders(table, range(3)) for table in tables)
    assert_mean(losses(rule(permuted, everything(permuted)), tables).sum(-1), truth)


@pytest.mark.parametrize("rule", UNBIASED, ids=repr)
def test_unbiased_where_tokens_are_given(rule: MaskingRule, permuted: Draws, tables: np.ndarray) -> None:
    """n differs by block and by row: the first token given, a prompt that ends inside or after a block."""
    kinds = [[0, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0, 1]]
    kind = torch.arange(len(permuted.levels)) % len(kinds)
    maskable = torch.tensor(kinds, dtype=torch.bool)[kind]
    loss = losses(rule(permuted, maskable), tables)
    for index, row in enumerate(kinds):
        mine = loss[kind == index]
        tokens = [[i for i in range(3) if row[3 * block + i]] for block in range(3)]
        truth = [nelbo_by_orders(table, own) for table, own in zip(tables, tokens, strict=True)]
        assert_mean(mine.sum(-1), sum(truth), precision=0.08)
        for block in range(3):
            if not tokens[block]:
                assert (mine[:, block] == 0).all()


def test_a_single_long_batch_is_unbiased_too(tables: np.ndarray) -> None:
    draws = LevelSampler().draw(20_000, 9, 3, generator=torch.Generator().manual_seed(0))
    for rule in (Times(), Counts()):
        assert_mean(
            losses(rule(draws, everything(draws)), tables).sum(-1),
            sum(nelbo_by_orders(table, range(3)) for table in tables),
        )


@pytest.mark.parametrize("rule", [Times(Cosine()), Counts(), Counts(complementary=True)], ids=repr)
def test_ordered_strata_are_biased_at_batch_one(rule: MaskingRule, tables: np.ndarray) -> None:
    """Why strata are handed out by a permutation: here block b always sees noise level b."""
    ordered = batch_of_one(LevelSampler(assignment="ordered"), 2000)
    loss = losses(rule(ordered, everything(ordered)), tables).sum(-1)
    truth = sum(nelbo_by_orders(table, range(3)) for table in tables)
    assert abs(loss.mean() - truth) > max(10 * loss.std() / len(loss) ** 0.5, 0.1 * truth)
    # and the error is of place alone: it vanishes where all blocks are the same
    same = np.stack([tables[0]] * 3)
    assert_mean(
        losses(rule(ordered, everything(ordered)), same).sum(-1), 3 * nelbo_by_orders(tables[0], range(3))
    )


# --- every rule ---


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(st.lists(st.booleans(), min_size=12, max_size=12), st.integers(0, 1000))
def test_only_maskable_tokens_are_hidden_and_only_hidden_ones_weigh(
    rule: MaskingRule, maskable: list[bool], seed: int
) -> None:
    draws = LevelSampler().draw(2, 6, 3, generator=torch.Generator().manual_seed(seed))
    allowed = torch.tensor(maskable).view(2, 6)
    masks = rule(draws, allowed)
    assert masks.masked.shape == masks.weight.shape == (2, rule.copies(3), 6)
    assert masks.masked.dtype == torch.bool
    assert masks.weight.dtype == torch.float32
    assert not (masks.masked & ~allowed.unsqueeze(1)).any()
    assert masks.weight.isfinite().all()
    assert torch.equal(masks.weight > 0, masks.masked)
    blocks = masks.weight.unflatten(-1, (2, 3)).masked_fill(~masks.masked.unflatten(-1, (2, 3)), torch.nan)
    top, bottom = blocks.nan_to_num(-1).amax(-1), blocks.nan_to_num(torch.inf).amin(-1)
    assert ((top == bottom) | (top == -1)).all()  # one weight a block and copy


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_row_is_masked_the_same_alone_or_in_its_batch(rule: MaskingRule) -> None:
    draws = LevelSampler().draw(6, 9, 3, generator=torch.Generator().manual_seed(1))
    maskable = torch.rand(6, 9, generator=torch.Generator().manual_seed(2)) < 0.7
    whole = rule(draws, maskable)
    for row in range(6):
        part = rule(draws[row : row + 1], maskable[row : row + 1])
        assert torch.equal(part.masked, whole.masked[row : row + 1])
        assert torch.equal(part.weight, whole.weight[row : row + 1])


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_nothing_maskable_is_worth_nothing(rule: MaskingRule) -> None:
    draws = LevelSampler().draw(4, 6, 3, generator=torch.Generator().manual_seed(0))
    masks = rule(draws, torch.zeros(4, 6, dtype=torch.bool))
    assert not masks.masked.any()
    assert (masks.weight == 0).all()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_weights_are_finite_at_the_smallest_level_that_can_be_drawn(rule: MaskingRule) -> None:
    smallest = 2.0**-53 / 1e6  # in the first of a million strata
    draws = Draws(
        levels=torch.full((1, 1), smallest, dtype=torch.float64),
        spare=torch.full((1, 1), 2.0**-53, dtype=torch.float64),
        tokens=torch.full((1, 3), 1e-300, dtype=torch.float64),
    )
    assert rule(draws, everything(draws)).weight.isfinite().all()


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "maskable", [torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 6)], ids=["shape", "dtype"]
)
def test_a_maskable_of_the_wrong_kind_is_refused(rule: MaskingRule, maskable: torch.Tensor) -> None:
    message = rf"maskable must be a bool tensor of shape \(2, 6\), got {maskable.dtype} of shape"
    with pytest.raises(ValueError, match=message):
        rule(LevelSampler().draw(2, 6, 3), maskable)


# --- DiscreteTimes ---

VOCAB, MASK = 4, 2


def discrete_truth(n: int, steps: int, schedule: NoiseSchedule, seed: int) -> tuple[np.ndarray, float, float]:
    """(table, reconstruction, diffusion) of a random network."""
    rng = np.random.default_rng(seed)
    network = random_network(n, VOCAB, MASK, rng)
    x = [(0, 1, 3)[i] for i in rng.integers(3, size=n)]
    alphas = [
        1.0,
        *(schedule.alpha(torch.tensor(j / steps, dtype=torch.float64)).item() for j in range(1, steps + 1)),
    ]
    return table_of(network, x), *discrete_nelbo(network, x, alphas, MASK)


def discrete_expectation(n: int, steps: int, schedule: NoiseSchedule, table: np.ndarray) -> float:
    rule = DiscreteTimes(steps=steps, schedule=schedule)
    weights = set_weights_by_rate_rule(rule, n, midpoints(steps), np.full(steps, 1 / steps))
    return float(weights @ table.sum(-1))


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), SquareRoot()], ids=repr)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_discrete_times_expects_reconstruction_plus_the_sum_of_divergences(
    n: int, steps: int, schedule: NoiseSchedule
) -> None:
    table, reconstruction, diffusion = discrete_truth(n, steps, schedule, seed=steps)
    expected = discrete_expectation(n, steps, schedule, table)
    assert expected == pytest.approx(reconstruction + diffusion, rel=FLOAT32)
    assert DiscreteTimes(steps=steps).is_unbiased(n)


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_the_papers_expectation_overcounts_the_diffusion_term(steps: int) -> None:
    """T · E over the T − 1 times 2/T..1 (Suppl. A) is T/(T−1) times the sum that bounds."""
    table, reconstruction, diffusion = discrete_truth(2, steps, Linear(), seed=0)
    rule = DiscreteTimes(steps=steps)
    without_first = midpoints(steps)[1:]
    uniform = np.full(steps - 1, 1 / (steps - 1))
    papers = float(set_weights_by_rate_rule(rule, 2, without_first, uniform) @ table.sum(-1))
    assert papers == pytest.approx(steps / (steps - 1) * diffusion, rel=FLOAT32)
    assert papers + reconstruction > 1.05 * discrete_expectation(2, steps, Linear(), table)


@every_schedule
def test_discrete_times_converges_to_the_continuous_nelbo(schedule: NoiseSchedule) -> None:
    table = random_table(3, np.random.default_rng(4))
    truth = nelbo_by_orders(table, range(3))
    errors = [abs(discrete_expectation(3, steps, schedule, table) / truth - 1) for steps in (10, 100, 10_000)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < (
        2e-2 if isinstance(schedule, SquareRoot) else 2e-4
    )  # √t is steep at 0: its error falls as T^-1/2


def test_discrete_times_draws_every_step_equally_often_and_has_no_floor() -> None:
    draws = product_draws(midpoints(500), torch.ones(1, 1))
    rate = DiscreteTimes(steps=5)(draws, everything(draws)).mask_rate
    assert rate is not None
    values, frequency = rate.unique(return_counts=True)
    assert values.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert frequency.tolist() == [100] * 5
    edges = product_draws(torch.tensor([2.0**-60, 1.0], dtype=torch.float64), torch.ones(1, 1))
    assert DiscreteTimes(steps=5)(edges, everything(edges)).mask_rate.flatten().tolist() == [0.2, 1.0]


@pytest.mark.parametrize("steps", [0, -1])
def test_discrete_times_refuses_no_steps(steps: int) -> None:
    with pytest.raises(ValueError, match=f"steps must be at least 1, got {steps}"):
        DiscreteTimes(steps=steps)


# --- ClippedTimes ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reference", lambda r: 1 / r),
        ("derivative", lambda r: 0.5 / r),
        ("paper", lambda r: 2 / r),
        ("flat", lambda r: torch.ones_like(r)),
    ],
)
@pytest.mark.parametrize("redraw", [False, True])
def test_clipped_weights_by_name(name: str, expected, redraw: bool) -> None:  # type: ignore[no-untyped-def]
    draws = LevelSampler().draw(100, 8, 4, generator=torch.Generator().manual_seed(0))
    masks = ClippedTimes(low=0.3, high=0.8, weight=name, redraw=redraw)(draws, everything(draws))
    rate = 0.3 + 0.5 * draws.levels
    torch.testing.assert_close(masks.mask_rate, rate)
    weight = expected(rate).repeat_interleave(4, 1)[masks.masked[:, 0]]
    torch.testing.assert_close(masks.weight[masks.masked], weight.float())


@pytest.mark.parametrize("weight", ["reference", "flat"])
@pytest.mark.parametrize("redraw", [False, True])
def test_full_masking_hides_everything_with_weight_one(weight: str, redraw: bool) -> None:
    rule = ClippedTimes(low=1.0, high=1.0, weight=weight, redraw=redraw)
    draws = LevelSampler().draw(100, 8, 4, generator=torch.Generator().manual_seed(0))
    masks = rule(draws, everything(draws))
    assert masks.masked.all()
    assert (masks.weight == 1).all()


def rate_of(k: int, n: int, low: float, high: float) -> bool:
    return low - 1e-9 <= k / n <= high + 1e-9


@given(st.just(0.0) | st.floats(1e-6, 0.95), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_redrawn_counts_lie_in_the_range_wherever_one_fits(low: float, width: float, seed: int) -> None:
    high = min(1.0, low + width)
    generator = torch.Generator().manual_seed(seed)
    draws = LevelSampler().draw(20, 12, 6, generator=generator)
    maskable = torch.rand(20, 12, generator=generator) < 0.8
    masked = ClippedTimes(low=low, high=high, redraw=True)(draws, maskable).masked[:, 0]
    plain = ClippedTimes(low=low, high=high)(draws, maskable).masked[:, 0]
    for row, block in product(range(20), range(2)):
        own = slice(6 * block, 6 * block + 6)
        n, k = int(maskable[row, own].sum()), int(masked[row, own].sum())
        if n and any(rate_of(j, n, low, high) for j in range(n + 1)):
            assert rate_of(k, n, low, high)
        else:
            assert torch.equal(masked[row, own], plain[row, own])


def test_redrawing_ends_and_keeps_the_plain_mask_where_no_count_fits() -> None:
    """[0.30, 0.45] holds no count of four tokens, and 1/3 of three."""
    draws = LevelSampler().draw(200, 8, 4, generator=torch.Generator().manual_seed(0))
    maskable = everything(draws)
    maskable[:, 0] = False
    redrawn, plain = (ClippedTimes(low=0.30, high=0.45, redraw=r)(draws, maskable) for r in (True, False))
    assert (redrawn.masked[:, 0, :4].sum(-1) == 1).all()
    assert torch.equal(redrawn.masked[:, 0, 4:], plain.masked[:, 0, 4:])
    assert plain.masked[:, 0, 4:].any()
    assert not torch.equal(redrawn.masked, plain.masked)


@pytest.mark.parametrize(
    ("n", "low", "high", "level"),
    [
        (4, 0.3, 0.8, 0.5),
        (4, 0.3, 0.8, 0.01),
        (5, 0.0, 0.4, 1.0),
        (6, 0.5, 1.0, 0.2),
        (3, 0.0, 1.0, 0.4),
        (10, 0.3, 0.6, 1e-6),
    ],
)
def test_the_law_of_a_redrawn_count_is_that_of_rejection(
    n: int, low: float, high: float, level: float
) -> None:
    """Rejection ends in the binomial given that it fits; compared on a grid of quantiles."""
    grid = 20_000
    draws = Draws(
        levels=torch.full((grid, 1), level, dtype=torch.float64),
        spare=midpoints(grid)[:, None],
        tokens=torch.rand(grid, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )
    masked = ClippedTimes(low=low, high=high, redraw=True)(draws, everything(draws)).masked[:, 0]
    observed = np.bincount(masked.sum(-1), minlength=n + 1) / grid
    expected = count_law(n, low + (high - low) * level, low, high)
    np.testing.assert_allclose(observed, expected, rtol=0, atol=1.01 / grid)


def test_a_redrawn_mask_is_uniform_given_its_count() -> None:
    tokens = every_order(4)
    draws = product_draws(torch.tensor([0.5], dtype=torch.float64), tokens)
    bits = hidden_bits(ClippedTimes(low=0.4, high=0.6, redraw=True)(draws, everything(draws)), 4)
    sets, frequency = np.unique(bits, return_counts=True)
    assert len(sets) == 6
    assert (frequency == 4).all()


RANGES = [(0.0, 1.0), (0.3, 0.8), (0.0, 0.5), (0.5, 1.0), (0.45, 0.95), (0.0, 0.3), (1.0, 1.0)]
CLIPPED = [
    ClippedTimes(low=low, high=high, weight=weight, redraw=redraw)
    for (low, high), weight, redraw in product(
        RANGES, ("reference", "derivative", "paper", "flat"), (False, True)
    )
    if low < high or weight in ("reference", "flat")
]


def expected_weights(rule: ClippedTimes, n: int) -> np.ndarray:
    return clipped_set_weights(n, rule.low, rule.high, rule.weight, rule.redraw)


def is_the_nelbo(weights: np.ndarray, n: int) -> bool:
    return bool(np.allclose(weights[1:], nelbo_set_weights(n)[1:], rtol=1e-9, atol=0))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("rule", CLIPPED, ids=repr)
def test_clipped_times_says_whether_it_is_unbiased(rule: ClippedTimes, n: int) -> None:
    """True: the expected loss is the NELBO for every table. False: for some table it is not."""
    assert rule.is_unbiased(n) == is_the_nelbo(expected_weights(rule, n), n)


@pytest.mark.parametrize(("low", "high"), [(0.3, 0.7), (0.45, 0.55)])
def test_a_symmetric_range_is_unbiased_for_two_tokens(low: float, high: float) -> None:
    """The mean of r over [low, 1 − low] is 1/2, which is all that two tokens ask of 1/rate."""
    rule = ClippedTimes(low=low, high=high)
    assert is_the_nelbo(expected_weights(rule, 1), 1)
    assert is_the_nelbo(expected_weights(rule, 2), 2)
    assert not is_the_nelbo(expected_weights(rule, 3), 3)
    assert rule.is_unbiased(2)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("rule", CLIPPED, ids=repr)
def test_clipped_times_weighs_each_set_as_enumeration_says(rule: ClippedTimes, n: int) -> None:
    rows = 20_000
    draws = LevelSampler(stratified=False).draw(rows, n, n, generator=torch.Generator().manual_seed(n))
    masks = rule(draws, everything(draws))
    weight = masks.weight[:, 0].double().amax(-1).numpy()
    bits = hidden_bits(masks, n)[:, 0, 0]
    for masked, truth in enumerate(expected_weights(rule, n)):
        if masked == 0:
            continue
        if truth == 0:
            assert not (bits == masked).any()
        else:
            assert_mean(weight * (bits == masked), truth, precision=0.2)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("rule", [rule for rule in CLIPPED if not rule.redraw and rule.low > 0], ids=repr)
def test_clipped_times_without_redrawing_is_exact_by_quadrature(rule: ClippedTimes, n: int) -> None:
    levels, probability = gauss_legendre(0.0, 1.0)
    weights = set_weights_by_rate_rule(rule, n, torch.from_numpy(levels), probability)
    np.testing.assert_allclose(weights[1:], expected_weights(rule, n)[1:], rtol=FLOAT32, atol=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (0.8, 0.3, "low and high must satisfy 0 <= low <= high <= 1, got low 0.8 and high 0.3"),
        (-0.1, 0.3, "low and high must satisfy 0 <= low <= high <= 1, got low -0.1 and high 0.3"),
        (0.1, 1.2, "low and high must satisfy 0 <= low <= high <= 1, got low 0.1 and high 1.2"),
        (float("nan"), 1.0, "low and high must satisfy 0 <= low <= high <= 1, got low nan and high 1.0"),
        (0.5, 0.5, r"low and high may be equal only at 1 \(full masking\), got low 0.5 and high 0.5"),
        (0.0, 0.0, r"low and high may be equal only at 1 \(full masking\), got low 0.0 and high 0.0"),
    ],
)
def test_clipped_times_refuses_a_bad_range(low: float, high: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClippedTimes(low=low, high=high)


def test_clipped_times_refuses_a_bad_weight() -> None:
    with pytest.raises(
        ValueError, match="weight must be 'reference', 'derivative', 'paper' or 'flat', got 'mean'"
    ):
        ClippedTimes(low=0.3, high=0.8, weight="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", ["derivative", "paper"])
def test_a_weight_by_width_needs_a_width(weight: str) -> None:
    message = (
        f"weight '{weight}' needs a range of positive width, got low = high = 1.0; use 'reference' or 'flat'"
    )
    with pytest.raises(ValueError, match=message):
        ClippedTimes(low=1.0, high=1.0, weight=weight)


# --- variance ---


def second_moment_of_times(table: np.ndarray, floor: float) -> float:
    """E[(Σ c / t)²; t > floor] of the linear schedule, per block, by quadrature in log t."""
    n = table.shape[1]
    s, ds = gauss_legendre(np.log(floor), 0.0, 200)
    t = np.exp(s)
    total = 0.0
    for masked in range(1, 2**n):
        k = masked.bit_count()
        total += float((ds * t ** (k - 1) * (1 - t) ** (n - k)).sum()) * table[masked].sum() ** 2
    return total


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_counts_vary_less_than_linear_times(n: int) -> None:
    """Even with t cut off at 0.01, which only lowers it: by linear Times it has no finite variance."""
    for seed in range(5):
        table = random_table(n, np.random.default_rng(seed))
        draws = product_draws(midpoints(n), every_order(n))
        by_counts = losses(Counts()(draws, everything(draws)), table[None])[:, 0]
        nelbo = nelbo_by_orders(table, range(n))
        assert by_counts.mean() == pytest.approx(nelbo, rel=FLOAT32)
        by_times = second_moment_of_times(table, 1e-2)
        assert by_counts.var() < by_times - nelbo**2
        singles = sum(table[1 << i].sum() ** 2 for i in range(n))
        growth = second_moment_of_times(table, 1e-7) - second_moment_of_times(table, 1e-6)
        assert growth == pytest.approx(np.log(10) * singles, rel=1e-4)


def test_counts_vary_less_than_linear_times_when_drawn(permuted: Draws, tables: np.ndarray) -> None:
    by_times, by_counts = (
        losses(rule(permuted, everything(permuted)), tables).sum(-1).var() for rule in (Times(), Counts())
    )
    assert by_counts < 0.5 * by_times


def test_set_weights_helper_notices_a_wrong_weight() -> None:
    """The instrument itself: a rule whose weight is 2/t must read as twice the NELBO."""

    class Doubled(Linear):
        def elbo_weight(self, t: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().elbo_weight(t)

    u, du = gauss_legendre(0.0, 1.0)
    weights = set_weights_by_rate_rule(Times(Doubled()), 2, torch.from_numpy(u), du)
    np.testing.assert_allclose(weights[1:], 2 * nelbo_set_weights(2)[1:], rtol=FLOAT32)
    draws = product_draws(midpoints(2), every_order(2))
    np.testing.assert_allclose(set_weights(Counts()(draws, everything(draws)))[1:], nelbo_set_weights(2)[1:])


@pytest.mark.parametrize("rule", [Times, lambda schedule: DiscreteTimes(steps=3, schedule=schedule)])
def test_a_schedule_that_ends_early_bounds_nothing(rule):
    """What α(1) > 0 leaves of a text is in no term of the sum, which so may fall below the entropy."""
    assert rule(Linear()).is_unbiased(4)
    assert not rule(Floored(Linear(), 0.9)).is_unbiased(4)
