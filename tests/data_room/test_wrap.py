"""Wrapping equals the obvious implementation: all tokens in one list, cut into pieces."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bd3lm.data import Tokenizer, TokenShards, WrappedTokens, byte_tokenizer, prepare
from tests.data_room.documents import small_corpus

TOKENIZER = Tokenizer(byte_tokenizer().spec, mask_id=257, eos_id=256, bos_id=3)
CORPUS = small_corpus()


def naive(split: str, context: int, *, bos_eos: bool) -> list[list[int]]:
    stream = [token for text in CORPUS.documents(split) for token in [*text.encode(), 256]]
    stride = context - 2 if bos_eos else context
    pieces = [stream[i : i + stride] for i in range(0, len(stream) - stride + 1, stride)]
    return [[3, *piece, 256] for piece in pieces] if bos_eos else pieces


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    """Shards shorter than some contexts, so a sequence can span several."""
    return prepare(CORPUS, TOKENIZER, tmp_path_factory.mktemp("wrap"), shard_tokens=60)


@given(st.sampled_from(["train", "valid"]), st.integers(3, 700), st.booleans())
def test_wrapping_is_concatenation_and_cutting(
    shards: TokenShards, split: str, context: int, bos_eos: bool
) -> None:
    wrapped = WrappedTokens(shards, split, context, bos_eos=bos_eos)
    expected = naive(split, context, bos_eos=bos_eos)
    assert len(wrapped) == len(expected)
    assert wrapped[:].tolist() == expected
    assert wrapped[:].shape == (len(expected), context)
    assert wrapped[:].dtype == np.int64


@given(st.data())
def test_any_sequences_in_any_order(shards: TokenShards, data: st.DataObject) -> None:
    wrapped = WrappedTokens(shards, "train", 50)
    expected = naive("train", 50, bos_eos=False)
    indices = data.draw(st.lists(st.integers(0, len(expected) - 1)))
    for form in (indices, np.array(indices, np.int32)):
        assert wrapped[form].tolist() == [expected[i] for i in indices]
        assert wrapped[form].shape == (len(indices), 50)


def test_one_sequence_and_slices(shards: TokenShards) -> None:
    wrapped = WrappedTokens(shards, "train", 50)
    expected = naive("train", 50, bos_eos=False)
    assert wrapped[4].shape == (50,)
    assert wrapped[4].tolist() == expected[4]
    assert wrapped[3:9:2].tolist() == expected[3:9:2]
    assert wrapped[-2:].tolist() == expected[-2:]


def test_results_are_copies(shards: TokenShards) -> None:
    wrapped = WrappedTokens(shards, "train", 50)
    before = wrapped[0].tolist()
    wrapped[0][:] = 0
    assert wrapped[0].tolist() == before


def test_a_split_shorter_than_the_context_has_no_sequences(shards: TokenShards) -> None:
    assert len(WrappedTokens(shards, "valid", 10**6)) == 0
    assert WrappedTokens(shards, "valid", 10**6)[:].shape == (0, 10**6)


def test_sequences_outside_are_refused(shards: TokenShards) -> None:
    wrapped = WrappedTokens(shards, "train", 50)
    for index in (-1, len(wrapped), [0, len(wrapped)]):
        with pytest.raises(IndexError, match=f"is not within the {len(wrapped)} of split 'train'"):
            wrapped[index]


@pytest.mark.parametrize(("context", "bos_eos", "smallest"), [(0, False, 1), (-1, False, 1), (2, True, 3)])
def test_a_context_without_room_is_refused(
    shards: TokenShards, context: int, bos_eos: bool, smallest: int
) -> None:
    with pytest.raises(ValueError, match=f"context must be at least {smallest}, got {context}"):
        WrappedTokens(shards, "train", context, bos_eos=bos_eos)


def test_an_unknown_split_is_refused(shards: TokenShards) -> None:
    with pytest.raises(ValueError, match="split must be one of train, valid"):
        WrappedTokens(shards, "test", 8)


def test_bos_and_eos_must_exist(tmp_path: Path) -> None:
    bare = Tokenizer(TOKENIZER.spec, mask_id=257, eos_id=None, bos_id=None)
    shards = prepare(CORPUS, bare, tmp_path, eos_between_documents=False)
    assert len(WrappedTokens(shards, "train", 8)) > 0
    with pytest.raises(ValueError, match="bos_eos must be False for a tokenizer without BOS and EOS"):
        WrappedTokens(shards, "train", 8, bos_eos=True)
