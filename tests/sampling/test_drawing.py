"""Drawing a token: sharpened in the order it says, with noise of its own seed, position and turn."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from bd3lm.diffusion import subs_at_masks
from bd3lm.sampling import RowSharpening, Sharpening


def random_log_p(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)


def sharpened_by_hand(p: list[float], rule: Sharpening) -> list[float]:
    """Temperature, then the k likeliest, then the nucleus, each on what the one before left."""
    p = [x ** (1 / rule.temperature) for x in p]
    order = sorted(range(len(p)), key=lambda v: -p[v])[: rule.top_k]
    total = sum(p[v] for v in order)
    kept, mass = [], 0.0
    for v in order:
        if rule.top_p_rule == "inclusive":
            stays = mass < rule.top_p
        else:
            stays = mass + p[v] / total <= rule.top_p
        mass += p[v] / total
        if rule.top_p == 1.0 or stays or not kept:
            kept.append(v)
    total = sum(p[v] for v in kept)
    return [p[v] / total if v in kept else 0.0 for v in range(len(p))]


RULES = [
    Sharpening(),
    Sharpening(temperature=0.5),
    Sharpening(temperature=3.0),
    Sharpening(top_k=1),
    Sharpening(top_k=3),
    Sharpening(top_k=100),
    Sharpening(top_p=0.8),
    Sharpening(top_p=0.8, top_p_rule="exclusive"),
    Sharpening(temperature=2.0, top_k=4, top_p=0.7),
    Sharpening(temperature=0.7, top_k=5, top_p=0.9, top_p_rule="exclusive"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_sharpening_is_temperature_then_top_k_then_nucleus(rule, seed):
    log_p = random_log_p(2, 3, 7, seed=seed)
    sharp = rule(log_p).exp()
    for row, place in product(range(2), range(3)):
        expected = sharpened_by_hand(log_p[row, place].exp().tolist(), rule)
        assert sharp[row, place].tolist() == pytest.approx(expected, abs=1e-12)


def test_by_default_nothing_changes():
    log_p = random_log_p(2, 3, 7)
    assert torch.equal(Sharpening()(log_p), log_p)


@pytest.mark.parametrize("rule", [Sharpening(), Sharpening(temperature=2.0, top_k=4, top_p=0.7)], ids=str)
def test_tokens_follow_the_sharpened_distribution(rule):
    log_p, draws = random_log_p(7), 20_000
    tokens = rule.rows().draw(log_p.expand(draws, 1, 7), torch.arange(draws), torch.tensor([[3]]))
    expected = draws * torch.tensor(sharpened_by_hand(log_p.exp().tolist(), rule), dtype=torch.float64)
    counts = tokens.flatten().bincount(minlength=7)
    assert not counts[expected == 0].any()
    possible = expected > 0
    assert stats.chisquare(counts[possible].numpy(), expected[possible].numpy()).pvalue > 1e-3


def test_the_likeliest_token_alone_needs_no_luck():
    log_p = random_log_p(4, 5, 7)
    tokens = Sharpening(top_k=1).rows().draw(log_p, torch.arange(4), torch.arange(5).expand(4, 5))
    assert torch.equal(tokens, log_p.argmax(-1))


def test_a_token_depends_on_its_own_seed_position_and_turn_alone():
    log_p, seeds = random_log_p(3, 4, 50), torch.tensor([5, -9, 2**62])
    positions = torch.tensor([[0, 1, 2, 3], [7, 5, 3, 1], [10, 20, 30, 40]])
    for repeat in (0, 1, 7):
        batch = Sharpening().rows().draw(log_p, seeds, positions, repeat=repeat)
        for row, place in product(range(3), range(4)):
            alone = (
                Sharpening()
                .rows()
                .draw(
                    log_p[row, place].view(1, 1, 50),
                    seeds[row].view(1),
                    positions[row, place].view(1, 1),
                    repeat=repeat,
                )
            )
            assert alone.item() == batch[row, place]


def test_seeds_positions_and_turns_draw_independently():
    """Fair draws from 100 tokens: two streams agree in about one of a hundred."""
    log_p = torch.full((1, 1000, 100), -math.log(100))
    here = torch.arange(1000).unsqueeze(0)
    first = Sharpening().rows().draw(log_p, torch.tensor([1]), here)
    for seed, positions, repeat in ((2, here, 0), (1, here + 1, 0), (1, here, 1), (1, here, 2)):
        other = Sharpening().rows().draw(log_p, torch.tensor([seed]), positions, repeat=repeat)
        assert (first == other).sum() < 30


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_logits_are_drawn_from_without_the_mask(rule):
    logits = random_log_p(3, 4, 7) + 5.0
    logits[..., 2] = 9.0  # the mask
    seeds, positions = torch.arange(3), torch.arange(12).view(3, 4)
    expected = rule.rows().draw(subs_at_masks(logits, 2), seeds, positions, repeat=3)
    for repeat in (3, torch.tensor([3])):
        found = rule.rows().draw_logits(logits, 2, seeds, positions, repeat=repeat)
        assert torch.equal(found, expected)
        assert not (found == 2).any()


def test_each_row_of_a_batch_is_drawn_in_its_own_way():
    """To the last bit, whatever the others are, and whatever rows they were before."""
    logits, seeds = 3.0 * random_log_p(len(RULES), 4, 7), torch.arange(len(RULES))
    positions = torch.arange(4).expand(len(RULES), 4)
    rows = Sharpening().rows(len(RULES) + 1)
    rows.put(range(1, len(RULES) + 1), RowSharpening(RULES, "cpu"))
    rows.move(1 + 9, 0)
    rows.put([10], RULES[9].rows())
    for number in range(1, len(RULES) + 1):
        here = [9, *range(number - 1)]
        some = rows.first(number)
        found = some(logits[here]), some.draw_logits(logits[here], 2, seeds[here], positions[:number])
        for row, rule in enumerate(here):
            alone = RULES[rule].rows()
            one = logits[rule : rule + 1]
            assert torch.equal(found[0][row], alone(one)[0])
            assert torch.equal(found[0][row], RULES[rule](one)[0])
            expected = alone.draw_logits(one, 2, seeds[rule : rule + 1], positions[:1])
            assert torch.equal(found[1][row], expected[0])


def test_impossible_tokens_are_never_drawn():
    log_p = torch.full((1000, 1, 4), -math.inf)
    log_p[..., 1] = 0.0
    drawn = Sharpening(temperature=0.5, top_p=0.9).rows().draw(log_p, torch.arange(1000), torch.tensor([[0]]))
    assert (drawn == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature must lie in \[0\.001, 1000\], .* got -1\.0"),
        ({"temperature": math.inf}, r"temperature must lie in \[0\.001, 1000\], .* got inf"),
        ({"temperature": math.nan}, r"temperature must lie in \[0\.001, 1000\], .* got nan"),
        ({"temperature": 1e-40}, r"temperature must lie in \[0\.001, 1000\], or be 0, .* got 1e-40"),
        ({"temperature": 1e300}, r"temperature must lie in \[0\.001, 1000\], .* got 1e\+300"),
        ({"temperature": 0.0, "top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p must lie in \(0, 1\], got 1.01"),
        ({"top_p": math.nan}, r"top_p must lie in \(0, 1\], got nan"),
        ({"top_p_rule": "outer"}, "top_p_rule must be 'inclusive' or 'exclusive', got 'outer'"),
    ],
)
def test_impossible_sharpening_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sharpening(**options)


@pytest.mark.parametrize("others", [{}, {"top_k": 5}, {"top_p": 0.3, "top_p_rule": "exclusive"}], ids=str)
def test_the_temperature_0_takes_the_likeliest_token(others):
    log_p = torch.randn(50, 1, 9, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    drawn = Sharpening(temperature=0.0, **others).rows().draw(log_p, torch.arange(50), torch.tensor([[7]]))
    assert torch.equal(drawn, log_p.argmax(-1))


@pytest.mark.parametrize("mask_id", [0, 3, 6, 7, 9])
@pytest.mark.parametrize(
    "rule", [Sharpening(temperature=0.0), Sharpening(top_k=1, top_p=0.5, temperature=2.0)]
)
def test_the_likeliest_token_is_looked_up(rule, mask_id):
    """As drawn from what is left of the others, of equal logits too; the mask may lie past the vocabulary."""
    logits = torch.randint(-2, 3, (40, 3, 7), generator=torch.Generator().manual_seed(1)).double()
    seeds, positions = torch.arange(40), torch.arange(3).expand(40, 3)
    found = rule.rows().draw_logits(logits, mask_id, seeds, positions)
    assert torch.equal(found, rule.rows().draw(subs_at_masks(logits, mask_id), seeds, positions))
    for row, tokens in zip(logits.tolist(), found.tolist(), strict=True):
        for place, token in zip(row, tokens, strict=True):
            others = [value for at, value in enumerate(place) if at != mask_id]
            assert token != mask_id
            assert place[token] == max(others)
            assert max(others) not in [place[at] for at in range(token) if at != mask_id]
    logits[5, 1] = math.nan
    assert rule.rows().draw_logits(logits, mask_id, seeds, positions)[5, 1] == mask_id
