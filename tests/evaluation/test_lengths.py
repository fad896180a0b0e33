"""Lengths of documents: quantiles by their definition, and which tokens count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bd3lm.evaluation import LengthStatistics, document_length, evenly_spaced, stop_counts

END = 9
some_lengths = st.lists(st.integers(0, 60), min_size=1, max_size=50)


def quantile(lengths: list[int], tenths: int) -> int:
    """The smallest length that so many tenths of the documents do not exceed."""
    return min(x for x in lengths if 10 * sum(y <= x for y in lengths) >= tenths * len(lengths))


@given(some_lengths)
def test_statistics_are_their_definitions(lengths):
    found = LengthStatistics.of(lengths)
    assert (found.number, found.max) == (len(lengths), max(lengths))
    assert (found.median, found.p90) == (quantile(lengths, 5), quantile(lengths, 9))
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))


def test_large_corpora_have_exact_counts():
    """As shards keep them: unsigned, and their sum beyond 32 bits."""
    lengths = np.array([2**31, 2**31, 2**31, 5], dtype=np.uint32)
    found = LengthStatistics.of(lengths)
    assert found == LengthStatistics(4, 2**31, 2**31, 2**31, (3 * 2**31 + 5) / 4)
    assert all(type(value) is int for value in (found.number, found.median, found.p90, found.max))


@pytest.mark.parametrize("lengths", [[], [1.5, 2.0], [3, -1], [[1, 2]], ["a"]], ids=str)
def test_what_are_no_lengths_is_refused(lengths):
    with pytest.raises(ValueError, match="lengths must be whole numbers"):
        LengthStatistics.of(lengths)


@pytest.mark.parametrize(
    ("tokens", "given", "stopped_by", "length"),
    [
        ([END, 1, 2, 3, END], 1, "eos", 3),
        ([END, END], 1, "eos", 0),
        ([END, 1, 2, 3], 1, "length", 3),
        ([END, 1, 2, 3], 1, "entropy", 3),
        ([END], 1, "entropy", 0),  # all that was written was dropped
        ([1, 2, 3, END], 0, "eos", 3),
        ([1, 2, 3], 0, "length", 3),
        ([END, 1, 2, END], 0, "eos", 2),  # a model that predicts first tokens began as texts do
        ([], 0, "entropy", 0),
    ],
)
def test_the_tokens_at_both_ends_of_a_document_do_not_count(tokens, given, stopped_by, length):
    assert document_length(tokens, given=given, stopped_by=stopped_by, marks={END}) == length


def test_a_token_that_was_given_does_not_count_whatever_it_is():
    assert document_length([4, 1, 2], given=1, stopped_by="length", marks=set()) == 2
    assert document_length([4, 1, 2], given=0, stopped_by="length", marks=set()) == 3


def test_a_document_has_no_prompt():
    with pytest.raises(ValueError, match="must be written from nothing, got 3 given tokens"):
        document_length([END, 1, 2, 3], given=3, stopped_by="length", marks={END})


def test_every_reason_is_counted():
    assert stop_counts(["length", "eos", "length"]) == {"eos": 1, "string": 0, "entropy": 0, "length": 2}
    assert stop_counts(["string", "eos", "length"]) == {"eos": 1, "string": 1, "entropy": 0, "length": 1}


@given(some_lengths, st.integers(2, 20))
def test_a_few_lengths_stand_for_all(lengths, most):
    kept = evenly_spaced(lengths, most)
    assert len(kept) == min(len(lengths), most)
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (min(lengths), max(lengths)) or len(lengths) == 1
    if len(lengths) <= most:
        assert kept == sorted(lengths)
    for place, length in enumerate(kept):  # each one is the quantile that its place says
        rank = place * (len(lengths) - 1) / (len(kept) - 1) if len(kept) > 1 else 0
        near = sorted(lengths)[max(0, int(rank) - 1) : int(rank) + 3]
        assert length in near
