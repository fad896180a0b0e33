"""Unmasking rules without a network: every masked place once, when plain loops say so."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bd3lm.diffusion import Cosine, Linear, NoiseSchedule, Purpose, SquareRoot, counter_uniform
from bd3lm.sampling import Ancestral, EntropyBound, FirstHitting, MostConfident, Planned, Remasking
from tests.oracles.orders import law_of_orders

pytestmark = pytest.mark.sweep(2)

SCHEDULES = [Linear(), SquareRoot(), Cosine()]
few = settings(max_examples=20)


@dataclass(frozen=True)
class Blocks:
    """Some rows' blocks: seeds (rows,), text positions (rows, n), and which of them are masked."""

    seeds: Tensor
    positions: Tensor
    masked: Tensor

    def row(self, row: int) -> "Blocks":
        return Blocks(self.seeds[row : row + 1], self.positions[row : row + 1], self.masked[row : row + 1])

    def rates(self, row: int) -> list[float]:
        """The mask rates at which the places of a row are hit."""
        return counter_uniform(self.seeds[row], self.positions[row], Purpose.ORDER, 1)[:, 0].tolist()


@st.composite
def any_blocks(draw: st.DrawFn) -> Blocks:
    rows, n = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    bits = draw(st.lists(st.booleans(), min_size=rows * n, max_size=rows * n))
    starts = draw(st.lists(st.integers(0, 1000), min_size=rows, max_size=rows))
    seeds = draw(st.lists(st.integers(0, 2**62), min_size=rows, max_size=rows))
    return Blocks(
        torch.tensor(seeds),
        torch.tensor(starts).unsqueeze(1) + torch.arange(n),
        torch.tensor(bits).view(rows, n),
    )


Step = tuple[set[int], float, set[int]]  # what a pass reveals, at which mask rate, what is masked afterwards


def passes(rule: Planned, blocks: Blocks, row: int) -> list[Step]:
    """A row's own passes: those that reveal something in it."""
    steps = []
    for step in rule.plan(blocks.seeds, blocks.positions, blocks.masked):
        assert step.places.shape == step.active.shape
        assert len(set(step.places[row].tolist())) == step.places.shape[1]  # distinct, as scatter needs
        revealed = set(step.places[row][step.active[row]].tolist())
        again = set() if step.masked_again is None else set(_places(step.masked_again[row]))
        assert revealed or not again
        steps.append((revealed, float(step.mask_rate[row]), again))
    while steps and not steps[-1][0]:
        steps.pop()  # other rows had more
    assert all(revealed for revealed, _, _ in steps)  # a row's passes come first, without holes
    return steps


def _places(masked: Tensor) -> list[int]:
    return masked.nonzero().flatten().tolist()


def assert_same_steps(steps: Sequence[Step], expected: Sequence[Step]) -> None:
    assert [(revealed, again) for revealed, _, again in steps] == [(r, a) for r, _, a in expected]
    assert [rate for _, rate, _ in steps] == pytest.approx([rate for _, rate, _ in expected], abs=1e-12)


EXACT_ONCE = [
    *(FirstHitting(), FirstHitting(2), FirstHitting(3), FirstHitting(100)),
    *(FirstHitting(lean=0.9), FirstHitting(2, lean=0.9), FirstHitting(lean=1e6)),
    *(Ancestral(steps, schedule) for steps in (1, 5, 5000) for schedule in SCHEDULES),
]


@pytest.mark.parametrize("rule", EXACT_ONCE, ids=str)
@few
@given(any_blocks())
def test_every_hidden_place_is_revealed_once_and_no_other(rule, blocks):
    for row, masked in enumerate(blocks.masked):
        revealed = [place for places, _, _ in passes(rule, blocks, row) for place in places]
        assert sorted(revealed) == _places(masked)


@pytest.mark.parametrize("rule", [*EXACT_ONCE[:6], Ancestral(5), Remasking(steps=7, eta=0.7)], ids=str)
@few
@given(any_blocks())
def test_a_row_has_the_same_plan_alone_and_in_a_batch(rule, blocks):
    for row in range(len(blocks.seeds)):
        assert passes(rule, blocks, row) == passes(rule, blocks.row(row), 0)


@pytest.mark.parametrize("k", [1, 2, 3])
@given(any_blocks())
def test_first_hitting_reveals_so_many_a_pass_from_the_latest_time_down(k, blocks):
    for row, masked in enumerate(blocks.masked):
        rates = blocks.rates(row)
        order = sorted(_places(masked), key=lambda place: -rates[place])
        expected: list[Step] = [
            (set(order[i : i + k]), rates[order[i]], set()) for i in range(0, len(order), k)
        ]
        assert_same_steps(passes(FirstHitting(k), blocks, row), expected)


@pytest.mark.parametrize("lean", [0.4, 2.0])
@pytest.mark.parametrize("k", [1, 2])
@given(any_blocks())
def test_a_lean_lets_the_clocks_of_the_left_run_faster(k, lean, blocks):
    """A place is revealed at −log(u) over its rate; the mask rate is that of its own number."""
    for row, masked in enumerate(blocks.masked):
        rates = blocks.rates(row)
        order = sorted(_places(masked), key=lambda place: -math.log(rates[place]) * math.exp(lean * place))
        expected: list[Step] = [
            (set(order[i : i + k]), rates[order[i]], set()) for i in range(0, len(order), k)
        ]
        assert_same_steps(passes(FirstHitting(k, lean), blocks, row), expected)


@given(any_blocks())
def test_a_large_lean_is_left_to_right(blocks):
    for row, masked in enumerate(blocks.masked):
        for lean in (200.0, 1e6):
            revealed = [places for places, _, _ in passes(FirstHitting(lean=lean), blocks, row)]
            assert revealed == [{place} for place in _places(masked)]


def test_leaning_orders_are_as_likely_as_they_should_be():
    """The second of four places is given: Plackett–Luce of the others."""
    rows, masked, lean = 20_000, [0, 2, 3], 0.9
    mask = torch.zeros(rows, 4, dtype=torch.bool)
    mask[:, masked] = True
    plan = FirstHitting(lean=lean).plan(torch.arange(rows), torch.arange(4).expand(rows, 4), mask)
    orders = Counter(map(tuple, torch.cat([step.places for step in plan], 1).tolist()))
    for other, fits in ((lean, True), (lean + 0.2, False)):
        law = law_of_orders(masked, other)
        p = stats.chisquare([orders[order] for order in law], [rows * p for p in law.values()]).pvalue
        assert (p > 1e-3) if fits else (p < 1e-6)


@pytest.mark.parametrize("rule", [FirstHitting(), FirstHitting(lean=0.3)], ids=str)
def test_hitting_times_do_not_depend_on_where_a_block_begins(rule):
    """A place given in advance, or a block cut in two, leaves the order of the others as it was."""
    positions = torch.arange(8).unsqueeze(0)
    everything = Blocks(torch.tensor([5]), positions, torch.ones(1, 8, dtype=torch.bool))
    some = torch.tensor([[True, False, True, True, False, True, True, False]])
    whole = [place for places, _, _ in passes(rule, everything, 0) for place in places]
    part = [p for ps, _, _ in passes(rule, Blocks(torch.tensor([5]), positions, some), 0) for p in ps]
    half = Blocks(torch.tensor([5]), positions[:, 4:], everything.masked[:, 4:])
    assert whole != sorted(whole)
    assert part == [place for place in whole if some[0, place]]
    assert [place for places, _, _ in passes(rule, half, 0) for place in places] == [
        place - 4 for place in whole if place >= 4
    ]


def mask_rate(schedule: NoiseSchedule, t: float) -> float:
    return float(schedule.mask_rate(torch.tensor(t, dtype=torch.float64)))


def ancestral_by_hand(rule: Ancestral, rates: Sequence[float], masked: Sequence[int]) -> list[Step]:
    """Step by step from t = 1 down; a token is revealed when the mask rate falls below its number."""
    steps: list[Step] = []
    still = set(masked)
    for j in range(rule.steps, 0, -1):
        rate_t, rate_s = (mask_rate(rule.schedule, i / rule.steps) for i in (j, j - 1))
        revealed = {place for place in still if rates[place] > rate_s}
        still -= revealed
        if revealed:
            steps.append((revealed, rate_t, set()))
    return steps


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("steps", [1, 3, 8, 50])
@few
@given(any_blocks())
def test_ancestral_steps_are_those_of_a_plain_loop_over_all_steps(schedule, steps, blocks):
    rule = Ancestral(steps, schedule)
    for row, masked in enumerate(blocks.masked):
        expected = ancestral_by_hand(rule, blocks.rates(row), _places(masked))
        assert_same_steps(passes(rule, blocks, row), expected)


def test_many_ancestral_steps_are_first_hitting_steps():
    blocks = Blocks(torch.arange(20), torch.arange(6).expand(20, 6), torch.ones(20, 6, dtype=torch.bool))
    for row in range(20):
        many, exact = (passes(rule, blocks, row) for rule in (Ancestral(10**7), FirstHitting()))
        assert [revealed for revealed, _, _ in many] == [revealed for revealed, _, _ in exact]
        assert [rate for _, rate, _ in many] == pytest.approx([rate for _, rate, _ in exact], abs=1e-6)


def remasking_by_hand(rule: Remasking, blocks: Blocks, row: int) -> list[Step]:
    """ReMDM as it is written, one step and one token after the other."""
    here = blocks.seeds[row], blocks.positions[row], Purpose.REMASK, 1
    chance = [counter_uniform(*here, repeat=j)[:, 0].tolist() for j in range(rule.steps)]
    alpha = [1 - mask_rate(rule.schedule, 1 - j / rule.steps) for j in range(rule.steps + 1)]
    mine = _places(blocks.masked[row])
    masked, steps = set(mine), []
    for j in range(rule.steps):
        alpha_t, alpha_s = alpha[j], alpha[j + 1]
        sigma = rule.eta * (min(1, (1 - alpha_s) / alpha_t) if alpha_t > 1e-12 else 1)
        revealed, again = set(), set()
        for place in mine:
            if place in masked:
                last = j == rule.steps - 1  # where 1 − α_t cancels and everything is revealed
                if last or chance[j][place] <= (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t):
                    revealed.add(place)
            elif chance[j][place] < sigma:
                again.add(place)
        masked = masked - revealed | again
        if revealed:
            steps.append((revealed, 1 - alpha_t, again))
        elif again:
            steps[-1] = (*steps[-1][:2], steps[-1][2] | again)  # no pass of its own
    assert not masked
    return steps


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("steps", "eta"), [(1, 0.5), (2, 1.0), (6, 0.0), (6, 0.3), (20, 1.0)])
@few
@given(any_blocks())
def test_remasking_is_a_plain_loop_over_its_steps(schedule, steps, eta, blocks):
    rule = Remasking(steps=steps, eta=eta, schedule=schedule)
    for row in range(len(blocks.seeds)):
        assert_same_steps(passes(rule, blocks, row), remasking_by_hand(rule, blocks, row))


@given(any_blocks(), st.integers(1, 12), st.sampled_from([0.0, 0.2, 1.0]))
def test_remasking_leaves_nothing_masked_and_hides_only_what_it_revealed(blocks, steps, eta):
    for row, masked in enumerate(blocks.masked):
        still, plan = set(_places(masked)), passes(Remasking(steps=steps, eta=eta), blocks, row)
        for revealed, _, again in plan:
            assert revealed <= still
            still -= revealed
            assert not again & still
            assert again <= set(_places(masked))
            still |= again
        assert not still
        assert len(plan) <= steps
        assert eta > 0 or sum(len(revealed) for revealed, _, _ in plan) == masked.sum()


def test_remasking_does_hide_tokens():
    blocks = Blocks(torch.arange(50), torch.arange(4).expand(50, 4), torch.ones(50, 4, dtype=torch.bool))
    plans = [passes(Remasking(steps=10, eta=0.5), blocks, row) for row in range(50)]
    assert sum(len(again) for plan in plans for _, _, again in plan) > 50


def test_a_plan_of_remasking_costs_no_more_than_its_steps():
    """Eight times the steps, of which nearly all reveal something: about eight times the work."""
    everything = torch.arange(2), torch.arange(32).expand(2, 32), torch.ones(2, 32, dtype=torch.bool)
    counts, work = [], []
    for steps in (40, 320):
        with Work() as done:
            counts.append(len(list(Remasking(steps=steps, eta=1.0).plan(*everything))))
        work.append(done.elements)
    assert counts[0] > 30
    assert counts[1] > 240
    assert work[1] < 10 * work[0]


class Work(TorchDispatchMode):
    """How many elements all operations inside it wrote."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple) else (result,)
        self.elements += sum(output.numel() for output in outputs if isinstance(output, Tensor))
        return result


@pytest.mark.parametrize("rule", [*EXACT_ONCE, Remasking(steps=1), Remasking(steps=7, eta=0.7)], ids=str)
def test_where_nothing_is_hidden_there_is_no_pass(rule):
    """As in blocks that are given between two gaps."""
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    assert list(rule.plan(torch.arange(3), torch.arange(4).expand(3, 4), nothing)) == []


# --- rules that look at the distributions ---


def rows_of(places: Tensor) -> list[list[int]]:
    return [_places(row) for row in places]


@st.composite
def eighths(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Distributions over 4 tokens in eighths, so that ties are frequent; tokens; masked places."""
    rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    cuts = draw(
        st.lists(st.lists(st.integers(0, 8), min_size=3, max_size=3), min_size=rows * n, max_size=rows * n)
    )
    p = [[b - a for a, b in zip([0, *sorted(cut)], [*sorted(cut), 8], strict=True)] for cut in cuts]
    log_p = (torch.tensor(p, dtype=torch.float64) / 8).log().view(rows, n, 4)
    bits = draw(st.lists(st.booleans(), min_size=rows * n, max_size=rows * n))
    return log_p, log_p.argmax(-1), torch.tensor(bits).view(rows, n)


@given(eighths(), st.sampled_from([None, 0.3, 0.5, 0.6, 1.0]), st.integers(1, 4))
def test_the_most_confident_are_those_of_a_plain_sort(drawn_from, threshold, k):
    log_p, drawn, masked = drawn_from
    chosen = MostConfident(threshold=threshold, tokens_per_pass=k).choose(log_p, drawn, masked)
    for row, places in enumerate(rows_of(masked)):
        confidence = {p: round(8 * math.exp(log_p[row, p, drawn[row, p]])) / 8 for p in places}
        likeliest = sorted(places, key=lambda p: (-confidence[p], p))[:k]  # the earlier of two equals
        sure = [p for p in places if threshold is not None and confidence[p] >= threshold]
        assert _places(chosen[row]) == sorted({*likeliest, *sure})


def test_confidence_is_that_of_the_token_drawn_not_of_the_likeliest():
    log_p = torch.tensor([[[0.9, 0.1], [0.4, 0.6]]], dtype=torch.float64).log()
    masked = torch.ones(1, 2, dtype=torch.bool)
    rule = MostConfident()
    assert rows_of(rule.choose(log_p, torch.tensor([[0, 1]]), masked)) == [[0]]
    assert rows_of(rule.choose(log_p, torch.tensor([[1, 1]]), masked)) == [[1]]


@pytest.mark.parametrize("threshold", [0.5, 0.5 + 1e-7, 0.5 - 1e-7])
@pytest.mark.parametrize(("nearly", "sure"), [(-1e-8, False), (0.0, True), (1e-8, True)])
def test_the_threshold_is_compared_with_the_confidence_itself(threshold, nearly, sure):
    """However near: the grid is for the order alone."""
    p = torch.tensor([0.9, threshold + nearly], dtype=torch.float64)
    log_p = torch.stack((p, 1 - p), -1).log().unsqueeze(0)
    if nearly == 0.0:
        threshold = float(log_p[0, 1, 0].exp())  # as it is after the logarithm
    drawn, masked = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.bool)
    chosen = MostConfident(threshold=threshold).choose(log_p, drawn, masked)
    assert rows_of(chosen) == [[0, 1] if sure else [0]]


def entropy_bound_by_hand(log_p: Tensor, places: Sequence[int], bound: float) -> list[int]:
    """The longest run of least entropies whose sum, less the largest of them, is within the bound."""
    entropy = {p: -sum(math.exp(x) * x for x in log_p[p].tolist() if x > -math.inf) for p in places}
    order = sorted(places, key=lambda p: (round(entropy[p], 9), p))
    best: list[int] = []
    for size in range(1, len(order) + 1):
        run = [entropy[p] for p in order[:size]]
        if sum(run) - max(run) <= bound:
            best = order[:size]
    return sorted(best)


@given(eighths(), st.sampled_from([0.0, 0.31, 0.71, 1.23, 2.57, 100.0, math.inf]))
def test_the_entropy_bound_is_its_definition(drawn_from, bound):
    log_p, drawn, masked = drawn_from
    chosen = EntropyBound(bound).choose(log_p, drawn, masked)
    for row, places in enumerate(rows_of(masked)):
        with_rounding = bound + 1e-6
        assert _places(chosen[row]) == entropy_bound_by_hand(log_p[row], places, with_rounding)


@pytest.mark.parametrize(("bound", "chosen"), [(0.0, 1), (0.7, 2), (1.4, 3), (2.1, 4), (2.0, 3)])
def test_equal_entropies_are_revealed_from_the_left_as_far_as_the_bound_goes(bound, chosen):
    """Four fair coins of log 2 nats: k of them cost (k − 1) log 2."""
    log_p = torch.full((1, 4, 2), math.log(0.5), dtype=torch.float64)
    masked = torch.ones(1, 4, dtype=torch.bool)
    places = EntropyBound(bound).choose(log_p, torch.zeros(1, 4, dtype=torch.long), masked)
    assert _places(places[0]) == list(range(chosen))


@given(eighths(), st.integers(0, 10**6))
def test_adaptive_rules_always_reveal_something_hidden_and_nothing_else(drawn_from, seed):
    log_p, _, masked = drawn_from
    drawn = torch.randint(0, 4, masked.shape, generator=torch.Generator().manual_seed(seed))
    for rule in (MostConfident(threshold=1.0), MostConfident(tokens_per_pass=2), EntropyBound(0.0)):
        for dtype in (torch.float32, torch.float64):
            chosen = rule.choose(log_p.to(dtype), drawn, masked)
            assert not (chosen & ~masked).any()
            assert torch.equal(chosen.any(1), masked.any(1))


@pytest.mark.parametrize("rule", [MostConfident(tokens_per_pass=2), EntropyBound(0.5)], ids=str)
def test_the_last_bit_of_a_probability_decides_nothing(rule):
    """Two places that are alike, computed in another order: the same is revealed."""
    generator = torch.Generator().manual_seed(0)
    log_p = torch.log_softmax(torch.randn(1, 1, 50, generator=generator, dtype=torch.float64), -1)
    alike = log_p.repeat(1, 5, 1)
    nudged = alike + 1e-9 * torch.randn(alike.shape, generator=generator, dtype=torch.float64)
    masked, drawn = torch.ones(1, 5, dtype=torch.bool), torch.full((1, 5), 7)
    assert rows_of(rule.choose(alike, drawn, masked)) == rows_of(rule.choose(nudged, drawn, masked))


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FirstHitting(0), "tokens_per_pass must be at least 1, got 0"),
        (lambda: FirstHitting(lean=-0.1), "lean must be a number from 0 to 1e6, got -0.1"),
        (lambda: FirstHitting(lean=True), "lean must be a number from 0 to 1e6, got True"),
        (lambda: FirstHitting(lean="abc"), "lean must be a number from 0 to 1e6, got 'abc'"),
        (lambda: FirstHitting(lean=math.nan), "lean must be a number from 0 to 1e6, got nan"),
        (lambda: FirstHitting(lean=math.inf), "lean must be a number from 0 to 1e6, got inf"),
        (lambda: Ancestral(0), "steps must be at least 1, got 0"),
        (lambda: Remasking(steps=0), "steps must be at least 1, got 0"),
        (lambda: Remasking(steps=3, eta=-0.1), r"eta must lie in \[0, 1\], got -0.1"),
        (lambda: Remasking(steps=3, eta=1.1), r"eta must lie in \[0, 1\], got 1.1"),
        (lambda: Remasking(steps=3, eta=math.nan), r"eta must lie in \[0, 1\], got nan"),
        (lambda: MostConfident(threshold=0.0), r"threshold must lie in \(0, 1\], got 0.0"),
        (lambda: MostConfident(threshold=1.5), r"threshold must lie in \(0, 1\], got 1.5"),
        (lambda: MostConfident(threshold=math.nan), r"threshold must lie in \(0, 1\], got nan"),
        (lambda: MostConfident(tokens_per_pass=0), "tokens_per_pass must be at least 1, got 0"),
        (lambda: EntropyBound(-1.0), "bound must not be negative, got -1.0"),
        (lambda: EntropyBound(math.nan), "bound must not be negative, got nan"),
        *(
            (partial(make, value), rf"{name} must be a whole number, got {value!r}")
            for make, name in (
                (FirstHitting, "tokens_per_pass"),
                (lambda value: MostConfident(tokens_per_pass=value), "tokens_per_pass"),
                (Ancestral, "steps"),
                (lambda value: Remasking(steps=value), "steps"),
            )
            for value in (1.5, "2", None, True, math.nan, math.inf)
        ),
        (lambda: Remasking(steps=3, eta="0.1"), r"eta must lie in \[0, 1\], got '0.1'"),
        (lambda: MostConfident(threshold="0.9"), r"threshold must lie in \(0, 1\], got '0.9'"),
        (lambda: MostConfident(threshold=True), r"threshold must lie in \(0, 1\], got True"),
        (lambda: EntropyBound("1"), "bound must be a number of nats, got '1'"),
        (lambda: EntropyBound(None), "bound must be a number of nats, got None"),
    ],
)
def test_impossible_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_may_be_numpys():
    assert FirstHitting(np.int64(2)) == FirstHitting(2)
    assert Ancestral(np.int32(7)) == Ancestral(7)
    assert MostConfident(threshold=np.float32(0.5)).threshold == 0.5
