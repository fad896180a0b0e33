"""D3PM's sampler follows the chain of its T steps, state by state."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Absorbing, Cosine, Floored, Linear, NoiseSchedule, Uniform
from bd3lm.sampling import (
    Ancestral,
    PosteriorWriter,
    Request,
    Sharpening,
    SlidingWriter,
    TokenRevealed,
    Writer,
    sample,
    write,
)
from tests.oracles import chains
from tests.oracles.frequencies import p_value
from tests.oracles.languages import VOCAB, Array, TableNetwork, fixed, guesses, log, random_language
from tests.oracles.networks import MASK, blocks_of, tiny_transformer
from tests.sampling.asking import drawn_by

pytestmark = pytest.mark.sweep(3)

ROWS = 3000
SURE = 1e-4
TO_MASK, TO_ALL = np.eye(VOCAB)[MASK], np.full(VOCAB, 1 / VOCAB)


def writer_of(network, *, context: int, steps: int, **options) -> PosteriorWriter:
    return PosteriorWriter(
        network, process=Uniform(VOCAB), mask_id=MASK, context=context, steps=steps, **options
    )


def request(seed: int, length: int, given: tuple[int, ...] = ()) -> Request:
    return Request(torch.tensor(given, dtype=torch.long), seed, length)


def drawn(
    writer: Writer, length: int, *, given: tuple[int, ...] = (), how: Sharpening | None = None
) -> Tensor:
    requests = [request(seed, length, given) for seed in range(ROWS)]
    samples = sample(writer, drawn_by(requests, how), batch_size=ROWS)
    return torch.stack([s.tokens for s in samples])


def logits(length: int) -> Array:
    return 1.5 * np.random.default_rng(0).standard_normal((VOCAB**length, length, VOCAB))


def softmax_of_clean(table: Array) -> Array:
    p = np.exp(table)
    p[..., MASK] = 0.0
    return p / p.sum(-1, keepdims=True)


def alphas(schedule: NoiseSchedule, steps: int) -> list[float]:
    t = torch.arange(steps, dtype=torch.float64) / steps
    return [*schedule.alpha(t).tolist(), schedule.last_alpha]


@pytest.mark.parametrize(
    ("steps", "schedule"),
    [
        *((steps, Linear()) for steps in (1, 2, 4)),
        *((3, schedule) for schedule in (Cosine(), Floored(Linear(), 0.2))),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else type(value).__name__,
)
def test_uniform_samples_follow_the_enumerated_chain(steps, schedule):
    table = logits(2)
    texts = drawn(writer_of(fixed(table), context=2, steps=steps, schedule=schedule), 2)
    law = chains.sampled([softmax_of_clean(table)] * (steps + 1), alphas(schedule, steps), TO_ALL, 2)
    assert (texts != MASK).all()
    assert p_value(texts, law) > SURE
    if steps > 1:  # and one step's is told apart
        one = chains.sampled([softmax_of_clean(table)] * 2, alphas(schedule, 1), TO_ALL, 2)
        assert p_value(texts, one) < 1e-8


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_absorbing_samples_with_ancestral_steps_follow_theirs(steps):
    """What `posterior` says of SlidingWriter: it is D3PM's sampler over masks."""
    table = logits(3)
    writer = SlidingWriter(fixed(table), reading=blocks_of(3), context=3, unmasking=Ancestral(steps))
    law = chains.sampled([softmax_of_clean(table)] * (steps + 1), alphas(Linear(), steps), TO_MASK, 3)
    assert p_value(drawn(writer, 3), law) > SURE


def test_with_the_true_conditionals_many_steps_give_the_language():
    language = random_language(2, 0)

    def table(noise: float) -> Array:
        alpha = 0.0 if noise > 6.9 else float(np.exp(-noise))
        return log(guesses(language, 2, chains.keep_matrix(alpha, TO_ALL)))

    network = TableNetwork(table, uses_noise=True)
    assert p_value(drawn(writer_of(network, context=2, steps=128), 2), language) > SURE
    assert p_value(drawn(writer_of(network, context=2, steps=1), 2), language) < 1e-8


def test_given_tokens_are_kept_and_the_rest_follows_its_law_given_them():
    table = logits(3)
    texts = drawn(writer_of(fixed(table), context=3, steps=2), 3, given=(MASK, 3))
    assert (texts[:, 1] == 3).all()
    inner = table.reshape(VOCAB, VOCAB, VOCAB, 3, VOCAB)[:, 3][:, :, [0, 2]].reshape(VOCAB**2, 2, VOCAB)
    law = chains.sampled([softmax_of_clean(inner)] * 3, [1, 0.5, 0], TO_ALL, 2)
    assert p_value(texts[:, [0, 2]], law) > SURE


def test_sharpening_is_of_the_guess():
    table = logits(2)
    texts = drawn(writer_of(fixed(table), context=2, steps=3), 2, how=Sharpening(temperature=0.5))
    law = chains.sampled([softmax_of_clean(2 * table)] * 4, alphas(Linear(), 3), TO_ALL, 2)
    assert p_value(texts, law) > SURE


@pytest.mark.parametrize("timed", [False, True])
def test_a_batch_equals_its_rows_alone(timed):
    network = tiny_transformer(4, adaln=timed, time_conditioning=timed)
    writer = writer_of(network, context=5, steps=6)
    requests = [request(seed, 3 + seed % 3, (1, MASK, 3)[: seed % 4]) for seed in range(12)]
    requests = drawn_by(requests, Sharpening(top_p=0.9))
    together, seats = (sample(writer, requests, batch_size=size) for size in (12, 5))
    for seed, one in enumerate(requests):
        (alone,) = sample(writer, [one])
        assert torch.equal(alone.tokens, together[seed].tokens)
        assert torch.equal(alone.tokens, seats[seed].tokens)
        assert alone.evaluations == together[seed].evaluations == seats[seed].evaluations
        assert alone.evaluations == 6 if timed else alone.evaluations <= 6


def test_what_is_watched_is_what_is_written():
    events = list(
        write(writer_of(fixed(logits(3)), context=3, steps=8), [request(1, 3, (MASK, 3))], watch=True)
    )
    seen = {1: 3}
    for event in events:
        if isinstance(event, TokenRevealed):
            assert event.position != 1
            seen[event.position] = event.token
    assert [seen[i] for i in range(3)] == events[-1].sample.tokens.tolist()


def test_what_makes_no_sense_is_refused():
    network = fixed(logits(2))
    with pytest.raises(ValueError, match=r"process must be Uniform, got Absorbing.*Ancestral"):
        PosteriorWriter(network, process=Absorbing(VOCAB, MASK), mask_id=MASK, context=2)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        writer_of(network, context=2, steps=0)
    with pytest.raises(ValueError, match="length must be at most 2, the network's whole context, got 3"):
        sample(writer_of(network, context=2, steps=1), [request(0, 3)])
    with pytest.raises(ValueError, match=r"mask_id must lie in 0..3, got 9"):
        PosteriorWriter(network, process=Uniform(VOCAB), mask_id=9, context=2)
