"""Texts of a model that come and go are those of `generate`."""

import random
import threading

import pytest

import bd3lm
from bd3lm.lm.engine import TextEngine
from bd3lm.sampling import Stopped
from tests.lm import of_bytes

CHANGES = [
    {},
    {"temperature": 0.5},
    {"temperature": 0.0},
    {"top_p": 0.6, "top_k": 9},
    {"stop": "e"},
    {"eos_id": 101},
    {"tokens_per_pass": 2},
    {"entropy_floor": 0.5, "entropy_window": 4, "redraws": 1},
]


def written(engine: TextEngine) -> dict[int, str | None]:
    done = {}
    while len(engine):
        for event in engine.step():
            if isinstance(event, Stopped):
                done[event.index] = engine.model.generation(event.sample).text
    return done


@pytest.mark.parametrize("tell", ["end", "pieces", "passes"])
def test_a_text_is_that_of_generate_with_its_seed(tell):
    model, chance = of_bytes(4), random.Random(3)
    engine, expected = model.engine(seats=3), {}
    for number in range(24):
        changes, prompt = chance.choice(CHANGES), "abcdefgh"[: chance.randrange(9)]
        handle = engine.submit(prompt, seed=number, max_new_tokens=7, tell=tell, **changes)
        (alone,) = model.generate(prompt, seeds=[number], max_new_tokens=7, **changes)
        expected[handle.index] = alone.text
    assert written(engine) == expected


def test_what_cannot_be_written_is_refused_at_once():
    engine = of_bytes(4).engine()
    for changes, message in (
        ({"temperature": -1.0}, "temperature must lie"),
        ({"stride": 3}, "stride must be left"),
        ({"law": "causal"}, "law must be block"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        ({"tell": "all"}, "tell must be one of end, pieces, passes, got 'all'"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit("ab", **changes)
    assert len(engine) == 0


def test_a_joint_model_writes_by_both_its_laws_side_by_side():
    model = bd3lm.load("box", device="cpu")
    engine, expected = model.engine(), {}
    for law in ("block", "causal", "block", "causal"):
        handle = engine.submit("The ", seed=len(expected), max_new_tokens=12, law=law)
        (alone,) = model.with_law(law).generate("The ", seeds=[len(expected)], max_new_tokens=12)
        expected[handle.index] = alone.text
    assert written(engine) == expected


def test_one_thread_steps_while_others_submit():
    model = of_bytes(4)
    engine, lock, expected, done = model.engine(seats=4), threading.Lock(), {}, {}

    def client(number: int) -> None:
        for turn in range(10):
            seed = 100 * number + turn
            handle = engine.submit("ab", seed=seed, max_new_tokens=6)
            with lock:
                expected[handle.index] = seed

    threads = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or len(engine):
        for event in engine.step():
            if isinstance(event, Stopped):
                done[event.index] = model.generation(event.sample).text
    alone = model.generate(["ab"] * 30, seeds=list(expected.values()), max_new_tokens=6)
    assert [done[index] for index in expected] == [text.text for text in alone]
