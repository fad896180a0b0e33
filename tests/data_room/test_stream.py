"""The stream of batches: one permutation per epoch, the same for every caller, step and slice of rows."""

from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bd3lm.data import (
    BatchStream,
    TokenShards,
    WrappedTokens,
    byte_tokenizer,
    prepare,
)
from bd3lm.data.stream import permute
from tests.data_room.documents import run_python, small_corpus


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> WrappedTokens:
    folder = tmp_path_factory.mktemp("stream")
    return WrappedTokens(prepare(small_corpus(), byte_tokenizer(), folder), "train", 100)


# --- the permutation --------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_it_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(size), size, (seed, epoch))
    assert sorted(images.tolist()) == list(range(size))


@given(st.integers(2**20, 2**62), st.integers(0, 2**32), st.data())
def test_large_domains_need_no_memory_and_do_not_collide(size: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=50))
    images = permute(np.array(places, np.int64), size, (seed, 0))
    assert len(set(images.tolist())) == len(places)
    assert all(0 <= image < size for image in images.tolist())


def test_places_are_permuted_one_by_one() -> None:
    together = permute(np.arange(777), 777, (5, 1))
    assert [int(permute(np.array([place]), 777, (5, 1))[0]) for place in range(777)] == together.tolist()


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.slow
def test_every_permutation_of_a_few_is_as_likely(size: int) -> None:
    seen = Counter(tuple(permute(np.arange(size), size, (seed, 0)).tolist()) for seed in range(720))
    counts = [seen[order] for order in permutations(range(size))]
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_where_a_place_goes_is_uniform_over_keys(vary: str) -> None:
    size, places = 37, np.array([0, 1, 36])
    keys = [(key, 4) if vary == "seed" else (4, key) for key in range(740)]
    images = np.stack([permute(places, size, key) for key in keys])
    for column in images.T:
        assert stats.chisquare(np.bincount(column, minlength=size)).pvalue > 1e-3


def test_neighbors_are_separated() -> None:
    """Consecutive positions go to positions without order: serial correlation and monotone runs as by
    chance."""
    size = 100_003
    images = permute(np.arange(size), size, (1, 2))
    correlation = np.corrcoef(images[:-1], images[1:])[0, 1]
    assert abs(correlation) < 5 / size**0.5
    ups = (np.diff(images) > 0).mean()
    assert abs(ups - 0.5) < 5 * (1 / 12 / size) ** 0.5


def test_epochs_and_seeds_are_unrelated() -> None:
    size = 20_011
    orders = [permute(np.arange(size), size, key) for key in ((0, 0), (0, 1), (1, 0), (1, 1), (-1, 0))]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / size**0.5
            assert (one == other).sum() < 10


def test_the_permutation_never_changes() -> None:
    """A run that resumes with another version must read on where it stopped."""
    assert permute(np.arange(10), 10, (0, 0)).tolist() == [4, 0, 8, 9, 7, 1, 6, 3, 2, 5]
    assert permute(np.arange(5), 10**12, (42, 7)).tolist() == [
        995860604794,
        108771760241,
        53041313502,
        670907917227,
        792289965067,
    ]


def test_the_permutation_refuses_bad_arguments() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        permute(np.arange(0), 0, (0, 0))
    with pytest.raises(ValueError, match=r"places must lie in 0\.\.4, got 5"):
        permute(np.arange(6), 5, (0, 0))


# --- batches ----------------------------------------------------------------------------------------


def test_an_epoch_holds_every_sequence_once_and_epochs_have_no_seam(sequences: WrappedTokens) -> None:
    n = len(sequences)
    for rows in (1, 7, n, n + 3, 3 * n):
        stream = BatchStream(sequences, rows=rows, seed=11)
        steps = -(-4 * n // rows)
        indices = np.concatenate([stream.indices(step) for step in range(steps)])
        epochs = [indices[i * n : (i + 1) * n].tolist() for i in range(4)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 4


def test_the_order_does_not_depend_on_the_batch_size(sequences: WrappedTokens) -> None:
    flat = [
        np.concatenate(
            [BatchStream(sequences, rows=rows, seed=5).indices(step) for step in range(240 // rows)]
        )
        for rows in (1, 8, 60)
    ]
    assert flat[0].tolist() == flat[1].tolist() == flat[2].tolist()


def test_a_stream_goes_on_where_another_stopped(sequences: WrappedTokens) -> None:
    """Whatever the batch size of either."""
    whole, first = (BatchStream(sequences, rows=rows, seed=5) for rows in (1, 7))
    second = BatchStream(sequences, rows=12, seed=5, skip=7 * 10)
    parts = [*(first.indices(step) for step in range(10)), *(second.indices(step) for step in range(20))]
    flat = np.concatenate(parts)
    assert flat.tolist() == [int(whole.indices(step)[0]) for step in range(len(flat))]
    with pytest.raises(ValueError, match="skip must not be negative, got -1"):
        BatchStream(sequences, rows=1, seed=0, skip=-1)


def test_batches_hold_the_sequences(sequences: WrappedTokens) -> None:
    stream = BatchStream(sequences, rows=6, seed=3)
    batch = stream.batch(17)
    assert batch.tokens.shape == batch.scored.shape == (6, 100)
    assert batch.tokens.dtype == torch.int64
    assert batch.scored.all(0).tolist() == [False] + 99 * [True]
    assert batch.tokens.tolist() == sequences[stream.indices(17)].tolist()


@given(st.integers(0, 10**9), st.integers(1, 40), st.data())
def test_ranks_and_micro_batches_take_slices(
    sequences: WrappedTokens, step: int, rows: int, data: st.DataObject
) -> None:
    stream = BatchStream(sequences, rows=rows, seed=3)
    whole = stream.batch(step).tokens
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    assert torch.equal(stream.batch(step, slice(start, stop)).tokens, whole[start:stop])
    strided = slice(start, None, 3)
    assert torch.equal(stream.batch(step, strided).tokens, whole[strided])


def test_the_stream_has_no_state(sequences: WrappedTokens) -> None:
    stream = BatchStream(sequences, rows=4, seed=3)
    forwards = [stream.batch(step).tokens.tolist() for step in range(30)]
    again = BatchStream(sequences, rows=4, seed=3)
    backwards = [again.batch(step).tokens.tolist() for step in reversed(range(30))]
    assert forwards == backwards[::-1]


def test_different_seeds_give_different_orders(sequences: WrappedTokens) -> None:
    orders = {seed: BatchStream(sequences, rows=50, seed=seed).indices(0).tolist() for seed in (0, 1, 2, -1)}
    assert len(set(map(tuple, orders.values()))) == 4


def test_the_stream_refuses_bad_arguments(sequences: WrappedTokens) -> None:
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        BatchStream(sequences, rows=0, seed=0)
    with pytest.raises(ValueError, match="step must not be negative, got -1"):
        BatchStream(sequences, rows=1, seed=0).batch(-1)
    empty = WrappedTokens(sequences.shards, "valid", 10**6)
    with pytest.raises(ValueError, match=r"the valid split has .* less than one context of 1,000,000"):
        BatchStream(empty, rows=1, seed=0)


def test_a_shard_that_vanished_is_one_clear_line(tmp_path: Path) -> None:
    prepare(small_corpus(), byte_tokenizer(), tmp_path, shard_tokens=2000)
    stream = BatchStream(WrappedTokens(TokenShards(tmp_path), "train", 100), rows=200, seed=0)
    (tmp_path / "train-00002.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"^shard .*train-00002\.bin is missing"):
        stream.batch(0)


def test_the_room_does_not_load_torch() -> None:
    """Tokenizing workers import it, and torch would cost each of them a few hundred megabytes."""
    assert run_python("import sys, bd3lm.data; print('torch' in sys.modules)").strip() == "False"
