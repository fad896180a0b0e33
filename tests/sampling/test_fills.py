"""Gaps that have text after them: the law of the fill that is drawn, its cost, and what is told of it.

The laws are enumerated. With K fills of chance q and weight w, the law of the one that is drawn is a sum over
all ways in which K draws can fall on the fills.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from math import factorial, inf, log, prod
from typing import Any

import pytest
import torch

from bd3lm.evaluation import CausalFills, EnumeratedFills, OrderedFills
from bd3lm.lm import Gap, LanguageModel, Settings
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.sampling import (
    BlockStarted,
    Engine,
    Extended,
    Failed,
    Fills,
    FillWeights,
    Request,
    Sample,
    Started,
    Stopped,
    Stopping,
    TokenRevealed,
    Writer,
    sample,
    write,
)
from bd3lm.sampling.fills import choose_fill, effective_number, fill_seeds, followed_to
from tests.lm import of_four_tokens
from tests.oracles.networks import MASK, blocks_of, tiny_transformer
from tests.oracles.sampling import (
    Law,
    Tokens,
    asking,
    chi_square,
    distance,
    in_blocks,
    in_every_order,
    in_tokens,
    leaning,
    sharpened,
)
from tests.sampling.loop_cases import (
    EOS,
    MODEL,
    TIMED,
    Counting,
    autoregressive,
    blocks,
    facts,
    prompt,
    tokens,
)

TEMPLATES: list[list[Any]] = [
    [0, Gap(2), 1, 3],  # the text that follows fills a block of its own, or part of one
    [0, Gap(1), 1, Gap(1), 3],  # text between gaps
    [0, 1, Gap(1), 3, Gap(1), 0],  # a prompt that ends inside a block of four, a text that does too
]


def given(template: Sequence[Any]) -> Tokens:
    return tuple(
        token for part in template for token in ([MASK] * part.tokens if isinstance(part, Gap) else [part])
    )


def before_gap(template: Sequence[Any]) -> Tokens:
    text = given(template)
    return text[: text.index(MASK)]


def held(law: Law, template: Sequence[Any]) -> Law:
    """The law of texts that hold what is given."""
    wanted = given(template)
    some = {
        text: p
        for text, p in law.items()
        if all(token in (MASK, mine) for mine, token in zip(text, wanted, strict=True))
    }
    total = sum(some.values())
    return {text: p / total for text, p in some.items()}


def ways(number: int, kinds: int) -> Iterator[tuple[int, ...]]:
    """All ways to put so many draws into so many kinds."""
    if kinds == 1:
        yield (number,)
        return
    for first in range(number + 1):
        for rest in ways(number - first, kinds - 1):
            yield (first, *rest)


def resampled(chances: Law, weights: Law, number: int) -> Law:
    """The law of one of so many fills, drawn in proportion to its weight."""
    texts = list(chances)
    law = dict.fromkeys(texts, 0.0)
    for counts in ways(number, len(texts)):
        chance = factorial(number) * prod(
            chances[text] ** count / factorial(count) for text, count in zip(texts, counts, strict=True)
        )
        share = [count * weights[text] for text, count in zip(texts, counts, strict=True)]
        for text, part in zip(texts, share, strict=True):
            law[text] += chance * part / sum(share)
    return law


Laws = Callable[[LanguageModel, Tokens, int], Law]


def causal_law(model: LanguageModel, start: Tokens, length: int, **options: Any) -> Law:
    return in_tokens(model.network, start, length, score_first=False, **options)


def block_law(size: int, lean: float = 0.0) -> Laws:
    def law(model: LanguageModel, start: Tokens, length: int, **options: Any) -> Law:
        order = leaning(lean) if lean else in_every_order
        return in_blocks(model.network, start, length, size, order, context=8, **options)

    return law


CASES: dict[str, tuple[LanguageModel, Any]] = {
    "causal": (of_four_tokens(None, context=8, seed=1), causal_law),
    "blocks of 2": (of_four_tokens(2, context=8, seed=1), block_law(2)),
    "blocks of 4": (of_four_tokens(4, context=8, seed=1), block_law(4)),
    "blocks of 4, leaning": (of_four_tokens(4, context=8, seed=1).with_lean(1.5), block_law(4, 1.5)),
    "blocks of 2, causal clean": (
        of_four_tokens(2, context=8, seed=1, causal_clean=True),
        lambda *words, **options: block_law(2)(*words, causal_clean=True, **options),
    ),
}
every_case = pytest.mark.parametrize("case", CASES)
every_template = pytest.mark.parametrize("template", TEMPLATES, ids=str)


@cache
def laws_of(case: str, which: int, **sharpening: Any) -> tuple[Law, Law, Law]:
    """What fills are drawn by, their weights p/q, and the law of the texts that hold what is given."""
    model, law_of = CASES[case]
    template = TEMPLATES[which]
    text = given(template)
    drawn = law_of(model, text, len(text), sharpen=sharpened(**sharpening)) if sharpening else None
    q = law_of(model, text, len(text))
    whole = law_of(model, before_gap(template), len(text))
    weights = {text: whole[text] / q[text] for text in q}
    return drawn or q, weights, held(whole, template)


def texts_of(
    model: LanguageModel, template: Sequence[Any], number: int, **options: Any
) -> list[torch.Tensor]:
    settings: dict[str, Any] = {"top_p": 1.0, "batch_size": 2048, **options}
    found = model.generate([template] * number, seeds=range(number), stop_at_eos=False, **settings)
    return [each.sample.tokens for each in found]


# --- the law ---


@every_case
@pytest.mark.parametrize("which", range(len(TEMPLATES)))
def test_the_law_of_the_fill_comes_to_that_of_the_model_as_one_over_their_number(
    case: str, which: int
) -> None:
    """By enumeration: half the distance for twice the fills, and one fill is far from it."""
    q, weights, target = laws_of(case, which)
    far = {number: distance(resampled(q, weights, number), target) for number in (1, 2, 4, 8)}
    assert distance(q, target) == pytest.approx(far[1])
    assert far[1] > 0.02
    assert far[8] < far[4] < far[2] < far[1]
    assert far[8] < 0.7 * far[4]
    bound = sum(p**2 / q[text] for text, p in target.items())  # E w² over (E w)²
    assert all(far[number] <= 2 * bound / number for number in far)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("case", ["causal", "blocks of 2", "blocks of 4"])
@every_template
def test_texts_follow_the_enumerated_law_of_so_many_fills(case: str, template: list[Any]) -> None:
    q, weights, _ = laws_of(case, TEMPLATES.index(template))
    model = CASES[case][0]
    for number, draws in ((2, 300), (8, 200)):
        texts = texts_of(model, template, draws, fills=number)
        assert chi_square(texts, resampled(q, weights, number)) > 1e-4


def test_weights_matter() -> None:
    """Without them, or with the likelihood of the fill among them, the texts would have another law."""
    model, _ = CASES["causal"]
    q, weights, _ = laws_of("causal", 0)
    texts = texts_of(model, TEMPLATES[0], 500, fills=8)
    assert chi_square(texts, resampled(q, weights, 8)) > 1e-4
    assert chi_square(texts, q) < 1e-6
    assert chi_square(texts, resampled(q, {text: w * q[text] for text, w in weights.items()}, 8)) < 1e-6


@pytest.mark.parametrize("case", ["causal", "blocks of 2"])
def test_sharpened_fills_are_weighed_by_the_model_itself(case: str) -> None:
    """The target is the law of what is filled, sharpened, times the plain likelihood of what is given."""
    sharpening = {"temperature": 0.6, "top_p": 0.9}
    drawn, weights, _ = laws_of(case, 1, **sharpening)
    texts = texts_of(CASES[case][0], TEMPLATES[1], 300, fills=6, **sharpening)
    assert chi_square(texts, resampled(drawn, weights, 6)) > 1e-4


@every_case
@every_template
def test_weights_are_those_of_the_enumeration(case: str, template: list[Any]) -> None:
    """Up to one number for all fills of a template."""
    _, weights, _ = laws_of(case, TEMPLATES.index(template))
    model = CASES[case][0]
    texts = torch.tensor(list(weights))
    gaps = torch.tensor(given(template)) == MASK
    config = model.config
    weigher = config.method.fill_weights(config.method.settled(Settings()), config.frame)
    assert isinstance(weigher, FillWeights)
    with torch.no_grad():
        found = weigher.weigh(model.network, texts, gaps, [0] * len(texts)).log_weights
    wanted = torch.tensor([log(w) for w in weights.values()], dtype=torch.float64)
    assert torch.allclose(found - found[0], wanted - wanted[0], atol=1e-9)


# --- blocks that are too large to enumerate ---


def given_first(
    model: LanguageModel, size: int, text: Tokens, template: Sequence[Any]
) -> dict[Tokens, float]:
    """In each block after that of the first gap: along each order of what is given, its likelihood while the
    gaps are masked. Each order of all blocks by its places, with its likelihood."""
    wanted = given(template)
    first = wanted.index(MASK) // size
    along: dict[Tokens, float] = {(): 1.0}
    for start in range((first + 1) * size, len(text), size):
        places = [i for i in range(size) if start + i < len(text) and wanted[start + i] != MASK]

        def sees(query: int, key: int, start: int = start) -> bool:
            return key < query // size * size + size

        conditional = asking(model.network, text[:start], size, sees)
        following = {}
        for done, p in along.items():
            for order in permutations(places):
                block, likelihood = [MASK] * size, p
                for place in order:
                    token = text[start + place]
                    likelihood *= conditional(tuple(block), None)[place][token]
                    block[place] = token
                following[(*done, *(start + place for place in order))] = likelihood
        along = following
    return along


def test_orders_of_what_is_given_have_their_likelihoods_and_are_as_often_drawn() -> None:
    """With one order a fill, each weight is that of some order; over many seeds, all orders come up alike."""
    model, size = of_four_tokens(4, context=12, seed=1), 4
    template = [0, Gap(3), 1, Gap(1), 3, 0, 3]
    text = (0, 1, 3, 0, 1, 3, 3, 0, 3)
    along = given_first(model, size, text, template)
    assert len(along) == 6
    seeds = range(1200)
    weigher = OrderedFills(reading=blocks_of(size), orders=1)
    with torch.no_grad():
        found = weigher.weigh(
            model.network,
            torch.tensor([text] * len(seeds)),
            torch.tensor(given(template)) == MASK,
            list(seeds),
        )
    assert found.passes == 1 + 3
    likelihoods = found.log_weights.exp()
    far = (likelihoods.unsqueeze(1) - torch.tensor(list(along.values()), dtype=torch.float64)).abs()
    assert far.min(1).values.max() < 1e-12
    counts = torch.bincount(far.argmin(1), minlength=6)
    assert ((counts - 200.0).square() / 200.0).sum() < 25  # χ² of 5 degrees of freedom, p = 1e-4
    several = replace(weigher, orders=3)
    with torch.no_grad():
        mean = several.weigh(
            model.network, torch.tensor([text] * 400), torch.tensor(given(template)) == MASK, list(range(400))
        ).log_weights.exp()
    wanted = sum(along.values()) / 6
    assert abs(mean.mean().item() - wanted) < 4 * mean.std().item() / 20


@pytest.mark.slow
def test_the_law_of_larger_blocks_comes_to_that_of_given_tokens_first() -> None:
    """Random weights that are right on average lead to the same law; the fill of the first block then follows
    the likelihood of the given tokens of later blocks."""
    model, size = of_four_tokens(2, context=8, seed=1), 2
    template = [0, Gap(2), 1, 3, 0]
    q = block_law(size)(model, given(template), 6)
    weights = {
        text: sum(given_first(model, size, text, template).values())
        / len(given_first(model, size, text, template))
        for text in q
    }
    total = sum(q[text] * weights[text] for text in q)
    target = {text: q[text] * weights[text] / total for text in q}
    fills = Fills(64, OrderedFills(reading=blocks_of(size), orders=2))
    writer = model._writer(Settings(top_p=1.0))
    requests = [Request(torch.tensor(given(template)), seed, 6, fills=fills) for seed in range(500)]
    texts = [each.tokens for each in sample(writer, requests, batch_size=2048)]
    assert distance(q, target) > 0.1
    assert chi_square(texts, target) > 1e-4
    assert chi_square(texts, q) < 1e-6


def test_nothing_is_weighed_where_no_later_block_has_given_tokens() -> None:
    weigher = OrderedFills(reading=blocks_of(4))
    found = weigher.weigh(MODEL, torch.zeros(2, 4, dtype=torch.long), torch.tensor([0, 1, 1, 0]) > 0, [0, 1])
    assert (found.log_weights.tolist(), found.passes) == ([0.0, 0.0], 0)


# --- the draw among fills ---


def test_a_fill_is_drawn_in_proportion_to_its_weight() -> None:
    log_weights = torch.tensor([0.0, -1.0, -inf, 0.5], dtype=torch.float64) - 1000.0
    counts = torch.bincount(
        torch.tensor([choose_fill(log_weights, seed) for seed in range(4000)]), minlength=4
    )
    shares = torch.softmax(log_weights, 0)
    kept = shares > 0
    assert counts[2] == 0
    assert ((counts - 4000 * shares).square()[kept] / (4000 * shares[kept])).sum() < 18.4  # 2 degrees, 1e-4
    impossible = torch.full((3,), -inf, dtype=torch.float64)
    assert {choose_fill(impossible, seed) for seed in range(40)} == {0, 1, 2}


def test_the_effective_number_of_fills() -> None:
    assert effective_number(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(3.0)
    assert effective_number(torch.tensor([0.0, -inf, -inf])) == 1.0
    assert effective_number(torch.full((3,), -inf)) == 3.0
    w = [1.0, 3.0, 0.5]
    found = effective_number(torch.tensor(w, dtype=torch.float64).log() - 700)
    assert found == pytest.approx(sum(w) ** 2 / sum(each**2 for each in w))


def test_more_fills_join_those_of_fewer() -> None:
    assert fill_seeds(5, 3) == fill_seeds(5, 7)[:3]
    assert fill_seeds(5, 1) == [5]
    assert len({*fill_seeds(5, 50), *fill_seeds(6, 50)}) == 100


@pytest.mark.parametrize(
    ("text", "end"),
    [("0_1", 3), ("0__", 0), ("013", 0), ("", 0), ("_", 0), ("_1_", 2), ("0_1_3__", 5)],
)
def test_given_text_counts_up_to_its_last_token_after_a_gap(text: str, end: int) -> None:
    assert followed_to(tokens(text).tolist(), MASK) == end


# --- requests ---

FILLS_CAUSAL = Fills(5, CausalFills(mask_id=MASK, score_first=True))
WRITERS: dict[str, tuple[Callable[..., Writer], Fills]] = {
    "causal": (autoregressive, FILLS_CAUSAL),
    "causal, after a first token": (
        lambda model, **options: autoregressive(model, score_first=False, **options),
        Fills(5, CausalFills(mask_id=MASK)),
    ),
    "causal, uncached": (lambda model: autoregressive(model, cache=False), FILLS_CAUSAL),
    "blocks of 4": (blocks, Fills(5, EnumeratedFills(reading=blocks_of(4)))),
    "blocks of 2": (
        lambda model: blocks(model, block_size=2),
        Fills(3, EnumeratedFills(reading=blocks_of(2))),
    ),
    "blocks of 4, by orders": (blocks, Fills(5, OrderedFills(reading=blocks_of(4)))),
    "one block": (
        lambda model: blocks(model, block_size=12),
        Fills(2, OrderedFills(reading=blocks_of(12))),
    ),
}
every_writer = pytest.mark.parametrize("name", WRITERS)
WITH_GAPS = [
    Request(tokens("0__1"), seed=7, length=4),
    Request(tokens("0__1 3"), seed=8, length=5),
    Request(tokens("01_3 _011 30"), seed=9, length=10),
    Request(tokens("0_13 _011 __"), seed=10, length=10),
    Request(tokens("0_1"), seed=11, length=11),
    Request(tokens("0___ __13 10"), seed=12, length=12, stopping=Stopping(eos_id=EOS)),
]
WITHOUT = [Request(prompt(3), seed=2, length=8), Request(tokens("01__"), seed=3, length=4)]


def asked(requests: Sequence[Request], fills: Fills) -> list[Request]:
    return [replace(request, fills=fills) for request in requests]


@every_writer
def test_a_text_is_the_same_alone_and_among_others(name: str) -> None:
    make, fills = WRITERS[name]
    writer = make(MODEL)
    requests = asked([*WITH_GAPS, *WITHOUT], fills)
    alone = [facts(*sample(writer, [request], batch_size=1)) for request in requests]
    for size in (2, 7, 64):
        assert [facts(each) for each in sample(writer, requests, batch_size=size)] == alone
    turned = sample(writer, requests[::-1], batch_size=9)
    assert [facts(each) for each in turned[::-1]] == alone


@every_writer
def test_the_text_is_that_of_one_of_its_fills(name: str) -> None:
    """Up to the last given token each fill is the text of its own seed, and what follows is a text that goes
    on from it, with the seed of the request."""
    make, fills = WRITERS[name]
    writer = make(MODEL)
    chosen = set()
    for request in WITH_GAPS:
        (found,) = sample(writer, asked([request], fills))
        end = followed_to(request.given.tolist(), MASK)
        of_seeds = [
            sample(writer, [Request(request.given[:end], seed, end)])[0].tokens.tolist()
            for seed in fill_seeds(request.seed, fills.number)
        ]
        filled = found.tokens[:end]
        assert filled.tolist() in of_seeds
        chosen.add(of_seeds.index(filled.tolist()))
        after = torch.cat((filled, request.given[end:]))
        (plain,) = sample(writer, [replace(request, given=after)])
        assert found.tokens.tolist() == plain.tokens.tolist()
        assert (found.fills, found.seed, found.stopped_by) == (fills.number, request.seed, plain.stopped_by)
        assert 1.0 <= found.effective_fills <= fills.number
        assert found.given == int((request.given != MASK).sum())
        assert found.prompt == request.given.tolist().index(MASK)
        assert found.written_from == end
    assert len(chosen) > 1


@every_writer
def test_where_nothing_follows_a_gap_nothing_changes(name: str) -> None:
    make, fills = WRITERS[name]
    network = Counting(MODEL)
    writer = make(network)
    for request in WITHOUT:
        network.rows.clear()
        plain, calls = facts(*sample(writer, [request])), len(network.rows)
        assert facts(*sample(writer, asked([request], fills))) == plain
        assert len(network.rows) == 2 * calls
        assert (plain["fills"], plain["effective_fills"]) == (1, 1.0)


@every_writer
def test_the_cost_is_every_pass_of_the_network(name: str) -> None:
    make, fills = WRITERS[name]
    network = Counting(MODEL)
    writer = make(network)
    for request in asked(WITH_GAPS, fills):
        network.rows.clear()
        (text,) = sample(writer, [request], batch_size=1)
        assert text.evaluations + text.fill_passes == sum(network.rows)  # fills are weighed side by side
        writing = text.evaluations + text.fill_passes - sum(rows for rows in network.rows if rows > 1)
        assert writing == network.rows.count(1)


def test_a_redraw_leaves_the_fill_and_is_counted() -> None:
    make, fills = WRITERS["causal"]
    network = Counting(MODEL)
    writer = make(network)
    stopping = Stopping(entropy_floor=1.3, entropy_window=4, redraws=2)
    redrawn = 0
    for seed in range(12):
        plain = Request(tokens("0_1"), seed=seed, length=9, stopping=stopping)
        network.rows.clear()
        (text,) = sample(writer, asked([plain], fills), batch_size=1)
        assert text.evaluations + text.fill_passes + text.redrawn_passes == sum(network.rows)
        (first,) = sample(writer, asked([Request(tokens("0_1"), seed=seed, length=3)], fills))
        assert text.tokens[:3].tolist() == first.tokens.tolist()
        redrawn += text.redraws
        assert (text.seed != seed) == (text.redraws > 0)
    assert redrawn


# --- the engine, and what is told ---


def test_a_text_with_several_fills_can_be_let_go_of() -> None:
    make, fills = WRITERS["blocks of 4"]
    writer = make(MODEL)
    engine = Engine(seats=2)
    first = engine.submit(asked(WITH_GAPS, fills)[2], writer)
    second = engine.submit(asked(WITH_GAPS, fills)[3], writer)
    engine.step()
    first.abort()
    assert len(engine) == 2
    done = []
    while len(engine):
        done += [event for event in engine.step() if isinstance(event, Stopped)]
    assert [event.index for event in done] == [second.index]
    assert facts(done[0].sample) == facts(*sample(writer, [second.request]))
    engine.step()
    assert engine.written == 0
    assert not engine._tables
    assert not engine._fillings._of


def test_a_text_that_goes_on_can_be_let_go_of() -> None:
    make, fills = WRITERS["causal"]
    engine = Engine(seats=8)
    handle = engine.submit(replace(WITH_GAPS[4], fills=fills), make(MODEL), tell="pieces")
    while not any(isinstance(event, Extended) for event in engine.step()):
        pass
    handle.abort()
    assert engine.step() == []
    assert len(engine) == engine.written == 0
    assert not engine._fillings._chosen


def test_what_is_told_in_pieces_is_the_text() -> None:
    make, fills = WRITERS["causal"]
    engine = Engine(seats=4)
    request = replace(WITH_GAPS[4], fills=fills)
    engine.submit(request, make(MODEL), tell="pieces")
    told: dict[int, int] = {}
    final: Sample | None = None
    while len(engine):
        for event in engine.step():
            assert event.index == 0
            match event:
                case Extended(start=start, tokens=new):
                    assert not set(told) & set(range(start, start + len(new)))
                    told |= {start + place: token for place, token in enumerate(new)}
                case Stopped(sample=found):
                    final = found
    assert final is not None
    assert min(told) == 1
    assert told == {place: final.tokens[place].item() for place in told}
    assert set(told) >= set(range(1, len(final.tokens) - 1))


@pytest.mark.parametrize("name", ["causal", "blocks of 4"])
def test_passes_are_told_of_the_fill_that_is_drawn_alone(name: str) -> None:
    make, fills = WRITERS[name]
    writer = make(MODEL)
    requests = asked([*WITH_GAPS, *WITHOUT], fills)
    texts: dict[int, list[int]] = {}
    quiet = sample(writer, requests)
    for event in write(writer, requests, watch=True):
        match event:
            case Started(index=index, request=request):
                assert index not in texts
                assert request == requests[index]
                texts[index] = request.given.tolist()
            case BlockStarted(index=index, stop=stop):
                texts[index] += [MASK] * (stop - len(texts[index]))
            case TokenRevealed(index=index, position=position, token=token):
                assert texts[index][position] == MASK
                texts[index][position] = token
            case Stopped(index=index, sample=text):
                assert texts[index][: len(text.tokens)] == text.tokens.tolist()
                assert facts(text) == facts(quiet[index])


def test_a_network_that_fails_fails_the_text_once() -> None:
    broken = tiny_transformer(9, vocab_size=8)
    with torch.no_grad():
        broken.embedding.weight[3] = torch.nan
    make, fills = WRITERS["causal"]
    cases = {
        "03__1": "text 0 cannot be written: the model's probabilities are not finite",
        "0_31": "text 0 cannot be written: the weights of its fills are not finite",
    }
    for template, reason in cases.items():
        engine = Engine(seats=3)
        request = Request(tokens(template), 1, len(template), fills=fills)
        engine.submit(request, make(broken))
        events = []
        while len(engine):
            events += engine.step()
        (failed,) = events
        assert isinstance(failed, Failed)
        assert failed.index == 0
        assert failed.reason.startswith(reason)
        other = engine.submit(request, make(MODEL))
        events = []
        while len(engine):
            events += engine.step()
        assert [event.index for event in events] == [other.index]
        assert engine.written == 0
        assert not engine._fillings._of


# --- what users ask for ---


def test_by_default_sixteen_fills_are_drawn_and_one_is_as_it_was() -> None:
    for case in ("causal", "blocks of 2"):
        model = CASES[case][0]
        (found,) = model.generate(TEMPLATES[0], top_p=1.0)
        assert found.sample.fills == 16
        (one,) = model.generate(TEMPLATES[0], top_p=1.0, fills=1)
        seeds = torch.tensor(given(TEMPLATES[0]))
        writer = model._writer(Settings(top_p=1.0))
        (plain,) = sample(writer, [Request(seeds, one.sample.seed, len(seeds))])
        assert facts(one.sample) == facts(plain)
        engine = model.engine(seats=3)
        engine.submit(TEMPLATES[0], top_p=1.0, seed=found.sample.seed)
        events = []
        while len(engine):
            events += engine.step()
        assert [facts(event.sample) for event in events] == [facts(found.sample)]


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (of_four_tokens(None), {"temperature": 0.0}, "if the likeliest token is always taken"),
        (of_four_tokens(None), {"top_k": 1}, "if the likeliest token is always taken"),
        (of_four_tokens(12, context=12), {}, "for a model of one block, which sees all given text"),
        (
            LanguageModel(
                TIMED,
                replace(
                    of_four_tokens(4, context=12, vocab_size=8).record,
                    network=TIMED.config,
                    method=BlockDiffusionMethod(block_size=4),
                ),
            ),
            {},
            "for a network that is told the noise level",
        ),
    ],
)
def test_where_nothing_weighs_fills_there_is_one_and_more_are_refused(
    model: LanguageModel, options: dict[str, Any], why: str
) -> None:
    (found,) = model.generate([0, Gap(2), 1], **options)
    assert found.sample.fills == 1
    with pytest.raises(ValueError, match=f"fills must be 1 {why}.* got 4"):
        model.generate([0, Gap(2), 1], fills=4, **options)


def test_a_template_past_the_context_has_one_fill() -> None:
    model = of_four_tokens(None, context=4)
    (found,) = model.generate([0, Gap(3), 1])
    assert found.sample.fills == 1
    with pytest.raises(
        ValueError, match=r"prompt 0: fills must be 1 .* past the context of 4 .* 3 with 5 tokens"
    ):
        model.generate([0, Gap(3), 1], fills=3)


def test_numbers_of_fills() -> None:
    model = of_four_tokens(None)
    for wrong in (0, -1, 1.5, "8", True):
        with pytest.raises(ValueError, match="fills must be a whole number from 1 on, got"):
            model.generate([0, Gap(1), 1], fills=wrong)
    with pytest.raises(ValueError, match="number must be at least 2"):
        Fills(1, CausalFills(mask_id=MASK))
    assert model.generate([0], fills=7)[0].sample.fills == 1
