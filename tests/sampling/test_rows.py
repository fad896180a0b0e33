"""Rows as a GPU has them: at rest in their batch, filled by passes of one length, kept for the next texts."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from bd3lm.sampling import Request, sample
from tests.oracles.networks import tiny_transformer
from tests.sampling.asking import ending
from tests.sampling.loop_cases import (
    EARLY,
    MODEL,
    REQUESTS,
    WRITERS,
    blocks,
    every_writer,
    facts,
    prompt,
    suited,
)

pytestmark = pytest.mark.sweep(2)


@every_writer
def test_rows_at_rest_change_nothing(make, monkeypatch):
    """On a GPU seats that become free stay in the batch until half of them are."""
    writer, batch_size = make(MODEL), 16
    requests = suited(REQUESTS, writer)
    expected = [facts(text) for text in sample(writer, ending(requests, EARLY), batch_size=batch_size)]
    monkeypatch.setattr("bd3lm.sampling.table._records", lambda writer: True)
    found = sample(make(MODEL), ending(requests, EARLY), batch_size=batch_size)
    assert [facts(text) for text in found] == expected


@every_writer
def test_given_text_may_be_read_in_passes_that_are_all_of_one_length(make, monkeypatch):
    """On a GPU, where a kernel is compiled for each; what is too much of a pass is not kept."""
    writer = make(MODEL, context=160) if make is not WRITERS["sliding by whole contexts"] else make(MODEL)
    requests = suited([*REQUESTS, Request(prompt(150), 1, 155), Request(prompt(300), 2, 303)], writer)
    expected = [facts(text) for text in sample(writer, requests, batch_size=5)]
    monkeypatch.setattr("bd3lm.sampling.writer._reads_whole_chunks", lambda inputs: True)
    assert [facts(text) for text in sample(writer, requests, batch_size=5)] == expected


def test_rows_are_freed_with_their_writer(monkeypatch):
    """Without a collector: what was recorded refers to the rows, and must not be held by them in a circle."""
    monkeypatch.setattr("bd3lm.sampling.writer._keeps_rows", lambda rows: True)
    writer = blocks(MODEL)
    sample(writer, REQUESTS[:2])
    (left,) = writer._left
    kept = weakref.ref(left[0])
    del left
    gc.disable()
    try:
        del writer
        assert kept() is None
    finally:
        gc.enable()


def test_rows_that_were_left_are_used_again_where_they_fit(monkeypatch):
    monkeypatch.setattr("bd3lm.sampling.writer._keeps_rows", lambda rows: True)
    writer, rows = blocks(MODEL), []
    for requests in (REQUESTS[:2], REQUESTS[4:6], REQUESTS[5:3:-1], REQUESTS[5:6], REQUESTS):
        alone = [facts(sample(blocks(MODEL), [request])[0]) for request in requests]
        assert [facts(text) for text in sample(writer, requests)] == alone
        rows.append([each for each, _ in writer._left])
    assert [len(left) for left in rows] == [1, 2, 2, 2, 3]
    used = [left[0] for left in rows]  # the last ones come first
    same = [before is after for before, after in pairwise(used)]
    assert same == [False, True, True, False]  # of another width, alike, fewer, more


@every_writer
def test_the_width_is_the_end_of_the_piece_that_holds_the_last_token(make):
    """Which may be found piece by piece, where texts are short."""
    writer = make(MODEL)
    for length in range(1, 60):
        end = 0
        while end < length:
            end = writer.piece_end(end)
        assert writer.width(length) == end
    assert writer.width(10**15) >= 10**15


@pytest.mark.parametrize(
    ("given", "seed", "length", "message"),
    [
        (prompt(5), 0, 4, "length must be .* at least the 5 given tokens, got 4"),
        (prompt(0), 0, 0, "length must be a whole number from 1 on .* got 0"),
        (prompt(0), 0, 4.0, r"length must be a whole number from 1 on .* got 4\.0"),
        (
            prompt(2).int(),
            0,
            4,
            r"given must be int64 token ids \(tokens,\), got torch.int32 of shape \(2,\)",
        ),
        (torch.zeros(2), 0, 4, "given must be .* torch.float32"),
        (prompt(2).unsqueeze(0), 0, 4, r"given must be .* shape \(1, 2\)"),
        ([0, 1], 0, 4, r"given must be a tensor of int64 token ids \(tokens,\), got \[0, 1\]"),
        (prompt(1), -1, 4, r"seed must be a whole number in 0\.\.2\^63 − 1, got -1"),
        (prompt(1), 2**63, 4, r"seed must be .* 0\.\.2\^63 − 1, got 9223372036854775808"),
        (prompt(1), 0.5, 4, "seed must be a whole number .* got 0.5"),
    ],
)
def test_a_request_that_cannot_be_written_is_refused_when_it_is_made(given, seed, length, message):
    with pytest.raises(ValueError, match=message):
        Request(given, seed, length)


def test_rows_are_where_the_network_is():
    writer = blocks(tiny_transformer(vocab_size=8).to("meta"), cache=False)
    rows = writer.open([Request(prompt(1), 0, 4)], width=4)
    assert {rows.text.device.type, rows.noise_seeds.device.type} == {"meta"}


def test_requests_are_compared_by_what_they_hold():
    one = Request(torch.tensor([1, 2]), 3, 8)
    assert one == Request(torch.tensor([1, 2]), 3, 8)
    assert hash(one) == hash(Request(torch.tensor([1, 2]), 3, 8))
    for other in (Request(torch.tensor([1, 0]), 3, 8), Request(torch.tensor([1]), 3, 8), (1, 2)):
        assert one != other
    assert one != Request(torch.tensor([1, 2]), 4, 8)
