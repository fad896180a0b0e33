"""Where a text ends: at an end token or what it was to end at, before low entropy, or at its length."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bd3lm.diffusion import derive_seed
from bd3lm.models import Layout
from bd3lm.sampling import (
    AutoregressiveWriter,
    BlockWriter,
    Redrawn,
    Request,
    Sample,
    SlidingWriter,
    Stopped,
    Stopping,
    Writer,
    sample,
    token_entropy,
    write,
)
from bd3lm.sampling.stopping import Ending, FindEnd
from tests.oracles.networks import MASK, Plain, blocks_of, tiny_transformer
from tests.sampling.asking import ending

pytestmark = pytest.mark.sweep(2)

EOS, VOCAB = 3, 8
NO_TOKENS = torch.tensor([], dtype=torch.long)


class Wishes(Plain):
    """A network that is certain which token belongs at each position, or where given none, has no idea."""

    uses_noise = False
    device = torch.device("cpu")

    def __init__(self, *wishes: int) -> None:
        self.wishes = wishes

    def __call__(self, tokens: Tensor, *, layout: Layout, **_: Any) -> Tensor:
        logits = torch.zeros(len(tokens), layout.size, VOCAB, dtype=torch.float64)
        for position, wish in enumerate(self.wishes[: layout.size]):
            logits[:, position, wish] = 1e3
        return logits[:, slice(*layout.read)]

    def head(self, states: Tensor) -> Tensor:
        return states


def blocks(*wishes: int, block_size: int = 4) -> BlockWriter:
    """A writer that writes the wishes: positions count from 0 where nothing is cached or out of sight."""
    return BlockWriter(Wishes(*wishes), reading=blocks_of(block_size), context=24, cache=False)


def write_one(writer: Writer, given: Sequence[int], length: int, seed: int = 0, **rules: Any) -> Sample:
    tokens = torch.tensor(given, dtype=torch.long)
    (text,) = sample(writer, [Request(tokens, seed, length, stopping=Stopping(**rules))])
    return text


# --- the end token ---


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("place", range(1, 8))
def test_a_sampled_end_token_is_the_last_token(block_size, place):
    wishes = [EOS if i >= place else i % 2 for i in range(8)]  # the first of several
    text = write_one(blocks(*wishes, block_size=block_size), [], 8, eos_id=EOS)
    assert text.stopped_by == "eos"
    assert text.tokens.tolist() == wishes[: place + 1]
    assert text.evaluations == (place // block_size + 1) * block_size  # the whole block was paid for


def test_every_writer_stops_at_the_end_token():
    wishes = (0, 1, 1, EOS, 1, 1, 1, 1)
    network = Wishes(*wishes)
    for writer, cost in (
        (AutoregressiveWriter(network, mask_id=MASK, context=8, score_first=True, cache=False), 4),
        (BlockWriter(network, reading=blocks_of(2), context=8, cache=False), 4),
        (SlidingWriter(network, reading=blocks_of(8), context=8), 8),
    ):
        text = write_one(writer, [], 8, eos_id=EOS)
        assert (text.tokens.tolist(), text.stopped_by, text.evaluations) == ([0, 1, 1, EOS], "eos", cost)


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_an_end_token_that_begins_a_text_does_not_end_it(block_size):
    text = write_one(blocks(EOS, 0, 1, 0, 1, 0, 1, 0, block_size=block_size), [], 8, eos_id=EOS)
    assert (len(text.tokens), text.stopped_by) == (8, "length")
    text = write_one(blocks(EOS, 0, EOS, 0, 1, 0, 1, 0, block_size=block_size), [], 8, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == ([EOS, 0, EOS], "eos")


@pytest.mark.parametrize("prompt", [[EOS], [0, EOS], [EOS, EOS, EOS], [0, 1, 0, EOS], [0, EOS, 1, 0, 1]])
def test_end_tokens_of_the_prompt_do_not_end_the_text(prompt):
    text = write_one(blocks(*[0] * 12), prompt, 12, eos_id=EOS)
    assert (len(text.tokens), text.stopped_by) == (12, "length")


@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
def test_an_end_token_before_the_last_given_one_does_not_end_the_text(block_size):
    template = [0, MASK, 1, MASK, MASK, 1]
    wishes = [0, EOS, 1, 0, EOS, 1, 0, 0, EOS, 0, 0, 0]
    text = write_one(blocks(*wishes, block_size=block_size), template, 12, eos_id=EOS)
    assert text.tokens.tolist() == wishes[:9]
    text = write_one(blocks(*wishes, block_size=block_size), template, 8, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == (wishes[:8], "length")


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_an_end_token_given_at_the_very_end_is_not_a_sampled_one(block_size):
    text = write_one(blocks(*[0] * 4, block_size=block_size), [0, MASK, 1, EOS], 4, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 0, 1, EOS], "length")


@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
def test_the_first_token_after_the_given_ones_may_end_the_text(block_size):
    text = write_one(blocks(*[EOS] * 12, block_size=block_size), [0, MASK, 1], 12, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, EOS, 1, EOS], "eos")


@pytest.mark.parametrize("template", [[0, MASK, MASK, MASK, MASK, MASK], [MASK] * 6])
def test_a_template_that_ends_in_a_gap_may_end_inside_it(template):
    text = write_one(blocks(0, 1, EOS, 0, 0, 0, block_size=2), template, 6, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 1, EOS], "eos")
    assert text.given == sum(token != MASK for token in template)
    text = write_one(blocks(0, 1, 0, 0, block_size=4), template[:4], 4, entropy_floor=1.0, entropy_window=2)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 1], "entropy")


def test_an_end_token_past_the_length_is_not_seen():
    text = write_one(blocks(0, 0, 0, 0, 0, EOS, EOS, EOS), [], 5, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == ([0] * 5, "length")


def test_an_end_token_at_the_very_end_ends_the_text():
    text = write_one(blocks(0, 0, 0, 0, 0, EOS), [], 6, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 0, 0, 0, 0, EOS], "eos")


# --- strings that end a text ---


def ends_after(*wanted: int) -> FindEnd:
    """At the first place, among the new tokens or not, where these tokens stand one after the other."""

    def find(tokens: Tensor, written_from: int, new_from: int) -> tuple[int, str] | None:
        written = tokens.tolist()
        ends = range(written_from + len(wanted), len(written) + 1)
        found = (end for end in ends if tuple(written[end - len(wanted) : end]) == wanted)
        return next(((end, str(wanted)) for end in found), None)

    return find


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
@pytest.mark.parametrize("place", range(2, 9))
def test_a_text_ends_where_it_has_met_what_it_is_to_end_at(block_size, place):
    wishes = [0] * (place - 2) + [1, 4] + [0] * (8 - place)
    text = write_one(blocks(*wishes, block_size=block_size), [], 8, find_end=ends_after(1, 4))
    assert (text.tokens.tolist(), text.stopped_by) == (wishes[:place], "string")
    assert text.stop_string == "(1, 4)"
    assert text.evaluations == -(-place // block_size) * block_size  # the whole block was paid for


def test_every_writer_asks():
    network = Wishes(0, 1, 1, 4, 1, 1, 1, 1)
    for writer in (
        AutoregressiveWriter(network, mask_id=MASK, context=8, score_first=True, cache=False),
        BlockWriter(network, reading=blocks_of(2), context=8, cache=False),
        SlidingWriter(network, reading=blocks_of(8), context=8),
    ):
        text = write_one(writer, [], 8, find_end=ends_after(1, 4))
        assert (text.tokens.tolist(), text.stopped_by) == ([0, 1, 1, 4], "string")


def test_each_new_token_of_a_row_is_asked_about_once():
    asked: list[tuple[list[int], int, int]] = []

    def never(tokens: Tensor, written_from: int, new_from: int) -> None:
        assert tokens.device.type == "cpu"
        asked.append((tokens.tolist(), written_from, new_from))

    wishes = [0, 1, 4, 5, 6, 7, 0, 1, 4, 5]
    write_one(blocks(*wishes), [0, MASK, 4, 5, 6], 10, find_end=never)
    assert asked == [(wishes[:8], 5, 5), (wishes, 5, 8)]
    asked.clear()
    write_one(blocks(*wishes), [0, MASK, 4, MASK, 6], 5, find_end=never)
    assert asked == []  # nothing is written after what was given


def test_a_row_at_rest_is_not_asked():
    """As on a GPU, where rows that have ended stay in the batch for a while."""
    asked: list[int] = []

    def find(tokens: Tensor, *_: int) -> None:
        asked.append(int(tokens[0]))

    places = {"written_from": torch.zeros(3).long(), "piece_start": torch.zeros(3).long()}
    ends = {"piece_end": torch.full((3,), 2), "stop": torch.full((3,), 4)}
    text = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [4, 1, 1, 1]])
    assert Stopping(find_end=find).ends(text, **places, **ends, taken=[0, 2]) == [None] * 3
    assert asked == [0, 4]
    assert Stopping(find_end=find).ends(text, **places, **ends) == [None] * 3
    assert asked == [0, 4, 0, 1, 4]


def test_what_comes_first_ends_a_text_and_the_end_token_if_both_do():
    wishes = [0, 1, 4, EOS, 1, 5, 0, 0]
    for wanted, expected in (
        ((1, 4), (wishes[:3], "string")),
        ((4, EOS), (wishes[:4], "eos")),
        ((1, 5), (wishes[:4], "eos")),
    ):
        text = write_one(blocks(*wishes, block_size=8), [], 8, find_end=ends_after(*wanted), eos_id=EOS)
        assert (text.tokens.tolist(), text.stopped_by) == expected


def test_low_entropy_comes_after_what_a_text_has_met_in_its_block():
    rules = {"entropy_floor": 1.0, "entropy_window": 4, "redraws": 3}
    met = write_one(blocks(7, 7, 7, 7), [], 8, find_end=ends_after(7, 7, 7), **rules)
    assert (met.tokens.tolist(), met.stopped_by, met.redraws) == ([7, 7, 7], "string", 0)
    not_yet = write_one(blocks(7, 7, 7, 7, 1, 4), [], 8, find_end=ends_after(1, 4), **rules)
    assert (not_yet.tokens.tolist(), not_yet.stopped_by, not_yet.redraws) == ([], "entropy", 3)


@pytest.mark.parametrize(
    ("given", "length", "prompt", "written_from"),
    [
        ([], 8, 0, 0),
        ([0, 1], 8, 2, 2),
        ([0, 1, MASK, 5], 8, 2, 4),
        ([MASK, 1, MASK, 5, MASK], 5, 0, 4),
        ([MASK] * 3, 8, 0, 0),
        ([0, 1, 4, 5], 4, 4, 4),
    ],
)
def test_a_sample_says_where_what_was_given_ends(given, length, prompt, written_from):
    text = write_one(blocks(0, 1, 4, 5, 6, 7, 0, 1), given, length)
    assert (text.prompt, text.written_from) == (prompt, written_from)
    assert text.given == sum(token != MASK for token in given)


# --- entropy ---


def entropy_of(tokens: Sequence[int]) -> float:
    """−Σ p log p of the frequencies."""
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in Counter(tokens).values())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_token_entropy_is_that_of_the_frequencies(tokens):
    assert token_entropy(torch.tensor(tokens)).item() == pytest.approx(entropy_of(tokens), abs=1e-12)


def test_token_entropy_is_along_the_last_dimension():
    tokens = torch.tensor([[[0, 0, 0], [0, 1, 2]], [[5, 5, 7], [9, 9, 9]]])
    expected = [[0.0, math.log(3)], [math.log(3) - 2 / 3 * math.log(2), 0.0]]
    torch.testing.assert_close(token_entropy(tokens), torch.tensor(expected, dtype=torch.float64))


def test_no_tokens_have_no_entropy():
    assert torch.equal(token_entropy(torch.zeros(3, 0, dtype=torch.long)), torch.zeros(3).double())


WINDOWS = {
    "all different": [0, 1, 3, 4, 5, 6, 7],
    "two of each": [0, 0, 1, 1, 3, 3, 4, 4],
    "an odd count": [0, 0, 0, 1, 1, 1, 1, 3, 4, 4, 4],
    "three and one": [7, 7, 7, 0],
    "all the same": [1, 1, 1, 1, 1],
    "one token": [5],
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_a_window_exactly_at_the_floor_goes_on_and_one_below_it_ends(window):
    floor, writer = entropy_of(window), blocks(*window, block_size=1)
    for other, stops in ((floor, False), (max(floor - 1e-6, 0.0), False), (floor + 1e-6, True)):
        text = write_one(writer, [], len(window), entropy_floor=other, entropy_window=len(window))
        assert text.stopped_by == ("entropy" if stops else "length")
        assert text.tokens.tolist() == ([] if stops else window)  # the window is dropped


def test_the_window_is_the_last_tokens_and_is_dropped():
    """Blocks of four: 0 1 4 5 | 6 7 7 7 | 7 …; the last five fall below the floor at the second end."""
    wishes = [0, 1, 4, 5, 6, 7, 7, 7, 7, 7, 7, 7]
    text = write_one(blocks(*wishes), [], 12, entropy_floor=1.0, entropy_window=5)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 1, 4], "entropy")
    assert text.evaluations == 8
    assert entropy_of(wishes[3:8]) < 1.0 < entropy_of(wishes[:4])


@pytest.mark.parametrize(("block_size", "left"), [(1, 2), (2, 2), (3, 2), (4, 4), (6, 2), (8, 4)])
def test_entropy_is_looked_at_when_a_block_ends(block_size, left):
    """Sevens from position 2 on, a window of 4: too low first at 6, noticed at the end of a block."""
    wishes = [0, 1] + [7] * 22
    text = write_one(blocks(*wishes, block_size=block_size), [], 24, entropy_floor=0.1, entropy_window=4)
    end = -(-6 // block_size) * block_size
    assert left == end - 4
    assert (text.tokens.tolist(), text.evaluations) == (wishes[:left], end)


def test_one_good_block_end_after_a_bad_stretch_inside_a_block_is_enough():
    text = write_one(blocks(7, 7, 7, 7, 0, 1, 3, 4, block_size=8), [], 8, entropy_floor=1.0, entropy_window=4)
    assert text.stopped_by == "length"


@pytest.mark.parametrize("prompt", range(9))
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_given_tokens_count_and_are_never_cut(prompt, block_size):
    """The prompt repeats itself as the text does; the rule waits until there are four tokens and one of them
    has been written."""
    text = write_one(
        blocks(*[7] * 24, block_size=block_size), [7] * prompt, 24, entropy_floor=1.0, entropy_window=4
    )
    end = next(end for end in range(0, 24, block_size) if end >= 4 and end > prompt)
    assert text.stopped_by == "entropy"
    assert len(text.tokens) == max(end - 4, prompt)
    assert (text.written, text.evaluations) == (len(text.tokens) - prompt, end - prompt)


@pytest.mark.parametrize(
    ("prompt", "judged", "left"),
    [
        ([0, 1, 3, 4], 7, 4),  # 4 7 7 7: the given token stays, the three others go
        ([0, 1, 3, 7], 6, 4),  # 3 7 7 7
        ([7, 7, 7], 4, 3),  # 7 7 7 7, three of them given
        ([0, 0, 0], 4, 3),  # 0 0 0 7: low for what was given
        ([0, 1], 5, 2),  # 1 7 7 7
        ([], 4, 0),
    ],
    ids=str,
)
def test_the_window_reaches_back_into_what_was_given(prompt, judged, left):
    text = write_one(blocks(*[7] * 24, block_size=1), prompt, 24, entropy_floor=1.0, entropy_window=4)
    assert (text.tokens.tolist(), text.stopped_by) == (prompt[:left], "entropy")
    assert text.evaluations == judged - len(prompt)


def test_a_gap_before_a_given_token_is_in_the_window_and_not_dropped():
    template = [7, MASK, MASK, MASK, MASK, MASK, 7]
    rules = {"entropy_floor": 1.0, "entropy_window": 4}
    text = write_one(blocks(*[7] * 24, block_size=1), template, 7, **rules)
    assert (len(text.tokens), text.stopped_by) == (7, "length")  # nothing after the last given one
    text = write_one(blocks(*[7] * 24, block_size=1), template, 8, **rules)
    assert (len(text.tokens), text.stopped_by) == (7, "entropy")
    for filled, evaluations in (([7, 7], 2 + 1), ([1, 4], 2 + 3)):  # 7 7 3 7, or not until 3 7 7 7
        writer = blocks(0, *filled, *[7] * 21, block_size=1)
        text = write_one(writer, [0, MASK, MASK, 3], 24, **rules)
        assert (text.tokens.tolist(), text.stopped_by) == ([0, *filled, 3], "entropy")
        assert (text.given, text.evaluations) == (2, evaluations)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_text_that_ends_in_given_tokens_is_never_judged(block_size):
    """Its end comes with the last gap, however low what follows it is, and whatever it holds."""
    template = [0, MASK, 7, 7, 7, 7, EOS, 7, 7]
    writer = blocks(*[7] * 24, block_size=block_size)
    text = write_one(writer, template, 9, entropy_floor=1.0, entropy_window=4, redraws=2, eos_id=EOS)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 7, 7, 7, 7, 7, EOS, 7, 7], "length")
    assert (text.evaluations, text.fill_passes, text.redrawn_passes) == (1, 0, 0)


@st.composite
def judged_texts(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """A text of few tokens, from where on it was written, where its last piece begins, and where it ends."""
    text = draw(st.lists(st.sampled_from([0, 1, 4]), min_size=1, max_size=12))
    end = draw(st.integers(1, len(text)))
    written_from, start = draw(st.integers(0, end)), draw(st.integers(0, end - 1))
    return text[:end] + [MASK] * (len(text) - end), written_from, start, end


@given(judged_texts(), st.integers(1, 8), st.sampled_from([0.5, 0.6, 0.9, 1.05]))
def test_low_entropy_is_its_definition(judged, window, floor):
    text, written_from, start, end = judged
    (verdict,) = Stopping(entropy_floor=floor, entropy_window=window).ends(
        torch.tensor([text]),
        written_from=torch.tensor([written_from]),
        piece_start=torch.tensor([start]),
        piece_end=torch.tensor([end]),
        stop=torch.tensor([len(text)]),
    )
    if end >= window and written_from < end and entropy_of(text[:end][-window:]) < floor:
        kept = [p for p in range(end) if p < written_from or p < end - window]
        assert verdict == Ending("entropy", len(kept))
    else:
        assert verdict == (Ending("length", end) if end == len(text) else None)


def test_a_text_shorter_than_the_window_is_never_judged():
    text = write_one(blocks(*[7] * 8), [], 8, entropy_floor=1.0, entropy_window=9)
    assert (len(text.tokens), text.stopped_by) == (8, "length")
    text = write_one(blocks(*[7] * 8), [], 8, entropy_floor=1.0, entropy_window=8)
    assert (len(text.tokens), text.stopped_by) == (0, "entropy")


def test_a_last_block_that_is_cut_short_is_judged_at_the_end_of_the_text():
    text = write_one(blocks(0, 1, 3, 4, 7, 7, 7, 7), [], 6, entropy_floor=0.1, entropy_window=2)
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 1, 3, 4], "entropy")
    text = write_one(blocks(0, 1, 3, 4, 5, 7, 7, 7), [], 6, entropy_floor=0.1, entropy_window=2)
    assert (len(text.tokens), text.stopped_by) == (6, "length")


# --- drawing again ---

REDRAWN = {"entropy_floor": 0.1, "entropy_window": 2}


@pytest.mark.parametrize("redraws", [0, 2])
@pytest.mark.parametrize(
    "writer",
    [
        blocks(block_size=2),
        BlockWriter(tiny_transformer(7, vocab_size=VOCAB), reading=blocks_of(2), context=8),
        AutoregressiveWriter(tiny_transformer(7, vocab_size=VOCAB), mask_id=MASK, context=8),
        SlidingWriter(tiny_transformer(7, vocab_size=VOCAB), reading=blocks_of(6), context=6),
    ],
    ids=["no idea", "blocks", "autoregressive", "sliding"],
)
def test_a_redraw_is_a_fresh_request_with_the_next_seed(writer, redraws):
    reached = set()
    for seed in range(10):
        text = write_one(writer, [0, 1, 4], 7, seed, redraws=redraws, **REDRAWN)
        spent, now = 0, seed
        for attempt in range(redraws + 1):
            fresh = write_one(writer, [0, 1, 4], 7, now, **REDRAWN)
            if fresh.stopped_by != "entropy" or attempt == redraws:
                break
            spent += fresh.evaluations + fresh.fill_passes
            now = derive_seed(now, "redraw", attempt + 1)
        assert text.tokens.tolist() == fresh.tokens.tolist()
        assert (text.seed, text.redraws, text.redrawn_passes) == (now, attempt, spent)
        assert (text.evaluations, text.fill_passes) == (fresh.evaluations, fresh.fill_passes)
        assert text.stopped_by == fresh.stopped_by
        reached.add((text.redraws, text.stopped_by))
    assert (0, "length") in reached
    if redraws:
        assert max(reached)[0] >= 1
    else:
        assert (0, "entropy") in reached


def test_redraws_are_limited():
    text = write_one(blocks(*[7] * 8), [], 8, redraws=5, **REDRAWN)
    assert (text.stopped_by, text.tokens.tolist(), text.redraws) == ("entropy", [7, 7], 5)
    assert (text.evaluations, text.redrawn_passes) == (4, 5 * 4)


def test_every_redraw_is_told_and_nothing_else_is_redrawn():
    requests = [Request(NO_TOKENS, seed, 8) for seed in range(10)]
    stopping = Stopping(redraws=2, **REDRAWN)
    events = list(write(blocks(block_size=2), ending(requests, stopping), batch_size=3))
    done = {e.index: e.sample for e in events if isinstance(e, Stopped)}
    redrawn = Counter(e.index for e in events if isinstance(e, Redrawn))
    assert {index: text.redraws for index, text in done.items()} == {i: redrawn[i] for i in range(10)}
    assert set(redrawn.values()) == {1, 2}


def test_only_low_entropy_is_drawn_again():
    text = write_one(blocks(0, EOS, 1, 1), [], 8, eos_id=EOS, redraws=3, **REDRAWN)
    assert (text.stopped_by, text.redraws) == ("eos", 0)


# --- length, and which rule comes first ---


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
def test_a_text_has_the_length_it_was_asked_for(length, block_size):
    text = write_one(blocks(*[0, 1] * 12, block_size=block_size), [], length)
    assert text.tokens.tolist() == ([0, 1] * 12)[:length]
    assert (text.stopped_by, text.evaluations) == ("length", length)


def test_a_full_prompt_is_finished_whatever_it_says():
    text = write_one(blocks(), [7, 7, EOS, 7], 4, eos_id=EOS, **REDRAWN)
    assert (text.tokens.tolist(), text.stopped_by, text.evaluations) == ([7, 7, EOS, 7], "length", 0)


def test_an_end_token_comes_before_low_entropy_and_that_before_the_length():
    rules = {"entropy_floor": 1.0, "entropy_window": 4}
    low = write_one(blocks(7, 7, 7, 7), [], 4, eos_id=EOS, **rules)
    assert (low.stopped_by, low.tokens.tolist()) == ("entropy", [])
    both = write_one(blocks(7, 7, EOS, 7), [], 4, eos_id=EOS, **rules)
    assert (both.stopped_by, both.tokens.tolist()) == ("eos", [7, 7, EOS])
    neither = write_one(blocks(0, 1, 4, 5), [], 4, eos_id=EOS, **rules)
    assert (neither.stopped_by, neither.tokens.tolist()) == ("length", [0, 1, 4, 5])


def test_rows_are_judged_one_by_one():
    """Straight at the rule: six rows at different places of their texts."""
    text = torch.tensor(
        [
            [0, 1, 4, EOS, 7, 7],  # an end token in the last piece
            [0, EOS, 4, 5, 6, 7],  # one that was passed already, and did not count then
            [0, 1, 7, 7, MASK, MASK],  # too low
            [7, 7, 7, 7, MASK, MASK],  # as low, but one of the last was given
            [7, 7, 7, 7, MASK, MASK],  # as low, but nothing was written yet
            [0, 1, 4, 5, 6, 7],  # at its length
        ]
    )
    verdicts = Stopping(eos_id=EOS, entropy_floor=0.1, entropy_window=2).ends(
        text,
        written_from=torch.tensor([0, 0, 0, 3, 4, 0]),
        piece_start=torch.tensor([2, 4, 2, 2, 2, 4]),
        piece_end=torch.tensor([6, 6, 4, 4, 4, 6]),
        stop=torch.tensor([6, 9, 6, 6, 6, 6]),
    )
    assert verdicts == [
        Ending("eos", 4),
        None,
        Ending("entropy", 2),
        Ending("entropy", 3),
        None,
        Ending("length", 6),
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"entropy_floor": 4.0, "entropy_window": 0}, "entropy_window must be at least 1, got 0"),
        ({"entropy_floor": -0.5}, "entropy_floor must be finite and not negative, got -0.5"),
        ({"entropy_floor": math.nan}, "entropy_floor must be finite and not negative, got nan"),
        ({"entropy_floor": math.inf}, "entropy_floor must be finite and not negative, got inf"),
        ({"entropy_floor": 4.0, "redraws": -1}, "redraws must not be negative, got -1"),
        ({"redraws": 2}, "redraws needs an entropy_floor, got 2 with none"),
        ({"eos_id": -1}, "eos_id must be a token id, got -1"),
    ],
)
def test_impossible_rules_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        Stopping(**rules)
