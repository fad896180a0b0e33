"""The noise that tokens are drawn with, and the noise level that a network is told."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform
from bd3lm.models import Layout
from bd3lm.sampling import (
    EntropyBound,
    MostConfident,
    Remasking,
    Request,
    TokenRevealed,
    sample,
    write,
)
from tests.oracles.networks import (
    Plain,
    log_probabilities,
)
from tests.sampling.loop_cases import (
    CONTEXT,
    TIMED,
    Counting,
    blocks,
    drawn,
    prompt,
    sliding,
    tokens,
)


class NoIdea(Plain):
    """A network to which all tokens are alike."""

    uses_noise = False
    device = torch.device("cpu")

    def __call__(self, tokens: Tensor, *, layout: Layout, **_: Any) -> Tensor:
        start, stop = layout.read
        return torch.zeros(len(tokens), stop - start, 1000, dtype=torch.float64)

    def head(self, states: Tensor) -> Tensor:
        return states


FLAT = log_probabilities(torch.zeros(1000, dtype=torch.float64))


def test_a_token_that_was_masked_again_is_drawn_with_fresh_noise():
    """Blocks of one, so that every reveal is a pass of its own: the k-th is drawn with the k-th noise."""
    rule = Remasking(steps=30, eta=1.0)
    writer = blocks(NoIdea(), block_size=1, unmasking=rule, cache=False)
    events = list(write(writer, [Request(prompt(0), seed, 4) for seed in range(5)], watch=True))
    turns = Counter()
    for event in events:
        if isinstance(event, TokenRevealed):
            turn = turns[event.index, event.position]
            assert event.token == drawn(FLAT, event.index, event.position, repeat=turn)
            turns[event.index, event.position] += 1
    assert set(turns) == {(index, position) for index in range(5) for position in range(4)}
    assert max(turns.values()) > 3


@pytest.mark.parametrize("rule", [MostConfident(), EntropyBound(0.0)], ids=str)
def test_a_token_that_was_not_revealed_is_drawn_again_with_fresh_noise(rule):
    """All tokens are equally likely, so these rules go from left to right, one place a pass."""
    (text,) = sample(blocks(NoIdea(), unmasking=rule, cache=False), [Request(prompt(0), 5, 10)])
    assert text.tokens.tolist() == [drawn(FLAT, 5, place, repeat=place % 4) for place in range(10)]


def noise_at(rate: float) -> float:
    """−log α, as if a thousandth of the text were always clean."""
    return -math.log(max(1 - rate, 1e-3))


def hitting_rates(seed: int, *positions: int) -> list[float]:
    """In the order in which they are hit."""
    rates = counter_uniform(torch.tensor(seed), torch.tensor(positions), Purpose.ORDER, 1)
    return sorted(rates[:, 0].tolist(), reverse=True)


def assert_told(network: Counting, expected: list[list[float]]) -> None:
    assert [len(noise[0]) for noise in network.told] == [len(noise) for noise in expected]
    for noise, wanted in zip(network.told, expected, strict=True):
        assert noise[0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_network_that_is_told_the_time_is_told_that_finished_text_has_no_noise():
    """Two blocks of the prompt, then the third with a gap, two given blocks, the last one with a gap."""
    network = Counting(TIMED)
    given = torch.cat((prompt(12), tokens("_1_0 1310 0131 _")))
    sample(blocks(network), [Request(given, 3, 25)])
    first, second = (noise_at(rate) for rate in hitting_rates(3, 12, 14))
    (last,) = (noise_at(rate) for rate in hitting_rates(3, 24))
    clean = [0.0] * 4
    assert_told(network, [clean * 2, clean + [first] * 4, [second] * 4, clean, clean, clean + [last] * 4])


def test_a_network_that_is_told_the_time_is_told_as_much_without_the_cache():
    network = Counting(TIMED)
    sample(blocks(network, cache=False), [Request(torch.cat((prompt(4), tokens("_1_0"))), 3, 8)])
    assert_told(network, [[0.0] * 4 + [noise_at(rate)] * 4 for rate in hitting_rates(3, 4, 6)])


def test_rules_without_a_time_tell_what_part_of_the_block_is_hidden():
    network = Counting(TIMED)
    writer = blocks(network, unmasking=MostConfident(), cache=False)
    sample(writer, [Request(tokens("_1"), 3, 4)])
    assert_told(network, [[noise_at(rate)] * 4 for rate in (0.75, 0.5, 0.25)])
    network.told.clear()
    sample(writer, [Request(prompt(0), 3, 4)])
    assert_told(network, [[noise_at(rate)] * 4 for rate in (1.0, 0.75, 0.5, 0.25)])


def test_rules_without_a_time_count_the_masks_past_the_end_which_the_network_sees():
    network = Counting(TIMED)
    writer = blocks(network, unmasking=MostConfident(), cache=False)
    sample(writer, [Request(prompt(0), 3, 2), Request(tokens("_1"), 3, 3)], batch_size=1)
    assert_told(network, [[noise_at(rate)] * 4 for rate in (1.0, 0.75, 0.75, 0.5)])
    network.told.clear()
    sample(sliding(network, unmasking=MostConfident()), [Request(prompt(4), 3, 6)])
    told = [noise.item() for noise in network.told]
    assert told == pytest.approx([noise_at(rate) for rate in (8 / 12, 7 / 12)], rel=1e-6)


def test_a_whole_context_is_told_one_time():
    network = Counting(TIMED)
    sample(sliding(network), [Request(prompt(10), 3, CONTEXT)])
    told = [noise.item() for noise in network.told]
    assert told == pytest.approx([noise_at(rate) for rate in hitting_rates(3, 10, 11)], rel=1e-6)
