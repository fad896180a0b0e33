"""SSD-LM's sampler: it is its definition number by number, whatever batch and cache it runs in."""

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import (
    GreedyProjection,
    MultiHotProjection,
    Projection,
    Purpose,
    SamplingProjection,
    counter_uniform,
)
from bd3lm.models import Transformer, TransformerConfig
from bd3lm.objectives import SimplexDiffusionLoss, TokenBatch
from bd3lm.sampling import (
    BlockFinished,
    Request,
    Sample,
    SimplexWriter,
    Started,
    Stopped,
    Stopping,
    TokenRevealed,
    sample,
    write,
)
from tests.oracles.networks import CLEAN, MASK, tiny_transformer
from tests.oracles.simplex import OpenNetwork, alpha_bar, logits_of_token, noised, sample_text, softmax
from tests.sampling.asking import ending

pytestmark = pytest.mark.sweep(2)

V = 4
PROJECTIONS: dict[str, Projection] = {
    "greedy": GreedyProjection(),
    "sampling": SamplingProjection(0.8),
    "multi-hot": MultiHotProjection(0.8),
}
CONDITIONINGS = {"plain": {}, "time": {"adaln": True, "time_conditioning": True}}
# Nothing, a part of a block, a block and a part, a template with gaps, a block given after a gap.
GIVEN = [(), (1,), (3, 0, 1, 1), (MASK, 0, MASK, MASK, 3), (0, MASK, 1, 3, 0, 1)]


def request(given: tuple[int, ...], length: int, seed: int = 0) -> Request:
    return Request(torch.tensor(given, dtype=torch.long), seed=seed, length=length)


def texts(samples: list[Sample]) -> list[list[int]]:
    return [s.tokens.tolist() for s in samples]


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_the_sampler_is_its_definition(projection, conditioning):
    """Texts of whole blocks and others, from any prompt, one network call for each step and block."""
    model = tiny_transformer(5, **CONDITIONINGS[conditioning])
    requests = [request(given, length, seed=i) for i, given in enumerate(GIVEN) for length in (6, 8)]
    writer = SimplexWriter(
        model,
        block_size=3,
        mask_id=MASK,
        context=9,
        steps=4,
        projection=PROJECTIONS[projection],
        simplex_scale=2.0,
    )
    with torch.no_grad():
        expected = [
            sample_text(
                model,
                r.given.tolist(),
                seed=r.seed,
                length=r.length,
                block_size=3,
                steps=4,
                mask_id=MASK,
                scale=2.0,
                projection=projection,
                share=0.8,
            )
            for r in requests
        ]
    assert texts(sample(writer, requests)) == expected
    assert len({token for text in expected for token in text}) == 3  # not one token all along


def test_seeds_make_texts_differ_with_every_projection():
    model = tiny_transformer(5)
    for projection in PROJECTIONS.values():
        writer = SimplexWriter(
            model, block_size=4, mask_id=MASK, context=8, steps=3, projection=projection, simplex_scale=2.0
        )
        drawn = texts(sample(writer, [request((), 8, seed) for seed in range(20)]))
        assert len({tuple(t) for t in drawn}) > 10
        assert texts(sample(writer, [request((), 8, seed) for seed in range(20)])) == drawn


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_a_batch_is_its_rows_alone(conditioning, cache):
    model = tiny_transformer(5, **CONDITIONINGS[conditioning])
    writer = SimplexWriter(
        model, block_size=3, mask_id=MASK, context=10, steps=3, simplex_scale=2.0, cache=cache
    )
    requests = [request(given, length, seed=7 * i) for i, given in enumerate(GIVEN) for length in (7, 9, 14)]
    together = sample(writer, requests, batch_size=4)  # seats are freed and taken again
    alone = [sample(writer, [r])[0] for r in requests]
    assert texts(together) == texts(alone)
    assert [s.evaluations for s in together] == [s.evaluations for s in alone]


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_the_cache_changes_nothing_within_the_window(conditioning):
    model = tiny_transformer(6, **CONDITIONINGS[conditioning])
    requests = [request(given, length, seed=i) for i, given in enumerate(GIVEN) for length in (8, 10)]
    cached, afresh = (
        SimplexWriter(model, block_size=3, mask_id=MASK, context=10, steps=4, simplex_scale=2.0, cache=cache)
        for cache in (True, False)
    )
    assert cached.window == 9  # of ten tokens the last is a block of its own, which sees three whole ones
    assert texts(sample(cached, requests)) == texts(sample(afresh, requests))


@pytest.mark.parametrize("cache", [True, False])
def test_what_the_network_is_shown(cache):
    """Noise of scale K that thins around the projection; given tokens almost one-hot; masks past the end."""
    steps, scale, seed, answer = 5, 1.5, 3, torch.tensor([0, 1, 3, 3, 0])
    shown: list[Tensor] = []

    def logits(inputs: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        shown.append(inputs[0])
        return 50.0 * F.one_hot(answer[positions.clamp_max(4)], V).double()

    writer = SimplexWriter(
        OpenNetwork(V, logits),
        block_size=3,
        mask_id=MASK,
        context=6,
        steps=steps,
        projection=GreedyProjection(),
        simplex_scale=scale,
        cache=cache,
    )
    sample(writer, [request((0, 1, 3, 3), 5, seed)])
    assert len(shown) == steps
    for turn, (given, written, past_the_end) in enumerate(shown):
        torch.testing.assert_close(given, torch.tensor(softmax(logits_of_token(3, V, scale))).double())
        assert past_the_end.tolist() == [float(v == MASK) for v in range(V)]
        uniform = counter_uniform(torch.tensor(seed), torch.tensor(4), Purpose.NOISE, V, repeat=turn)
        normal = [NormalDist().inv_cdf(u) for u in uniform.tolist()]
        w = noised(logits_of_token(0, V, scale), alpha_bar(steps - turn, steps), normal, scale)
        expected = torch.tensor(softmax(w), dtype=torch.float64)
        torch.testing.assert_close(written, expected, rtol=0, atol=1e-12)


def knowing(answer: Tensor) -> OpenNetwork:
    """Knows the text by heart."""

    def logits(inputs: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        return 50.0 * F.one_hot(answer[positions % len(answer)], V).double()

    return OpenNetwork(V, logits)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("steps", [1, 2, 25])
def test_a_network_that_knows_the_answer_recovers_it(steps, projection):
    """Past its window too, with the sliding cache."""
    generator = torch.Generator().manual_seed(0)
    answer = torch.tensor(CLEAN)[torch.randint(0, 3, (64,), generator=generator)]
    writer = SimplexWriter(
        knowing(answer),
        block_size=5,
        mask_id=MASK,
        context=12,
        steps=steps,
        projection=PROJECTIONS[projection],
    )
    for length in (3, 5, 12, 41):
        given = answer[: length // 3]
        (text,) = sample(writer, [Request(given, seed=3, length=length)])
        assert text.tokens.equal(answer[:length])
        assert text.given == len(given)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("steps", [1, 7])
def test_evaluations_are_the_steps_of_every_block_and_the_calls_of_the_network(steps, cache):
    network = knowing(torch.tensor([0, 1, 3]))
    writer = SimplexWriter(network, block_size=5, mask_id=MASK, context=20, steps=steps, cache=cache)
    # length, given, blocks with something to write, of which the last may be cut off
    for length, given, blocks in ((5, 0, 1), (6, 0, 2), (15, 0, 3), (17, 7, 3), (17, 10, 2), (11, 10, 1)):
        network.calls = 0
        (text,) = sample(writer, [request((0,) * given, length)])
        assert text.evaluations == steps * blocks
        assert network.calls == text.evaluations + text.fill_passes
        # Two given blocks: the first is read on its own, the second with the first pass over the third.
        assert text.fill_passes == (1 if cache and given >= 10 else 0)


def test_each_row_counts_its_own_evaluations():
    writer = SimplexWriter(knowing(torch.tensor([0, 1, 3])), block_size=5, mask_id=MASK, context=20, steps=4)
    requests = [request((), 3), request((), 12), request((0,) * 6, 20), request((0,) * 10 + (MASK,), 11)]
    assert [s.evaluations for s in sample(writer, requests)] == [4, 12, 12, 4]


def test_a_given_block_between_gaps_costs_no_evaluation():
    model = tiny_transformer(4)
    template = request((0, MASK, 1, 3, 0, 1, MASK, 1), 8)
    writer = SimplexWriter(model, block_size=2, mask_id=MASK, context=8, steps=3, simplex_scale=2.0)
    (text,) = sample(writer, [template])
    assert text.evaluations == 6
    kept = template.given != MASK
    assert text.tokens[kept].equal(template.given[kept])
    assert (text.tokens != MASK).all()


def test_events_replay_to_the_text():
    model = tiny_transformer(4)
    writer = SimplexWriter(model, block_size=3, mask_id=MASK, context=9, steps=3, simplex_scale=2.0)
    requests = [request(given, 11, seed=i) for i, given in enumerate(GIVEN)]
    pages: dict[int, list[int]] = {}
    finished: dict[int, list[int]] = {}
    ended: dict[int, list[int]] = {}
    for event in write(writer, requests, batch_size=3, watch=True):
        match event:
            case Started(index, started):
                pages[index] = started.given.tolist() + [MASK] * (started.length - len(started.given))
            case TokenRevealed(index, position, token):
                assert pages[index][position] == MASK
                pages[index][position] = token
            case BlockFinished(index, start, stop):
                finished.setdefault(index, []).extend(range(start, stop))
            case Stopped(index, text):
                ended[index] = text.tokens.tolist()
    assert pages == ended
    assert ended == dict(enumerate(texts(sample(writer, requests))))
    assert all(places[-1] == 10 for places in finished.values())


def test_a_text_past_the_context_goes_on():
    model = tiny_transformer(4)
    writer = SimplexWriter(model, block_size=3, mask_id=MASK, context=7, steps=2, simplex_scale=2.0)
    long, short = sample(writer, [request((1,), 40), request((1,), 8)])
    assert len(long.tokens) == 40
    assert (long.tokens != MASK).all()
    assert long.evaluations == 2 * 14
    assert long.tokens[:6].equal(short.tokens[:6])


def test_a_text_ends_with_the_end_token():
    writer = SimplexWriter(
        knowing(torch.tensor([0, 0, 1, 0, 3, 1, 1, 1])), block_size=3, mask_id=MASK, context=9, steps=2
    )
    (text,) = sample(writer, ending([request((), 8)], Stopping(eos_id=3)))
    assert (text.tokens.tolist(), text.stopped_by) == ([0, 0, 1, 0, 3], "eos")
    assert text.evaluations == 4


# --- a language of two symbols ---

LETTERS, END, BLOCK, LENGTH = 2, 2, 4, 10  # the mask is the third token; the last block is cut off


def alternating(rows: int, generator: torch.Generator) -> Tensor:
    first = torch.randint(0, 2, (rows, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % 2


def share_obeying(drawn: Tensor) -> float:
    return float((drawn[:, 1:] != drawn[:, :-1]).all(1).double().mean())


@pytest.fixture(scope="module")
def learner() -> tuple[Transformer, Transformer]:
    """A tiny network before and after 1,000 steps on texts that alternate between two symbols.

    At a rate that falls to 0: at a constant one it is a matter of luck, and of the processor, how sure of
    itself the last step leaves it.
    """
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=3,
        layers=2,
        hidden=32,
        heads=2,
        context=LENGTH,
        dropout=0.0,
        # As SSD-LM. A network that is not told t takes noise for a confident text: on pure noise it pays more
        # than log 2, and about a twentieth of its texts break the rule.
        adaln=True,
        time_conditioning=True,
    )
    untrained, model = Transformer(config).eval(), Transformer(config)
    generator = torch.Generator().manual_seed(0)
    objective = SimplexDiffusionLoss(block_size=BLOCK, mask_id=END)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1000):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1.0 - step / 1000)
        batch = TokenBatch.of(alternating(32, generator), score_first=True)
        loss = objective(model, batch, generator=generator).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return untrained, model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_tiny_network_learns_a_language_of_two_symbols(learner, projection):
    obeying = []
    for model in learner:
        writer = SimplexWriter(
            model,
            block_size=BLOCK,
            mask_id=END,
            context=LENGTH,
            steps=25,
            projection=PROJECTIONS[projection],
        )
        samples = sample(writer, [request((), LENGTH, seed) for seed in range(200)], batch_size=200)
        drawn = torch.tensor(texts(samples))
        obeying.append(share_obeying(drawn))
    assert obeying[0] < 0.1  # chance is 2 of 2^10
    assert obeying[1] > 0.9
    assert 0.2 < drawn[:, 0].double().mean() < 0.8  # both texts of the language are written


@pytest.mark.slow
def test_what_it_learned_is_worth_more_the_less_noise_there_is(learner):
    _, model = learner
    steps = 10
    batch = TokenBatch.of(alternating(200, torch.Generator().manual_seed(9)), score_first=True)
    objective = SimplexDiffusionLoss(block_size=BLOCK, mask_id=END, steps=steps)
    draws = objective.draw(200, LENGTH, generator=torch.Generator().manual_seed(3), device="cpu")
    nats = []
    with torch.no_grad():
        for t in range(1, steps + 1):
            draws.levels.fill_(t / steps)
            first_block = objective.loss(model, batch, draws).nats[:, :BLOCK]
            nats.append(float(first_block.mean()))
    assert all(less <= more + 0.01 for less, more in pairwise(nats))
    assert nats[0] < 0.02
    assert abs(nats[-1] - math.log(LETTERS)) < 0.1  # no noise-free symbol to start from: either, by chance


# --- errors ---


def test_bad_settings_are_refused():
    settings = {"block_size": 2, "mask_id": MASK, "context": 8}
    for name in ("block_size", "context", "steps"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            SimplexWriter(tiny_transformer(0), **(settings | {name: 0}))
    for scale in (0.0, math.inf):
        with pytest.raises(ValueError, match=f"simplex_scale must be positive and finite, got {scale}"):
            SimplexWriter(tiny_transformer(0), **settings, simplex_scale=scale)


def test_a_block_that_is_the_whole_context_cannot_be_left():
    writer = SimplexWriter(tiny_transformer(0), block_size=8, mask_id=MASK, context=8, steps=2)
    assert len(sample(writer, [request((), 8)])[0].tokens) == 8
    with pytest.raises(ValueError, match=r"length must be at most the block size 8, .* got 9"):
        sample(writer, [request((), 9)])
