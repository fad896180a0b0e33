"""Block diffusion under any noise: texts follow the enumerated chains of their blocks."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Absorbing, Floored, Linear, Uniform
from bd3lm.models import Transformer
from bd3lm.sampling import (
    AnalyticWriter,
    Ancestral,
    BlockWriter,
    PosteriorWriter,
    Request,
    Sharpening,
    Started,
    Stopped,
    Stopping,
    TokenRevealed,
    Writer,
    sample,
    write,
)
from bd3lm.sampling.blocks import BlockwiseWriter
from tests.oracles import chains, scores
from tests.oracles.frequencies import p_value
from tests.oracles.languages import VOCAB, Array, Text, states
from tests.oracles.networks import MASK, blocks_of, tiny_transformer
from tests.oracles.noisy_blocks import guesses_after, law_in_blocks, logits_after
from tests.sampling.asking import drawn_by, ending

pytestmark = pytest.mark.sweep(3)

ROWS, LENGTH, LEAST, SURE = 3000, 4, 1e-3, 1e-4
CONTEXT = 8
TO_MASK, TO_ALL = np.eye(VOCAB)[MASK], np.full(VOCAB, 1 / VOCAB)
PLAIN = tiny_transformer(1)
TOLD = tiny_transformer(3, adaln=True, time_conditioning=True, gain=1.0)
SIZES = pytest.mark.parametrize("size", [1, 2, 4])
STEPS = 3


def posterior(model: Transformer, size: int | None, *, context: int = CONTEXT, **options) -> PosteriorWriter:
    return PosteriorWriter(
        model,
        process=Uniform(VOCAB),
        mask_id=MASK,
        context=context,
        steps=STEPS,
        block_size=size,
        **options,
    )


def ancestral(model: Transformer, size: int, *, context: int = CONTEXT, **options) -> BlockWriter:
    """D3PM's sampler over masks."""
    return BlockWriter(model, reading=blocks_of(size), context=context, unmasking=Ancestral(STEPS), **options)


def analytic(
    process: str, model: Transformer, size: int | None, *, context: int = CONTEXT, **options
) -> AnalyticWriter:
    absorbing = process == "absorbing"
    return AnalyticWriter(
        model,
        process=Absorbing(VOCAB, MASK) if absorbing else Uniform(VOCAB),
        mask_id=MASK,
        context=context,
        steps=STEPS - 1,  # and the one that leaves no noise
        schedule=Linear() if absorbing else Floored(Linear(), LEAST),
        block_size=size,
        **options,
    )


MASKS, SCORES = partial(analytic, "absorbing"), partial(analytic, "uniform")
WRITERS = {
    "d3pm-absorbing": ancestral,
    "d3pm-uniform": posterior,
    "sedd-absorbing": MASKS,
    "sedd-uniform": SCORES,
}
EACH = pytest.mark.parametrize("kind", WRITERS)
STEPWISE = pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "d3pm-absorbing"])


def law(kind: str, model: Transformer, size: int, length: int = LENGTH, given: Text = ()) -> Array:
    """Of all T steps in every block, by explicit matrices."""
    absorbing, noise = kind.endswith("absorbing"), TO_MASK if kind.endswith("absorbing") else TO_ALL
    if kind.startswith("d3pm"):
        rates = [j / STEPS for j in range(STEPS + 1)]

        def block_law(past: Text, start: Array, kept: tuple[bool, ...]) -> Array:
            tables = [guesses_after(model, past, size, rate) for rate in rates]
            return chains.sampled(tables, [1 - r for r in rates], noise, size, start, kept=kept)
    else:
        least = 0.0 if absorbing else LEAST
        alphas = [1.0 - (1.0 - least) * t for t in np.linspace(1.0, 0.0, STEPS + 1)]
        alphas[0] = 1e-10 if absorbing else LEAST  # not 0, whose σ is infinite
        rates_of_jumps = scores.absorbing_rates(MASK) if absorbing else scores.uniform_rates()

        def block_law(past: Text, start: Array, kept: tuple[bool, ...]) -> Array:
            table = partial(score_table, absorbing, model, past, size)
            return scores.tweedie_law(
                table, alphas, rates_of_jumps, size, start=start, mask_id=MASK, kept=kept
            )

    return law_in_blocks(block_law, noise, length, size, given=given, writes_past_end=not absorbing)


@cache
def score_table(absorbing: bool, model: Transformer, past: Text, size: int, alpha: float) -> Array:
    table = np.exp(logits_after(model, past, size, 1 - alpha))
    if absorbing:
        table = table / (VOCAB - 1) * alpha / (1 - alpha)
        table[..., MASK] = 0.0
    for row, x in enumerate(states(size)):
        for i in range(size):
            table[row, i] *= not absorbing or x[i] == MASK  # a clean token came from itself
            table[row, i, x[i]] = 1.0
    return table


def request(seed: int, length: int, given: Text = ()) -> Request:
    return Request(torch.tensor(given, dtype=torch.long), seed, length)


def drawn(writer: Writer, length: int = LENGTH, given: Text = ()) -> Tensor:
    samples = sample(writer, [request(seed, length, given) for seed in range(ROWS)], batch_size=ROWS)
    return torch.stack([s.tokens for s in samples])


@EACH
@SIZES
@pytest.mark.parametrize("model", [PLAIN, TOLD], ids=["plain", "told"])
def test_texts_follow_the_enumerated_law_of_their_blocks(kind, size, model):
    texts = drawn(WRITERS[kind](model, size))
    assert (texts != MASK).all()
    assert p_value(texts, law(kind, model, size)) > SURE
    if model is PLAIN:  # and blocks of another size are told apart
        assert p_value(texts, law(kind, model, {1: 2, 2: 4, 4: 1}[size])) < 1e-8


@EACH
@SIZES
def test_prompts_and_gaps_inside_blocks_are_kept_and_the_rest_follows_its_law(kind, size):
    given = (MASK, 3, 0)
    texts = drawn(WRITERS[kind](PLAIN, size), 4, given)
    assert (texts[:, 1:3] == torch.tensor([3, 0])).all()
    assert p_value(texts, law(kind, PLAIN, size, 4, given)) > SURE


@EACH
@pytest.mark.parametrize(("size", "length"), [(2, 3), (4, 3), (4, 2)])
def test_a_text_may_end_inside_a_block(kind, size, length):
    """What lies past its end stays masked; uniform noise writes it too, and cuts."""
    texts = drawn(WRITERS[kind](PLAIN, size), length)
    assert texts.shape == (ROWS, length)
    assert (texts != MASK).all()
    assert p_value(texts, law(kind, PLAIN, size, length)) > SURE


@STEPWISE
@pytest.mark.parametrize("model", [PLAIN, TOLD], ids=["plain", "told"])
def test_one_block_is_the_whole_context_to_the_last_bit(kind, model):
    requests = [request(seed, 3 + seed % 3, (1, MASK, 3)[: seed % 4]) for seed in range(30)]
    whole, one = (sample(WRITERS[kind](model, size, context=5), requests) for size in (None, 5))
    assert whole == one


@STEPWISE
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("model", [PLAIN, TOLD], ids=["plain", "told"])
def test_with_a_cache_or_without_alone_or_in_a_batch_a_text_is_the_same(kind, size, model):
    """Texts of other lengths, prompts and places beside it, that enter and leave at other times."""
    given = [(), (1, 0), (1, MASK, 3), (0, 3, 1, 1, 0, 3, 1), (0, 3, 1, 0, 3, 1, MASK, 1)]
    requests = [request(seed, 5 + seed % 5, given[seed % 5][: 5 + seed % 5]) for seed in range(15)]
    requests = drawn_by(requests, Sharpening(top_p=0.9))
    make = partial(WRITERS[kind], model, size, context=9)
    together, few = (sample(make(), requests, batch_size=rows) for rows in (15, 4))
    afresh = sample(make(cache=False), requests)
    for seed, one in enumerate(requests):
        (alone,) = sample(make(), [one])
        for other in (together[seed], few[seed], afresh[seed]):
            assert torch.equal(alone.tokens, other.tokens)
            assert alone.evaluations == other.evaluations
        assert alone.fill_passes == together[seed].fill_passes
        blocks = len({place // size for place in range(len(one.given), one.length)}) + 1
        assert alone.evaluations <= STEPS * blocks


@STEPWISE
def test_a_text_past_the_context_goes_on_and_ends_with_the_end_token(kind):
    writer = WRITERS[kind](PLAIN, 2, context=6)
    long, short = sample(writer, [request(0, 25, (1,)), request(0, 5, (1,))])
    assert len(long.tokens) == 25
    assert (long.tokens != MASK).all()
    assert long.tokens[:4].equal(short.tokens[:4])
    (ended,) = sample(writer, ending([request(0, 25, (1,))], Stopping(eos_id=int(long.tokens[4]))))
    assert ended.tokens.equal(long.tokens[: len(ended.tokens)])
    assert ended.stopped_by == "eos"


@STEPWISE
def test_events_replay_to_the_texts(kind):
    requests = [request(seed, 7, (1, MASK, 3)[: seed % 4]) for seed in range(6)]
    pages: dict[int, list[int]] = {}
    for event in write(WRITERS[kind](PLAIN, 3, context=9), requests, batch_size=4, watch=True):
        match event:
            case Started(index, started):
                pages[index] = started.given.tolist() + [MASK] * (7 - len(started.given))
            case TokenRevealed(index, position, token):
                assert position >= len(requests[index].given) or requests[index].given[position] == MASK
                pages[index][position] = token
            case Stopped(index, text):
                assert pages.pop(index) == text.tokens.tolist()
    assert not pages


@STEPWISE
def test_what_makes_no_sense_is_refused(kind):
    make = partial(WRITERS[kind], PLAIN)
    for size in (0, 3, 16):
        with pytest.raises(
            ValueError, match=f"block_size must be a positive divisor of context 8, got {size}"
        ):
            make(size)
    with pytest.raises(ValueError, match="length must be at most 8, the network's whole context, got 9"):
        sample(make(8), [request(0, 9)])
    assert isinstance(make(2), BlockwiseWriter)
