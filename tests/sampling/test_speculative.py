"""Drafts verified several a pass: the coupled scheme changes no token, and rejection changes no law."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from bd3lm.models import Transformer
from bd3lm.sampling import (
    AutoregressiveWriter,
    Drafted,
    Engine,
    Failed,
    Request,
    Sample,
    Sharpening,
    SpeculativeWriter,
    Started,
    Stopped,
    Stopping,
    TokenRevealed,
    sample,
)
from bd3lm.sampling import speculative as under_test
from bd3lm.sampling.verifying import (
    Ahead,
    Drawing,
    Tree,
    acceptance_chance,
    rejection_drafts,
    rejection_verdict,
    residual,
)
from tests.oracles.networks import FAMILIES, clean_of, network_of, tiny_transformer
from tests.oracles.sampling import chi_square, in_tokens, sharpened
from tests.sampling.asking import drawn_by
from tests.sampling.loop_cases import Counting, speculative

FITS, FAILS = 1e-3, 1e-6  # p-values of samples that follow a law, and of those that do not
_OF_COSTS = ("index", "tokens", "evaluations", "fill_passes", "drafted", "accepted", "redrawn_passes")


def without(writer: SpeculativeWriter) -> AutoregressiveWriter:
    """The same texts, a token a pass."""
    return AutoregressiveWriter(
        writer.model, mask_id=writer.mask_id, context=writer.window + 1, score_first=writer.score_first
    )


def text_of(found: Sample) -> dict[str, Any]:
    """What a sample says of its text, and not of what was spent on it."""
    facts = {name: value for name, value in vars(found).items() if name not in _OF_COSTS}
    return facts | {"tokens": found.tokens.tolist()}


# --- coupled: the texts of sampling without speculation ---


@lru_cache(maxsize=16)
def network(family: str, seed: int) -> Transformer:
    additions = {"additions": 2} if seed % 2 else {}
    return network_of(family, seed, vocab_size=8 if family == "GPT" else 7, **additions)


def ends_with(pair: tuple[int, int]) -> Callable[[Tensor, int, int], tuple[int, str] | None]:
    """Ends a text after two tokens."""

    def find(text: Tensor, written_from: int, new_from: int) -> tuple[int, str] | None:
        for end in range(max(new_from, written_from) + 1, len(text) + 1):
            if end >= 2 and tuple(text[end - 2 : end].tolist()) == pair:
                return end, str(pair)
        return None

    return find


def asked(chance: random.Random, writer: SpeculativeWriter, seed: int) -> Request:
    """A random request: a prompt or a template, any settings, any end."""
    clean = clean_of(writer.model)
    length = chance.randint(2, 30)
    known = chance.choice((0.0, 0.0, 0.3, 0.7))
    given = [chance.choice(clean) for _ in range(chance.choice((0, 1, 1, 2, 5, 20)))]
    while chance.random() < known and len(given) < length:
        given += [writer.mask_id] * chance.randint(1, 4) + [chance.choice(clean)] * chance.randint(1, 3)
    if not writer.score_first and (not given or given[0] == writer.mask_id):
        given = [chance.choice(clean), *given[1:]]
    stopping = Stopping(
        eos_id=chance.choice((None, None, clean[-1])),
        find_end=chance.choice((None, None, ends_with((chance.choice(clean), chance.choice(clean))))),
    )
    if chance.random() < 0.25:
        stopping = replace(
            stopping,
            entropy_floor=chance.choice((0.7, 1.0, 1.3)),
            entropy_window=chance.randint(3, 6),
            redraws=chance.randint(0, 2),
        )
    sharpening = Sharpening(
        temperature=chance.choice((1.0, 1.0, 0.6, 1.7)),
        top_p=chance.choice((1.0, 1.0, 0.8)),
        top_k=chance.choice((None, None, 1, 3)),
    )
    length = max(length, len(given))
    return Request(
        torch.tensor(given, dtype=torch.long), seed, length, sharpening=sharpening, stopping=stopping
    )


def writer_of(chance: random.Random) -> SpeculativeWriter:
    """Any network, read in any way, past a context of any length, with any speculation."""
    drafts = chance.choice((None, 1, 2, 3, 5))
    return speculative(
        network(chance.choice(tuple(FAMILIES)), chance.randrange(4)),
        context=chance.choice((64, 12, 8, 6)),
        score_first=chance.random() < 0.5,
        shifted=chance.random() < 0.5,
        previous_token=chance.random() < 0.3,
        drafts=drafts,
        candidates=chance.choice((1, 1, 2, 3)),
        passes=chance.choice((1, 1, 2)),
    )


@pytest.mark.sweep(10)
@pytest.mark.parametrize("seed", range(160))
def test_no_token_depends_on_speculation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where the order of sums decides no near-tie: 25 requests that take each other's seats.

    On a GPU several rounds run between two looks at the texts, so the same is tried here.
    """
    chance = random.Random(seed)
    monkeypatch.setattr(under_test, "_bursts", lambda device: chance.choice((1, 1, 4)))
    writer = writer_of(chance)
    requests = [asked(chance, writer, 1000 * seed + each) for each in range(25)]
    expected = [text_of(text) for text in sample(without(writer), requests, batch_size=25)]
    found = sample(writer, requests, batch_size=chance.choice((1, 4, 25)))
    assert [text_of(text) for text in found] == expected


def test_drafts_of_one_request_are_right_often_enough_to_matter() -> None:
    """Of a network that guesses well: a sweep in which every draft were wrong would show nothing."""
    writer = speculative(Obvious(), score_first=False, context=64, drafts=4)
    (text,) = sample(writer, [Request(torch.tensor([3]), 1, 41)])
    assert text.tokens.tolist() == [3 + place % 5 for place in range(41)]
    assert (text.evaluations, text.drafted, text.accepted) == (9, (8,) * 4, (8,) * 4)  # 1, then 5 a pass
    (text,) = sample(
        speculative(Obvious(), score_first=False, context=64, drafts=4, passes=2),
        [Request(torch.tensor([3]), 1, 41)],
    )
    assert text.evaluations == 14  # 6 in every two


class Obvious:
    """A causal network on which masks guess right: after a token its successor follows, up to 7 and then 3.

    It goes by positions alone, so that a pass must place its masks and drafts well.
    """

    def __init__(self) -> None:
        self._model = tiny_transformer(vocab_size=8)
        self.vocab_size = 8

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: Tensor, *, layout: Any, cache: Any = None, **options: Any) -> Tensor:
        self._model(tokens, layout=layout, cache=cache, **options)
        ends = cache.ends.unsqueeze(1)
        follows = (ends + layout.text_positions() + 1) % 5 + 3
        start, stop = layout.read
        return torch.nn.functional.one_hot(follows, 8)[:, start:stop].double() * 50.0

    def head(self, states: Tensor) -> Tensor:
        return states


def test_passes_are_those_that_the_network_makes() -> None:
    """Of one text at a time, whatever the speculation; and what was read of it is told apart."""
    for seed in range(12):
        chance = random.Random(seed)
        writer = writer_of(chance)
        counting: Any = Counting(writer.model)
        writer.model = counting
        for each in range(4):
            request = replace(asked(chance, writer, each), stopping=Stopping())
            counting.rows.clear()
            (text,) = sample(writer, [request])
            assert text.evaluations + text.fill_passes == len(counting.rows)


def test_with_one_draft_too_many_a_text_costs_no_more_than_a_token_a_pass() -> None:
    """Each pass writes a token, right drafts or not."""
    for seed in range(6):
        writer = speculative(network("Llama", seed % 4), drafts=2)
        requests = [Request(torch.tensor([1]), each, 30) for each in range(10)]
        for text in sample(writer, requests, batch_size=10):
            assert text.evaluations + sum(text.accepted) >= 29  # the last drafts may reach past the end
            assert text.evaluations <= 29
            assert all(right <= drafted for right, drafted in zip(text.accepted, text.drafted, strict=True))


def test_a_draft_that_is_wrong_is_told_as_a_draft_only() -> None:
    """Of a text that is watched, what is revealed is what stands in the sample, once and in its order."""
    for seed in range(8):
        chance = random.Random(seed)
        writer = writer_of(chance)
        engine = Engine()
        request = replace(asked(chance, writer, seed), stopping=Stopping())
        engine.submit(request, writer, tell="passes")
        events = []
        while len(engine):
            events += engine.step()
        (text,) = [event.sample for event in events if isinstance(event, Stopped)]
        revealed = [(event.position, event.token) for event in events if isinstance(event, TokenRevealed)]
        tokens = text.tokens.tolist()
        given = request.given.tolist() + [writer.mask_id] * (len(tokens) - len(request.given))
        free = [place for place, token in enumerate(given) if token == writer.mask_id]
        assert revealed == [(place, tokens[place]) for place in free]
        for event in events:
            if isinstance(event, Drafted):
                assert set(event.positions) <= set(free)
                assert writer.mask_id not in event.tokens


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("burst", [1, 4])
def test_what_is_told_but_for_drafts_is_what_is_told_without(
    burst: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event by event: blocks begin, tokens are revealed, blocks are finished."""
    monkeypatch.setattr(under_test, "_bursts", lambda device: burst)
    for seed in range(6):
        chance = random.Random(seed)
        writer = speculative(
            network("Llama", seed % 4), context=64, score_first=seed % 2 == 0, drafts=3, passes=passes
        )
        requests = [asked(chance, writer, each) for each in range(5)]
        told = []
        for each in (writer, without(writer)):
            engine = Engine()
            for request in requests:
                engine.submit(request, each, tell="passes")
            events: dict[int, list[Any]] = {}
            while len(engine):
                for event in engine.step():
                    if isinstance(event, Stopped):
                        event = text_of(event.sample)
                        events[event.pop("seed")] = [event]
                    elif not isinstance(event, Drafted | Started):
                        events.setdefault(event.index, []).append(event)
            told.append(events)
        assert told[0] == told[1]


@pytest.mark.parametrize("scheme", ["coupled", "rejection"])
@pytest.mark.parametrize("family", ["GPT", "Llama"])
def test_probabilities_that_are_not_finite_fail_a_text_and_no_other(family: str, scheme: Any) -> None:
    """Also where the mask, which stands for such a draft, is no token of the vocabulary."""
    spoilt = network_of(family, 1, vocab_size=8 if family == "GPT" else 7)
    with torch.no_grad():
        spoilt.embedding.weight[3] = torch.nan
    writer, engine = speculative(spoilt, scheme=scheme, candidates=2), Engine()
    for first in (3, 1):
        engine.submit(Request(torch.tensor([first]), 2, 9), writer)
    found = {event.index: type(event) for event in iter(lambda: _next(engine), None)}
    assert found[0] is Failed


def _next(engine: Engine) -> Any:
    """The next text that is done with."""
    while len(engine):
        for event in engine.step():
            if isinstance(event, Stopped | Failed):
                return event
    return None


def test_settings_that_no_text_can_be_written_with_are_refused() -> None:
    model = network("GPT", 0)
    with pytest.raises(ValueError, match=r"speculation\.drafts must be 1 to 7, less than the context, got 8"):
        speculative(model, context=8, drafts=8)
    with pytest.raises(
        ValueError, match=r"speculation\.candidates must be less than the 8 tokens of the voc"
    ):
        speculative(model, candidates=8)
    with pytest.raises(ValueError, match=r"speculation must keep a pass to 1,024 positions, .* got 1,701"):
        speculative(model, context=64, drafts=20, candidates=4)
    uncached: Any = Counting(model)
    uncached.cache_shape = None
    with pytest.raises(ValueError, match="keeps no keys and values"):
        speculative(uncached)


# --- rejection: other texts of the same law ---


def distributions(seed: int, number: int, size: int = 5) -> tuple[Tensor, Tensor]:
    """Two, some entries of which are 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(2, number, size, generator=generator, dtype=torch.float64) ** 3
    drawn[:, :, 0] += 0.05
    drawn *= torch.rand(drawn.shape, generator=generator) > 0.25
    drawn[:, :, 0] += 1e-3
    p, q = drawn / drawn.sum(-1, keepdim=True)
    return p, q


def law_of_rejection(p: Tensor, q: Tensor, candidates: int) -> Tensor:
    """Of a token that is a draft of q if one is accepted, and is drawn from what they leave otherwise."""
    law, reached = torch.zeros_like(p), torch.ones(len(p), 1, dtype=p.dtype)
    left = p
    tokens = torch.arange(p.shape[-1])
    for _ in range(candidates):
        accepted = torch.stack([acceptance_chance(left, q, tokens[v].expand(len(p))) for v in tokens], -1)
        taken = q * torch.where(q > 0, accepted, 0.0)
        law += reached * taken
        reached = reached * (1 - taken.sum(-1, keepdim=True))
        left = residual(left, q)
    return law + reached * left


@pytest.mark.parametrize("candidates", [1, 2, 3])
def test_the_law_of_rejection_is_that_of_the_network(candidates: int) -> None:
    p, q = distributions(candidates, 500)
    torch.testing.assert_close(law_of_rejection(p, q, candidates), p, rtol=0, atol=1e-12)
    same = law_of_rejection(p, p.clone(), candidates)
    torch.testing.assert_close(same, p, rtol=0, atol=1e-12)


def test_a_rule_that_forgets_what_drafts_were_drawn_from_has_another_law() -> None:
    """The likeliest of q accepted with min(1, p/q), as published decoders do."""
    p, q = distributions(1, 200)
    at = q.argmax(-1, keepdim=True)
    accepted = acceptance_chance(p, q, at.squeeze(1)).unsqueeze(1)
    law = (1 - accepted) * residual(p, q)
    law.scatter_add_(1, at, accepted)
    assert ((law - p).abs().sum(-1) > 0.05).double().mean() > 0.5


@pytest.mark.parametrize("candidates", [1, 2, 3])
def test_verdicts_on_many_drafts_follow_the_law(candidates: int) -> None:
    """Two hundred thousand at once: noise that candidates shared, or chances, would show."""
    generator = torch.Generator().manual_seed(candidates)
    size, number = 5, 200_000

    def logits(*shape: int) -> Tensor:
        return 1.5 * torch.randn(*shape, size, generator=generator, dtype=torch.float64)

    first, second, guesses = logits(), logits(size), logits(2)
    tree = Tree(2, candidates)
    drawing = Drawing(Sharpening().rows(number, torch.device("cpu")), torch.arange(number), size)
    positions = torch.arange(7, 10).expand(number, 3)
    drafts, log_q = rejection_drafts(drawing, guesses.expand(number, 2, size), positions[:, :2], candidates)
    tables = tree.on(torch.device("cpu"))
    drafts = drafts[:, tables.places, tables.candidates]
    seen = torch.cat((first.expand(number, 1, size), second[drafts]), 1)
    ahead = Ahead(
        positions,
        torch.ones(number, 3, dtype=torch.bool),
        torch.zeros(number, 3, dtype=torch.long),
        torch.full((number,), 2),
    )
    reached, tokens = rejection_verdict(drawing, tree, seen, drafts, log_q, ahead)
    assert fits(tokens[:, 0], first) > FITS
    has_second = tables.depths[reached] > 0
    for token in range(size):
        assert fits(tokens[has_second & (tokens[:, 0] == token), 1], second[token]) > FITS


def fits(tokens: Tensor, logits: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(logits)).double()
    return float(stats.chisquare(counts.numpy(), (logits.softmax(0) * counts.sum()).numpy()).pvalue)


CASES = [
    {"drafts": 1},
    {"drafts": 3},
    {"drafts": 2, "candidates": 3},
    {"drafts": 2, "passes": 2},
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("given", [(), (1, 2, 0, 2)], ids=str)
@pytest.mark.parametrize("how", CASES, ids=str)
def test_texts_by_rejection_follow_the_chain_rule(how: dict[str, int], given: tuple[int, ...]) -> None:
    """Enumerated for all texts; templates too, whose given tokens stand among the drafts."""
    model = tiny_transformer(2)
    writer = speculative(model, score_first=True, context=8, scheme="rejection", **how)
    assert chi_square(written(writer, given), in_tokens(model, given, 5, score_first=True)) > FITS


def test_sharpened_texts_by_rejection_follow_the_sharpened_chain_rule() -> None:
    model, how = tiny_transformer(2), {"temperature": 0.6, "top_p": 0.9}
    writer = speculative(model, score_first=True, scheme="rejection")
    law = in_tokens(model, (), 5, score_first=True, sharpen=sharpened(**how))
    assert chi_square(written(writer, (), sharpening=Sharpening(**how)), law) > FITS


def test_likeliest_drafts_with_the_rule_for_drawn_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    original = under_test.rejection_drafts

    def likeliest(*args: Any) -> tuple[Tensor, Tensor]:
        drafts, log_q = original(*args)
        return log_q.argmax(-1, keepdim=True).expand_as(drafts), log_q

    monkeypatch.setattr(under_test, "rejection_drafts", likeliest)
    model = tiny_transformer(2)
    writer = speculative(model, score_first=True, scheme="rejection")
    assert chi_square(written(writer, ()), in_tokens(model, (), 5, score_first=True)) < FAILS


def written(
    writer: SpeculativeWriter,
    given: tuple[int, ...],
    *,
    sharpening: Sharpening | None = None,
    rows: int = 3000,
) -> Iterator[Tensor]:
    requests = [Request(torch.tensor(given, dtype=torch.long), seed, 5) for seed in range(rows)]
    for text in sample(writer, drawn_by(requests, sharpening), batch_size=rows):
        yield text.tokens


def test_by_rejection_too_a_text_depends_on_its_request_alone() -> None:
    writer = speculative(network("Qwen3", 1), scheme="rejection", drafts=2, candidates=2)
    chance = random.Random(3)
    requests = [asked(chance, writer, each) for each in range(20)]
    alone = [text_of(*sample(writer, [request])) for request in requests]
    assert [text_of(text) for text in sample(writer, requests, batch_size=7)] == alone


def test_a_tree_has_a_chain_and_other_candidates_beside_it() -> None:
    tree = Tree(3, 2)
    assert tree.parents == (0, 1, 2, 0, 1, 2)
    assert tree.order == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [tree.draft(*each) for each in tree.order] == [1, 2, 3, 4, 5, 6]
    assert tree.on(torch.device("cpu")).paths.tolist() == [
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 1, 2, 2],
        [0, 1, 2, 3],
        [0, 4, 4, 4],
        [0, 1, 5, 5],
        [0, 1, 2, 6],
    ]
