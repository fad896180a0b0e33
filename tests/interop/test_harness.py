"""A model in lm-evaluation-harness: likelihoods by hand, greedy texts, windows, continuations."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'bd3lm[harness]'")

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import get_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from bd3lm.data import train_bpe
from bd3lm.interop.harness import HarnessLM
from bd3lm.lm import Gap, LanguageModel
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.models import Transformer
from tests.lm import (
    BYTES,
    CONTEXT,
    D3PM,
    D3PM_UNIFORM,
    END,
    SEDD,
    SSD,
    baseline,
    every_method,
    of_bytes,
    of_method,
)
from tests.oracles.likelihood import nll, table
from tests.oracles.networks import Written, log_probabilities, logits_of

pytestmark = pytest.mark.sweep(3)

LETTERS = "abcdefghijklmnopqrstuvwxyz "
PAIRS = [
    ("", "a"),
    ("", "hello"),
    ("a", "b"),
    ("the", " cat"),
    ("the ", "cat"),
    ("the  ", "cat"),
    ("  ", "x"),
    ("one two", " three"),
    ("naïve", " ☂"),
]
first_scored_or_given = pytest.mark.parametrize(
    "score_first", [False, True], ids=["given first", "scored first"]
)


def of_letters(block_size: int | None = 4, *, end_logit: float = -1e3, **options: Any) -> LanguageModel:
    """A model that writes only letters and spaces, so its texts encode back to the same tokens."""
    model = of_bytes(block_size, end_logit=end_logit, **options)
    with torch.no_grad():
        model.network.output.bias[[byte for byte in range(256) if chr(byte) not in LETTERS]] = -1e3
    return model


def asked(*arguments: Any) -> Any:
    """A request as the harness makes it, with the fields that a model reads."""
    return SimpleNamespace(args=arguments)


def score(lm: HarnessLM, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
    return lm.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)


def rolling(lm: HarnessLM, texts: Sequence[str]) -> list[float]:
    return lm.loglikelihood_rolling([asked(text) for text in texts], disable_tqdm=True)


def write(lm: HarnessLM, contexts: Sequence[str], **options: Any) -> list[str]:
    return lm.generate_until([asked(context, options) for context in contexts], disable_tqdm=True)


def tokens_and_given(context: str, continuation: str, score_first: bool) -> tuple[list[int], int]:
    """By bytes: spaces before a continuation belong to it."""
    begin = [] if score_first else [END]
    stripped = context.rstrip(" ")
    tokens = [*begin, *(context + continuation).encode()]
    return tokens[-CONTEXT:], max(0, len(begin) + len(stripped.encode()) - max(0, len(tokens) - CONTEXT))


# --- likelihoods ---


@torch.no_grad()
def chain_rule(model: LanguageModel, tokens: list[int], given: int) -> float:
    """One network call per token, each with the tokens before it."""
    mask = model.config.mask_id
    before = [mask] if model.config.method.score_first else []
    total = 0.0
    for place in range(given, len(tokens)):
        seen = torch.tensor([[*before, *tokens[:place]]])
        logits = logits_of(model.network, seen, Written(seen.shape[1], lambda q, k: k <= q))
        total += log_probabilities(logits[0, -1], mask)[tokens[place]].item()
    return total


@torch.no_grad()
def all_orders(model: LanguageModel, tokens: list[int], given: int) -> float:
    """Block by block, the mean over the orders of the tokens that are not given; past the end everything
    stays masked."""
    size, mask = model.config.method.block_size, model.config.mask_id
    padded = torch.tensor([tokens + [0] * (-len(tokens) % size)])
    total = 0.0
    for start in range(0, len(tokens), size):
        scored = [place - start for place in range(max(start, given), min(start + size, len(tokens)))]
        absent = [place - start for place in range(len(tokens), start + size)]
        if scored:
            each = table(model.network, padded, start, size, scored, absent=absent, mask_id=mask)
            total -= nll(each, scored).item()
    return total


@first_scored_or_given
@pytest.mark.parametrize(
    ("block_size", "by_hand"), [(None, chain_rule), (2, all_orders)], ids=["AR", "block"]
)
def test_likelihoods_are_those_by_hand(block_size, by_hand, score_first):
    model = of_bytes(block_size, score_first=score_first)
    found = score(HarnessLM(model), PAIRS)
    for pair, (log_p, _) in zip(PAIRS, found, strict=True):
        assert log_p == pytest.approx(by_hand(model, *tokens_and_given(*pair, score_first)), abs=1e-9), pair


@pytest.mark.parametrize("block_size", [None, 1, 4])
def test_a_context_and_its_continuation_make_the_whole(block_size):
    """log p(a) + log p(b | a) = log p(ab), if a ends with a block."""
    lm = HarnessLM(of_bytes(block_size))
    (whole, first, second) = (p for p, _ in score(lm, [("", "abcdefg"), ("", "abc"), ("abc", "defg")]))
    assert first + second == pytest.approx(whole, abs=1e-9)


@pytest.mark.parametrize(
    ("estimator", "meaning"), [("exact", "exact"), ("nelbo", "bound"), ("counts", "bound"), ("iw:3", "bound")]
)
def test_estimators_are_those_of_log_likelihood(estimator, meaning):
    model = of_bytes(4)
    samples = {} if estimator == "exact" else {"samples": 5}
    lm = HarnessLM(model, estimator=estimator, seed=2, **samples)
    assert (lm.figure.name, lm.figure.meaning) == (estimator, meaning)
    assert lm.get_model_info()["likelihoods"] == meaning
    texts, given = zip(*(tokens_and_given(*pair, False) for pair in PAIRS), strict=True)
    expected = model.log_likelihood(
        [list(text) for text in texts], given=given, estimator=estimator, seed=2, **samples
    )
    assert [p for p, _ in score(lm, PAIRS)] == pytest.approx([each.log_p for each in expected], abs=1e-9)


@pytest.mark.parametrize("estimator", ["exact", "counts", "iw:3"])
def test_a_lean_replaces_the_models_own(estimator):
    model = of_bytes(4)
    leans, same, without = (
        score(HarnessLM(each, estimator=estimator, **options), PAIRS)
        for each, options in ((model, {"lean": 2.0}), (model.with_lean(2.0), {}), (model, {}))
    )
    assert leans == same != without
    assert score(HarnessLM(model.with_lean(2.0), estimator=estimator, lean=0), PAIRS) == without
    assert HarnessLM(model, lean=2).get_model_info()["model_title"] == "block diffusion, blocks of 4, lean 2"
    assert model.config.method.lean == 0.0


def test_a_lean_applies_to_texts_too():
    model, contexts = of_letters(4), ["ab"] * 4
    sampled = {"max_gen_toks": 12, "do_sample": True}
    leans, same, without = (
        write(HarnessLM(each, seed=1, **options), contexts, **sampled)
        for each, options in ((model, {"lean": 3.0}), (model.with_lean(3.0), {}), (model, {}))
    )
    assert leans == same != without


@pytest.mark.parametrize("estimator", ["exact", "counts"])
def test_neither_order_nor_batch_matters(estimator):
    model = of_letters(4)
    pairs = [*PAIRS, *((context, continuation * 2) for context, continuation in PAIRS)]
    expected = dict(zip(pairs, score(HarnessLM(model, estimator=estimator), pairs), strict=True))
    for batch_size in (1, 3):
        random.Random(batch_size).shuffle(pairs)
        found = score(HarnessLM(model, estimator=estimator, batch_size=batch_size), pairs)
        for pair, (log_p, greedy) in zip(pairs, found, strict=True):
            assert log_p == pytest.approx(expected[pair][0], abs=1e-9)
            assert greedy == expected[pair][1]


def test_what_does_not_fit_is_left_off_on_the_left():
    model = of_bytes(4)
    context, continuation = "the quick brown fox jumps over", " the lazy dog"
    (found,) = score(HarnessLM(model), [(context, continuation)])
    tokens = (context + continuation).encode()[-CONTEXT:]
    (expected,) = model.log_likelihood([list(tokens)], given=[CONTEXT - len(continuation)])
    assert found[0] == pytest.approx(expected.log_p, abs=1e-9)
    most = "x" * (CONTEXT - 1)
    assert score(HarnessLM(model), [("abc", most)])[0][0] < 0
    with pytest.raises(ValueError, match="a continuation must have 1 to 15 tokens after its context, got 16"):
        score(HarnessLM(model), [("abc", most + "x")])
    with pytest.raises(ValueError, match="1 to 15 tokens after its context, got 0 for ''"):
        score(HarnessLM(model), [("abc", "")])


class Theirs(TemplateLM):
    """As the harness's own models encode, with the same tokenizer."""

    eot_token_id = loglikelihood_rolling = generate_until = _loglikelihood_tokens = None

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.encode = tokenizer.encode

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.encode(string)


def test_pairs_are_encoded_as_the_harness_does_for_its_own_models():
    """With tokens of several letters, which could span the boundary."""
    tokenizer = train_bpe(["the cat sat on the mat, the cats sat"] * 4, 275)
    method = BlockDiffusionMethod(block_size=4)
    lm = HarnessLM(of_method(method, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, context=32))
    theirs = Theirs(tokenizer)
    for context, continuation in (
        ("the cat", " sat on"),
        ("the cat ", "sat on"),
        ("the ca", "ts sat on the mat"),
        ("the mat,  ", " the cats"),
        ("the cat\n", "sat"),
    ):
        text = lm._pair(context, continuation)
        before, after = theirs._encode_pair(context, continuation)
        assert (text.tokens[1:], text.given) == ([*before, *after], 1 + len(before))
        assert text.tokens[0] == tokenizer.bos_id


# --- greedy texts ---


@pytest.mark.parametrize("context", ["", "hello"])
@every_method
def test_greedy_is_what_the_model_writes_with_the_likeliest_tokens(block_size, context):
    """The text written at once is greedy, whatever pieces it is compared in. With any letter changed it is
    not."""
    model = of_letters(block_size)
    lm = HarnessLM(model, seed=7, estimator="auto" if block_size != CONTEXT else "counts")
    prompt = [END, *context.encode()]
    for length in range(
        1, CONTEXT - len(prompt) + 1, 2
    ):  # ends at odd places after one, even after the other
        (written,) = model.generate(
            [[*prompt, Gap(length)]], top_k=1, top_p=1.0, stop_at_eos=False, seeds=[7]
        )
        text = bytes(written.tokens[len(prompt) :]).decode()
        if text.startswith(" "):
            continue  # the space would be taken for the end of an empty context
        others = [text[:i] + ("q" if text[i] != "q" else "z") + text[i + 1 :] for i in range(length)]
        found = [greedy for _, greedy in score(lm, [(context, each) for each in (text, *others)])]
        assert found == [True] + [False] * length


def test_most_texts_are_decided_by_their_first_piece(monkeypatch):
    """Passes are counted: a text that differs early costs fewer passes than it has tokens."""
    model, calls = of_letters(None), []
    forward = Transformer.forward
    monkeypatch.setattr(
        Transformer, "forward", lambda *words, **options: calls.append(1) or forward(*words, **options)
    )
    lm = HarnessLM(model)
    assert lm._are_greedy([lm._pair("", "zqzqzqzqzqzqzqz")]) == [False]
    assert len(calls) <= 2


@pytest.mark.parametrize("method", [SEDD, D3PM], ids=["SEDD", "D3PM"])
def test_the_baselines_have_bounds_and_greedy_texts(method):
    lm = HarnessLM(baseline(method), steps=4, samples=16)
    assert lm.figure.meaning == "bound"
    for (log_p, greedy), (context, continuation) in zip(score(lm, PAIRS), PAIRS, strict=True):
        text = tokens_and_given(context, continuation, False)
        (expected,) = lm.model.log_likelihood([text[0]], given=[text[1]], samples=16)
        assert log_p == pytest.approx(expected.log_p, abs=1e-9)
        (written,) = lm.model.generate(
            [[*text[0][: text[1]], Gap(len(text[0]) - text[1])]],
            steps=4,
            top_k=1,
            top_p=1.0,
            stop_at_eos=False,
            seeds=[0],
        )
        assert greedy == (written.tokens == text[0])


# --- rolling ---


@pytest.mark.parametrize("length", [1, 2, 14, 15, 16, 17, 29, 30, 31, 32, 33, 45, 46, 47, 100])
def test_windows_are_the_harness_own(length):
    lm = HarnessLM(of_bytes(4))
    tokens = [index % 250 for index in range(length)]
    theirs = map(make_disjoint_window, get_rolling_token_windows(tokens, END, CONTEXT - 1, 1))
    assert [(text.tokens, text.given) for text in lm._windows(tokens)] == [
        ([*before, *after], len(before)) for before, after in theirs
    ]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
def test_windows_score_every_token_once_also_where_the_first_is_predicted(length):
    lm = HarnessLM(of_bytes(4, score_first=True))
    tokens = [index % 250 for index in range(length)]
    windows = list(lm._windows(tokens))
    assert [token for text in windows for token in text.tokens[text.given :]] == tokens
    assert [text.given == 0 for text in windows] == [True] + [False] * (len(windows) - 1)
    assert all(len(text.tokens) <= CONTEXT for text in windows)
    assert length < CONTEXT or all(len(text.tokens) == CONTEXT for text in windows)


@first_scored_or_given
@pytest.mark.parametrize("block_size", [None, 4])
def test_rolling_sums_over_windows(block_size, score_first):
    model = of_bytes(block_size, score_first=score_first)
    lm = HarnessLM(model, batch_size=2)
    texts = ["", "a", "fits the context"[: CONTEXT - 1], "longer than one context, and than two of them"]
    found = rolling(lm, texts)
    assert found[0] == 0.0
    assert found[1:3] == pytest.approx([each.log_p for each in model.log_likelihood(texts[1:3])], abs=1e-9)
    windows = list(lm._windows(list(texts[3].encode())))
    parts = model.log_likelihood([text.tokens for text in windows], given=[text.given for text in windows])
    assert len(parts) == 3
    assert found[3] == pytest.approx(sum(each.log_p for each in parts), abs=1e-9)


# --- continuations ---


@every_method
def test_continuations_are_greedy_by_default_and_without_the_context(block_size):
    model = of_letters(block_size)
    found = write(HarnessLM(model), ["", "ab", "hello"], max_gen_toks=6)
    for context, text in zip(["", "ab", "hello"], found, strict=True):
        assert len(text) == 6
        assert set(text) <= set(LETTERS)
        if block_size is None:  # no order is drawn, so nothing is random
            (expected,) = model.generate(context, top_k=1, top_p=1.0, length=1 + len(context) + 6)
            assert context + text == expected.text


@pytest.mark.parametrize("block_size", [None, 4])
def test_a_text_ends_before_its_first_stop_string(block_size):
    lm = HarnessLM(of_letters(block_size))
    (whole,) = write(lm, ["ab"], max_gen_toks=30)
    for until in ([whole[3]], [whole[5:7], whole[9]], ["", whole[4:6]], whole[2:4], ["#"]):
        strings = [string for string in ([until] if isinstance(until, str) else until) if string]
        (found,) = write(lm, ["ab"], max_gen_toks=30, until=until)
        places = [whole.find(string) for string in strings if string in whole]
        assert found == whole[: min(places, default=len(whole))]


def test_sampling_ends_when_all_texts_have_stopped(monkeypatch):
    model, calls = of_letters(None), []
    forward = Transformer.forward
    monkeypatch.setattr(
        Transformer, "forward", lambda *words, **options: calls.append(1) or forward(*words, **options)
    )
    lm = HarnessLM(model)
    (whole,) = write(lm, ["ab"], max_gen_toks=200)
    assert len(calls) >= 200
    calls.clear()
    assert write(lm, ["ab"], max_gen_toks=200, until=[whole[:3]]) == [""]
    assert len(calls) < 10


@pytest.mark.parametrize("block_size", [None, 4, CONTEXT])
def test_the_end_token_ends_a_text_and_what_follows_it_in_its_block_is_not_read(block_size):
    """Some texts end on their own; a stop string after the end does not bring back what was dropped."""
    lm = HarnessLM(of_letters(block_size, end_logit=4.0))
    contexts = [first + second for first in "abcdefgh" for second in "xyz"]
    options = {"max_gen_toks": 13, "do_sample": True}
    whole = write(lm, contexts, **options)
    assert 0 < sum(len(text) < 13 for text in whole) < len(whole)
    for stop in "aeiou t":
        assert write(lm, contexts, until=[stop], **options) == [text.partition(stop)[0] for text in whole]


def test_sampling_is_the_models_own_unless_sharpened():
    model = of_letters(4)
    lm, contexts = HarnessLM(model, seed=1), ["ab"] * 3
    sampled = {"max_gen_toks": 10, "do_sample": True}
    found = write(lm, contexts, **sampled)
    assert len(set(found)) == 3  # a repeated request is drawn anew
    assert write(HarnessLM(model, seed=1, batch_size=1), contexts, **sampled) == found
    assert write(HarnessLM(model, seed=2), contexts, **sampled) != found
    settings, until, length = lm._options({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 9})
    assert (settings.temperature, settings.top_p, settings.top_k) == (0.7, 0.8, 9)
    assert (until, length) == ([], 256)
    settings, _, _ = lm._options(sampled)
    assert (settings.temperature, settings.top_p, settings.top_k) == (1.0, 1.0, None)
    for options in ({}, {"do_sample": False, "temperature": 0.5}, {"temperature": 0}, {"num_beams": 1}):
        settings, _, _ = lm._options(options)
        assert (settings.temperature, settings.top_p, settings.top_k) == (1.0, 1.0, 1)


def test_a_request_has_its_own_seed_whatever_stands_beside_it():
    lm = HarnessLM(of_letters(4), batch_size=2)
    options = {"max_gen_toks": 8, "do_sample": True}
    contexts = ["a", "b", "a", "c", "d"]
    found = write(lm, contexts, **options)
    again = write(lm, contexts[::-1], **options)[::-1]
    assert [found[1], found[3], found[4]] == [again[1], again[3], again[4]]
    assert {found[0], found[2]} == {again[0], again[2]}
    mixed = lm.generate_until(
        [asked("b", {"max_gen_toks": 3}), asked("b", options), asked("d", options)], disable_tqdm=True
    )
    assert mixed[1:] == [found[1], found[4]]
    assert len(mixed[0]) == 3


def test_a_long_context_is_cut_on_the_left_and_texts_go_past_the_networks_context():
    lm = HarnessLM(of_letters(4))
    long = "the quick brown fox jumps over the lazy dog "
    options = {"max_gen_toks": 2 * CONTEXT}
    assert lm._prompt(long, 99) == list(long.encode()[-CONTEXT:])
    assert len(write(lm, [long], **options)[0]) == 2 * CONTEXT
    lm = HarnessLM(baseline(SEDD), steps=3)
    assert lm._prompt(long, 6) == list(long.encode()[-10:])
    with pytest.raises(ValueError, match="max_gen_toks must be below 16, the network's context, past which"):
        write(lm, [long], max_gen_toks=CONTEXT)


@pytest.mark.parametrize("method", [SEDD, D3PM, D3PM_UNIFORM, SSD], ids=lambda method: method.title)
def test_the_baselines_write(method):
    lm = HarnessLM(baseline(method, end_logit=-1e3), steps=3)
    for options in ({}, {"do_sample": True, "top_p": 0.9}):
        texts = lm.generate_until([asked("ab", {"max_gen_toks": 5, **options})], disable_tqdm=True)
        assert len(texts[0]) > 0


# --- what is refused ---


def test_ssd_lm_has_no_likelihood():
    lm = HarnessLM(baseline(SSD))
    assert lm.figure is None
    for ask in (
        lambda: score(lm, PAIRS),
        lambda: rolling(lm, ["a"]),
        lambda: HarnessLM(lm.model, estimator="nelbo"),
    ):
        with pytest.raises(ValueError, match=r"SSD-LM \(method kind simplex\) has neither a likelihood"):
            ask()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"estimator": "best"},
            "estimator must be auto, paper, exact, nelbo, nelbo:ordered, nelbo:reference, counts or iw:K",
        ),
        ({"steps": 0}, "steps must be a whole number from 1 on, got 0"),
        ({"lean": -1.0}, "lean must be a number from 0 to 1e6, got -1.0"),
        ({"lean": "abc"}, "lean must be a number from 0 to 1e6, got 'abc'"),
        ({"lean": 2.0, "estimator": "nelbo"}, "must be exact, counts or iw:K for an order that leans"),
        ({"batch_size": "many"}, "batch_size must be a whole number from 1 on, got 'many'; auto is 8"),
        ({"max_batch_size": 0}, "max_batch_size must be a whole number from 1 on, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number from 1 on, got 0"),
        ({"device": "cpu"}, "device, dtype and tokenizer must be None for a model that is already loaded"),
    ],
)
def test_bad_options_of_a_model(options, message):
    with pytest.raises(ValueError, match=message):
        HarnessLM(of_bytes(4), **options)


@pytest.mark.parametrize("model", [of_bytes(None), baseline(SEDD)], ids=["AR", "SEDD"])
def test_a_lean_is_for_block_diffusion(model):
    with pytest.raises(ValueError, match="lean is for block diffusion, whose order can be chosen"):
        HarnessLM(model, lean=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 2.0}, "generation options must be among until, .*, got repetition_penalty"),
        ({"num_beams": 4}, "num_beams must be 1 \\(no beam search\\), got 4"),
        ({"max_gen_toks": 0}, "max_gen_toks must be at least 1, got 0"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must lie in"),
    ],
)
def test_bad_options_of_a_request(options, message):
    with pytest.raises(ValueError, match=message):
        write(HarnessLM(of_bytes(4)), ["ab"], **options)


@pytest.mark.parametrize(
    ("asked_for", "most", "size"),
    [("auto", None, 8), ("auto:4", None, 8), ("auto", 64, 8), ("auto", "2", 2), (16, 4, 16), ("3", None, 3)],
)
def test_an_automatic_batch_size_is_the_default_one(asked_for, most, size):
    assert HarnessLM(of_bytes(4), batch_size=asked_for, max_batch_size=most).batch_size == size


def test_a_top_k_of_0_is_off():
    lm = HarnessLM(of_letters(4))
    assert lm._options({"do_sample": True, "top_k": 0})[0].top_k is None
    assert write(lm, ["ab"], do_sample=True, top_k=0, max_gen_toks=3)


def test_after_generation_alone_no_likelihoods_are_reported():
    lm = HarnessLM(of_letters(4))
    assert lm.figure is not None
    write(lm, ["ab"], max_gen_toks=3)
    assert lm.figure is None
    assert lm.get_model_info()["likelihoods"] is None
    score(lm, PAIRS[:1])
    assert lm.figure.meaning == "exact"


def test_a_model_needs_a_tokenizer():
    with pytest.raises(ValueError, match="saved without a tokenizer; name one with tokenizer="):
        HarnessLM(of_bytes(4, tokenizer=None))


# --- as the harness makes it ---


def test_the_harness_knows_it_by_name(tmp_path):
    of_bytes(4).save_pretrained(tmp_path / "model")
    assert get_model("bd3lm") is HarnessLM
    lm = get_model("bd3lm").create_from_arg_string(
        f"pretrained={tmp_path / 'model'},estimator=counts,samples=3,dtype=float32,lean=2",
        {"batch_size": "2", "max_batch_size": None, "device": "cpu"},
    )
    assert (lm.batch_size, lm.samples, lm.figure.name) == (2, 3, "counts")
    assert lm.get_model_info()["model_dtype"] == "float32"
    assert lm.model.tokenizer == BYTES
    assert lm.model.config.method.lean == 2.0
    automatic = get_model("bd3lm").create_from_arg_string(
        f"pretrained={tmp_path / 'model'},dtype=auto",
        {"batch_size": "auto", "max_batch_size": 4, "device": "cpu"},
    )
    assert automatic.batch_size == 4
    assert automatic.get_model_info()["model_dtype"] == "float64"  # as it was saved
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float64, got 'int8'"):
        HarnessLM(tmp_path / "model", dtype="int8")
