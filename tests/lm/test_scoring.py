"""How likely a text is: the chain rule, brute force over all orders, bounds, and the sampler's own law."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bd3lm.data import train_bpe
from bd3lm.evaluation import Figure, exact_likelihood
from bd3lm.lm import Gap, LanguageModel, TextLikelihood
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.objectives import TokenBatch
from tests.lm import BYTES, CONTEXT, END, SEDD, baseline, of_bytes, of_four_tokens, of_method
from tests.oracles.likelihood import (
    every_text,
    importance_weighted,
    log_p_along,
    nelbo,
    nelbo_by_orders,
    nll,
    table,
)
from tests.oracles.networks import (
    CLEAN,
    FAMILIES,
    MASK,
    AfterPrevious,
    Written,
    blocks_of,
    log_probabilities,
    logits_of,
)

pytestmark = pytest.mark.sweep(2)

TEXTS = [[0, 1], [3, 0, 3], [1, 1, 0, 3, 0], [0, 3, 1, 0, 1, 3], [1, 3, 3, 0, 1, 0, 3, 1]]
EXACT = Figure("exact", "exact")
first_scored_or_given = pytest.mark.parametrize(
    "score_first", [False, True], ids=["given first", "scored first"]
)


def log_p(scores: Sequence[TextLikelihood]) -> list[float]:
    return [score.log_p for score in scores]


# --- autoregressive: the chain rule ---


@torch.no_grad()
def chain_rule(model: LanguageModel, text: list[int]) -> float:
    """One network call a token, each for what stands before it."""
    before = [MASK] if model.config.method.score_first else []
    total = 0.0
    for place in range(1 - len(before), len(text)):
        seen = [*before, *text[:place]]
        logits = logits_of(model.network, torch.tensor([seen]), Written(len(seen), lambda q, k: k <= q))
        total += log_probabilities(logits[0, -1]).tolist()[text[place]]
    return total


@first_scored_or_given
def test_autoregressive_models_have_the_chain_rule(score_first):
    model = of_four_tokens(None, context=8, score_first=score_first)
    for estimator in ("auto", "exact"):
        for text, found in zip(TEXTS, model.log_likelihood(TEXTS, estimator=estimator), strict=True):
            assert found.log_p == pytest.approx(chain_rule(model, text), abs=1e-10)
            assert found.tokens == len(text) - (not score_first)
            assert found.figure == EXACT


# --- block diffusion: every order ---


def asked(model: LanguageModel) -> Any:
    """The network as the texts are shown to it."""
    return AfterPrevious(model.network) if model.config.method.previous_token else model.network


def by_brute_force(model: LanguageModel, text: list[int], of: Any = nll) -> float:
    """Block by block, for all sets of hidden tokens; what lies past the end of the text stays masked."""
    size, given = model.config.method.block_size, int(not model.config.method.score_first)
    padded = torch.tensor([text + [0] * (-len(text) % size)])
    total = 0.0
    for start in range(0, len(text), size):
        scored = [place - start for place in range(max(start, given), min(start + size, len(text)))]
        absent = [place - start for place in range(len(text), start + size)]
        if scored:
            options = {"absent": absent, "causal_clean": model.config.method.causal_clean}
            total += of(table(asked(model), padded, start, size, scored, **options), scored).item()
    return total


@first_scored_or_given
@pytest.mark.parametrize("more", ["causal_clean", "previous_token", None])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_block_diffusion_has_the_sum_over_all_orders(block_size, more, score_first):
    model = of_four_tokens(
        block_size, context=8, score_first=score_first, **({} if more is None else {more: True})
    )
    truth = [-by_brute_force(model, text) for text in TEXTS]
    for estimator in ("auto", "exact"):
        scores = model.log_likelihood(TEXTS, estimator=estimator)
        assert log_p(scores) == pytest.approx(truth, abs=1e-10)
        for text, found in zip(TEXTS, scores, strict=True):
            assert found.tokens == len(text) - (not score_first)
            assert found.figure == EXACT


@first_scored_or_given
@pytest.mark.parametrize("block_size", [2, 4])
def test_it_is_what_evaluation_computes(block_size, score_first):
    model = of_four_tokens(block_size, context=8, score_first=score_first)
    texts = torch.tensor([TEXTS[-1], TEXTS[-1][::-1]])
    batch = TokenBatch.of(texts, score_first=score_first)
    expected = exact_likelihood(model.network, batch, blocks_of(block_size)).nll.sum(1)
    assert log_p(model.log_likelihood(texts)) == pytest.approx((-expected).tolist(), abs=1e-12)


@pytest.mark.parametrize("block_size", [None, 1, 4, 8])
def test_neither_neighbours_nor_padding_change_a_likelihood(block_size):
    model = of_four_tokens(block_size, context=8)
    texts = TEXTS[::2]
    alone = [model.log_likelihood([text])[0] for text in texts]
    together = model.log_likelihood(texts, batch_size=2)
    assert log_p(together) == pytest.approx(log_p(alone), abs=1e-12)
    assert [score.tokens for score in together] == [len(text) - 1 for text in texts]
    backwards = model.log_likelihood(texts[::-1])[::-1]
    assert log_p(backwards) == pytest.approx(log_p(alone), abs=1e-12)


@first_scored_or_given
@pytest.mark.parametrize(("block_size", "context"), [(None, 4), (1, 4), (2, 4), (4, 4), (3, 6)])
@pytest.mark.parametrize("length", [3, 4])
def test_the_probabilities_of_all_texts_sum_to_one(block_size, context, length, score_first):
    model = of_four_tokens(block_size, context=context, score_first=score_first)
    texts = every_text(CLEAN, length)
    p = torch.tensor(log_p(model.log_likelihood(texts, batch_size=len(texts))), dtype=torch.float64).exp()
    totals = p.sum() if score_first else p.view(len(CLEAN), -1).sum(1)  # given each first token
    torch.testing.assert_close(totals, torch.ones_like(totals), rtol=0, atol=1e-10)
    assert p.max() > 3 * p.min()  # a network with opinions


@pytest.mark.parametrize("mask_id", [0, 3])
def test_any_token_may_be_the_mask(mask_id):
    """Also that of the id with which rows are padded otherwise."""
    model = of_four_tokens(4, score_first=True, mask_id=mask_id)
    texts = every_text([token for token in range(4) if token != mask_id], 3)
    assert sum(map(math.exp, log_p(model.log_likelihood(texts, batch_size=len(texts))))) == pytest.approx(1.0)


# --- what is drawn is what is likely ---


@first_scored_or_given
@pytest.mark.parametrize(
    ("block_size", "more"),
    [
        (None, None),
        (1, None),
        (2, None),
        (2, "causal_clean"),
        (2, "previous_token"),
        (4, None),
        (4, "previous_token"),
    ],
)
def test_texts_are_written_as_often_as_they_are_likely(block_size, more, score_first):
    model = of_four_tokens(block_size, score_first=score_first, **({} if more is None else {more: True}))
    rows, length = 1000, 3 if score_first else 4
    texts = every_text(CLEAN, length)
    if not score_first:
        texts = texts[texts[:, 0] == 1]
    prompt: list[int] = [] if score_first else [1]
    found = model.generate([prompt] * rows, top_p=1.0, length=length, batch_size=rows)
    counts = Counter(tuple(each.tokens) for each in found)
    expected = [rows * math.exp(score.log_p) for score in model.log_likelihood(texts, batch_size=len(texts))]
    observed = [counts[tuple(text)] for text in texts.tolist()]
    assert sum(observed) == rows
    assert chi_square(observed, expected) > 0.01


@pytest.mark.parametrize("block_size", [None, 4, 2])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_networks_of_today_are_scored_and_written_alike(family, block_size):
    """Their mask lies beside the vocabulary."""
    model = of_four_tokens(block_size, vocab_size=3, mask_id=3, **FAMILIES[family])
    texts = every_text(range(3), 4)
    p = torch.tensor(log_p(model.log_likelihood(texts, batch_size=len(texts))), dtype=torch.float64).exp()
    torch.testing.assert_close(p.view(3, -1).sum(1), torch.ones(3).double(), rtol=0, atol=1e-10)
    found = model.generate([[1]] * 1000, top_p=1.0, length=4, batch_size=1000)
    counts = Counter(tuple(each.tokens) for each in found)
    begun = texts[:, 0] == 1
    observed = [counts[tuple(text)] for text in texts[begun].tolist()]
    assert sum(observed) == 1000
    assert chi_square(observed, (1000 * p[begun]).tolist()) > 0.01


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Its p-value; neighbours of which fewer than five are expected count as one."""
    cells = [[0.0, 0.0]]
    for pair in sorted(zip(observed, expected, strict=True), key=lambda pair: pair[1]):
        cells[-1] = [a + b for a, b in zip(cells[-1], pair, strict=True)]
        if cells[-1][1] >= 5:
            cells.append([0.0, 0.0])
    cells.pop()  # empty, since the last and largest was enough for a cell
    assert len(cells) > 5
    return float(stats.chisquare(*zip(*cells, strict=True)).pvalue)


# --- orders that lean ---


@pytest.mark.parametrize(
    ("block_size", "more", "lean", "score_first"),
    [
        (2, None, 2.0, False),
        (2, None, 0.8, True),
        (4, None, 0.8, False),
        (4, "causal_clean", 2.0, False),
        (4, "causal_clean", 0.8, True),
        (4, "previous_token", 0.8, False),
        (4, "previous_token", 2.0, True),
        (8, None, 2.0, True),
    ],
)
def test_a_lean_has_the_sum_over_all_orders_by_their_probabilities(block_size, more, lean, score_first):
    options = {} if more is None else {more: True}
    plain = of_four_tokens(block_size, context=8, score_first=score_first, **options)
    model, texts = plain.with_lean(lean), TEXTS[:-2] if block_size == 8 else TEXTS
    without = log_p(plain.log_likelihood(texts))
    truth = [-by_brute_force(model, text, partial(nll, lean=lean)) for text in texts]
    for estimator in ("auto", "exact"):
        found = model.log_likelihood(texts, estimator=estimator)
        assert log_p(found) == pytest.approx(truth, abs=1e-10)
        assert {each.figure for each in found} == {EXACT}
        assert max(abs(a - b) for a, b in zip(log_p(found), without, strict=True)) > 0.01


@pytest.mark.parametrize(
    ("block_size", "more", "score_first"),
    [(2, None, True), (2, "causal_clean", False), (4, None, False), (4, "previous_token", True)],
)
def test_leaning_texts_are_written_as_often_as_they_are_likely(block_size, more, score_first):
    """One model in two orders: what each writes is what it finds likely, and not what the other does."""
    options = {} if more is None else {more: True}
    plain = of_four_tokens(block_size, score_first=score_first, seed=4, **options)
    model, rows, length = plain.with_lean(2.5), 2000, 4
    texts = every_text(CLEAN, length)
    if not score_first:
        texts = texts[texts[:, 0] == 1]
    prompt: list[int] = [] if score_first else [1]
    found = model.generate([prompt] * rows, top_p=1.0, length=length, batch_size=rows)
    counts = Counter(tuple(each.tokens) for each in found)
    observed = [counts[tuple(text)] for text in texts.tolist()]
    assert sum(observed) == rows
    own, other = (
        [rows * math.exp(score.log_p) for score in each.log_likelihood(texts, batch_size=len(texts))]
        for each in (model, plain)
    )
    assert chi_square(observed, own) > 0.01
    assert chi_square(observed, other) < 1e-6


@pytest.mark.parametrize("given", [1, 2, 3, 5])
def test_leaning_continuations_have_probabilities_that_sum_to_one_and_are_drawn_so(given):
    """Also where what is given ends inside a block."""
    model = of_four_tokens(4, context=8, seed=4).with_lean(1.5)
    start = [1, 3, 0, 1, 3][:given]
    texts = torch.cat((torch.tensor(start).expand(27, -1), every_text(CLEAN, 3)), dim=1)
    p = [math.exp(each.log_p) for each in model.log_likelihood(texts, given=[given] * 27, batch_size=27)]
    assert sum(p) == pytest.approx(1.0)
    found = model.generate([start] * 1000, top_p=1.0, length=given + 3, batch_size=1000)
    counts = Counter(tuple(each.tokens) for each in found)
    assert chi_square([counts[tuple(text)] for text in texts.tolist()], [1000 * each for each in p]) > 0.01


@pytest.mark.parametrize("estimator", ["counts", "iw:1"])
@pytest.mark.parametrize("block_size", [4, 8])
def test_bounds_of_a_lean_are_its_own(estimator, block_size):
    lean, texts = 3.0, [[1, 1, 0, 3, 0], [3, 0, 0, 1]]
    model = of_four_tokens(block_size, context=8, seed=4).with_lean(lean)
    options: dict[str, Any] = {"estimator": estimator, "samples": 500, "batch_size": 500}
    found = [model.log_likelihood(texts, **options, seed=seed) for seed in range(6)]
    told_apart = 0
    for index, text in enumerate(texts):
        each = [-scores[index].log_p for scores in found]
        error = stdev(each) / len(each) ** 0.5
        truth = by_brute_force(model, text, partial(nelbo_by_orders, lean=lean))
        assert fmean(each) == pytest.approx(truth, abs=4 * error)
        assert {scores[index].figure for scores in found} == {Figure(estimator, "bound")}
        told_apart += abs(fmean(each) - by_brute_force(model, text, nelbo)) > 8 * error
    assert told_apart  # from the bound of uniform orders


def test_large_blocks_that_lean_have_counts_by_default():
    model = of_four_tokens(12, context=24).with_lean(1.0)
    (found,), (same,) = (model.log_likelihood([TEXTS[-1]], estimator=name) for name in ("auto", "counts"))
    assert found == same
    assert found.figure == Figure("counts", "bound")
    assert found != of_four_tokens(12, context=24).log_likelihood([TEXTS[-1]])[0]


@pytest.mark.parametrize("block_size", [2, 12])
def test_times_are_refused_for_an_order_that_leans(block_size):
    model = of_four_tokens(block_size, context=12).with_lean(0.5)
    said = (
        r"estimator must be exact, counts or iw:K for an order that leans \(lean 0\.5\), got 'nelbo', which"
    )
    with pytest.raises(ValueError, match=said):
        model.log_likelihood([[0, 1]], estimator="nelbo")
    assert model.with_lean(0.0).log_likelihood([[0, 1]], estimator="nelbo")[0].log_p < 0


# --- bounds ---


@pytest.mark.parametrize(
    ("estimator", "block_size", "previous_token", "score_first"),
    [
        ("nelbo", 2, True, False),
        ("nelbo", 8, False, True),
        ("counts", 2, True, True),
        ("counts", 8, False, False),
    ],
)
def test_the_nelbo_is_a_bound(estimator, block_size, previous_token, score_first):
    """Its mean is the NELBO of brute force, which is above −log p."""
    model = of_four_tokens(block_size, context=8, score_first=score_first, previous_token=previous_token)
    texts, options = TEXTS[2:], {"estimator": estimator, "samples": 250, "batch_size": 250}
    sampled = [model.log_likelihood(texts, **options, seed=seed) for seed in range(8)]
    for index, truth in enumerate(model.log_likelihood(texts, estimator="exact")):
        found = [scores[index] for scores in sampled]
        assert {(each.figure, each.tokens) for each in found} == {(Figure(estimator, "bound"), truth.tokens)}
        bound = by_brute_force(model, texts[index], nelbo)
        assert bound >= -truth.log_p - 1e-9
        error = stdev(log_p(found)) / len(found) ** 0.5
        assert error < (0.02 if estimator == "counts" else 0.1) * bound  # otherwise this says little
        assert -fmean(log_p(found)) == pytest.approx(bound, abs=3 * error + 1e-9)


@pytest.mark.parametrize("previous_token", [False, True])
def test_importance_weighting_lies_between(previous_token):
    """Its mean over many seeds is the mean over all tuples of orders, which falls from NELBO to −log p."""
    model, text, scored = (
        of_four_tokens(4, score_first=True, previous_token=previous_token),
        [1, 3, 3, 3],
        range(4),
    )
    truth = table(asked(model), torch.tensor([text]), 0, 4, scored)
    along = torch.stack([log_p_along(truth, order) for order in permutations(scored)])
    means = [importance_weighted(along, orders).item() for orders in (1, 2)]
    assert nelbo(truth, scored).item() == pytest.approx(means[0])
    exact = nll(truth, scored).item()
    assert exact < means[1] < means[0]
    for orders, mean in enumerate(means, start=1):
        scores = [model.log_likelihood([text], estimator=f"iw:{orders}", seed=seed)[0] for seed in range(60)]
        assert {(score.figure, score.tokens) for score in scores} == {(Figure(f"iw:{orders}", "bound"), 4)}
        error = stdev(log_p(scores)) / len(scores) ** 0.5
        assert error < 0.3 * (mean - exact)  # otherwise this says nothing
        assert -fmean(log_p(scores)) == pytest.approx(mean, abs=3 * error)
    (many,) = model.log_likelihood([text], estimator="iw:100")
    assert -many.log_p == pytest.approx(exact, abs=0.2 * (means[1] - exact))


@pytest.mark.parametrize("estimator", ["nelbo", "counts", "iw:3"])
def test_estimates_depend_on_the_seed_and_on_nothing_else(estimator):
    model = of_four_tokens(4, context=8)
    options: dict[str, Any] = {"estimator": estimator, "samples": 5}
    alone = [model.log_likelihood([text], **options)[0] for text in TEXTS]
    for batch_size in (1, 3, 8):
        together = model.log_likelihood(TEXTS, **options, batch_size=batch_size)
        assert log_p(together) == pytest.approx(log_p(alone), abs=1e-12)
    backwards = model.log_likelihood([*TEXTS[::-1], TEXTS[0]], **options)
    assert log_p(backwards[:-1][::-1]) == pytest.approx(log_p(alone), abs=1e-12)
    other = model.log_likelihood(TEXTS, **options, seed=1)
    assert all(abs(a.log_p - b.log_p) > 1e-6 for a, b in zip(other[1:], alone[1:], strict=True))
    torch.manual_seed(1)  # nor on torch's own generator
    assert log_p(model.log_likelihood(TEXTS, **options)) == pytest.approx(log_p(alone), abs=1e-12)


def test_more_samples_are_less_noise():
    model = of_four_tokens(8, context=8)
    spread = [
        torch.tensor(
            [
                model.log_likelihood([TEXTS[-1]], estimator="nelbo", samples=samples, seed=seed)[0].log_p
                for seed in range(20)
            ]
        ).std()
        for samples in (1, 32)
    ]
    assert spread[1] < spread[0] / 3


# --- the noise of the draws, and what each block adds ---


def test_what_is_not_drawn_has_no_error():
    for model in (of_four_tokens(None, context=8), of_four_tokens(4, context=8)):
        assert {each.error for each in model.log_likelihood(TEXTS)} == {0.0}


@pytest.mark.parametrize(("estimator", "samples"), [("iw:2", 8), ("counts", 8)])
def test_the_error_is_the_spread_over_seeds(estimator, samples):
    """Of independent draws; noise levels that are spread evenly make the spread smaller, and not larger."""
    model = of_four_tokens(4, context=8, seed=4)
    text, options = TEXTS[-1], {"estimator": estimator, "samples": samples, "batch_size": samples}
    found = [model.log_likelihood([text], **options, seed=seed)[0] for seed in range(150)]
    spread, error = stdev(log_p(found)), fmean(each.error**2 for each in found) ** 0.5
    assert spread > 0.01  # otherwise this says nothing
    assert 0.8 * spread < error
    if estimator == "iw:2":
        assert error < 1.25 * spread


def test_one_draw_tells_no_error():
    model = of_four_tokens(4, context=8)
    for options in ({"estimator": "iw:2"}, {"estimator": "counts", "samples": 1}):
        assert model.log_likelihood([TEXTS[-1]], **options)[0].error is None
    for options in ({"estimator": "iw:2", "samples": 2}, {"estimator": "nelbo"}):
        assert model.log_likelihood([TEXTS[-1]], **options)[0].error > 0


@first_scored_or_given
@pytest.mark.parametrize("block_size", [None, 2, 4])
def test_blocks_sum_to_the_likelihood_and_each_is_what_it_adds(block_size, score_first):
    model = of_four_tokens(block_size, context=8, score_first=score_first)
    for text, found in zip(TEXTS, model.log_likelihood(TEXTS), strict=True):
        size = block_size or 1
        first = 0 if score_first or size > 1 else 1  # a block of nothing but what is given has none
        assert len(found.blocks) == -(-len(text) // size) - first
        assert sum(found.blocks) == pytest.approx(found.log_p, abs=1e-12)
        for end in range(size * (first + 1), len(text), size):
            (begun,) = model.log_likelihood([text[:end]])
            assert found.blocks[: len(begun.blocks)] == pytest.approx(begun.blocks, abs=1e-12)
    (rest,) = model.log_likelihood([TEXTS[-1]], given=[5])
    assert sum(rest.blocks) == pytest.approx(rest.log_p, abs=1e-12)
    assert len(rest.blocks) == {None: 3, 2: 2, 4: 1}[block_size]
    if block_size is not None:
        assert model.log_likelihood([TEXTS[-1]], estimator="counts")[0].blocks is None


# --- what follows a prompt ---


@first_scored_or_given
@pytest.mark.parametrize("block_size", [None, 1, 4])
def test_a_text_after_a_prompt_is_the_rest_after_what_is_given(block_size, score_first):
    model = of_bytes(block_size, score_first=score_first)
    begin = [] if score_first else [END]
    for prompt, text in (("The", " cat"), ("naïve", "té"), ("", "abc")):
        before, after = [*begin, *prompt.encode()], list(text.encode())
        (found,) = model.log_likelihood([text], prompts=[prompt])
        assert found == model.log_likelihood([before + after], given=[len(before)])[0]
        assert found.tokens == len(after)
        assert found == model.log_likelihood(text, prompts=prompt)[0]
        if prompt:
            assert found == model.log_likelihood([after], prompts=[before])[0]
    several = model.log_likelihood(["b", "bc"], prompts=["a", "aaaaa"])
    alone = [model.log_likelihood("b", prompts="a")[0], model.log_likelihood("bc", prompts="aaaaa")[0]]
    assert log_p(several) == pytest.approx(log_p(alone), abs=1e-12)


@pytest.mark.parametrize("block_size", [None, 4])
def test_prompt_and_continuation_are_the_text(block_size):
    """log p(prompt) + log p(text | prompt) = log p(both), where the prompt ends with a block."""
    model = of_bytes(block_size)
    (prompt,), (rest,), (both,) = (
        model.log_likelihood("abc"),  # four tokens, with the one that texts begin with
        model.log_likelihood(" is it", prompts="abc"),
        model.log_likelihood("abc is it"),
    )
    assert prompt.log_p + rest.log_p == pytest.approx(both.log_p, abs=1e-9)
    assert prompt.tokens + rest.tokens == both.tokens


def test_prompt_and_text_are_tokenized_apart_as_in_generation():
    tokenizer = train_bpe(["the cat sat on the mat"] * 40, 300)
    method = BlockDiffusionMethod(block_size=2)
    model = of_method(method, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    assert len(tokenizer.encode("cat")) < len(tokenizer.encode("c") + tokenizer.encode("at"))
    (found,) = model.log_likelihood("at", prompts="c")
    (written,) = model.generate("c", length=8)
    given = written.tokens[: written.sample.written_from]
    assert found == model.log_likelihood([[*given, *tokenizer.encode("at")]], given=[len(given)])[0]


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        (["b"], {"prompts": ["a"], "given": [1]}, "give either prompts or given, not both, got"),
        (["b", "c"], {"prompts": ["a"]}, "prompts must hold one prompt for each of 2 texts, got 1"),
        (["b"], {"prompts": [[]]}, r"prompt 0 must have at least 1 token, .*, got \[\]"),
        ([""], {"prompts": ["a"]}, "text 0 must have at least 1 token to score, got ''"),
        (["b"], {"prompts": [[1, 258]]}, r"prompt 0: token ids must lie in 0\.\.257, got 258"),
        (["b", [5, -1]], {"prompts": ["a", "a"]}, r"text 1: token ids must lie in 0\.\.257, got -1"),
        (["b"], {"prompts": [["a", Gap(2)]]}, "text 0 must have no gaps"),
        (["b" * 10], {"prompts": ["a" * 10]}, "text 0 must have 2 to 16 tokens .*, got 21"),
        (["b"], {"prompts": 5}, "prompts must be a text, token ids, a template, or a list of these, got 5"),
    ],
    ids=str,
)
def test_bad_prompts(texts, options, said):
    with pytest.raises(ValueError, match=said):
        of_bytes().log_likelihood(texts, **options)


# --- which estimator ---


@pytest.mark.parametrize(
    ("block_size", "network", "chosen"),
    [
        (None, {}, "exact"),
        (1, {}, "exact"),
        (8, {}, "exact"),
        (12, {}, "counts"),
        (24, {}, "counts"),
        (4, {"adaln": True}, "exact"),
        (4, {"adaln": True, "time_conditioning": True}, "nelbo"),
    ],
    ids=str,
)
def test_auto_is_exact_where_that_is_cheap(block_size, network, chosen):
    model = of_four_tokens(block_size, context=24, **network)
    (found,) = model.log_likelihood([TEXTS[-1]])
    assert (found.figure.name, found.is_exact) == (chosen, chosen == "exact")
    (same,) = model.log_likelihood([TEXTS[-1]], estimator=chosen)
    assert same == found


@pytest.mark.parametrize("estimator", ["nelbo", "counts", "iw:3"])
def test_autoregressive_likelihoods_need_no_bound(estimator):
    said = f"must be 'exact' for an autoregressive model, whose likelihood needs no bound, got '{estimator}'"
    with pytest.raises(ValueError, match=said):
        of_four_tokens(None).log_likelihood([[0, 1]], estimator=estimator)


def test_large_blocks_have_no_exact_likelihood():
    model = of_four_tokens(16, context=16)
    said = r"which is 2^16 − 1 for blocks of 16; it is for blocks of at most 12. Use 'counts'.* or 'iw:K'"
    with pytest.raises(ValueError, match=said.replace("^", r"\^")):
        model.log_likelihood([[0, 1]], estimator="exact")
    assert model.log_likelihood([[0, 1]], estimator="iw:2")[0].log_p < 0


@pytest.mark.parametrize("estimator", ["exact", "counts", "iw:4"])
def test_networks_that_are_told_the_time_have_a_nelbo_alone(estimator):
    model = of_four_tokens(2, adaln=True, time_conditioning=True)
    allowed = "'nelbo', 'nelbo:ordered' or 'nelbo:reference'"
    said = f"estimator must be {allowed} for a network that is told the noise level, got '{estimator}'"
    with pytest.raises(ValueError, match=said):
        model.log_likelihood([[0, 1]], estimator=estimator)
    for allowed in ("auto", "nelbo"):
        assert model.log_likelihood([[0, 1]], estimator=allowed)[0].figure == Figure("nelbo", "bound")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"estimator": "exakt"},
            r"estimator must be auto, paper, exact, nelbo, nelbo:ordered, nelbo:reference, counts or "
            r"iw:K .*, got 'exakt', did you mean 'exact'\?",
        ),
        ({"estimator": "iw:0"}, "iw:K with K from 1 to 1,000, got 'iw:0'"),
        ({"samples": 4}, "samples is for an estimate that draws, and 'exact' draws nothing, got 4"),
        ({"samples": 0}, "samples must be a whole number, at least 1, or None, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number, at least 1, got 0"),
        ({"batch_size": True}, "batch_size must be a whole number, at least 1, got True"),
        ({"batch_size": None}, "batch_size must be a whole number, at least 1, got None"),
        ({"samples": 2.0}, r"samples must be a whole number, at least 1, or None, got 2\.0"),
        ({"seed": 2**70}, rf"seed must be a whole number, at least 0 and below 2\^63, got {2**70}"),
        ({"seed": -1}, "seed must be a whole number, at least 0 .*, got -1"),
        ({"seed": None}, "seed must be a whole number, at least 0 .*, got None"),
        (
            {"estimator": None},
            "estimator must be auto, paper, exact, nelbo, nelbo:ordered, nelbo:reference, counts or iw:K, "
            "got None",
        ),
    ],
    ids=str,
)
def test_bad_options(changes, said):
    with pytest.raises(ValueError, match=said):
        of_four_tokens().log_likelihood([[0, 1]], **changes)


@pytest.mark.parametrize(
    ("block_size", "estimator"),
    [(None, "exact"), (4, "exact"), (4, "nelbo"), (4, "counts"), (4, "iw:2")],
    ids=str,
)
def test_a_network_in_training_is_refused(block_size, estimator):
    """With dropout a likelihood would be another one each time."""
    model = of_four_tokens(block_size, dropout=0.5)
    model.network.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        model.log_likelihood([[0, 1, 3]], estimator=estimator)


# --- which texts ---


@pytest.mark.parametrize("block_size", [None, 4])
def test_a_text_is_scored_from_its_first_token_on(block_size):
    model = of_bytes(block_size)
    (found,) = model.log_likelihood("naïve")
    assert found.tokens == 6
    assert found == model.log_likelihood(["naïve"])[0] == model.log_likelihood([[END, *"naïve".encode()]])[0]
    given = model.log_likelihood([list("naïve".encode())])[0]
    assert given.tokens == 5  # ids are taken as they are
    model = of_bytes(block_size, score_first=True)
    (found,) = model.log_likelihood("naïve")
    assert found.tokens == 6
    assert found == model.log_likelihood([list("naïve".encode())])[0]


@pytest.mark.parametrize("block_size", [None, 4, CONTEXT])
def test_ids_may_come_as_tensors_and_tuples(block_size):
    model = of_bytes(block_size)
    ids = [END, 97, 98]
    expected = model.log_likelihood([ids])
    for texts in (
        [tuple(ids)],
        [torch.tensor(ids)],
        torch.tensor([ids]),
        np.array([ids]),
        ["ab"],
        [["a", "b"]],
    ):
        assert model.log_likelihood(texts) == expected


@pytest.mark.parametrize("block_size", [None, 4, CONTEXT])
def test_one_text_needs_no_list_around_it(block_size):
    model = of_bytes(block_size)
    ids = [END, 97, 98]
    expected = model.log_likelihood([ids])
    for text in (ids, tuple(ids), torch.tensor(ids), np.array(ids), "ab"):
        assert model.log_likelihood(text) == expected
    several = model.log_likelihood(["ab", "a"])
    assert log_p(several) == pytest.approx(log_p([*expected, *model.log_likelihood("a")]), abs=1e-12)


@pytest.mark.parametrize("block_size", [None, 4])
def test_texts_up_to_one_context(block_size):
    model = of_bytes(block_size)
    assert model.log_likelihood("x" * 15)[0].tokens == 15
    counts = r"\(the network's context, including the start token\)"
    with pytest.raises(ValueError, match=f"text 1 must have 2 to 16 tokens {counts}, got 17"):
        model.log_likelihood(["x", "x" * 16])


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "texts must hold at least one text, got none"),
        ("", "text 0 must have 2 to 16 tokens"),
        (["a", []], "text 1 must have 2 to 16 tokens .*got 0"),
        ([[5]], "text 0 must have 2 to 16 tokens .*got 1"),
        ([[5, BYTES.mask_id, 5]], "it must not hold the mask token 257"),
        ([[5, 258]], r"token ids must lie in 0\.\.257, got 258"),
        ([[5, -1]], r"token ids must lie in 0\.\.257, got -1"),
        ([5, 258], r"token ids must lie in 0\.\.257, got 258"),
        ([["a", Gap(2), "b"]], "text 0 must have no gaps"),
        (["a", ["a", Gap(2)]], "text 1 must have no gaps"),
        (["a", Gap(2), "b"], "text 0 must have no gaps"),
        ([5, Gap(2), 6], "text 0 must have no gaps"),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [None, 4])
def test_bad_texts(texts, said, block_size):
    with pytest.raises(ValueError, match=said):
        of_bytes(block_size).log_likelihood(texts)


@pytest.mark.parametrize(
    "texts",
    [[[1.5, 2.0]], [[True, False]], [1.5, 2.0], [True, False], b"ab", [b"ab"], 5, None, torch.tensor(1.0)],
    ids=str,
)
def test_what_are_no_texts_is_told_so(texts):
    with pytest.raises(ValueError, match="text"):
        of_bytes().log_likelihood(texts)


def test_models_that_predict_first_tokens_score_single_ones():
    assert of_bytes(score_first=True).log_likelihood([[5]])[0].tokens == 1
    with pytest.raises(ValueError, match=r"text 0 must have 1 to 16 tokens .*got 0"):
        of_bytes(score_first=True).log_likelihood("")


def test_texts_need_a_tokenizer():
    model = of_bytes(tokenizer=None)
    with pytest.raises(
        ValueError, match="text needs a tokenizer, and this model was saved without one; give ids"
    ):
        model.log_likelihood("ab")
    assert model.log_likelihood([[END, 97]]) == of_bytes().log_likelihood("a")


# --- perplexity ---


def test_perplexity_is_per_token():
    assert TextLikelihood(-6.0, 3, EXACT).perplexity == pytest.approx(math.exp(2.0))
    assert TextLikelihood(-1e6, 3, Figure("nelbo", "bound")).perplexity == math.inf
    (found,) = of_bytes().log_likelihood("hello")
    assert found.perplexity == pytest.approx(math.exp(-found.log_p / 5))


# --- what is given ---


@pytest.mark.parametrize("block_size", [None, 1, 2, 4])
@pytest.mark.parametrize("given", [1, 2, 3, 5])
def test_what_follows_given_tokens_has_probabilities_that_sum_to_one(block_size, given):
    """The sampler's law of a text after its beginning, wherever in a block that ends."""
    model = of_four_tokens(block_size, context=8)
    start = torch.tensor([1, 3, 0, 1, 3][:given])
    texts = torch.cat((start.expand(9, -1), every_text(CLEAN, 2)), dim=1)
    scores = model.log_likelihood(texts, given=[given] * 9, batch_size=4)
    assert {score.tokens for score in scores} == {2}
    assert sum(math.exp(score.log_p) for score in scores) == pytest.approx(1.0)


def test_given_tokens_split_a_likelihood_at_block_borders():
    """log p(a, b) = log p(a) + log p(b | a) where b begins a block."""
    model = of_four_tokens(4, context=8)
    text = TEXTS[-1]
    (whole,), (start,) = model.log_likelihood([text]), model.log_likelihood([text[:4]])
    (rest,) = model.log_likelihood([text], given=[4])
    assert whole.log_p == pytest.approx(start.log_p + rest.log_p, abs=1e-10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1], "a number for each of 2 texts, got 1"),
        ([1, 3], r"given\[1\] .* 1 to 2, got 3"),
        ([0, 1], "given"),
        ([1.5, 1], r"given\[0\] must be a whole number of tokens, got 1\.5"),
        ([1, True], r"given\[1\] must be a whole number of tokens, got True"),
        (2, "given must hold a number for each of 2 texts, got 2"),
        ("11", "given must hold a number for each of 2 texts, got '11'"),
    ],
)
def test_bad_numbers_of_given_tokens(given, said):
    with pytest.raises(ValueError, match=said):
        of_four_tokens().log_likelihood([[0, 1], [0, 1, 3]], given=given)


def test_numbers_may_be_numpys():
    model, text = of_four_tokens(), [[0, 1, 3]]
    plain = model.log_likelihood(text, given=[2], estimator="counts", samples=3, seed=5, batch_size=2)
    for given in ([np.int64(2)], np.array([2])):
        found = model.log_likelihood(
            text,
            given=given,
            estimator="counts",
            samples=np.int64(3),
            seed=np.int32(5),
            batch_size=np.int64(2),
        )
        assert found == plain


def test_what_are_no_texts_is_named_so():
    with pytest.raises(ValueError, match=r"^texts must be a text, token ids, .* got None$"):
        of_bytes().log_likelihood(None)


@pytest.mark.parametrize(
    ("block_size", "estimator"), [(None, "auto"), (2, "exact"), (2, "counts"), (2, "iw:2")]
)
def test_likelihoods_that_are_no_numbers(block_size, estimator):
    model = of_four_tokens(block_size)
    with torch.no_grad():
        model.network.output.bias[1] = math.nan
    with pytest.raises(FloatingPointError, match="the model's probabilities are not finite"):
        model.log_likelihood([[0, 1, 3]], estimator=estimator)


@pytest.mark.parametrize(
    ("model", "name"),
    [(of_bytes(None), "exact"), (of_bytes(4), "nelbo"), (of_bytes(16), "nelbo"), (baseline(SEDD), "nelbo")],
    ids=["autoregressive", "blocks of 4", "one block", "SEDD"],
)
def test_the_paper_s_estimator_is_what_its_method_says(model, name):
    (asked,), named = (model.log_likelihood("a text", estimator=each) for each in ("paper", name))
    assert [asked] == named
    assert asked.figure.name == name
