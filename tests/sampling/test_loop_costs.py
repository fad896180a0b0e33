"""What a text costs: every pass is counted once, and what is there already costs nothing."""

import pytest
import torch

from bd3lm.sampling import (
    Ancestral,
    FirstHitting,
    Remasking,
    Request,
    SlidingWriter,
    sample,
    write,
)
from tests.sampling.loop_cases import (
    CONTEXT,
    EARLY,
    MODEL,
    WRITERS,
    Counting,
    autoregressive,
    blocks,
    every_rule,
    every_writer,
    facts,
    one_by_one,
    prompt,
    tokens,
)

pytestmark = pytest.mark.sweep(2)


@every_writer
def test_every_pass_is_counted_once_and_there_are_no_more_than_tokens(make):
    rule = getattr(make(MODEL), "unmasking", FirstHitting())
    for text, passes in one_by_one(make):
        assert passes == text.evaluations + text.fill_passes
        if rule == FirstHitting():
            assert text.evaluations == text.written
        elif not isinstance(rule, Remasking):
            assert text.evaluations <= text.written


@pytest.mark.parametrize("context", [CONTEXT, 160])
@pytest.mark.parametrize(
    "name", ["first-hitting", "remasking, causal", "uncached", "blocks of one", "autoregressive", "sliding"]
)
def test_every_pass_over_a_long_prompt_is_counted_once(name, context):
    network = Counting(MODEL)
    gaps = torch.cat((tokens("0___"), prompt(140), tokens("_"), prompt(9)))
    for given, more in ((prompt(128), 2), (prompt(129), 2), (prompt(300), 2), (gaps, 2), (gaps, 0)):
        network.rows.clear()
        (text,) = sample(WRITERS[name](network, context=context), [Request(given, 1, len(given) + more)])
        assert len(network.rows) == text.evaluations + text.fill_passes


@every_rule
def test_every_pass_of_a_text_that_was_thrown_away_is_counted_too(name):
    """With a prompt, which is read again each time."""
    network = Counting(MODEL)
    writer, redraws = WRITERS[name](network), 0
    for seed in range(4):
        network.rows.clear()
        (text,) = sample(writer, [Request(prompt(9), seed, 24, stopping=EARLY)])
        assert len(network.rows) == text.evaluations + text.fill_passes + text.redrawn_passes
        assert (text.redrawn_passes > text.redraws) == (text.redraws > 0)
        redraws += text.redraws
    assert redraws


@pytest.mark.parametrize(
    ("given", "passes"), [(0, 0), (4, 0), (7, 0), (8, 1), (131, 1), (132, 1), (136, 2), (300, 3)]
)
def test_a_prompt_is_read_in_passes_of_128_tokens(given, passes):
    """All its blocks but the last, which the first pass over the next one reads."""
    (text,) = sample(blocks(MODEL, context=160), [Request(prompt(given), 0, given + 1)])
    assert (text.fill_passes, text.evaluations) == (passes, 1)
    (text,) = sample(autoregressive(MODEL, context=160), [Request(prompt(given), 0, given + 1)])
    assert (text.fill_passes, text.evaluations) == (-(-given // 128), 1)


def test_given_text_after_a_gap_is_read_too():
    """At each of three given blocks a pass reads the one before; the last is read with the gap after it."""
    (text,) = sample(blocks(MODEL), [Request(tokens("0__1 0131 1013 3013 _"), 0, 17)])
    assert (text.evaluations, text.fill_passes) == (3, 3)
    (text,) = sample(blocks(MODEL, cache=False), [Request(tokens("0__1 0131 1013 3013 _"), 0, 17)])
    assert (text.evaluations, text.fill_passes) == (3, 0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("given", range(12))
def test_a_partial_block_is_completed_and_costs_a_pass_for_each_missing_token(block_size, given):
    start = prompt(given)
    (text,) = sample(blocks(MODEL, block_size=block_size), [Request(start, 0, 12)])
    assert torch.equal(text.tokens[:given], start)
    assert text.evaluations == text.written == 12 - given


@pytest.mark.parametrize("given", [0, 3, 4, 9])
def test_two_tokens_a_pass_cost_half_the_passes_of_every_block(given):
    (text,) = sample(blocks(MODEL, unmasking=FirstHitting(2)), [Request(prompt(given), 0, 15)])
    masked = [len(range(max(start, given), min(start + 4, 15))) for start in range(0, 15, 4)]
    assert text.evaluations == sum(-(-h // 2) for h in masked)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 20, 1000, 100_000])
@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
def test_ancestral_steps_cost_no_more_passes_than_tokens_or_steps(steps, block_size):
    requests = [Request(prompt(seed % 4), seed, 12) for seed in range(8)]
    writer = blocks(MODEL, block_size=block_size, unmasking=Ancestral(steps))
    for text in sample(writer, requests):
        pieces = 12 // block_size - text.given // block_size
        assert pieces <= text.evaluations <= min(text.written, steps * pieces)
        assert steps < 100_000 or text.evaluations == text.written


def test_remasking_costs_at_most_its_steps_in_every_block():
    requests = [Request(prompt(0), seed, 12) for seed in range(8)]
    texts = sample(blocks(MODEL, unmasking=Remasking(steps=9, eta=1.0)), requests)
    assert all(text.evaluations <= 3 * 9 for text in texts)
    assert any(text.evaluations > 12 for text in texts)


# --- a text that is already there ---


@every_writer
def test_nothing_to_write_costs_nothing(make):
    network = Counting(MODEL)
    (text,) = sample(make(network), [Request(prompt(9), 5, 9)])
    assert network.rows == []
    assert facts(text) == {
        "tokens": prompt(9).tolist(),
        "given": 9,
        "prompt": 9,
        "written_from": 9,
        "seed": 5,
        "evaluations": 0,
        "fill_passes": 0,
        "stopped_by": "length",
        "stop_string": None,
        "redraws": 0,
        "redrawn_passes": 0,
        "drafted": (),
        "accepted": (),
        "log_p": None,
        "alternatives": (),
        "fills": 1,
        "effective_fills": 1.0,
    }


@every_writer
def test_what_is_given_after_the_last_gap_costs_nothing(make):
    """It is not even read: nothing is left to be written after it."""
    network = Counting(MODEL)
    writer = make(network)
    texts, calls = [], []
    for tail in ("", "0131 1013 3013 0131 1013 3013 0"):
        given = tokens("0__1" + tail)
        (text,) = sample(writer, [Request(given, 7, len(given))])
        texts.append(text)
        calls.append(len(network.rows))
        network.rows.clear()
        assert text.tokens[3:].tolist() == given[3:].tolist()
        assert (text.given, text.written, text.stopped_by) == (len(given) - 2, 2, "length")
    short, long = texts
    assert calls[0] == calls[1] == long.evaluations + long.fill_passes
    assert (short.evaluations, short.fill_passes) == (long.evaluations, long.fill_passes)
    if not isinstance(writer, SlidingWriter):  # to which the tail is context
        assert short.tokens.tolist() == long.tokens[:4].tolist()


def test_a_text_that_goes_on_past_its_template_reads_all_of_it():
    """One more token to write, and the four blocks before it are passes again."""
    (text,) = sample(blocks(MODEL), [Request(tokens("0__1 0131 1013 3013"), 7, 16)])
    assert (text.evaluations, text.fill_passes) == (2, 0)
    (text,) = sample(blocks(MODEL), [Request(tokens("0__1 0131 1013 3013"), 7, 17)])
    assert (text.evaluations, text.fill_passes) == (3, 3)


def test_a_seat_is_free_once_the_last_gap_is_filled():
    """Blocks of two and one seat: one pass over the gap, then the next text, whose block has two."""
    network = Counting(MODEL)
    requests = [Request(tokens("0_ 1301 3013"), 0, 10), Request(prompt(0), 1, 2)]
    events = write(blocks(network, block_size=2), requests, batch_size=1)
    assert [(event.index, len(network.rows)) for event in events] == [(0, 1), (1, 3)]


def test_a_template_without_gaps_at_its_end_is_still_written_inside():
    (text,) = sample(blocks(MODEL), [Request(tokens("01_3 0"), 5, 5)])
    assert (text.evaluations, text.given, text.written) == (1, 4, 1)
