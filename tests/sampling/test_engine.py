"""Requests that come and go while others are written: each text is as if it were alone."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bd3lm.models import Denoiser
from bd3lm.sampling import (
    Ancestral,
    Engine,
    Extended,
    Failed,
    FirstHitting,
    MostConfident,
    Redrawn,
    Request,
    Sample,
    Sharpening,
    Started,
    Stopped,
    Stopping,
    Writer,
    sample,
)
from bd3lm.sampling.writer import fill_cache
from tests.sampling.loop_cases import (
    EOS,
    MODEL,
    REQUESTS,
    autoregressive,
    blocks,
    facts,
    prompt,
    sliding,
    speculative,
    suited,
)

SHARPENINGS = [
    Sharpening(),
    Sharpening(temperature=0.7),
    Sharpening(top_p=0.8),
    Sharpening(temperature=1.5, top_k=3),
    Sharpening(top_k=1),
]
STOPPINGS = [
    Stopping(),
    Stopping(eos_id=EOS),
    Stopping(entropy_floor=1.0, entropy_window=3, redraws=2),
    Stopping(eos_id=EOS, entropy_floor=0.9, entropy_window=4),
]


def writers(model: Denoiser = MODEL) -> list[Writer]:
    return [
        blocks(model),
        blocks(model, block_size=2, unmasking=FirstHitting(1, 1.5)),
        blocks(model, unmasking=Ancestral(3), causal_clean=True),
        blocks(model, unmasking=MostConfident(threshold=0.6)),
        autoregressive(model),
        speculative(model),
        speculative(model, drafts=2, candidates=2, previous_token=True),
        speculative(model, scheme="rejection", passes=2),
        sliding(model),
    ]


def asked(writer: Writer, seed: int) -> Request:
    """One of many different requests."""
    chance = random.Random(seed)
    request = chance.choice(suited(REQUESTS, writer))
    return replace(
        request, seed=seed, sharpening=chance.choice(SHARPENINGS), stopping=chance.choice(STOPPINGS)
    )


def alone(writer: Writer, request: Request) -> dict[str, Any]:
    return facts(*sample(writer, [request]))


def run(engine: Engine) -> list[Sample]:
    done = []
    while len(engine):
        done += [event.sample for event in engine.step() if isinstance(event, Stopped)]
    return done


@pytest.mark.parametrize("records", [False, True])
def test_texts_that_come_and_go_are_each_as_if_alone(records: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of writers and settings at once; some come later, some are let go of."""
    monkeypatch.setattr("bd3lm.sampling.table._records", lambda writer: records)
    chance, engine, of = random.Random(1), Engine(seats=5), writers()
    wanted: dict[int, tuple[Writer, Request]] = {}
    done: dict[int, dict[str, Any]] = {}
    aborted: set[int] = set()
    for turn in range(400):
        for _ in range(chance.choice((0, 0, 0, 1, 3)) if turn < 200 else 0):
            writer = chance.choice(of)
            handle = engine.submit(asked(writer, len(wanted)), writer)
            wanted[handle.index] = writer, handle.request
            if chance.random() < 0.2:
                handle.abort()
                aborted.add(handle.index)
        for event in engine.step():
            assert event.index not in aborted
            if isinstance(event, Stopped):
                assert event.index not in done
                done[event.index] = facts(event.sample)
        assert engine.written <= 5
        if not len(engine) and turn > 200:
            break
    assert set(done) == set(wanted) - aborted
    assert len(aborted) > 10
    for index, found in done.items():
        assert found == alone(*wanted[index])


def test_a_text_that_nobody_wants_any_more_frees_its_seat_at_the_next_step() -> None:
    engine, writer = Engine(seats=1), blocks(MODEL)
    first = engine.submit(Request(prompt(1), 1, 400), writer)
    second = engine.submit(Request(prompt(1), 2, 8), writer)
    engine.step()
    assert engine.written == 1
    first.abort()
    (text,) = run(engine)
    assert facts(text) == alone(writer, second.request)
    first.abort()  # once more does nothing
    assert len(engine) == engine.written == 0


def test_a_long_prompt_is_read_between_the_passes_of_others() -> None:
    """Nobody waits for all of it, and it is read in as many passes as ever."""
    writer = autoregressive(MODEL, context=64)
    engine = Engine(seats=4)
    long = Request(prompt(600), 1, 604)
    engine.submit(Request(prompt(1), 2, 40), writer)
    engine.step()
    engine.submit(long, writer)
    steps = []
    while len(engine):
        steps.append([event for event in engine.step() if isinstance(event, Stopped)])
    (ended, (second,)), (last, (first,)) = [(at, each) for at, each in enumerate(steps) if each]
    assert (ended, last) == (
        10 + 3 - 1,
        38 - 1,
    )  # ten chunks, after the last of which four tokens; the other has 38
    assert facts(second.sample) == alone(writer, long)
    assert first.sample.index == 0


@pytest.mark.parametrize("make", [autoregressive, blocks])
def test_nobody_waits_for_many_long_prompts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads a few of them at most, so that texts under way go on; and a short one that comes last is
    begun at once, whether anything else is being written or not."""
    read: list[int] = []

    def noting(model: Any, cache: Any, inputs: Any, counts: Any, *, chunk: int, layout: Any) -> Any:
        for found in fill_cache(model, cache, inputs, counts, chunk=chunk, layout=layout):
            read.append(len(counts) * chunk)
            yield found
        read.append(len(counts) * chunk)

    module = "autoregressive" if make is autoregressive else "blocks"
    monkeypatch.setattr(f"bd3lm.sampling.{module}.fill_cache", noting)
    monkeypatch.setattr("bd3lm.sampling.table._read_together", lambda writer: 256)
    writer = make(MODEL, context=256)
    for is_idle in (True, False):
        engine = Engine(seats=16)
        wanted = [] if is_idle else [Request(prompt(3), 50, 43)]
        wanted += [Request(prompt(900 + 10 * number), number, 1000) for number in range(9)]
        handles = [engine.submit(request, writer) for request in wanted]
        engine.step()
        handles.append(engine.submit(Request(prompt(5), 51, 13), writer))
        gone = handles[3]
        order, done, steps = [], {}, 0
        while len(engine):
            read.clear()
            for event in engine.step():
                if isinstance(event, Stopped):
                    order.append(event.index)
                    done[event.index] = facts(event.sample)
            assert sum(read) <= 2 * 256  # short ones, and long ones
            steps += 1
            if steps == 4:
                gone.abort()
        assert order[0] == handles[-1].index
        assert steps > 8 * 7 // 2  # of nine long prompts, two were read in a pass
        assert set(done) == {handle.index for handle in handles} - {gone.index}
        assert all(done[each.index] == alone(writer, each.request) for each in handles if each is not gone)


def test_texts_of_other_lengths_share_passes_where_they_are_about_as_long() -> None:
    engine, writer = Engine(seats=8), blocks(MODEL)
    for length in (50, 40, 64, 500, 490):
        engine.submit(Request(prompt(1), length, length), writer)
    engine.step()
    assert sorted(len(table.seats) for table in engine._tables) == [2, 3]


@pytest.mark.slow
def test_four_threads_submit_abort_and_step() -> None:
    engine, of = Engine(seats=6), writers()
    lock, done = threading.Lock(), {}
    wanted: dict[int, tuple[Writer, Request]] = {}
    aborted: set[int] = set()
    begin = threading.Barrier(4)

    def client(number: int) -> None:
        chance = random.Random(number)
        begin.wait()
        for turn in range(60):
            writer = chance.choice(of)
            handle = engine.submit(asked(writer, 1000 * number + turn), writer)
            with lock:
                wanted[handle.index] = writer, handle.request
            if chance.random() < 0.3:
                with lock:
                    aborted.add(handle.index)
                handle.abort()
            for _ in range(chance.randrange(4)):
                take(engine.step())

    def take(events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, Stopped):
                with lock:
                    assert event.index not in done
                    done[event.index] = facts(event.sample)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while len(engine):
        take(engine.step())
    assert set(wanted) - aborted <= set(done)
    assert not engine._tables
    for index, found in done.items():
        assert found == alone(*wanted[index])


def test_one_text_that_cannot_be_written_does_not_stop_the_others() -> None:
    class Spoilt:
        """NaN in texts whose second token is 3."""

        def __init__(self, model: Any) -> None:
            self._model = model

        def __getattr__(self, name: str) -> Any:
            return getattr(self._model, name)

        def __call__(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
            states = self._model(tokens, **options)
            return torch.where((tokens[:, 1] == 3).view(-1, 1, 1), torch.nan, states)

    writer: Any = blocks(Spoilt(MODEL), cache=False)
    engine = Engine()
    bad = engine.submit(Request(torch.tensor([0, 3]), 1, 8), writer)
    good = engine.submit(Request(torch.tensor([0, 1]), 2, 4, sharpening=Sharpening(top_k=1)), writer)
    events = []
    while len(engine):
        events += engine.step()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.index == bad.index
    assert "not finite" in failed.reason
    assert [event.index for event in events if isinstance(event, Stopped)] == [good.index]


def test_what_cannot_be_written_is_refused_when_it_is_submitted() -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="given must begin with a token"):
        engine.submit(Request(prompt(0), 1, 4), autoregressive(MODEL, score_first=False))
    assert len(engine) == 0
    with pytest.raises(ValueError, match="seats must be at least 1, got 0"):
        Engine(seats=0)


@pytest.mark.parametrize("writer", writers(), ids=lambda writer: type(writer).__name__)
def test_pieces_are_told_as_they_are_written(writer: Writer) -> None:
    """With what `Stopped` adds they are the text; others beside it are not told of."""
    engine = Engine()
    handles = [engine.submit(asked(writer, seed), writer, tell="pieces") for seed in range(12)]
    quiet = [engine.submit(asked(writer, seed), writer) for seed in range(6)]
    told: dict[int, dict[int, int]] = {handle.index: {} for handle in handles}
    while len(engine):
        for event in engine.step():
            if isinstance(event, Extended):
                told[event.index] |= dict(enumerate(event.tokens, event.start))
            elif isinstance(event, Redrawn) and event.index in told:
                told[event.index] = {}
            elif isinstance(event, Stopped) and event.index in told:
                tokens = event.sample.tokens.tolist()
                assert all(
                    tokens[place] == token
                    for place, token in told[event.index].items()
                    if place < len(tokens)
                )
    assert sum(map(len, told.values())) > 20
    assert {handle.index for handle in quiet}.isdisjoint(told)


def test_a_watched_engine_tells_of_every_pass() -> None:
    engine, writer = Engine(), blocks(MODEL)
    engine.submit(Request(prompt(4), 1, 4), writer, tell="passes")  # which is full
    engine.submit(Request(prompt(1), 1, 8), writer, tell="passes")
    engine.submit(Request(prompt(1), 1, 8), writer)
    events = []
    while len(engine):
        events += engine.step()
    assert [type(event) for event in events if event.index == 0] == [Started, Stopped]
    assert sum(type(event).__name__ == "TokenRevealed" for event in events if event.index == 1) == 7
    assert [type(event) for event in events if event.index == 2] == [Stopped]
