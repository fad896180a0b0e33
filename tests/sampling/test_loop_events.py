"""Events: they tell what happens to each text, and replayed they give it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bd3lm.diffusion import Purpose, counter_uniform
from bd3lm.sampling import (
    BlockFinished,
    BlockStarted,
    Redrawn,
    Request,
    Started,
    Stopped,
    Stopping,
    TokenHidden,
    TokenRevealed,
    sample,
    write,
)
from bd3lm.sampling.loop import close_suspended
from tests.oracles.networks import (
    MASK,
)
from tests.sampling.asking import ending
from tests.sampling.loop_cases import (
    EARLY,
    MODEL,
    REQUESTS,
    WRITERS,
    blocks,
    every_rule,
    facts,
    prompt,
    suited,
    tokens,
)

pytestmark = pytest.mark.sweep(2)


def replay(request: Request, first: int, events: Sequence[Any]) -> None:
    """Apply what happened to one text; every step must make sense, and lead to what was reported."""
    given = request.given.tolist() + [MASK] * (request.length - len(request.given))
    text, told, block = list(given), request, (0, 0)
    for event in events:
        match event:
            case Started(request=told):
                text, block = list(given), (first, first)
            case BlockStarted(start=start, stop=stop):
                assert block[1] == start < stop <= request.length
                block = (start, stop)
            case TokenRevealed(position=p, token=token):
                assert p in range(*block)
                assert text[p] == MASK != token
                text[p] = token
            case TokenHidden(position=p):
                assert p in range(*block)
                assert text[p] != MASK == given[p]
                text[p] = MASK
            case BlockFinished(start=start, stop=stop):
                # What is all given after the last gap is finished with it.
                assert (start, stop) == (block[0], block[1] if MASK in given[block[1] :] else request.length)
                assert MASK not in text[:stop]
                block = (start, stop)
            case Stopped(sample=done):
                assert event is events[-1]
                assert text[: len(done.tokens)] == done.tokens.tolist()
                assert (told.seed, told.length) == (done.seed, request.length)
                assert len(done.tokens) <= block[1] or MASK not in given


@every_rule
@pytest.mark.parametrize("stopping", [Stopping(), EARLY], ids=["in full", "early"])
def test_the_events_replayed_give_the_text(name, stopping):
    writer = WRITERS[name](MODEL)
    requests = suited(REQUESTS, writer)
    events = list(write(writer, ending(requests, stopping), batch_size=3, watch=True))
    done = sorted((e.sample for e in events if isinstance(e, Stopped)), key=lambda s: s.index)
    assert [facts(s) for s in done] == [facts(s) for s in sample(writer, ending(requests, stopping))]
    for index, (request, text) in enumerate(zip(requests, done, strict=True)):
        own = [event for event in events if event.index == index]
        gaps = [*(request.given == MASK).tolist(), True]
        replay(request, writer.first_start(gaps.index(True)), own)
        counts = Counter(type(event) for event in own)
        assert counts[Redrawn] == text.redraws
        assert counts[BlockStarted] == counts[BlockFinished]
        assert counts[Started] == text.redraws + 1
        if stopping == Stopping():
            assert counts[TokenRevealed] - counts[TokenHidden] == text.written


@pytest.mark.parametrize("name", ["remasking", "remasking, causal", "sliding and remasking"])
def test_remasking_hides_tokens_and_other_rules_do_not(name):
    events = list(write(WRITERS[name](MODEL), REQUESTS, watch=True))
    assert any(isinstance(event, TokenHidden) for event in events)
    assert not any(isinstance(e, TokenHidden) for e in write(blocks(MODEL), REQUESTS, watch=True))


def test_blocks_are_finished_in_order_from_the_first_that_is_written():
    requests = [
        Request(prompt(5), 0, 15),
        Request(prompt(0), 0, 6),
        Request(tokens("0131 10_1 3013 _301 1301 1"), 0, 21),
    ]
    started: list[list[tuple[int, int]]] = [[], [], []]
    finished: list[list[tuple[int, int]]] = [[], [], []]
    for event in write(blocks(MODEL), requests, watch=True):
        if isinstance(event, BlockStarted):
            started[event.index].append((event.start, event.stop))
        if isinstance(event, BlockFinished):
            finished[event.index].append((event.start, event.stop))
    assert started == [[(4, 8), (8, 12), (12, 15)], [(0, 4), (4, 6)], [(4, 8), (8, 12), (12, 16)]]
    assert finished == [[(4, 8), (8, 12), (12, 15)], [(0, 4), (4, 6)], [(4, 8), (8, 12), (12, 21)]]


def test_first_hitting_is_told_token_by_token_in_the_order_of_its_passes():
    order = counter_uniform(torch.tensor(3), torch.arange(8), Purpose.ORDER, 1)[:, 0]
    events = write(blocks(MODEL), [Request(prompt(0), 3, 8)], watch=True)
    told = [e.position for e in events if isinstance(e, TokenRevealed)]
    assert told == [
        *sorted(range(4), key=lambda p: -order[p]),
        *sorted(range(4, 8), key=lambda p: -order[p]),
    ]


def test_unwatched_only_ends_and_redraws_are_told():
    events = list(write(blocks(MODEL), ending(REQUESTS, EARLY), batch_size=2))
    assert {type(event) for event in events} == {Redrawn, Stopped}
    assert sorted(e.index for e in events if isinstance(e, Stopped)) == list(range(len(REQUESTS)))


@pytest.mark.parametrize("name", ["first-hitting", "remasking", "autoregressive", "sliding"])
def test_an_abandoned_iterator_leaves_nothing_broken(name):
    writer = WRITERS[name](MODEL)
    requests = suited(REQUESTS, writer)
    before = [facts(s) for s in sample(writer, requests)]
    abandoned = write(writer, requests, batch_size=3, watch=True)
    for _ in range(20):
        next(abandoned)
        assert torch.is_grad_enabled()  # no_grad does not leak out of a suspended iterator
    assert [facts(s) for s in sample(writer, requests)] == before
    abandoned.close()
    assert [facts(s) for s in sample(writer, requests)] == before


def test_two_iterators_of_one_writer_do_not_touch_each_other():
    writer = blocks(MODEL)
    one, other = (write(writer, REQUESTS, batch_size=2, watch=True) for _ in range(2))
    pairs = list(zip(one, other, strict=True))
    assert len(pairs) > 100
    assert all(repr(a) == repr(b) for a, b in pairs)


def test_samples_share_nothing_with_the_requests_and_keep_no_gradients():
    given = prompt(6)
    full, longer = sample(blocks(MODEL), [Request(given, 0, 6), Request(given, 0, 8)])
    full.tokens.fill_(0)
    longer.tokens.fill_(0)
    assert torch.equal(given, prompt(6))


def test_what_is_suspended_when_the_interpreter_ends_is_closed_while_torch_is_there() -> None:
    suspended, finished = (write(blocks(MODEL), REQUESTS, watch=True) for _ in range(2))
    next(suspended)
    list(finished)
    close_suspended()
    assert next(suspended, None) is None
