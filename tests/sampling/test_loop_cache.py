"""The loop with the cache and without: the same texts inside the context, a window past it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from bd3lm.diffusion import Purpose, counter_uniform
from bd3lm.sampling import (
    Request,
    Writer,
    sample,
)
from tests.oracles.networks import (
    AfterPrevious,
    Written,
    log_probabilities,
    logits_of,
    mask_of,
)
from tests.sampling.loop_cases import (
    CONTEXT,
    LLAMA,
    MODEL,
    QWEN,
    RULES,
    TIMED,
    Counting,
    autoregressive,
    blocks,
    drawn,
    prompt,
    suited,
    tokens,
)

pytestmark = pytest.mark.sweep(2)

CACHED: dict[str, Callable[..., Writer]] = {
    **{f"blocks of {n}": partial(blocks, block_size=n) for n in (1, 2, 4)},
    **{f"blocks of {n}, causal": partial(blocks, block_size=n, causal_clean=True) for n in (1, 2, 4)},
    **{
        f"blocks of {n}, with the token before": partial(blocks, block_size=n, previous_token=True)
        for n in (1, 4)
    },
    **{f"{name}, blocks of 4": partial(blocks, unmasking=rule) for name, rule in RULES.items()},
    "autoregressive": autoregressive,
    "autoregressive after a first token": partial(autoregressive, score_first=False),
}
every_cached_writer = pytest.mark.parametrize("make", CACHED.values(), ids=CACHED)


OF_TODAY = {
    "Llama, blocks of 2, causal": (LLAMA, CACHED["blocks of 2, causal"]),
    "Llama, remasking": (LLAMA, CACHED["remasking, blocks of 4"]),
    "Llama, autoregressive": (LLAMA, CACHED["autoregressive"]),
    "Qwen3, threshold": (QWEN, CACHED["threshold, blocks of 4"]),
    "Qwen3, autoregressive after a first token": (QWEN, CACHED["autoregressive after a first token"]),
    "Qwen3, blocks of 4, with the token before": (QWEN, CACHED["blocks of 4, with the token before"]),
}


@every_cached_writer
def test_inside_the_context_the_cache_changes_nothing(make):
    assert_the_cache_changes_nothing(MODEL, make)


@pytest.mark.parametrize(("model", "make"), OF_TODAY.values(), ids=OF_TODAY)
def test_nor_does_it_for_networks_of_today(model, make):
    assert_the_cache_changes_nothing(model, make)


def assert_the_cache_changes_nothing(model, make):
    plain = make(model, cache=False)
    requests = suited([Request(prompt(n, seed=n), n, CONTEXT) for n in (0, 1, 2, 3, 5, 8, 11)], plain)
    requests += suited([Request(tokens("0_1_ 3013 _"), 1, CONTEXT)], plain)
    without, cached = (sample(writer, requests) for writer in (plain, make(model)))
    for a, b in zip(without, cached, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.evaluations == b.evaluations


@pytest.mark.parametrize("name", ["blocks of 1", "blocks of 2", "blocks of 4, causal", "autoregressive"])
def test_past_the_context_the_cache_changes_the_distribution(name):
    """Its keys were computed from text that has left the window since; without it they are fresh."""
    requests = [Request(prompt(1), seed, 3 * CONTEXT) for seed in range(4)]
    without, cached = (sample(CACHED[name](MODEL, cache=use), requests) for use in (False, True))
    same = [int((a.tokens == b.tokens).long().cumprod(0).sum()) for a, b in zip(without, cached, strict=True)]
    assert min(same) >= CONTEXT
    assert min(same) < 3 * CONTEXT


def blocks_by_hand(
    model: Any, request: Request, n: int, window: int, *, causal_clean: bool, afresh: bool
) -> list[int]:
    """First-hitting. A pass is over the whole text, in which every block sees `window` tokens before it;
    `afresh`: it is over just the tokens that its block sees.
    """
    mask = mask_of(model)
    text = torch.full((-(-request.length // n) * n,), mask)
    text[: len(request.given)] = request.given
    order = counter_uniform(torch.tensor(request.seed), torch.arange(len(text)), Purpose.ORDER, 1)[:, 0]
    for start in range(0, len(text), n):
        first, end = max(start - window, 0) if afresh else 0, start + n

        def sees(query: int, key: int, first: int = first, start: int = start) -> bool:
            query, key = query + first, key + first
            group = query // n * n
            finished = query < start and causal_clean
            return group - window <= key <= (query if finished else group + n - 1)

        masked = [p for p in range(start, end) if text[p] == mask and p < request.length]
        for position in sorted(masked, key=lambda p: -order[p]):
            noise = torch.zeros(1, end - first)
            noise[:, start - first :] = -(1 - order[position]).clamp(1e-3).log()
            logits = logits_of(model, text[None, first:end], Written(end - first, sees), noise=noise)
            log_p = log_probabilities(logits, mask)[0, position - first]
            text[position] = drawn(log_p, request.seed, position)
    return text[: request.length].tolist()


def tokens_by_hand(
    model: Any, request: Request, window: int, *, score_first: bool, afresh: bool
) -> list[int]:
    """Each token from the one before it, which saw `window` inputs before itself, each of which did too;
    `afresh`: there are no others.
    """
    mask = mask_of(model)
    before = [mask] if score_first else []
    text = request.given.tolist() + [mask] * (request.length - len(request.given))
    for position, token in enumerate(text):
        if token == mask:
            inputs = (before + text[:position])[-(window + 1) if afresh else 0 :]
            layout = Written(len(inputs), lambda query, key: query - window <= key <= query)
            log_p = log_probabilities(logits_of(model, torch.tensor([inputs]), layout), mask)[0, -1]
            text[position] = drawn(log_p, request.seed, position)
    return text


LONG = [
    Request(prompt(0), seed=1, length=27),
    Request(prompt(27), seed=2, length=33),  # its prompt is longer than the context
    Request(tokens("013_ ____ 1301 ____ 0131 1013 _0"), seed=3, length=30),
]
both_caches = pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
every_model = pytest.mark.parametrize(
    "model", [MODEL, LLAMA, TIMED, QWEN], ids=["untimed", "Llama", "timed", "Qwen3"]
)


@pytest.mark.parametrize(
    ("n", "causal_clean", "previous_token"),
    [(1, False, True), (2, False, False), (4, False, True), (4, True, False)],
)
@every_model
@both_caches
@torch.no_grad()
def test_past_the_context_every_block_sees_a_window(model, n, causal_clean, previous_token, cache):
    """Cached: a window over the whole text, in which each block saw its own; uncached: nothing else."""
    how = {"causal_clean": causal_clean, "previous_token": previous_token}
    writer = blocks(model, block_size=n, context=8, cache=cache, **how)
    asked = AfterPrevious(model) if previous_token else model
    requests = suited(LONG, writer)
    for request, text in zip(requests, sample(writer, requests, batch_size=2), strict=True):
        expected = blocks_by_hand(asked, request, n, 8 - n, causal_clean=causal_clean, afresh=not cache)
        assert text.tokens.tolist() == expected


@pytest.mark.parametrize("model", [MODEL, TIMED], ids=["untimed", "timed"])
@both_caches
@torch.no_grad()
def test_a_block_that_is_the_whole_context_is_written_in_passes_of_the_whole_batch(model, cache):
    network = Counting(model)
    requests = [
        Request(prompt(0), seed=1, length=CONTEXT),
        Request(prompt(3), seed=2, length=CONTEXT - 2),
        Request(tokens("013_ ____ 1301"), seed=3, length=CONTEXT),
    ]
    for request, text in zip(
        requests, sample(blocks(network, block_size=CONTEXT, cache=cache), requests), strict=True
    ):
        expected = blocks_by_hand(model, request, CONTEXT, 0, causal_clean=False, afresh=False)
        assert text.tokens.tolist() == expected
        assert (text.evaluations, text.fill_passes) == (text.written, 0)
    assert network.rows == [3] * CONTEXT


@pytest.mark.parametrize("model", [MODEL, LLAMA, QWEN], ids=["GPT", "Llama", "Qwen3"])
@pytest.mark.parametrize("score_first", [False, True])
@both_caches
@torch.no_grad()
def test_past_the_context_every_token_sees_a_window(score_first, cache, model):
    writer = autoregressive(model, context=8, score_first=score_first, cache=cache)
    requests = suited(LONG, writer)
    for request, text in zip(requests, sample(writer, requests, batch_size=2), strict=True):
        expected = tokens_by_hand(model, request, 7, score_first=score_first, afresh=not cache)
        assert text.tokens.tolist() == expected
