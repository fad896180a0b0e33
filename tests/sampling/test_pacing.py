"""Simulated rounds, whose costs and drafts are known: the number chosen is about the best there is."""

import random
from collections.abc import Callable

import pytest

from bd3lm.sampling.pacing import NUMBERS, Pacing

Seconds = Callable[[int, int], float]
"""Of a round of so many texts with so many drafts."""

COSTS: dict[str, Seconds] = {
    "drafts are free": lambda rows, drafts: 1.0,
    "drafts cost as much as tokens": lambda rows, drafts: rows * (1.0 + 2.0 * drafts),
    "drafts cost a little": lambda rows, drafts: 1.0 + 0.15 * drafts,
    "drafts are free for few texts": lambda rows, drafts: max(1.0, rows * (1 + drafts) / 24),
    "speculation costs something by itself": lambda rows, drafts: 1.0 + 0.3 * (drafts > 0) + 0.02 * drafts,
}
CHANCES = {"good": [0.8, 0.75, 0.7, 0.7, 0.6, 0.6, 0.5, 0.5], "poor": [0.3] * 8, "none": [0.0] * 8}


def tokens_of(chances: list[float], drafts: int) -> float:
    tokens = reached = 1.0
    for chance in chances[:drafts]:
        reached *= chance
        tokens += reached
    return tokens


def rounds(
    pacing: Pacing, rows: int, number: int, seconds: Seconds, chances: list[float], chance: random.Random
) -> tuple[float, float]:
    """Tokens of a text, and seconds, of so many rounds; times are off by a tenth, now and then doubled."""
    tokens = spent = 0.0
    for _ in range(number):
        drafts = pacing.choose(rows)
        asked, right = [0] * pacing.most, [0] * pacing.most
        for _ in range(rows):
            for place in range(drafts):
                asked[place] += 1
                if chance.random() >= chances[place]:
                    break
                right[place] += 1
        took = seconds(rows, drafts)
        noise = chance.uniform(0.9, 1.1) * (2.0 if chance.random() < 0.03 else 1.0)
        pacing.note(rows, drafts, took * noise, asked, right)
        tokens += 1 + sum(right) / rows
        spent += took
    return tokens, spent


@pytest.mark.parametrize("chances", CHANCES.values(), ids=CHANCES)
@pytest.mark.parametrize("seconds", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("rows", [1, 16])
def test_it_is_nearly_as_fast_as_the_best_number(rows: int, seconds: Seconds, chances: list[float]) -> None:
    """And never more than 3 % slower than none, once it is settled; it starts without knowing anything."""
    chance, pacing = random.Random(1), Pacing(8)
    rounds(pacing, rows, 100, seconds, chances, chance)
    tokens, spent = rounds(pacing, rows, 3000, seconds, chances, chance)
    best = max(tokens_of(chances, drafts) / seconds(rows, drafts) for drafts in NUMBERS)
    assert tokens / spent > 0.92 * best
    assert tokens / spent > 0.97 / seconds(rows, 0)


def test_what_is_known_of_some_batches_is_where_others_begin() -> None:
    """A batch that shrinks does not try all numbers again for each of its sizes."""
    chance, pacing = random.Random(2), Pacing(6)
    seconds = COSTS["drafts cost as much as tokens"]
    rounds(pacing, 32, 200, seconds, CHANCES["poor"], chance)
    assert pacing.choose(32) == 0
    for rows in range(31, 0, -1):
        assert pacing.choose(rows) == 0
        rounds(pacing, rows, 3, seconds, CHANCES["poor"], chance)


def test_drafts_that_become_good_are_used_again() -> None:
    """Of a model that says nothing of use at first, now and then drafts are tried."""
    chance, pacing = random.Random(3), Pacing(4)
    seconds = COSTS["drafts cost a little"]
    rounds(pacing, 4, 500, seconds, CHANCES["none"], chance)
    assert pacing.choose(4) == 0
    rounds(pacing, 4, 4000, seconds, CHANCES["good"], chance)
    assert pacing.choose(4) >= 2


def test_it_begins_with_none_and_goes_up_while_that_seems_to_pay() -> None:
    """Times that say nothing of later ones, as of passes that are being compiled, are not counted."""
    pacing, chosen = Pacing(8), []
    for _ in range(30):
        drafts = pacing.choose(1)
        chosen.append(drafts)
        is_first = chosen.count(drafts) == 1
        asked = [1] * min(drafts, 2) + [0] * 8
        right = [1] * min(drafts, 1) + [0] * 8  # none after the first
        pacing.note(1, drafts, None if is_first else 1.0 + 0.5 * drafts, asked, right)
    assert chosen[:8] == [0] * 4 + [1] * 4
    assert 8 not in chosen
    assert pacing.choose(1) == 1


def test_candidates_without_drafts_behind_them_end_a_round() -> None:
    """Half of all right drafts are such, so that the second place is reached half as often as the first."""
    pacing = Pacing(2)
    pacing.note(1, 2, 1.0, [1000, 400], [800, 320])
    assert pacing.expected(2) == pytest.approx(1 + 0.8 + 0.4 * 0.8, abs=0.01)
    pacing.note(1, 1, 1.0, [1000, 0], [800, 0])  # says nothing of the second
    assert pacing.expected(2) == pytest.approx(1 + 0.8 + 0.4 * 0.8, abs=0.01)
