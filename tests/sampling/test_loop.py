"""The loop: a text depends on its own request alone, rows enter and leave, and bad input is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bd3lm.sampling import (
    Request,
    Stopping,
    Writer,
    sample,
    write,
)
from tests.oracles.networks import (
    MASK,
    tiny_transformer,
)
from tests.sampling.asking import ending
from tests.sampling.loop_cases import (
    CONTEXT,
    EARLY,
    EOS,
    MODEL,
    REQUESTS,
    RULES,
    TIMED,
    WRITERS,
    Counting,
    autoregressive,
    blocks,
    every_rule,
    every_writer,
    facts,
    one_by_one,
    prompt,
    sliding,
    suited,
    tokens,
)

pytestmark = pytest.mark.sweep(2)

# --- a batch is its rows, each on its own ---


def written_alone(
    writer: Writer, *, stopping: Stopping | None = None, batch_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """The facts of every text written alone; they must be those in batches of any size, in any order."""
    alone = [facts(*sample(writer, ending([request], stopping))) for request in suited(REQUESTS, writer)]
    assert_the_same_together(alone, writer, stopping=stopping, batch_sizes=batch_sizes)
    return alone


def assert_the_same_together(
    alone: list[dict[str, Any]],
    writer: Writer,
    *,
    stopping: Stopping | None = None,
    batch_sizes: Sequence[int],
) -> None:
    requests = suited(REQUESTS, writer)
    for batch_size in batch_sizes:
        turn = -1 if batch_size == 3 else 1  # once in the opposite order
        together = sample(writer, ending(requests[::turn], stopping), batch_size=batch_size)
        assert [s.index for s in together] == list(range(len(requests)))
        assert [facts(s) for s in together] == alone[::turn]


@every_writer
def test_a_text_is_the_same_alone_and_in_any_batch(make):
    alone = [facts(text) for text, _ in one_by_one(make)]
    assert_the_same_together(alone, make(MODEL), batch_sizes=(3, len(REQUESTS)))
    assert {text["stopped_by"] for text in alone} == {"length"}


@every_rule
def test_texts_that_end_early_or_begin_again_do_not_change_the_others(name):
    alone = written_alone(WRITERS[name](MODEL), stopping=EARLY, batch_sizes=(1, 3))
    assert {text["stopped_by"] for text in alone} > {"length"}
    assert any(text["redraws"] for text in alone)


@pytest.mark.parametrize("name", [*RULES, "first-hitting, causal", "uncached", "sliding"])
def test_a_network_that_is_told_the_time_writes_each_text_as_if_alone(name):
    written_alone(WRITERS[name](TIMED), batch_sizes=[3])


@every_writer
def test_what_is_given_is_kept_and_the_rest_is_written(make):
    writer = make(MODEL)
    requests = suited(REQUESTS, writer)
    for request, text in zip(requests, sample(writer, requests), strict=True):
        known = request.given != MASK
        assert torch.equal(text.tokens[: len(known)][known], request.given[known])
        assert not (text.tokens == MASK).any()
        assert text.tokens.dtype == torch.long
        assert len(text.tokens) == request.length
        assert (text.given, text.written) == (known.sum(), request.length - known.sum())


def test_two_seeds_give_two_texts():
    requests = [Request(prompt(1), seed, 20) for seed in range(6)]
    assert len({tuple(s.tokens.tolist()) for s in sample(blocks(MODEL), requests)}) == 6


def test_the_place_of_a_request_is_not_its_seed():
    same = sample(blocks(MODEL), [Request(prompt(1), 5, 20)] * 3, batch_size=2)
    assert len({tuple(s.tokens.tolist()) for s in same}) == 1


# --- seats ---


def test_a_free_seat_is_taken_at_once_and_an_unwanted_one_taken_away():
    """Blocks of two, two passes each, two seats: request 2 enters when 0 ends; at last 1 is alone."""
    network = Counting(MODEL)
    requests = [Request(prompt(0), seed, length) for seed, length in enumerate((2, 8, 4))]
    sample(blocks(network, block_size=2), requests, batch_size=2)
    assert network.rows == [2] * 6 + [1] * 2


def test_who_enters_a_running_batch_reads_its_prompt_alone():
    network = Counting(MODEL)
    requests = [Request(prompt(n), 0, length) for n, length in ((0, 2), (0, 8), (6, 8))]
    sample(blocks(network, block_size=2), requests, batch_size=2)
    assert network.rows == [2] * 2 + [1] + [2] * 2 + [1] * 4  # [1]: the first four of six given tokens


def test_a_row_that_ends_early_frees_its_seat():
    requests = ending([Request(prompt(1), seed, 1 + 12) for seed in range(6)], Stopping(eos_id=EOS))
    writer = autoregressive(Counting(MODEL), score_first=False)
    ends = [s.evaluations for s in sample(writer, requests, batch_size=1)]
    assert len(set(ends)) > 2

    seats, expected, waiting = [0, 0], [], list(ends)  # how long each seat is still taken
    while any(seats) or waiting:
        seats = [left or (waiting.pop(0) if waiting else 0) for left in seats]
        expected.append(sum(left > 0 for left in seats))
        seats = [max(left - 1, 0) for left in seats]
    network = Counting(MODEL)
    sample(autoregressive(network, score_first=False), requests, batch_size=2)
    assert network.rows == expected


def test_a_batch_larger_than_the_requests_has_no_empty_rows():
    network = Counting(MODEL)
    sample(blocks(network), [Request(prompt(0), 0, 4), Request(prompt(9), 0, 9)], batch_size=100)
    assert network.rows == [1] * 4  # the second one has nothing to write


# --- what is refused ---

ONE = [Request(prompt(1), 0, 4)]
IN_TRAINING = tiny_transformer(dropout=0.1).train()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: sample(blocks(MODEL), []), "requests must hold at least one text to write, got none"),
        (lambda: sample(blocks(MODEL), ONE, batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: sample(blocks(IN_TRAINING), ONE), "model must be in evaluation mode"),
        (lambda: sample(sliding(IN_TRAINING), ONE), "model must be in evaluation mode"),
        (lambda: sample(autoregressive(IN_TRAINING), ONE), "model must be in evaluation mode"),
        (
            lambda: sample(autoregressive(MODEL, score_first=False), [Request(prompt(0), 0, 4)]),
            "request 0: given must begin with a token, since this model was not trained to predict the first "
            "one, got none",
        ),
        (
            lambda: sample(autoregressive(MODEL, score_first=False), [*ONE, Request(tokens("_1"), 0, 4)]),
            r"request 1: given must begin with a token, since this model .* got \[2\]",
        ),
        (lambda: autoregressive(TIMED), "model must not be conditioned on the noise level"),
        (lambda: autoregressive(MODEL, context=0), "context must be at least 1, got 0"),
        (lambda: blocks(MODEL, context=0), "block_size must be a positive divisor of context 0, got 4"),
        (lambda: blocks(MODEL, context=-4), "block_size must be a positive divisor of context -4, got 4"),
        (
            lambda: sample(blocks(MODEL, block_size=CONTEXT), [*ONE, Request(prompt(1), 0, CONTEXT + 1)]),
            "request 1: length must be at most the block size 12, .* got 13; SlidingWriter can "
            "write longer texts",
        ),
        (lambda: blocks(MODEL, block_size=5), "block_size must be a positive divisor of context 12, got 5"),
        (lambda: blocks(MODEL, block_size=0), "block_size must be at least 1, got 0"),
        (lambda: blocks(MODEL, block_size=24), "block_size must be .* got 24"),
        (lambda: sliding(MODEL, stride=0), r"stride must lie in 1\.\.12, the context, got 0"),
        (lambda: sliding(MODEL, stride=13), r"stride must lie in 1\.\.12, the context, got 13"),
    ],
)
def test_bad_input_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_the_least_and_the_largest_seed_are_seeds():
    texts = sample(blocks(MODEL), [Request(prompt(1), seed, 20) for seed in (0, 2**63 - 1)])
    assert [text.seed for text in texts] == [0, 2**63 - 1]
    assert texts[0].tokens.tolist() != texts[1].tokens.tolist()


def test_bad_input_is_refused_before_the_first_event_is_asked_for():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -1"):
        write(blocks(MODEL), ONE, batch_size=-1)


def test_a_network_without_dropout_may_be_in_training_mode():
    trained = tiny_transformer(9, vocab_size=8).train()
    assert [facts(s) for s in sample(blocks(trained), ONE)] == [facts(s) for s in sample(blocks(MODEL), ONE)]
