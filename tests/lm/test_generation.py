"""What users ask for is what is written: prompts, seeds, lengths, every setting, and events on the way."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from scipy import stats

from bd3lm.config import AutoregressiveMethod
from bd3lm.data import train_bpe
from bd3lm.lm import Gap, Generation, LanguageModel, Settings, load
from bd3lm.models import Transformer
from bd3lm.sampling import (
    Ancestral,
    BlockFinished,
    BlockStarted,
    EntropyBound,
    Event,
    FirstHitting,
    MostConfident,
    Redrawn,
    Remasking,
    Started,
    Stopped,
    TokenHidden,
    TokenRevealed,
    Unmasking,
)
from tests.lm import BYTES, CONTEXT, END, METHODS, of_bytes, of_four_tokens
from tests.oracles.networks import MASK, Written, block_after_clean, log_probabilities, logits_of

PROMPTS = ["", "a", "hello", "naïve ☂", "the cat sat on"]
every_method = pytest.mark.parametrize("block_size", METHODS.values(), ids=METHODS)


def tokens_of(generations: Iterable[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


def texts_of(generations: Iterable[Generation]) -> list[str | None]:
    return [generation.text for generation in generations]


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


# --- prompts ---


@every_method
def test_texts_go_on_from_their_prompts(block_size):
    for prompt, found in zip(PROMPTS, of_bytes(block_size).generate(PROMPTS, stop_at_eos=False), strict=True):
        given = [END, *bytes_of(prompt)]
        assert found.tokens[: len(given)] == given
        assert BYTES.mask_id not in found.tokens
        assert len(found.tokens) == CONTEXT
        assert (found.sample.given, found.sample.written) == (len(given), CONTEXT - len(given))
        assert found.text == bytes(b for b in found.tokens if b < 256).decode(errors="replace")
        assert found.text.startswith(prompt)


@pytest.mark.parametrize(
    "prompts",
    [
        ["ab"],
        ("ab",),
        [[END, 97, 98]],
        [(END, 97, 98)],
        [torch.tensor([END, 97, 98])],
        [torch.tensor([END, 97, 98], dtype=torch.int32)],
        torch.tensor([[END, 97, 98]]),
        [["ab"]],
        [["a", "", "b"]],
    ],
    ids=str,
)
def test_a_prompt_may_be_given_in_many_ways(prompts):
    model = of_bytes()
    assert tokens_of(model.generate(prompts)) == tokens_of(model.generate("ab"))


def test_no_prompt_is_the_empty_one():
    model = of_bytes()
    (found,) = model.generate()
    assert found.sample.given == 1
    assert found.tokens == model.generate("")[0].tokens == model.generate([""])[0].tokens


@every_method
@pytest.mark.parametrize(
    "template",
    [
        ["ab", Gap(3), "cd"],
        [Gap(2), "cd"],
        ["a", Gap(1), "b", Gap(6), "c"],
        ["a", Gap(2), Gap(1)],
        [Gap(5)],
    ],
    ids=str,
)
def test_templates_keep_what_is_given_and_fill_their_gaps(template, block_size):
    given: list[int | None] = [END]
    for part in template:
        given += [None] * part.tokens if isinstance(part, Gap) else bytes_of(part)
    model = of_bytes(block_size)
    (found,) = model.generate([template], stop_at_eos=False)
    assert len(found.tokens) == CONTEXT
    assert BYTES.mask_id not in found.tokens
    kept = [
        (token, written) for token, written in zip(given, found.tokens, strict=False) if token is not None
    ]
    assert all(token == written for token, written in kept)
    assert found.sample.given == len(kept)
    (filled,) = model.generate([template], length=len(given), stop_at_eos=False)
    assert len(filled.tokens) == len(given)
    assert BYTES.mask_id not in filled.tokens


def test_what_stands_after_a_gap_in_its_block_is_seen_and_in_a_later_block_is_not():
    def fillings(block_size: int | None, before: str) -> set[int]:
        templates = [[before, Gap(1), end] for end in ascii_lowercase]
        place = 1 + len(before)
        found = of_bytes(block_size).generate(templates, length=place + 2, seeds=[0] * len(templates))
        return {each.tokens[place] for each in found}

    assert len(fillings(4, "a")) > 1
    assert len(fillings(4, "ab")) == 1  # the gap ends its block
    assert len(fillings(CONTEXT, "ab")) > 1
    assert len(fillings(None, "a")) == 1


@every_method
def test_models_that_predict_first_tokens_put_nothing_before_a_text(block_size):
    model = of_bytes(block_size, score_first=True)
    empty, prompted = model.generate(["", "ab"], stop_at_eos=False)
    assert (empty.sample.given, empty.sample.written) == (0, CONTEXT)
    assert prompted.tokens[:2] == bytes_of("ab")
    assert prompted.sample.given == 2
    (template,) = model.generate([[Gap(2), "ab"]], stop_at_eos=False)
    assert template.tokens[2:4] == bytes_of("ab")


def test_a_tokenizer_without_a_first_token_puts_nothing_before_a_text():
    nothing_first = replace(BYTES, bos_id=None)
    (found,) = of_bytes(None, tokenizer=nothing_first).generate("ab")
    assert found.tokens[:2] == bytes_of("ab")
    assert found.sample.given == 2


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], r'prompts must hold at least one prompt \("" starts from nothing\), got none'),
        (["a", [BYTES.mask_id]], "prompt 1: it must not hold the mask token 257; a Gap leaves"),
        ([[258]], r"prompt 0: token ids must lie in 0\.\.257, got 258"),
        ([[-1]], r"prompt 0: token ids must lie in 0\.\.257, got -1"),
        ([[True]], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got True"),
        ([[1.0]], "prompt 0: it must be a text, token ids, or a list of texts and Gaps, got 1.0"),
        ([torch.tensor([1.0])], "prompt 0: it must be a text, token ids, or a list"),
        ([torch.tensor([[1, 2]])], "prompt 0: it must be a text, token ids, or a list"),
        ([[97, "a"]], "prompt 0: it must be a text, token ids, or a list"),
        ([["a", None]], "prompt 0: it must be a text, token ids, or a list"),
    ],
    ids=str,
)
def test_bad_prompts(prompts, said):
    with pytest.raises(ValueError, match=said):
        of_bytes().generate(prompts)


@pytest.mark.parametrize(
    "prompts",
    [[1, 2, 3], torch.tensor([1, 2, 3]), ["a", Gap(2), "b"], [None]],
    ids=["ids", "tensor", "gap", "none"],
)
def test_one_prompt_without_a_list_around_it_is_told_so(prompts):
    with pytest.raises(ValueError, match="prompt"):
        of_bytes().generate(prompts)


@pytest.mark.parametrize("tokens", [0, -2])
def test_gaps_have_tokens(tokens):
    with pytest.raises(ValueError, match=f"a Gap must have at least 1 token, got {tokens}"):
        Gap(tokens)


@pytest.mark.parametrize("prompt", ["", [Gap(2)], []], ids=["text", "gap", "ids"])
def test_an_autoregressive_model_that_does_not_predict_first_tokens_needs_one(prompt):
    model = of_bytes(None, tokenizer=replace(BYTES, bos_id=None))
    with pytest.raises(
        ValueError, match="the first token of a text must be given: this model was not trained"
    ):
        model.generate([prompt])


# --- each text on its own ---


@every_method
def test_a_text_is_the_same_alone_and_in_any_batch(block_size):
    model = of_bytes(block_size, end_logit=4.0)
    prompts, seeds = [*PROMPTS, "a", ["x", Gap(3), "y"]], list(range(7))
    alone = [model.generate([p], seeds=[s], length=24)[0] for p, s in zip(prompts, seeds, strict=True)]
    assert len({len(one.tokens) for one in alone}) > 2  # they end at different times
    for batch_size in (1, 2, 3, 32):
        together = model.generate(prompts, seeds=seeds, batch_size=batch_size, length=24)
        for one, other in zip(together, alone, strict=True):
            assert one.tokens == other.tokens
            assert one.text == other.text
            assert one.sample.stopped_by == other.sample.stopped_by
            assert one.sample.evaluations == other.sample.evaluations


@pytest.mark.parametrize(
    "unmasking",
    [
        Ancestral(3),
        Remasking(steps=6, eta=0.5),
        MostConfident(threshold=0.2),
        EntropyBound(2.0),
        FirstHitting(3),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [4, CONTEXT])
def test_neither_does_it_depend_on_the_batch_under_other_rules(block_size, unmasking):
    model = of_bytes(block_size, end_logit=4.0)
    settings = Settings(length=24, unmasking=unmasking)
    together = model.generate(PROMPTS, settings, seeds=range(5), batch_size=2)
    alone = [model.generate(p, settings, seeds=[s])[0] for s, p in enumerate(PROMPTS)]
    assert tokens_of(together) == tokens_of(alone)
    assert [g.sample.evaluations for g in together] == [g.sample.evaluations for g in alone]


def test_seeds_belong_to_texts_and_not_to_places():
    model = of_bytes()
    forwards = model.generate(PROMPTS, seeds=[1, 2, 3, 4, 5])
    backwards = model.generate(PROMPTS[::-1], seeds=[5, 4, 3, 2, 1])
    assert tokens_of(forwards) == tokens_of(backwards[::-1])
    assert [found.sample.seed for found in forwards] == [1, 2, 3, 4, 5]


def test_the_seed_of_the_settings_gives_every_text_its_own():
    model = of_bytes()
    first, second = model.generate(["ab", "ab"]), model.generate(["ab", "ab"], seed=1)
    assert len({tuple(found.tokens) for found in (*first, *second)}) == 4
    assert tokens_of(model.generate(["ab", "ab"], seed=1)) == tokens_of(second)
    assert model.generate("ab", seed=1)[0].tokens == second[0].tokens  # the first of more is the only one
    for found in first:  # the seed that is written down is enough to write it again
        assert model.generate("ab", seeds=[found.sample.seed])[0].tokens == found.tokens


def test_as_many_seeds_as_prompts():
    with pytest.raises(ValueError, match="seeds must be one for each of 2 prompts, got 3"):
        of_bytes().generate(["a", "b"], seeds=[1, 2, 3])


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_seeds_that_do_not_fit_are_refused_at_the_call(seed):
    with pytest.raises(ValueError, match="seed"):
        of_bytes().stream("a", seeds=[seed])


@every_method
def test_results_come_in_the_order_of_the_prompts(block_size):
    model = of_bytes(block_size, end_logit=4.0)
    prompts = [f"{number:02}" for number in range(12)]
    events = model.stream(prompts, batch_size=4, length=20, watch=False)
    finished = [event.index for event in events if isinstance(event, Stopped)]
    assert finished != sorted(finished)  # otherwise this says nothing
    found = model.generate(prompts, batch_size=4, length=20)
    assert [each.sample.index for each in found] == list(range(12))
    assert [each.text[:2] for each in found] == prompts


# --- length ---


@every_method
@pytest.mark.parametrize(("length", "reached"), [(None, CONTEXT), (5, 5), (16, 16), (17, 17), (50, 50)])
def test_length(block_size, length, reached):
    (found,) = of_bytes(block_size).generate("abc", length=length, stop_at_eos=False)
    assert len(found.tokens) == reached
    assert found.sample.stopped_by == "length"
    assert found.sample.evaluations == reached - 4  # a pass for each written token
    assert BYTES.mask_id not in found.tokens


@every_method
def test_prompts_may_be_longer_than_the_context(block_size):
    prompt = "a prompt that is longer than the context"
    (found,) = of_bytes(block_size).generate(prompt, length=50, stop_at_eos=False)
    assert found.text.startswith(prompt)
    assert found.sample.written == 50 - 1 - len(prompt)


@every_method
def test_where_nothing_is_left_to_write_nothing_is_done(block_size):
    (found,) = of_bytes(block_size).generate("abc", length=4)
    assert found.text == "abc"
    assert (found.sample.written, found.sample.evaluations, found.sample.stopped_by) == (0, 0, "length")


@every_method
def test_a_length_that_does_not_hold_the_prompt(block_size):
    with pytest.raises(ValueError, match=r"prompt 1: length must hold its 6 tokens, got 5"):
        of_bytes(block_size).generate(["a", "abcde"], length=5)
    with pytest.raises(ValueError, match=r"prompt 0: length must hold its 18 tokens, got 16"):
        of_bytes(block_size).generate("x" * 17)


# --- settings: how a token is drawn ---


def sharpened(p: list[float], temperature=1.0, top_k=None, nucleus_p=0.9, nucleus_rule="inclusive"):
    """A distribution by hand: temperature, the k likeliest, then the likeliest that hold nucleus_p."""
    p = [each ** (1 / temperature) for each in p]
    ranked = sorted(range(len(p)), key=lambda token: -p[token])
    ranked = ranked[:top_k]
    mass = sum(p[token] for token in ranked)
    kept, total = [], 0.0
    for token in ranked:
        after = total + p[token] / mass
        if kept and (total >= nucleus_p if nucleus_rule == "inclusive" else after > nucleus_p):
            break
        kept.append(token)
        total = after
    mass = sum(p[token] for token in kept)
    return [p[token] / mass if token in kept else 0.0 for token in range(len(p))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nucleus_p": 1.0},
        {"nucleus_p": 0.7},
        {"nucleus_p": 0.7, "nucleus_rule": "exclusive"},
        {"nucleus_p": 1.0, "temperature": 0.5},
        {"nucleus_p": 1.0, "temperature": 2.0},
        {"nucleus_p": 1.0, "top_k": 3},
        {"nucleus_p": 0.7, "top_k": 4, "temperature": 1.5, "nucleus_rule": "exclusive"},
    ],
    ids=str,
)
def test_a_token_is_drawn_from_the_distribution_that_was_asked_for(settings):
    model = of_eight_tokens()
    with torch.no_grad():
        logits = logits_of(model.network, torch.tensor([[1, 5]]), Written(2, lambda query, key: key <= query))
    p = sharpened(log_probabilities(logits[0, -1], MASK).exp().tolist(), **settings)
    rows = 2000
    found = model.generate([[1, 5]] * rows, Settings(length=3, batch_size=rows, **settings))
    counts = Counter(each.tokens[-1] for each in found)
    possible = [token for token in range(8) if p[token] > 0]
    assert set(counts) <= set(possible)
    assert 1 < len(possible) < 8
    observed = [counts[token] for token in possible]
    assert stats.chisquare(observed, [p[token] * rows for token in possible]).pvalue > 0.01


def of_eight_tokens() -> LanguageModel:
    return of_four_tokens(None, vocab_size=8, context=CONTEXT)


@pytest.mark.parametrize(
    ("block_size", "causal_clean"), [(None, False), (1, False), (4, False), (4, True), (CONTEXT, False)]
)
def test_top_1_is_the_likeliest_token_given_all_that_is_there(block_size, causal_clean):
    """Each revealed token against the network's answer for the text as it stood."""
    model = of_bytes(block_size, causal_clean=causal_clean)
    texts: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    checked = 0
    for event in model.stream(["ab", "x", "hello"], top_k=1, stop_at_eos=False):
        if isinstance(event, TokenRevealed):
            text, start = texts[event.index], starts[event.index]
            assert event.token == likeliest(model, text, start, event.position)
            checked += 1
        if isinstance(event, BlockStarted):
            starts[event.index] = event.start
        replay(texts, event)
    assert checked == 3 * CONTEXT - (3 + 2 + 6)


@torch.no_grad()
def likeliest(model: LanguageModel, text: list[int], start: int, position: int) -> int:
    """The network's first choice at a position of a block that is being written after clean text."""
    method, mask = model.config.method, BYTES.mask_id
    if isinstance(method, AutoregressiveMethod):
        tokens, place = text[:position], position - 1
        layout = Written(position, lambda query, key: key <= query)
    else:
        size = method.block_size
        tokens, place = (text + [mask] * size)[: start + size], position
        layout = block_after_clean(start, size, causal_clean=method.causal_clean)
    logits = logits_of(model.network, torch.tensor([tokens]), layout)[0, place]
    return int(log_probabilities(logits, mask).argmax())


@pytest.mark.parametrize("block_size", [None, 1])
def test_greedy_texts_have_no_chance_in_them(block_size):
    found = of_bytes(block_size).generate(["ab"] * 4, top_k=1)
    assert len({tuple(each.tokens) for each in found}) == 1


# --- settings: how a block is uncovered ---


@pytest.mark.parametrize(
    ("unmasking", "passes"),
    [
        (FirstHitting(), 12),
        (FirstHitting(2), 6),
        (FirstHitting(3), 6),  # two a block of four
        (FirstHitting(9), 3),
        (Ancestral(1), 3),
        (MostConfident(tokens_per_pass=2), 6),
        (MostConfident(threshold=1e-9), 3),
        (MostConfident(threshold=1.0), 12),
        (EntropyBound(1e3), 3),
        (EntropyBound(0.0), 12),
        (Remasking(steps=1), 3),
    ],
    ids=str,
)
def test_unmasking_decides_how_many_passes_a_block_takes(unmasking, passes):
    (found,) = of_bytes(4).generate("abc", unmasking=unmasking, stop_at_eos=False)
    assert found.sample.evaluations == passes
    assert found.sample.written == 12


@pytest.mark.parametrize("block_size", [4, CONTEXT])
def test_remasking_thinks_tokens_over(block_size):
    model = of_bytes(block_size)
    settings = Settings(unmasking=Remasking(steps=40, eta=1.0), stop_at_eos=False)
    events = list(model.stream("abc", settings))
    hidden = [event for event in events if isinstance(event, TokenHidden)]
    assert len(hidden) > 5
    assert all(event.position >= 4 for event in hidden)
    assert isinstance(events[-1], Stopped)
    assert 12 < events[-1].sample.evaluations <= 3 * 40


# --- settings: when a text ends ---


@every_method
def test_the_end_token_ends_a_text_or_not(block_size):
    model = of_bytes(block_size, end_logit=5.0)
    ended = model.generate(PROMPTS, length=20)
    whole = model.generate(PROMPTS, length=20, stop_at_eos=False)
    reasons = set()
    for short, long in zip(ended, whole, strict=True):
        given = long.sample.given
        assert (long.sample.stopped_by, len(long.tokens)) == ("length", 20)
        ends = [place for place, token in enumerate(long.tokens) if token == END and place >= given]
        assert short.tokens == long.tokens[: ends[0] + 1 if ends else 20]
        assert short.sample.stopped_by == ("eos" if ends else "length")
        assert "endoftext" not in short.text
        reasons.add(short.sample.stopped_by)
    assert "eos" in reasons


def test_end_tokens_that_are_given_end_nothing():
    (found,) = of_bytes().generate([[END, 97, END, END, 98]], length=8, stop_at_eos=True)
    assert found.tokens[:5] == [END, 97, END, END, 98]
    assert found.sample.written > 0


def entropy_by_hand(tokens: list[int]) -> float:
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in Counter(tokens).values())


@every_method
def test_low_entropy_ends_a_text(block_size):
    """The rule applied afterwards to texts that were written without it, at the ends of their pieces."""
    model, window, length = of_bytes(block_size), 6, 32
    ends = [16, 24, 32] if block_size == CONTEXT else range(block_size or 1, length + 1, block_size or 1)
    settings = Settings(length=length, stop_at_eos=False, entropy_window=window)
    whole = model.generate(PROMPTS, settings)
    for floor, reasons in ((0.0, {"length"}), (1.5, {"length", "entropy"}), (9.0, {"entropy"})):
        found = model.generate(PROMPTS, settings, entropy_floor=floor)
        for short, long in zip(found, whole, strict=True):
            enough = [end for end in ends if end - long.sample.given >= window]
            low = [end for end in enough if entropy_by_hand(long.tokens[end - window : end]) < floor - 1e-12]
            assert short.tokens == long.tokens[: low[0] - window if low else length]
            assert short.sample.stopped_by == ("entropy" if low else "length")
        assert {short.sample.stopped_by for short in found} <= reasons


@every_method
def test_redraws(block_size):
    model = of_bytes(block_size)
    settings = Settings(length=24, stop_at_eos=False, entropy_window=8, nucleus_p=1.0)
    (hopeless,) = model.generate("ab", settings, entropy_floor=9.0, redraws=3, seeds=[5])
    assert (hopeless.sample.redraws, hopeless.sample.stopped_by) == (3, "entropy")
    assert hopeless.sample.redrawn_evaluations == 3 * hopeless.sample.evaluations > 0
    floor = 1.85  # so many texts fall below it, and so many do not
    found = model.generate(["ab"] * 6, settings, entropy_floor=floor, redraws=15)
    ended = model.generate(["ab"] * 6, settings, entropy_floor=floor)
    assert {each.sample.stopped_by for each in ended} == {"entropy", "length"}  # otherwise this says nothing
    for again, once in zip(found, ended, strict=True):
        assert again.sample.stopped_by == "length"
        assert (again.sample.redraws > 0) == (once.sample.stopped_by == "entropy")
        assert (again.sample.redrawn_evaluations > 0) == (again.sample.redraws > 0)
        assert (again.sample.seed != once.sample.seed) == (again.sample.redraws > 0)
        # The seed that is written down is that of the text, not of its failed attempts.
        assert model.generate("ab", settings, seeds=[again.sample.seed])[0].tokens == again.tokens


def test_the_entropy_of_a_text():
    for found in of_bytes().generate(PROMPTS):
        assert found.entropy == pytest.approx(entropy_by_hand(found.tokens), abs=1e-12)


def test_a_text_of_which_nothing_is_left_has_no_entropy():
    (found,) = of_bytes(score_first=True).generate("", entropy_floor=9.0, entropy_window=4)
    assert (found.text, found.tokens) == ("", [])
    assert found.entropy == 0.0


# --- settings: past the context, and the cache ---


@pytest.mark.parametrize(
    ("stride", "pieces"), [(None, 1 + 3), (8, 1 + 3), (3, 1 + 8), (16, 1 + 2), (1, 1 + 24)]
)
def test_stride(stride, pieces):
    """One pass a piece: the context first, then strides."""
    model = of_bytes(CONTEXT)
    settings = Settings(length=40, stop_at_eos=False, unmasking=Ancestral(1))
    (found,) = model.generate("abc", settings, stride=stride)
    assert found.sample.evaluations == pieces
    assert len(found.tokens) == 40
    blocks = [e.stop for e in model.stream("abc", settings, stride=stride) if isinstance(e, BlockFinished)]
    assert len(blocks) == pieces
    assert blocks[0] == CONTEXT


@pytest.mark.parametrize("block_size", [None, 1, 4])
def test_without_a_cache_the_same_tokens_inside_the_context(block_size, monkeypatch):
    model = of_bytes(block_size, end_logit=4.0)
    cached = model.generate([*PROMPTS, ["x", Gap(5), "y"]])

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a cache was made")

    monkeypatch.setattr(Transformer, "new_cache", refuse)
    assert tokens_of(model.generate([*PROMPTS, ["x", Gap(5), "y"]], cache=False)) == tokens_of(cached)
    (past,) = model.generate("abc", cache=False, length=40, stop_at_eos=False)
    assert len(past.tokens) == 40
    with pytest.raises(AssertionError, match="a cache was made"):
        model.generate("abc")


# --- settings: what is refused ---


@pytest.mark.parametrize(
    ("block_size", "changes", "said"),
    [
        (None, {"unmasking": Ancestral(5)}, r"unmasking must be left at its default, got Ancestral\(steps=5"),
        (None, {"unmasking": FirstHitting(2)}, "an autoregressive model writes token after token"),
        (None, {"stride": 4}, "stride must be left at its default, got 4: an autoregressive model"),
        (1, {"stride": 4}, "stride must be left at its default, got 4: this model writes blocks of 1"),
        (4, {"stride": 4}, "stride must be left at its default, got 4: this model writes blocks of 4"),
        (
            CONTEXT,
            {"cache": False},
            "cache must be left at its default, got False: a network of one block has",
        ),
    ],
    ids=str,
)
def test_settings_that_would_do_nothing(block_size, changes, said):
    with pytest.raises(ValueError, match=said):
        of_bytes(block_size).stream("a", **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature must be positive and finite, got 0.0; top_k=1 always takes"),
        ({"temperature": math.inf}, "temperature must be positive and finite, got inf"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"nucleus_p": 0.0}, r"nucleus_p must lie in \(0, 1\], got 0.0"),
        ({"nucleus_p": 1.5}, r"nucleus_p must lie in \(0, 1\], got 1.5"),
        ({"nucleus_rule": "exclude"}, "nucleus_rule must be 'inclusive' or 'exclusive', got 'exclude'"),
        ({"entropy_floor": -1.0}, "entropy_floor must be finite and not negative, got -1.0"),
        ({"entropy_floor": 1.0, "entropy_window": 0}, "entropy_window must be at least 1, got 0"),
        ({"redraws": 2}, "redraws needs an entropy_floor, got 2 with none"),
        ({"entropy_floor": 1.0, "redraws": -1}, "redraws must not be negative, got -1"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(changes, said):
    with pytest.raises(ValueError, match=said):
        of_bytes().stream("a", **changes)
    if "batch_size" not in changes:
        with pytest.raises(ValueError, match=said):
            Settings(**changes)


@pytest.mark.parametrize("stride", [0, CONTEXT + 1])
def test_strides_lie_within_the_context(stride):
    with pytest.raises(ValueError, match=rf"stride must lie in 1\.\.16, the context, got {stride}"):
        of_bytes(CONTEXT).stream("a", stride=stride)


@pytest.mark.parametrize(
    ("name", "meant"), [("lenght", "length"), ("nucleus", "nucleus_p"), ("topk", "top_k"), ("seeds_", "seed")]
)
def test_misspelt_settings_get_a_suggestion(name, meant):
    with pytest.raises(
        ValueError, match=rf"{name} is no setting, did you mean '{meant}'\? allowed are length, "
    ):
        of_bytes().generate("a", **{name: 3})


def test_unknown_settings_get_the_list_of_all():
    with pytest.raises(ValueError, match="foo is no setting, allowed are") as caught:
        of_bytes().stream("a", foo=3)
    assert all(field.name in str(caught.value) for field in fields(Settings))


def test_changes_come_before_settings():
    model, settings = of_bytes(), Settings(length=8, seed=3)
    assert (
        model.generate("a", settings, length=12)[0].tokens == model.generate("a", length=12, seed=3)[0].tokens
    )
    assert settings.length == 8


def test_a_network_in_training_is_refused():
    model = of_bytes(dropout=0.5)
    model.network.train()
    with pytest.raises(ValueError, match=r"model must be in evaluation mode \(model\.eval\(\)\)"):
        model.stream("a")


# --- events ---


def replay(texts: dict[int, list[int]], event: Event) -> None:
    """Do to the texts what an event says, and check that it can be done."""
    mask = BYTES.mask_id
    match event:
        case Started(index=index, request=request):
            texts[index] = request.given.tolist()
        case BlockStarted(index=index, start=start, stop=stop):
            assert start < stop
            texts[index] += [mask] * (stop - len(texts[index]))
        case TokenRevealed(index=index, position=position, token=token):
            assert texts[index][position] == mask
            assert token != mask
            texts[index][position] = token
        case TokenHidden(index=index, position=position):
            assert texts[index][position] != mask
            texts[index][position] = mask
        case BlockFinished(index=index, start=start, stop=stop):
            assert mask not in texts[index][start:stop]


RULES: list[Unmasking] = [
    FirstHitting(),
    FirstHitting(3),
    Ancestral(3),
    Remasking(steps=9, eta=0.7),
    MostConfident(threshold=0.3),
    EntropyBound(1.0),
]


@pytest.mark.parametrize(
    ("block_size", "unmasking"),
    [
        (None, FirstHitting()),
        (1, Remasking(steps=9)),
        *((size, rule) for size in (4, CONTEXT) for rule in RULES),
    ],
    ids=str,
)
def test_events_replay_to_what_generate_gives(block_size, unmasking):
    model = of_bytes(block_size, end_logit=4.0)
    settings = Settings(length=24, unmasking=unmasking, seed=7, batch_size=2)
    prompts = ["ab", "", ["x", Gap(5), "y"], "hello", "naïve ☂"]
    texts: dict[int, list[int]] = {}
    stopped: dict[int, Generation] = {}
    for event in model.stream(prompts, settings):
        assert event.index not in stopped
        replay(texts, event)
        if isinstance(event, Stopped):
            stopped[event.index] = model.generation(event.sample)
    expected = model.generate(prompts, settings)
    for index, found in enumerate(expected):
        assert texts[index][: len(found.tokens)] == found.tokens == stopped[index].tokens
        assert stopped[index].text == found.text
        assert stopped[index].sample.evaluations == found.sample.evaluations
    assert len(stopped) == len(prompts)


def test_blocks_are_written_one_after_the_other():
    events = list(of_bytes(4).stream("ab", length=10, stop_at_eos=False))
    frame = [event for event in events if not isinstance(event, TokenRevealed)]
    assert [(type(event).__name__, getattr(event, "start", None)) for event in frame] == [
        ("Started", None),
        ("BlockStarted", 0),
        ("BlockFinished", 0),
        ("BlockStarted", 4),
        ("BlockFinished", 4),
        ("BlockStarted", 8),
        ("BlockFinished", 8),
        ("Stopped", None),
    ]
    assert [event.stop for event in frame if isinstance(event, BlockFinished)] == [4, 8, 10]
    places = [event.position for event in events if isinstance(event, TokenRevealed)]
    assert sorted(places) == list(range(3, 10))


def test_redrawn_texts_start_again():
    settings = Settings(length=8, stop_at_eos=False, entropy_floor=9.0, entropy_window=4, redraws=2)
    texts: dict[int, list[int]] = {}
    names = []
    for event in of_bytes(4).stream("ab", settings):
        replay(texts, event)
        if isinstance(event, Started | Redrawn | Stopped):
            names.append(type(event).__name__)
    assert names == ["Started", "Redrawn", "Started", "Redrawn", "Started", "Stopped"]


@every_method
def test_without_watching_only_ends_are_told(block_size):
    model = of_bytes(block_size)
    settings = Settings(
        entropy_floor=1.85, entropy_window=8, redraws=15, stop_at_eos=False, length=24, nucleus_p=1.0
    )
    quiet = list(model.stream(["ab"] * 8, settings, watch=False))
    assert {type(event) for event in quiet} == {Redrawn, Stopped}
    watched = [e for e in model.stream(["ab"] * 8, settings) if isinstance(e, Redrawn | Stopped)]
    assert [(type(e), e.index) for e in quiet] == [(type(e), e.index) for e in watched]
    ends = [
        [e.sample.tokens.tolist() for e in events if isinstance(e, Stopped)] for events in (quiet, watched)
    ]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("prompts", "changes"),
    [
        ("x" * 17, {}),
        ([], {}),
        ([[999]], {}),
        ("a", {"lenght": 3}),
        ("a", {"stride": 3}),
        ("a", {"top_k": 0}),
    ],
    ids=str,
)
def test_errors_come_at_the_call(prompts, changes):
    """Not when the first event is asked for."""
    with pytest.raises(ValueError, match=r"."):
        of_bytes().stream(prompts, **changes)


# --- tokenizers ---


@every_method
def test_without_a_tokenizer_ids_go_in_and_come_out(block_size):
    bare, model = of_bytes(block_size, tokenizer=None), of_bytes(block_size)
    (found,) = bare.generate([[END, 97, 98]])
    assert found.text is None
    assert found.tokens == model.generate("ab", stop_at_eos=False)[0].tokens
    assert found.entropy == pytest.approx(entropy_by_hand(found.tokens))


@pytest.mark.parametrize("prompt", ["ab", "", ["ab", Gap(2)]], ids=str)
def test_without_a_tokenizer_texts_are_refused(prompt):
    with pytest.raises(
        ValueError, match="prompt 0: text needs a tokenizer, and this model was saved without one"
    ):
        of_bytes(tokenizer=None).generate([prompt])


def test_without_a_tokenizer_nothing_is_an_end_token():
    model = of_bytes(end_logit=9.0, tokenizer=None)
    (found,) = model.generate([[END]], length=12)
    assert END in found.tokens[1:-1]
    assert len(found.tokens) == 12


def test_a_tokenizer_is_saved_and_loaded_with_its_model(tmp_path: Path):
    model = of_bytes()
    model.save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer == BYTES
    assert texts_of(load(tmp_path).generate(PROMPTS)) == texts_of(model.generate(PROMPTS))


def test_a_tokenizer_can_be_named_for_a_model_saved_without_one(tmp_path: Path):
    of_bytes(tokenizer=None).save_pretrained(tmp_path / "model")
    BYTES.save(tmp_path / "tokenizer")
    assert load(tmp_path / "model").tokenizer is None
    expected = texts_of(of_bytes().generate(PROMPTS))
    for tokenizer in (tmp_path / "tokenizer", str(tmp_path / "tokenizer"), "bytes"):
        assert texts_of(load(tmp_path / "model", tokenizer=tokenizer).generate(PROMPTS)) == expected
    with pytest.raises(FileNotFoundError, match="there is no tokenizer folder"):
        load(tmp_path / "model", tokenizer=tmp_path / "nowhere")


def test_tokens_of_several_characters():
    tokenizer = train_bpe(["hello there, hello world"] * 3, 270)
    bare = of_four_tokens(4, vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, context=CONTEXT)
    model = LanguageModel(bare.network, bare.config, tokenizer)
    prompt = "hello hello, ☂"
    assert len(tokenizer.encode(prompt)) < len(prompt)
    (found,) = model.generate(prompt, stop_at_eos=False)
    assert found.text.startswith(prompt)
    assert found.text == tokenizer.decode(found.tokens)
    assert found.sample.given == 1 + len(tokenizer.encode(prompt))
    assert model.log_likelihood("hello")[0].tokens == len(tokenizer.encode("hello"))


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path):
    of_four_tokens().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer must have the network's 4 tokens, got 258"):
        load(tmp_path, tokenizer="bytes")
