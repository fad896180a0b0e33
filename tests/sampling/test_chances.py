"""What is told of tokens' probabilities, against likelihoods and a softmax by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.lm import Gap, LanguageModel
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.models import BlockDecoding, Causal
from bd3lm.sampling import Engine, Request, Speculation, Stopped, TokenHidden, TokenRevealed, write
from tests.lm import BASELINES, BYTES, D3PM, baseline, of_bytes, of_four_tokens, of_method, that_drafts
from tests.oracles.networks import MASK
from tests.oracles.orders import law_of_orders
from tests.sampling.loop_cases import MODEL, REQUESTS, WRITERS, every_writer, facts, suited


def in_double(lm: LanguageModel) -> LanguageModel:
    lm.network.double()
    return lm


def joint(law: str = "causal") -> LanguageModel:
    method = BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True)
    return in_double(of_method(method)).with_law(law)  # type: ignore[arg-type]


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6, "top_p": 0.7},
    "likeliest": {"temperature": 0.0},
    "top 5": {"top_k": 5},
    "coupled": {"speculation": 3},
    "two candidates": {"speculation": Speculation(drafts=2, candidates=2)},
    "two passes": {"speculation": Speculation(drafts=3, passes=2)},
    "rejection": {"speculation": Speculation(drafts=3, scheme="rejection")},
    "rejection, cold": {
        "speculation": Speculation(drafts=2, candidates=2, scheme="rejection"),
        "temperature": 0.7,
    },
    "uncached": {"cache": False},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("prompt", ["", "the cat"])
def test_under_the_causal_law_they_sum_to_the_likelihood(how: dict[str, Any], prompt: str) -> None:
    lm = in_double(that_drafts()) if "speculation" in how else joint()
    told = lm.generate(prompt, count=4, top_p=how.get("top_p", 1.0), alternatives=2, **without(how, "top_p"))
    for text in told:
        assert text.sample.log_p is not None
        given = text.sample.given
        assert text.sample.log_p[:given] == (None,) * given
        written = [each for each in text.sample.log_p[given:] if each is not None]
        assert len(written) == text.sample.written
        (known,) = lm.log_likelihood([text.tokens], given=[given])
        assert sum(written) == pytest.approx(known.log_p, abs=1e-9)


def without(how: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in how.items() if key != name}


def test_past_the_context_they_are_of_what_the_token_sees() -> None:
    lm = joint()
    (fresh,) = lm.generate("ab", length=40, cache=False, alternatives=0)
    tokens = torch.tensor(fresh.tokens)
    context = lm.config.network.context
    for place in range(3, 40):
        seen = tokens[max(place - context, 0) : place].unsqueeze(0)
        with torch.no_grad():
            logits = lm.network.head(lm.network(seen, layout=Causal(seen.shape[1])))[0, -1]
        assert fresh.sample.log_p is not None
        assert fresh.sample.log_p[place] == pytest.approx(
            by_hand(logits, BYTES.mask_id)[tokens[place]].item()
        )
    slid, fast = (lm.generate("ab", length=40, speculation=each, alternatives=3)[0] for each in ("off", 3))
    assert slid.tokens == fast.tokens
    assert near(slid.sample.log_p, fast.sample.log_p)


def near(one: Any, other: Any) -> bool:
    return one == pytest.approx(other, abs=1e-9, nan_ok=False)


def by_hand(logits: Tensor, mask_id: int) -> Tensor:
    kept = torch.arange(len(logits)) != mask_id
    p = torch.where(kept, (logits - logits[kept].max()).exp(), 0.0)
    return (p / p.sum()).log()


@pytest.mark.parametrize("block_size", [2, 3, 4])
@pytest.mark.parametrize("lean", [0.0, 1.5])
def test_in_a_block_they_follow_the_order_in_which_it_was_revealed(block_size: int, lean: float) -> None:
    """By hand: the path of each text and order. The mean of a text's paths over all orders, by how likely
    these are, is its likelihood."""
    lm = in_double(of_four_tokens(block_size, context=2 * block_size, score_first=True)).with_lean(lean)
    texts: dict[int, list[TokenRevealed]] = {}
    done = {}
    for event in lm.stream([[]], count=30, length=block_size, top_p=1.0, alternatives=3, seed=5):
        if isinstance(event, TokenRevealed):
            texts.setdefault(event.index, []).append(event)
        elif isinstance(event, Stopped):
            done[event.index] = event.sample
    for index, told in texts.items():
        tokens, order = done[index].tokens, [each.position for each in told]
        path = [log_p for log_p, _ in along(lm, tokens, order)]
        assert near([each.log_p for each in told], path)
        for each, (_, everything) in zip(told, along(lm, tokens, order), strict=True):
            likely = sorted(((float(p), token) for token, p in enumerate(everything)), reverse=True)[:3]
            assert [token for token, _ in each.alternatives] == [token for _, token in likely]
            assert near([p for _, p in each.alternatives], [p for p, _ in likely])
        if index < 3:
            orders = law_of_orders(tuple(range(block_size)), lean)
            whole = sum(
                p * math.exp(sum(each for each, _ in along(lm, tokens, list(order))))
                for order, p in orders.items()
            )
            (known,) = lm.log_likelihood([tokens.tolist()], estimator="exact")
            assert math.log(whole) == pytest.approx(known.log_p, abs=1e-9)


def along(lm: LanguageModel, tokens: Tensor, order: list[int]) -> list[tuple[float, Tensor]]:
    """Log-probabilities of the tokens of one block, and of all others there, revealed in order."""
    block, found = torch.full_like(tokens, MASK), []
    for place in order:
        layout = BlockDecoding(len(tokens), len(tokens), causal_clean=False)
        with torch.no_grad():
            log_p = by_hand(lm.network.head(lm.network(block.unsqueeze(0), layout=layout))[0, place], MASK)
        found.append((log_p[tokens[place]].item(), log_p))
        block[place] = tokens[place]
    return found


BLOCK_WAYS: dict[str, dict[str, Any]] = {
    "speculation": {"speculation": 3},
    "two drafts": {"speculation": 2},
    "leaning": {"speculation": 3, "lean": 2.0},
}


@pytest.mark.parametrize("how", BLOCK_WAYS.values(), ids=BLOCK_WAYS)
@pytest.mark.parametrize("prompt", ["", "the cat", ["a", Gap(5), "bc", Gap(3)]], ids=str)
def test_speculation_in_blocks_tells_the_same(how: dict[str, Any], prompt: Any) -> None:
    lm = joint("block").with_lean(how.get("lean", 0.0))
    asked = {"length": None if isinstance(prompt, list) else 30, "alternatives": 4, "fills": 1}
    prompts = [prompt] if isinstance(prompt, list) else prompt
    plain, fast = (
        lm.generate(prompts, speculation=each, count=3, **asked) for each in ("off", how["speculation"])
    )
    for one, other in zip(plain, fast, strict=True):
        assert one.tokens == other.tokens
        assert near(one.sample.log_p, other.sample.log_p)
        for mine, theirs in zip(one.sample.alternatives, other.sample.alternatives, strict=True):
            assert near([p for _, p in mine], [p for _, p in theirs])


@every_writer
def test_a_writer_that_tells_writes_the_same_in_as_many_passes(make: Any) -> None:
    plain, telling = make(MODEL), make(MODEL)
    telling.alternatives = 2
    requests = suited(REQUESTS, plain)
    events = list(write(telling, requests, batch_size=3, watch=True))
    samples = {event.index: event.sample for event in events if isinstance(event, Stopped)}
    shown: dict[tuple[int, int], Any] = {}
    for event in events:
        if isinstance(event, TokenRevealed):
            assert event.log_p is not None
            assert event.log_p <= event.alternatives[0][1] < 1e-9
            assert MASK not in dict(event.alternatives)
            assert dict(event.alternatives).get(event.token, event.log_p) == event.log_p
            shown[event.index, event.position] = event.log_p, event.alternatives
        elif isinstance(event, TokenHidden):
            del shown[event.index, event.position]
    told = ("log_p", "alternatives")
    for event in write(plain, requests, batch_size=3, watch=True):
        if isinstance(event, Stopped):
            index, sample = event.index, samples[event.index]
            both = [
                {k: v for k, v in facts(each).items() if k not in told} for each in (sample, event.sample)
            ]
            assert both[0] == both[1]
            assert (event.sample.log_p, event.sample.alternatives) == (None, ())
            places = range(len(sample.tokens)) if sample.written else ()
            assert [shown.get((index, place), (None, ())) for place in places] == list(
                zip(sample.log_p or (), sample.alternatives, strict=True)
            )


def test_there_are_no_more_alternatives_than_tokens() -> None:
    lm = of_four_tokens(score_first=True)
    (event, *_) = (e for e in lm.stream([[]], alternatives=20) if isinstance(e, TokenRevealed))
    assert sorted(dict(event.alternatives)) == [0, 1, 3]
    assert sum(math.exp(p) for _, p in event.alternatives) == pytest.approx(1.0, abs=1e-5)
    (event, *_) = (e for e in lm.stream([[]], alternatives=0) if isinstance(e, TokenRevealed))
    assert event.log_p is not None
    assert event.alternatives == ()
    (event, *_) = (e for e in lm.stream([[]]) if isinstance(e, TokenRevealed))
    assert (event.log_p, event.alternatives) == (None, ())


def test_of_several_fills_those_of_the_one_that_was_drawn_are_told() -> None:
    lm = joint()
    (text,) = lm.generate([["ab", Gap(2), "cd", Gap(3)]], fills=4, alternatives=1)
    assert text.sample.log_p is not None
    (known,) = lm.log_likelihood([text.tokens], given=[text.sample.prompt])
    written = [place for place, each in enumerate(text.sample.log_p) if each is not None]
    assert len(written) == 5
    (whole,) = lm.generate([text.tokens[: written[0]]], max_new_tokens=1, alternatives=20, fills=1)
    assert whole.sample.log_p is not None
    assert known.log_p < sum(each or 0.0 for each in text.sample.log_p)
    assert text.sample.alternatives[written[0]][0] == pytest.approx(
        whole.sample.alternatives[written[0]][0], abs=1e-9
    )


def test_a_grammar_leaves_them_the_model_s_own() -> None:
    pytest.importorskip("llguidance")
    lm = joint()
    for text in lm.generate("ab", regex="[xyz]{5}", count=3, alternatives=2, max_new_tokens=8):
        given = text.sample.given
        assert text.completion is not None
        assert set(text.completion) <= set("xyz")
        assert text.sample.log_p is not None
        (known,) = lm.log_likelihood([text.tokens], given=[given])
        assert sum(each or 0.0 for each in text.sample.log_p) == pytest.approx(known.log_p, abs=1e-9)
        assert not {token for each in text.sample.alternatives[given:] for token, _ in each} <= set(b"xyz")


def test_a_text_that_is_drawn_again_tells_of_the_last_attempt() -> None:
    lm = joint()
    floor: dict[str, Any] = {"entropy_floor": 1.0, "entropy_window": 4, "redraws": 3}
    texts = lm.generate("a", count=20, alternatives=0, top_p=0.2, length=12, **floor)
    text = next(each for each in texts if each.sample.redraws and each.sample.written)
    assert text.sample.log_p is not None
    (known,) = lm.log_likelihood([text.tokens], given=[text.sample.given])
    assert sum(each or 0.0 for each in text.sample.log_p) == pytest.approx(known.log_p, abs=1e-9)


# --- refusals ---


@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "5"])
def test_numbers_that_cannot_be_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^alternatives must be a whole number in 0\.\.20, got "):
        of_bytes().generate(alternatives=value)


@pytest.mark.parametrize("name", [name for name in BASELINES if BASELINES[name] is not D3PM])
def test_methods_that_do_not_draw_from_the_network_refuse(name: str) -> None:
    with pytest.raises(ValueError, match=r"^alternatives must be None for .*, got 3$"):
        baseline(BASELINES[name]).generate(alternatives=3)


def test_masks_that_d3pm_uncovers_have_them() -> None:
    lm = baseline(D3PM)
    (text,) = lm.generate(alternatives=3)
    (plain,) = lm.generate()
    assert text.sample.log_p is not None
    assert text.tokens == plain.tokens
    assert sum(each is not None for each in text.sample.log_p) == text.sample.written


def test_nothing_is_computed_that_nobody_is_told() -> None:
    with pytest.raises(
        ValueError, match=r"^alternatives are reported for each pass, .* got 2 for a text that is"
    ):
        of_bytes().stream(alternatives=2, watch=False)
    with pytest.raises(ValueError, match=r"^alternatives are reported for each pass"):
        of_bytes().engine().submit("a", alternatives=2)
    writer = WRITERS["autoregressive"](MODEL)
    writer.alternatives = 1
    for tell in ("end", "pieces"):
        with pytest.raises(ValueError, match=r"^alternatives are reported for each pass"):
            Engine().submit(Request(torch.tensor([0]), 0, 4), writer, tell=tell)  # type: ignore[arg-type]


def test_rows_that_ask_share_no_passes_with_those_that_do_not() -> None:
    engine = of_bytes().engine()
    asks = engine.submit("a", alternatives=1, tell="passes", length=16)
    plain = engine.submit("a", tell="passes", length=16)
    told: dict[int, set[bool]] = {asks.index: set(), plain.index: set()}
    while len(engine):
        for event in engine.step():
            if isinstance(event, TokenRevealed):
                told[event.index].add(event.log_p is not None)
    assert told == {asks.index: {True}, plain.index: {False}}
