"""What users may set: how tokens are drawn, blocks uncovered and texts ended, and what is refused."""

import math
import re
from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bd3lm.lm import Gap, LanguageModel, Settings
from bd3lm.methods import AutoregressiveMethod
from bd3lm.models import Transformer
from bd3lm.sampling import (
    Ancestral,
    BlockFinished,
    BlockStarted,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Remasking,
    Stopped,
    TokenHidden,
    TokenRevealed,
)
from tests.lm import (
    BYTES,
    CONTEXT,
    END,
    PROMPTS,
    entropy_by_hand,
    every_method,
    of_bytes,
    of_four_tokens,
    replay,
    tokens_of,
)
from tests.oracles.networks import MASK, Written, block_after_clean, log_probabilities, logits_of

pytestmark = pytest.mark.sweep(2)

# --- how a token is drawn ---


def sharpened(p: list[float], temperature=1.0, top_k=None, top_p=0.9, top_p_rule="inclusive"):
    """A distribution by hand: temperature, the k likeliest, then the likeliest that hold top_p."""
    p = [each ** (1 / temperature) for each in p]
    ranked = sorted(range(len(p)), key=lambda token: -p[token])
    ranked = ranked[:top_k]
    mass = sum(p[token] for token in ranked)
    kept, total = [], 0.0
    for token in ranked:
        after = total + p[token] / mass
        if kept and (total >= top_p if top_p_rule == "inclusive" else after > top_p):
            break
        kept.append(token)
        total = after
    mass = sum(p[token] for token in kept)
    return [p[token] / mass if token in kept else 0.0 for token in range(len(p))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_p": 1.0},
        {"top_p": 0.7},
        {"top_p": 0.7, "top_p_rule": "exclusive"},
        {"top_p": 1.0, "temperature": 0.5},
        {"top_p": 1.0, "temperature": 2.0},
        {"top_p": 1.0, "top_k": 3},
        {"top_p": 0.7, "top_k": 4, "temperature": 1.5, "top_p_rule": "exclusive"},
    ],
    ids=str,
)
def test_a_token_is_drawn_from_the_distribution_that_was_asked_for(settings):
    model = of_eight_tokens()
    with torch.no_grad():
        logits = logits_of(model.network, torch.tensor([[1, 5]]), Written(2, lambda query, key: key <= query))
    p = sharpened(log_probabilities(logits[0, -1], MASK).exp().tolist(), **settings)
    rows = 1000
    found = model.generate([[1, 5]] * rows, Settings(length=3, batch_size=rows, **settings))
    counts = Counter(each.tokens[-1] for each in found)
    possible = [token for token in range(8) if p[token] > 0]
    assert set(counts) <= set(possible)
    assert 1 < len(possible) < 8
    observed = [counts[token] for token in possible]
    assert stats.chisquare(observed, [p[token] * rows for token in possible]).pvalue > 0.01


@every_method
def test_the_temperature_0_is_greedy(block_size):
    model = of_bytes(block_size)
    cold = tokens_of(model.generate(PROMPTS, length=24, temperature=0))
    assert cold == tokens_of(model.generate(PROMPTS, length=24, top_k=1))
    assert cold != tokens_of(model.generate(PROMPTS, length=24))


@every_method
def test_the_default_nucleus_is_the_papers(block_size):
    model = of_bytes(block_size)
    assert Settings().top_p is None
    default = tokens_of(model.generate(PROMPTS, length=24))
    assert default == tokens_of(model.generate(PROMPTS, length=24, top_p=0.9))
    assert default != tokens_of(model.generate(PROMPTS, length=24, top_p=0.5))
    assert model.config.method.settled(Settings()).top_p == 0.9
    assert model.config.method.settled(Settings(top_p=0.4)).top_p == 0.4


@pytest.mark.parametrize("lean", [0.0, 2.0])
def test_the_default_order_is_the_models_own(lean):
    method = of_bytes(4).with_lean(lean).config.method
    assert Settings().unmasking is None
    assert method.settled(Settings()).unmasking == FirstHitting(lean=lean)
    for rule in (FirstHitting(), FirstHitting(2), FirstHitting(lean=1.0), Ancestral(5), MostConfident()):
        assert method.settled(Settings(unmasking=rule)).unmasking == rule
    chosen = Settings(top_p=0.4, unmasking=FirstHitting(3))
    assert method.settled(chosen) == chosen
    assert AutoregressiveMethod().settled(Settings(top_p=0.4)) == Settings(top_p=0.4)


@pytest.mark.parametrize("block_size", [4, CONTEXT])
def test_a_model_that_leans_writes_in_its_own_order_unless_told_otherwise(block_size):
    model = of_bytes(block_size)
    leans = model.with_lean(3.0)
    own = tokens_of(leans.generate(PROMPTS, length=24))
    assert own == tokens_of(model.generate(PROMPTS, length=24, unmasking=FirstHitting(lean=3.0)))
    plain = tokens_of(model.generate(PROMPTS, length=24))
    assert own != plain == tokens_of(leans.generate(PROMPTS, length=24, unmasking=FirstHitting()))
    assert own == tokens_of(leans.generate(PROMPTS, length=24))  # also after the writer of another order


@pytest.mark.parametrize("block_size", [4, CONTEXT])
@pytest.mark.parametrize(
    "rule", [Ancestral(5), Remasking(steps=5), MostConfident(), EntropyBound(1.0)], ids=str
)
def test_a_rule_without_a_lean_is_not_for_a_model_that_leans(rule, block_size):
    leans = of_bytes(block_size).with_lean(2.0)
    said = re.escape(
        f"unmasking {rule} has no order that leans, and the model's lean is 2: use with_lean(0), or --lean 0"
    )
    with pytest.raises(ValueError, match=said):
        leans.generate(PROMPTS, unmasking=rule)
    plain = tokens_of(of_bytes(block_size).generate(PROMPTS, length=24, unmasking=rule))
    assert tokens_of(leans.with_lean(0).generate(PROMPTS, length=24, unmasking=rule)) == plain


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


# --- how a block is uncovered ---


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


# --- when a text ends ---


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


@every_method
def test_another_token_may_be_the_end(block_size):
    """Also for a model without a tokenizer, whose own end is not known."""
    model = of_bytes(block_size)
    prompts = [[END, 97], [END, 98], [END, 99]]
    whole = model.generate(prompts, length=20, stop_at_eos=False)
    chosen = whole[0].tokens[7]
    for each in (model, of_bytes(block_size, tokenizer=None)):
        for short, long in zip(each.generate(prompts, length=20, eos_id=chosen), whole, strict=True):
            ends = [place for place, token in enumerate(long.tokens) if token == chosen and place >= 2]
            assert short.tokens == long.tokens[: ends[0] + 1 if ends else 20]
            assert short.sample.stopped_by == ("eos" if ends else "length")


def test_end_tokens_that_are_given_end_nothing():
    (found,) = of_bytes().generate([[END, 97, END, END, 98]], length=8, stop_at_eos=True)
    assert found.tokens[:5] == [END, 97, END, END, 98]
    assert found.sample.written > 0


@every_method
def test_low_entropy_ends_a_text(block_size):
    """The rule applied afterwards to texts that were written without it, at the ends of their pieces."""
    model, window, length = of_bytes(block_size), 6, 32
    ends = [16, 24, 32] if block_size == CONTEXT else range(block_size or 1, length + 1, block_size or 1)
    settings = Settings(length=length, stop_at_eos=False, entropy_window=window)
    whole = model.generate(PROMPTS, settings)
    for floor, reasons in ((0.0, {"length"}), (1.5, {"length", "entropy"}), (math.log(window), {"entropy"})):
        found = model.generate(PROMPTS, settings, entropy_floor=floor)
        for short, long in zip(found, whole, strict=True):
            given = long.sample.given
            enough = [end for end in ends if end >= window and end > given]
            low = [end for end in enough if entropy_by_hand(long.tokens[end - window : end]) < floor - 1e-12]
            assert short.tokens == long.tokens[: max(low[0] - window, given) if low else length]
            assert short.sample.stopped_by == ("entropy" if low else "length")
            assert short.sample.given == given
        assert {short.sample.stopped_by for short in found} <= reasons


@pytest.mark.parametrize(("block_size", "first"), [(None, 11), (1, 11), (4, 12)])
def test_given_tokens_count_in_the_window_and_are_never_dropped(block_size, first):
    """A prompt of one letter is low already: at the end of the first piece all that was written goes."""
    model = of_bytes(block_size)
    settings = Settings(length=24, stop_at_eos=False, entropy_window=8)
    (whole,) = model.generate("a" * 9, settings)
    assert entropy_by_hand(whole.tokens[first - 8 : first]) < 1.2
    (found,) = model.generate("a" * 9, settings, entropy_floor=1.2)
    assert (found.tokens, found.sample.written) == (whole.tokens[:10], 0)
    assert (found.sample.stopped_by, found.sample.evaluations) == ("entropy", first - 10)
    (diverse,) = model.generate("abcdefghi", settings, entropy_floor=1.2)
    assert diverse.sample.written > 0
    assert diverse.tokens[:10] == [END, *b"abcdefghi"]


@every_method
@pytest.mark.parametrize(
    ("prompt", "changes", "length"), [("a", {}, 16), ("a", {"length": 255}, 255), (["a", Gap(3)], {}, 5)]
)
def test_a_text_shorter_than_the_window_is_refused(prompt, changes, length, block_size):
    said = (
        f"prompt 0: entropy_window must be at most the length {length}, or entropy_floor has no effect, "
        "got 256"
    )
    with pytest.raises(ValueError, match=said):
        of_bytes(block_size).stream([prompt], entropy_floor=4.0, **changes)
    of_bytes(block_size).stream([prompt], **changes)  # without a floor there is nothing to it
    of_bytes(block_size).stream([prompt], **changes, entropy_floor=1.0, entropy_window=length)


@pytest.mark.parametrize(
    ("window", "highest", "said"), [(8, math.log(8), "2.08"), (1000, math.log(BYTES.vocab_size - 1), "5.55")]
)
def test_a_floor_that_nothing_reaches_is_refused(window, highest, said):
    """Tokens are at most as different as the window and the vocabulary let them be."""
    of_bytes().stream("a", length=1000, entropy_floor=highest, entropy_window=window)
    above = highest + 0.01
    with pytest.raises(ValueError, match=rf"entropy_floor must be at most {said}, .* got {above:g}$"):
        of_bytes().stream("a", length=1000, entropy_floor=above, entropy_window=window)


def test_a_mask_beside_the_vocabulary_takes_none_of_a_floors_tokens():
    shape = {"mask_id": 4, "vocab_size": 4, "mask_vector": True, "context": CONTEXT}
    model, window = of_four_tokens(4, **shape), {"length": 1000, "entropy_window": 1000}
    model.stream([[0]], **window, entropy_floor=math.log(4))
    with pytest.raises(
        ValueError, match=r"entropy_floor must be at most 1\.39, .* a vocabulary of 4 can have"
    ):
        model.stream([[0]], **window, entropy_floor=math.log(4) + 0.01)


@every_method
def test_redraws(block_size):
    model = of_bytes(block_size)
    settings = Settings(length=24, stop_at_eos=False, entropy_window=8, top_p=1.0)
    never = {"entropy_floor": math.log(CONTEXT), "entropy_window": CONTEXT}  # by what has a letter twice
    (hopeless,) = model.generate("aa", settings, **never, redraws=3, seeds=[5])
    assert (hopeless.sample.redraws, hopeless.sample.stopped_by) == (3, "entropy")
    each = hopeless.sample.evaluations + hopeless.sample.fill_passes
    assert hopeless.sample.redrawn_passes == 3 * each > 0
    floor = 1.85  # so many texts fall below it, and so many do not
    found = model.generate(["ab"] * 6, settings, entropy_floor=floor, redraws=15)
    ended = model.generate(["ab"] * 6, settings, entropy_floor=floor)
    assert {each.sample.stopped_by for each in ended} == {"entropy", "length"}  # otherwise this says nothing
    for again, once in zip(found, ended, strict=True):
        assert again.sample.stopped_by == "length"
        assert (again.sample.redraws > 0) == (once.sample.stopped_by == "entropy")
        assert (again.sample.redrawn_passes > 0) == (again.sample.redraws > 0)
        assert (again.sample.seed != once.sample.seed) == (again.sample.redraws > 0)
        # The seed that is written down is that of the text, not of its failed attempts.
        assert model.generate("ab", settings, seeds=[again.sample.seed])[0].tokens == again.tokens


def test_the_entropy_of_a_text():
    for found in of_bytes().generate(PROMPTS):
        assert found.entropy == pytest.approx(entropy_by_hand(found.tokens), abs=1e-12)


def test_a_text_of_which_nothing_is_left_has_no_entropy():
    (found,) = of_bytes(score_first=True).generate("", entropy_floor=math.log(8), entropy_window=8)
    assert (found.text, found.tokens) == ("", [])
    assert found.entropy == 0.0


# --- past the context, and the cache ---


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


@pytest.mark.parametrize(
    ("short", "rule"),
    [
        ({"steps": 3}, Ancestral(3)),
        ({"steps": 5, "remask": 0.5}, Remasking(steps=5, eta=0.5)),
        ({"tokens_per_pass": 2}, FirstHitting(2)),
        ({"confidence": 0.1}, MostConfident(threshold=0.1)),
        ({"entropy_bound": 2.0}, EntropyBound(2.0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [4, CONTEXT])
def test_what_is_short_for_a_rule_writes_as_the_rule_does(short, rule, block_size):
    model = of_bytes(block_size)
    named = model.generate(["ab", ""], length=12, unmasking=rule)
    assert tokens_of(model.generate(["ab", ""], length=12, **short)) == tokens_of(named)
    assert tokens_of(model.generate(["ab", ""], length=12)) != tokens_of(named)
    settled = model.config.method.settled(Settings(**short))
    assert settled == model.config.method.settled(Settings(unmasking=rule))  # which records say


def test_tokens_per_pass_keeps_the_order_of_the_model():
    model = of_bytes(8).with_lean(2.0)
    few, rule = Settings(tokens_per_pass=2), Settings(unmasking=FirstHitting(2, lean=2.0))
    assert model.config.method.settled(few) == model.config.method.settled(rule)


# --- what is refused ---


@pytest.mark.parametrize(
    ("block_size", "changes", "said"),
    [
        (None, {"unmasking": Ancestral(5)}, r"unmasking must be left at its default, got Ancestral\(steps=5"),
        (None, {"unmasking": FirstHitting(2)}, "an autoregressive model writes token by token"),
        (None, {"stride": 4}, "stride must be left at its default, got 4: an autoregressive model"),
        (None, {"steps": 4}, "steps must be left at its default, got 4: an autoregressive model"),
        (None, {"projection": "greedy"}, "projection must be left at its default, got greedy: an auto"),
        (
            1,
            {"projection": "greedy"},
            "projection must be left at its default, got greedy: only SSD-LM has projections",
        ),
        (
            4,
            {"steps": 4, "unmasking": FirstHitting()},
            "only one of steps, tokens_per_pass, confidence, entropy_bound, unmasking may be given, got "
            "steps and unmasking",
        ),
        (
            None,
            {"tokens_per_pass": 4},
            "tokens_per_pass must be left at its default, got 4: an autoregressive",
        ),
        (None, {"confidence": 0.5}, r"confidence must be left at its default, got 0\.5: an autoregressive"),
        (CONTEXT, {"projection": "multi_hot"}, "got multi_hot: only SSD-LM has projections"),
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


NEVER_NONE = ("seed", "batch_size", "temperature", "entropy_window", "redraws")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(
            ({name: value}, rf"^{name} must be a whole number from 1 on, got {re.escape(repr(value))}$")
            for name in ("length", "batch_size", "top_k", "steps", "entropy_window", "stride")
            for value in (0, -3, 2.0, "8", True)
        ),
        ({"temperature": math.inf}, r"temperature must lie in \[0\.001, 1000\], .* got inf"),
        *(
            ({"temperature": value}, rf"temperature must lie in \[0\.001, 1000\], .* got {value}")
            for value in (1e-40, 1e-300, 1e-4, 1e5)
        ),
        *(({name: None}, rf"^{name} must be a .*number.*, got None$") for name in NEVER_NONE),
        ({"temperature": True}, "temperature must be a number, got True"),
        *(
            ({name: value}, f"^{name} must be True or False, got {value!r}$")
            for name in ("cache", "stop_at_eos")
            for value in ("no", None, 0)
        ),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"top_p_rule": "exclude"}, "top_p_rule must be 'inclusive' or 'exclusive', got 'exclude'"),
        ({"entropy_floor": -1.0}, "entropy_floor must be finite and not negative, got -1.0"),
        (
            {"unmasking": "ancestral"},
            "unmasking must be a rule of bd3lm.sampling such as FirstHitting.*'ancest",
        ),
        ({"unmasking": Ancestral}, "unmasking must be a rule of bd3lm.sampling such as FirstHitting"),
        ({"projection": "argmax"}, "projection must be one of greedy, sampling, multi_hot, got 'argmax'"),
        ({"remask": 0.1}, "remask needs steps, the number of steps for each block, got 0.1"),
        ({"steps": 4, "remask": 1.5}, r"remask must lie in \[0, 1\], got 1.5"),
        ({"confidence": 0.0}, r"confidence must lie in \(0, 1\], got 0.0"),
        ({"entropy_bound": -1.0}, "entropy_bound must not be negative, got -1.0"),
        ({"entropy_bound": "1"}, "entropy_bound must be a number, got '1'"),
        ({"tokens_per_pass": 0}, "tokens_per_pass must be a whole number from 1 on, got 0"),
        ({"eos_id": 5, "stop_at_eos": False}, "eos_id is for stop_at_eos, which is off, got 5"),
        ({"eos_id": -1}, "eos_id must be a token id, got -1"),
        ({"redraws": 2}, "redraws needs an entropy_floor, got 2 with none"),
        ({"entropy_floor": 1.0, "redraws": -1}, "redraws must not be negative, got -1"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(changes, said):
    with pytest.raises(ValueError, match=said):
        of_bytes().stream("a", **changes)
    with pytest.raises(ValueError, match=said):
        Settings(**changes)


def test_whole_numbers_may_be_numpys():
    model, settings = of_bytes(), Settings(length=np.int64(9), batch_size=np.int32(2), top_k=np.int64(3))
    assert tokens_of(model.generate("a", settings)) == tokens_of(model.generate("a", length=9, top_k=3))


@pytest.mark.parametrize("settings", [{"length": 8}, 8, "8", Settings], ids=str)
def test_settings_are_settings(settings):
    with pytest.raises(ValueError, match="settings must be a Settings, or fields of it by name, got "):
        of_bytes().stream("a", settings)


@pytest.mark.parametrize("stride", [CONTEXT + 1, 40])
def test_strides_lie_within_the_context(stride):
    with pytest.raises(ValueError, match=rf"stride must lie in 1\.\.16, the context, got {stride}"):
        of_bytes(CONTEXT).stream("a", stride=stride)


@pytest.mark.parametrize(("name", "meant"), [("lenght", "length"), ("top_b", "top_p"), ("seeds_", "seed")])
def test_misspelt_settings_get_a_suggestion(name, meant):
    with pytest.raises(
        ValueError, match=rf"{name} is not a setting, did you mean '{meant}'\? allowed are length, "
    ):
        of_bytes().generate("a", **{name: 3})


def test_unknown_settings_get_the_list_of_all():
    with pytest.raises(ValueError, match="foo is not a setting, allowed are") as caught:
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


def test_the_other_settings_may_be_none():
    """As the annotations have it."""
    for field in fields(Settings):
        if "None" in str(field.type):
            assert getattr(Settings(**{field.name: None}), field.name) is None


@every_method
@pytest.mark.parametrize("rule", [None, MostConfident(), EntropyBound(1.0)], ids=str)
def test_weights_that_are_no_numbers_write_nothing(block_size, rule):
    if block_size is None and rule is not None:
        return
    model = of_bytes(block_size)
    with torch.no_grad():
        model.network.output.bias[7] = math.nan
    with pytest.raises(
        FloatingPointError, match="text 0 cannot be written: the model's probabilities are not "
    ):
        model.generate(["a", "b"], unmasking=rule)
