"""The counter: bit for bit against SplitMix64 in Python integers; streams that do not touch."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bd3lm.diffusion import Purpose, counter_uniform, derive_seed

pytestmark = pytest.mark.sweep(3)

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15

every_purpose = pytest.mark.parametrize("purpose", list(Purpose), ids=lambda p: p.name)


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator: add the golden ratio, mix."""
    return [mix((state + i * GOLDEN) % WORD) for i in range(1, count + 1)]


def expected_uniforms(seed: int, position: int, purpose: int, entries: int) -> list[float]:
    """The mixed seed, advanced by a word that holds position and purpose, starts a SplitMix64 stream."""
    word = 4 * position + purpose
    key = mix((mix(seed % WORD) + (word + 1) * GOLDEN) % WORD)
    return [((w >> 12) + 0.5) / 2**52 for w in splitmix64(key, entries)]


def uniforms(seed: int, position: int, purpose: Purpose, entries: int, repeat: int = 0) -> torch.Tensor:
    return counter_uniform(torch.tensor(seed), torch.tensor(position), purpose, entries, repeat=repeat)


def test_the_oracle_gives_the_published_sequence() -> None:
    assert splitmix64(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@every_purpose
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_every_number_equals_the_big_integer_one(purpose: Purpose, seed: int, position: int) -> None:
    assert uniforms(seed, position, purpose, 5).tolist() == expected_uniforms(seed, position, int(purpose), 5)


@pytest.mark.parametrize(
    ("seed", "position", "purpose", "numbers"),
    [
        (0, 0, Purpose.TOKEN, [0.6524484863740322, 0.7012121095215252]),
        (0, 0, Purpose.ORDER, [0.27623358227789463, 0.21586845960432577]),
        (1234, 567, Purpose.TOKEN, [0.025401093620413095, 0.5844230990562863]),
        (-1, 2**40, Purpose.ORDER, [0.6181488654420518, 0.023260976844724612]),
    ],
)
def test_a_number_drawn_once_never_changes(
    seed: int, position: int, purpose: Purpose, numbers: list[float]
) -> None:
    """What a seed means must not change: these were computed before a number could be drawn again."""
    assert uniforms(seed, position, purpose, 2).tolist() == numbers
    unsaid = counter_uniform(torch.tensor(seed), torch.tensor(position), purpose, 2)
    assert unsaid.tolist() == numbers


@every_purpose
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40 - 1), st.integers(0, 2**20))
def test_a_number_drawn_again_is_that_of_a_position_beyond_all_texts(
    purpose: Purpose, seed: int, position: int, repeat: int
) -> None:
    again = uniforms(seed, position, purpose, 5, repeat)
    assert again.tolist() == expected_uniforms(seed, position + repeat * 2**40, int(purpose), 5)


def test_how_often_a_number_was_drawn_may_be_a_tensor() -> None:
    """One for all, as a graph replays it, or one for each position."""
    seed, positions = torch.tensor(5), torch.arange(4)
    turns = torch.tensor([0, 1, 7, 2**20])
    each = counter_uniform(seed, positions, Purpose.TOKEN, 6, repeat=turns)
    for place, turn in enumerate(turns.tolist()):
        assert torch.equal(each[place], uniforms(5, place, Purpose.TOKEN, 6, turn))
        for one in (torch.tensor(turn), torch.tensor([turn])):
            again = counter_uniform(seed, positions, Purpose.TOKEN, 6, repeat=one)
            assert torch.equal(again, counter_uniform(seed, positions, Purpose.TOKEN, 6, repeat=turn))


@every_purpose
def test_numbers_are_uniform(purpose: Purpose) -> None:
    assert stats.kstest(uniforms(3, 7, purpose, 50_000), "uniform").pvalue > 1e-3
    across_positions = counter_uniform(torch.tensor(3), torch.arange(50_000), purpose, 1)[:, 0]
    across_seeds = counter_uniform(torch.arange(50_000), torch.tensor(7), purpose, 1)[:, 0]
    across_repeats = torch.cat([uniforms(3, 7, purpose, 1, repeat) for repeat in range(2000)])
    for sample in (across_positions, across_seeds, across_repeats):
        assert stats.kstest(sample, "uniform").pvalue > 1e-3


@every_purpose
def test_low_bits_are_as_random_as_high_ones(purpose: Purpose) -> None:
    last_bits = ((uniforms(0, 0, purpose, 64_000) * 2**52).long() & 63).bincount(minlength=64)
    assert stats.chisquare(last_bits).pvalue > 1e-3


def test_streams_are_uncorrelated_at_every_lag() -> None:
    entries, lags = 4096, range(-3, 4)
    # Neighbours, where a weak mix would show.
    keys = product((0, 1, 2, -1), (0, 1, 2), Purpose, (0, 1, 2))
    streams = torch.stack([uniforms(s, p, purpose, entries, r) for s, p, purpose, r in keys]) - 0.5
    for lag in lags:
        correlation = 12 * streams @ streams.roll(lag, 1).T / entries
        if lag == 0:
            correlation.fill_diagonal_(0.0)
        assert correlation.abs().max() < 6 / entries**0.5


def test_no_two_streams_share_a_number() -> None:
    keys = product((0, 1, 5, -1, 2**62), (0, 1, 5, 2**40 - 1), Purpose, [500], (0, 1, 2, 1000))
    numbers = torch.cat([uniforms(*key) for key in keys])
    assert numbers.unique().numel() == numbers.numel()


@every_purpose
def test_a_row_draws_the_same_alone_or_in_a_batch(purpose: Purpose) -> None:
    seeds, positions = torch.tensor([5, 9, -3]), torch.tensor([[0, 4], [1, 2], [7, 7]])
    batch = counter_uniform(seeds[:, None], positions, purpose, 6)
    assert batch.shape == (3, 2, 6)
    for row, column in product(range(3), range(2)):
        alone = uniforms(int(seeds[row]), int(positions[row, column]), purpose, 6)
        assert torch.equal(batch[row, column], alone)


def test_the_first_entries_do_not_depend_on_how_many_are_asked_for() -> None:
    assert torch.equal(uniforms(1, 2, Purpose.TOKEN, 3), uniforms(1, 2, Purpose.TOKEN, 1000)[:3])


@given(st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]), st.integers(0, 2**31))
def test_numbers_are_odd_multiples_of_two_to_the_minus_53(seed: int, position: int) -> None:
    """So they are exact and neither 0 nor 1 can occur."""
    u = uniforms(seed, position, Purpose.TOKEN, 100)
    assert u.dtype == torch.float64
    assert (((u * 2**53) % 2) == 1).all()
    assert (u > 0).all()
    assert (u < 1).all()


def test_derived_seeds_are_told_apart_by_every_part() -> None:
    parts = [
        (),
        (0,),
        (1,),
        ("1",),
        (1, 2),
        (12,),
        (2, 1),
        ("a", "b"),
        ("ab",),
        (1, "masks", 7),
        (1, "masks", 8),
    ]
    seeds = [derive_seed(*p) for p in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))


def test_a_derived_seed_never_changes() -> None:
    """A run that is resumed by a later version must draw what it would have drawn."""
    assert derive_seed(1, "masks", 7) == 8882908330064653695


def test_a_derived_seed_is_of_the_number_whoever_made_it() -> None:
    assert derive_seed(np.int64(1), "masks", np.uint8(7)) == derive_seed(1, "masks", 7)
    assert derive_seed(True) != derive_seed(1)  # as ever
