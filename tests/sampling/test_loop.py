"""The loop: a text depends on its own request alone, costs what it says, and is told as it happens."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform
from bd3lm.models import Denoiser, Layout
from bd3lm.sampling import (
    Ancestral,
    AutoregressiveWriter,
    BlockFinished,
    BlockStarted,
    BlockWriter,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Redrawn,
    Remasking,
    Request,
    Sample,
    SlidingWriter,
    Started,
    Stopped,
    Stopping,
    TokenHidden,
    TokenRevealed,
    Unmasking,
    Writer,
    sample,
    write,
)
from tests.oracles.networks import (
    CLEAN,
    MASK,
    AfterPrevious,
    Written,
    log_probabilities,
    logits_of,
    tiny_transformer,
)

EOS = 3
CONTEXT = 12
MODEL = tiny_transformer(9, vocab_size=8)
TIMED = tiny_transformer(3, vocab_size=8, adaln=True, time_conditioning=True, conditioning_dim=32)


def blocks(model: Denoiser, **options: Any) -> BlockWriter:
    return BlockWriter(model, **{"block_size": 4, "mask_id": MASK, "context": CONTEXT} | options)


def autoregressive(model: Denoiser, **options: Any) -> AutoregressiveWriter:
    return AutoregressiveWriter(model, **{"mask_id": MASK, "context": CONTEXT, "score_first": True} | options)


def sliding(model: Denoiser, **options: Any) -> SlidingWriter:
    return SlidingWriter(model, **{"mask_id": MASK, "context": CONTEXT, "stride": 5} | options)


RULES: dict[str, Unmasking] = {
    "first-hitting": FirstHitting(),
    "two a pass": FirstHitting(2),
    "ancestral": Ancestral(3),
    "remasking": Remasking(steps=6, eta=0.5),
    "threshold": MostConfident(threshold=0.6),
    "two likeliest": MostConfident(tokens_per_pass=2),
    "entropy": EntropyBound(0.6),
}
WRITERS: dict[str, Callable[..., Writer]] = {
    **{name: partial(blocks, unmasking=rule) for name, rule in RULES.items()},
    **{
        f"{name}, causal": partial(blocks, unmasking=RULES[name], causal_clean=True)
        for name in ("first-hitting", "remasking", "threshold")
    },
    **{
        f"{name}, with the token before": partial(blocks, unmasking=RULES[name], previous_token=True)
        for name in ("first-hitting", "remasking", "threshold")
    },
    "blocks of one": partial(blocks, block_size=1),
    "uncached": partial(blocks, cache=False),
    "autoregressive": autoregressive,
    "autoregressive after a first token": partial(autoregressive, score_first=False),
    "autoregressive uncached": partial(autoregressive, cache=False),
    "sliding": sliding,
    "sliding, with the token before": partial(sliding, previous_token=True),
    "sliding and remasking": partial(sliding, unmasking=RULES["remasking"]),
    "sliding by whole contexts": partial(sliding, stride=CONTEXT),
}
every_writer = pytest.mark.parametrize("make", WRITERS.values(), ids=WRITERS)
every_rule = pytest.mark.parametrize("name", [*RULES, "autoregressive", "sliding", "sliding and remasking"])


def tokens(text: str) -> Tensor:
    """ "0_ 13" is a template of four tokens with one gap."""
    return torch.tensor([MASK if c == "_" else int(c) for c in text.replace(" ", "")], dtype=torch.long)


def prompt(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(CLEAN)[torch.randint(0, len(CLEAN), (length,), generator=generator)]


REQUESTS = [
    Request(prompt(0), seed=1, length=7),
    Request(prompt(3), seed=2, length=8),
    Request(prompt(4), seed=3, length=5),
    Request(prompt(9), seed=4, length=9),  # nothing to write
    Request(prompt(8), seed=5, length=13),
    Request(prompt(26), seed=6, length=31),  # the prompt is longer than the context
    Request(tokens("0__1 ____ 3"), seed=7, length=10),
    Request(tokens("____ 1301 1_01 0131 1013 _0"), seed=8, length=23),
    Request(prompt(10), seed=9, length=2 * CONTEXT + 1),
    Request(tokens("0__1 1301 1_01 0131 1013 301"), seed=10, length=23),  # what follows the gaps is given
]


def suited(requests: Sequence[Request], writer: Writer) -> list[Request]:
    """With a first token, where the writer needs one."""
    if getattr(writer, "score_first", True):
        return list(requests)
    return [Request(torch.cat((torch.tensor([0]), r.given[1:])), r.seed, max(r.length, 2)) for r in requests]


def facts(sample: Sample) -> dict[str, Any]:
    """All that a sample says, but for its place among the requests."""
    return {k: v for k, v in vars(sample).items() if k != "index"} | {"tokens": sample.tokens.tolist()}


class Counting:
    """A network that notes how many rows each of its passes had, and what noise it was told."""

    def __init__(self, model: Denoiser) -> None:
        self.model = model
        self.rows: list[int] = []
        self.told: list[Tensor | None] = []

    def __call__(self, tokens: Tensor, *, noise: Tensor | None = None, **options: Any) -> Tensor:
        assert not torch.is_grad_enabled()
        self.rows.append(len(tokens))
        self.told.append(noise)
        return self.model(tokens, noise=noise, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


# --- a batch is its rows, each on its own ---

EARLY = Stopping(eos_id=EOS, entropy_floor=1.0, entropy_window=3, redraws=2)


def written_alone(
    writer: Writer, *, stopping: Stopping | None = None, batch_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """The facts of every text written alone; they must be those in batches of any size, in any order."""
    requests = suited(REQUESTS, writer)
    alone = [facts(*sample(writer, [request], stopping=stopping)) for request in requests]
    for batch_size in batch_sizes:
        turn = -1 if batch_size == 3 else 1  # once in the opposite order
        together = sample(writer, requests[::turn], stopping=stopping, batch_size=batch_size)
        assert [s.index for s in together] == list(range(len(requests)))
        assert [facts(s) for s in together] == alone[::turn]
    return alone


@every_writer
def test_a_text_is_the_same_alone_and_in_any_batch(make):
    alone = written_alone(make(MODEL), batch_sizes=(1, 3, len(REQUESTS)))
    assert {text["stopped_by"] for text in alone} == {"length"}


@every_rule
def test_texts_that_end_early_or_begin_again_do_not_change_the_others(name):
    alone = written_alone(WRITERS[name](MODEL), stopping=EARLY, batch_sizes=(2, 3))
    assert {text["stopped_by"] for text in alone} > {"length"}
    assert any(text["redraws"] for text in alone)


@pytest.mark.parametrize("name", [*RULES, "first-hitting, causal", "uncached", "sliding"])
def test_a_network_that_is_told_the_time_writes_each_text_as_if_alone(name):
    written_alone(WRITERS[name](TIMED), batch_sizes=[3])


@every_writer
def test_what_is_given_is_kept_and_the_rest_is_written(make):
    writer = make(MODEL)
    requests = suited(REQUESTS, writer)
    for request, text in zip(requests, sample(writer, requests), strict=True):
        known = request.given != MASK
        assert torch.equal(text.tokens[: len(known)][known], request.given[known])
        assert not (text.tokens == MASK).any()
        assert text.tokens.dtype == torch.long
        assert len(text.tokens) == request.length
        assert (text.given, text.written) == (known.sum(), request.length - known.sum())


def test_two_seeds_give_two_texts():
    requests = [Request(prompt(1), seed, 20) for seed in range(6)]
    assert len({tuple(s.tokens.tolist()) for s in sample(blocks(MODEL), requests)}) == 6


def test_the_place_of_a_request_is_not_its_seed():
    same = sample(blocks(MODEL), [Request(prompt(1), 5, 20)] * 3, batch_size=2)
    assert len({tuple(s.tokens.tolist()) for s in same}) == 1


# --- seats ---


def test_a_free_seat_is_taken_at_once_and_an_unwanted_one_taken_away():
    """Blocks of two, two passes each, two seats: request 2 enters when 0 ends; at last 1 is alone."""
    network = Counting(MODEL)
    requests = [Request(prompt(0), seed, length) for seed, length in enumerate((2, 8, 4))]
    sample(blocks(network, block_size=2), requests, batch_size=2)
    assert network.rows == [2] * 6 + [1] * 2


def test_who_enters_a_running_batch_reads_its_prompt_alone():
    network = Counting(MODEL)
    requests = [Request(prompt(n), 0, length) for n, length in ((0, 2), (0, 8), (6, 8))]
    sample(blocks(network, block_size=2), requests, batch_size=2)
    assert network.rows == [2] * 2 + [1] + [2] * 2 + [1] * 4  # [1]: the first four of six given tokens


def test_a_row_that_ends_early_frees_its_seat():
    requests = [Request(prompt(1), seed, 1 + 12) for seed in range(6)]
    writer = autoregressive(Counting(MODEL), score_first=False)
    ends = [s.evaluations for s in sample(writer, requests, stopping=Stopping(eos_id=EOS), batch_size=1)]
    assert len(set(ends)) > 2

    seats, expected, waiting = [0, 0], [], list(ends)  # how long each seat is still taken
    while any(seats) or waiting:
        seats = [left or (waiting.pop(0) if waiting else 0) for left in seats]
        expected.append(sum(left > 0 for left in seats))
        seats = [max(left - 1, 0) for left in seats]
    network = Counting(MODEL)
    sample(autoregressive(network, score_first=False), requests, stopping=Stopping(eos_id=EOS), batch_size=2)
    assert network.rows == expected


def test_a_batch_larger_than_the_requests_has_no_empty_rows():
    network = Counting(MODEL)
    sample(blocks(network), [Request(prompt(0), 0, 4), Request(prompt(9), 0, 9)], batch_size=100)
    assert network.rows == [1] * 4  # the second one has nothing to write


# --- with and without the cache ---

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


@every_cached_writer
def test_inside_the_context_the_cache_changes_nothing(make):
    plain = make(MODEL, cache=False)
    requests = suited([Request(prompt(n, seed=n), n, CONTEXT) for n in (0, 1, 2, 3, 5, 8, 11)], plain)
    requests += suited([Request(tokens("0_1_ 3013 _"), 1, CONTEXT)], plain)
    without, cached = (sample(writer, requests) for writer in (plain, make(MODEL)))
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


def drawn(log_p: Tensor, seed: int, position: int, repeat: int = 0) -> int:
    """Gumbel-max with the noise of this position."""
    place = torch.tensor(seed), torch.tensor(position)
    u = counter_uniform(*place, Purpose.TOKEN, len(log_p), repeat=repeat)
    return int((log_p - (-u.log()).log()).argmax())


def blocks_by_hand(
    model: Any, request: Request, n: int, window: int, *, causal_clean: bool, afresh: bool
) -> list[int]:
    """First-hitting. A pass is over the whole text, in which every block sees `window` tokens before it;
    `afresh`: it is over just the tokens that its block sees.
    """
    text = torch.full((-(-request.length // n) * n,), MASK)
    text[: len(request.given)] = request.given
    order = counter_uniform(torch.tensor(request.seed), torch.arange(len(text)), Purpose.ORDER, 1)[:, 0]
    for start in range(0, len(text), n):
        first, end = max(start - window, 0) if afresh else 0, start + n

        def sees(query: int, key: int, first: int = first, start: int = start) -> bool:
            query, key = query + first, key + first
            group = query // n * n
            finished = query < start and causal_clean
            return group - window <= key <= (query if finished else group + n - 1)

        hidden = [p for p in range(start, end) if text[p] == MASK and p < request.length]
        for position in sorted(hidden, key=lambda p: -order[p]):
            noise = torch.zeros(1, end - first)
            noise[:, start - first :] = -(1 - order[position]).clamp(1e-3).log()
            logits = logits_of(model, text[None, first:end], Written(end - first, sees), noise=noise)
            text[position] = drawn(log_probabilities(logits)[0, position - first], request.seed, position)
    return text[: request.length].tolist()


def tokens_by_hand(
    model: Any, request: Request, window: int, *, score_first: bool, afresh: bool
) -> list[int]:
    """Each token from the one before it, which saw `window` inputs before itself, each of which did too;
    `afresh`: there are no others.
    """
    before = [MASK] if score_first else []
    text = request.given.tolist() + [MASK] * (request.length - len(request.given))
    for position, token in enumerate(text):
        if token == MASK:
            inputs = (before + text[:position])[-(window + 1) if afresh else 0 :]
            layout = Written(len(inputs), lambda query, key: query - window <= key <= query)
            log_p = log_probabilities(logits_of(model, torch.tensor([inputs]), layout))[0, -1]
            text[position] = drawn(log_p, request.seed, position)
    return text


LONG = [
    Request(prompt(0), seed=1, length=27),
    Request(prompt(27), seed=2, length=33),  # its prompt is longer than the context
    Request(tokens("013_ ____ 1301 ____ 0131 1013 _0"), seed=3, length=30),
]
both_caches = pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])


@pytest.mark.parametrize(
    ("n", "causal_clean", "previous_token"),
    [(1, False, True), (2, False, False), (4, False, True), (4, True, False)],
)
@pytest.mark.parametrize("model", [MODEL, TIMED], ids=["untimed", "timed"])
@both_caches
@torch.no_grad()
def test_past_the_context_every_block_sees_a_window(model, n, causal_clean, previous_token, cache):
    """Cached: a window over the whole text, in which each block saw its own; uncached: nothing else."""
    how = {"causal_clean": causal_clean, "previous_token": previous_token}
    writer = blocks(model, block_size=n, context=8, cache=cache, **how)
    asked = AfterPrevious(model) if previous_token else model
    for request, text in zip(LONG, sample(writer, LONG, batch_size=2), strict=True):
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


@pytest.mark.parametrize("score_first", [False, True])
@both_caches
@torch.no_grad()
def test_past_the_context_every_token_sees_a_window(score_first, cache):
    writer = autoregressive(MODEL, context=8, score_first=score_first, cache=cache)
    requests = suited(LONG, writer)
    for request, text in zip(requests, sample(writer, requests, batch_size=2), strict=True):
        expected = tokens_by_hand(MODEL, request, 7, score_first=score_first, afresh=not cache)
        assert text.tokens.tolist() == expected


# --- noise ---


class NoIdea:
    """A network to which all tokens are alike."""

    uses_noise = False
    device = torch.device("cpu")

    def __call__(self, tokens: Tensor, *, layout: Layout, **_: Any) -> Tensor:
        start, stop = layout.read
        return torch.zeros(len(tokens), stop - start, 1000, dtype=torch.float64)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


FLAT = log_probabilities(torch.zeros(1000, dtype=torch.float64))


def test_a_token_that_was_hidden_again_is_drawn_with_fresh_noise():
    """Blocks of one, so that every reveal is a pass of its own: the k-th is drawn with the k-th noise."""
    rule = Remasking(steps=30, eta=1.0)
    writer = blocks(NoIdea(), block_size=1, unmasking=rule, cache=False)
    events = list(write(writer, [Request(prompt(0), seed, 4) for seed in range(5)], watch=True))
    turns = Counter()
    for event in events:
        if isinstance(event, TokenRevealed):
            turn = turns[event.index, event.position]
            assert event.token == drawn(FLAT, event.index, event.position, repeat=turn)
            turns[event.index, event.position] += 1
    assert set(turns) == {(index, position) for index in range(5) for position in range(4)}
    assert max(turns.values()) > 3


@pytest.mark.parametrize("rule", [MostConfident(), EntropyBound(0.0)], ids=str)
def test_a_token_that_was_not_revealed_is_drawn_again_with_fresh_noise(rule):
    """All tokens are equally likely, so these rules go from left to right, one place a pass."""
    (text,) = sample(blocks(NoIdea(), unmasking=rule, cache=False), [Request(prompt(0), 5, 10)])
    assert text.tokens.tolist() == [drawn(FLAT, 5, place, repeat=place % 4) for place in range(10)]


def noise_at(rate: float) -> float:
    """−log α, as if a thousandth of the text were always clean."""
    return -math.log(max(1 - rate, 1e-3))


def hitting_rates(seed: int, *positions: int) -> list[float]:
    """In the order in which they are hit."""
    rates = counter_uniform(torch.tensor(seed), torch.tensor(positions), Purpose.ORDER, 1)
    return sorted(rates[:, 0].tolist(), reverse=True)


def assert_told(network: Counting, expected: list[list[float]]) -> None:
    assert [len(noise[0]) for noise in network.told] == [len(noise) for noise in expected]
    for noise, wanted in zip(network.told, expected, strict=True):
        assert noise[0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_network_that_is_told_the_time_is_told_that_finished_text_has_no_noise():
    """Two blocks of the prompt, then the third with a gap, two given blocks, the last one with a gap."""
    network = Counting(TIMED)
    given = torch.cat((prompt(12), tokens("_1_0 1310 0131 _")))
    sample(blocks(network), [Request(given, 3, 25)])
    first, second = (noise_at(rate) for rate in hitting_rates(3, 12, 14))
    (last,) = (noise_at(rate) for rate in hitting_rates(3, 24))
    clean = [0.0] * 4
    assert_told(network, [clean * 2, clean + [first] * 4, [second] * 4, clean, clean, clean + [last] * 4])


def test_a_network_that_is_told_the_time_is_told_as_much_without_the_cache():
    network = Counting(TIMED)
    sample(blocks(network, cache=False), [Request(torch.cat((prompt(4), tokens("_1_0"))), 3, 8)])
    assert_told(network, [[0.0] * 4 + [noise_at(rate)] * 4 for rate in hitting_rates(3, 4, 6)])


def test_rules_without_a_time_tell_what_part_of_the_block_is_hidden():
    network = Counting(TIMED)
    writer = blocks(network, unmasking=MostConfident(), cache=False)
    sample(writer, [Request(tokens("_1"), 3, 4)])
    assert_told(network, [[noise_at(rate)] * 4 for rate in (0.75, 0.5, 0.25)])
    network.told.clear()
    sample(writer, [Request(prompt(0), 3, 4)])
    assert_told(network, [[noise_at(rate)] * 4 for rate in (1.0, 0.75, 0.5, 0.25)])


def test_rules_without_a_time_count_the_masks_past_the_end_which_the_network_sees():
    network = Counting(TIMED)
    writer = blocks(network, unmasking=MostConfident(), cache=False)
    sample(writer, [Request(prompt(0), 3, 2), Request(tokens("_1"), 3, 3)], batch_size=1)
    assert_told(network, [[noise_at(rate)] * 4 for rate in (1.0, 0.75, 0.75, 0.5)])
    network.told.clear()
    sample(sliding(network, unmasking=MostConfident()), [Request(prompt(4), 3, 6)])
    told = [noise.item() for noise in network.told]
    assert told == pytest.approx([noise_at(rate) for rate in (8 / 12, 7 / 12)], rel=1e-6)


def test_a_whole_context_is_told_one_time():
    network = Counting(TIMED)
    sample(sliding(network), [Request(prompt(10), 3, CONTEXT)])
    told = [noise.item() for noise in network.told]
    assert told == pytest.approx([noise_at(rate) for rate in hitting_rates(3, 10, 11)], rel=1e-6)


# --- what a text costs ---


@every_writer
def test_every_pass_is_counted_once_and_there_are_no_more_than_tokens(make):
    network = Counting(MODEL)
    writer = make(network)
    rule = getattr(writer, "unmasking", FirstHitting())
    for request in suited(REQUESTS, writer):
        network.rows.clear()
        (text,) = sample(writer, [request])
        assert len(network.rows) == text.evaluations + text.fill_passes
        if rule == FirstHitting():
            assert text.evaluations == text.written
        elif not isinstance(rule, Remasking):
            assert text.evaluations <= text.written


@pytest.mark.parametrize("context", [CONTEXT, 160])
@pytest.mark.parametrize(
    "name", ["first-hitting", "remasking, causal", "uncached", "blocks of one", "autoregressive", "sliding"]
)
def test_every_pass_over_a_long_prompt_is_counted_once(name, context):
    network = Counting(MODEL)
    gaps = torch.cat((tokens("0___"), prompt(140), tokens("_"), prompt(9)))
    for given, more in ((prompt(128), 2), (prompt(129), 2), (prompt(300), 2), (gaps, 2), (gaps, 0)):
        network.rows.clear()
        (text,) = sample(WRITERS[name](network, context=context), [Request(given, 1, len(given) + more)])
        assert len(network.rows) == text.evaluations + text.fill_passes


@every_rule
def test_every_pass_of_a_text_that_was_thrown_away_is_counted_too(name):
    """With a prompt, which is read again each time."""
    network = Counting(MODEL)
    writer, redraws = WRITERS[name](network), 0
    for seed in range(4):
        network.rows.clear()
        (text,) = sample(writer, [Request(prompt(9), seed, 24)], stopping=EARLY)
        assert len(network.rows) == text.evaluations + text.fill_passes + text.redrawn_passes
        assert (text.redrawn_passes > text.redraws) == (text.redraws > 0)
        redraws += text.redraws
    assert redraws


@pytest.mark.parametrize(
    ("given", "passes"), [(0, 0), (4, 0), (7, 0), (8, 1), (131, 1), (132, 1), (136, 2), (300, 3)]
)
def test_a_prompt_is_read_in_passes_of_128_tokens(given, passes):
    """All its blocks but the last, which the first pass over the next one reads."""
    (text,) = sample(blocks(MODEL, context=160), [Request(prompt(given), 0, given + 1)])
    assert (text.fill_passes, text.evaluations) == (passes, 1)
    (text,) = sample(autoregressive(MODEL, context=160), [Request(prompt(given), 0, given + 1)])
    assert (text.fill_passes, text.evaluations) == (-(-given // 128), 1)


def test_given_text_after_a_gap_is_read_too():
    """At each of three given blocks a pass reads the one before; the last is read with the gap after it."""
    (text,) = sample(blocks(MODEL), [Request(tokens("0__1 0131 1013 3013 _"), 0, 17)])
    assert (text.evaluations, text.fill_passes) == (3, 3)
    (text,) = sample(blocks(MODEL, cache=False), [Request(tokens("0__1 0131 1013 3013 _"), 0, 17)])
    assert (text.evaluations, text.fill_passes) == (3, 0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("given", range(12))
def test_a_partial_block_is_completed_and_costs_a_pass_for_each_missing_token(block_size, given):
    start = prompt(given)
    (text,) = sample(blocks(MODEL, block_size=block_size), [Request(start, 0, 12)])
    assert torch.equal(text.tokens[:given], start)
    assert text.evaluations == text.written == 12 - given


@pytest.mark.parametrize("given", [0, 3, 4, 9])
def test_two_tokens_a_pass_cost_half_the_passes_of_every_block(given):
    (text,) = sample(blocks(MODEL, unmasking=FirstHitting(2)), [Request(prompt(given), 0, 15)])
    hidden = [len(range(max(start, given), min(start + 4, 15))) for start in range(0, 15, 4)]
    assert text.evaluations == sum(-(-h // 2) for h in hidden)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 20, 1000, 100_000])
@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
def test_ancestral_steps_cost_no_more_passes_than_tokens_or_steps(steps, block_size):
    requests = [Request(prompt(seed % 4), seed, 12) for seed in range(8)]
    writer = blocks(MODEL, block_size=block_size, unmasking=Ancestral(steps))
    for text in sample(writer, requests):
        pieces = 12 // block_size - text.given // block_size
        assert pieces <= text.evaluations <= min(text.written, steps * pieces)
        assert steps < 100_000 or text.evaluations == text.written


def test_remasking_costs_at_most_its_steps_in_every_block():
    requests = [Request(prompt(0), seed, 12) for seed in range(8)]
    texts = sample(blocks(MODEL, unmasking=Remasking(steps=9, eta=1.0)), requests)
    assert all(text.evaluations <= 3 * 9 for text in texts)
    assert any(text.evaluations > 12 for text in texts)


# --- what happens, as it happens ---


def replay(request: Request, first: int, events: Sequence[Any]) -> None:
    """Apply what happened to one text; every step must make sense, and lead to what was reported."""
    given = request.given.tolist() + [MASK] * (request.length - len(request.given))
    text, told, block = list(given), request, (0, 0)
    for event in events:
        match event:
            case Started(request=told):
                text, block = list(given), (first, first)
            case BlockStarted(start=start, stop=stop):
                assert block[1] == start < stop <= request.length
                block = (start, stop)
            case TokenRevealed(position=p, token=token):
                assert p in range(*block)
                assert text[p] == MASK != token
                text[p] = token
            case TokenHidden(position=p):
                assert p in range(*block)
                assert text[p] != MASK == given[p]
                text[p] = MASK
            case BlockFinished(start=start, stop=stop):
                # What is all given after the last gap is finished with it.
                assert (start, stop) == (block[0], block[1] if MASK in given[block[1] :] else request.length)
                assert MASK not in text[:stop]
                block = (start, stop)
            case Stopped(sample=done):
                assert event is events[-1]
                assert text[: len(done.tokens)] == done.tokens.tolist()
                assert (told.seed, told.length) == (done.seed, request.length)
                assert len(done.tokens) <= block[1] or MASK not in given


@every_rule
@pytest.mark.parametrize("stopping", [Stopping(), EARLY], ids=["in full", "early"])
def test_the_events_replayed_give_the_text(name, stopping):
    writer = WRITERS[name](MODEL)
    requests = suited(REQUESTS, writer)
    events = list(write(writer, requests, stopping=stopping, batch_size=3, watch=True))
    done = sorted((e.sample for e in events if isinstance(e, Stopped)), key=lambda s: s.index)
    assert [facts(s) for s in done] == [facts(s) for s in sample(writer, requests, stopping=stopping)]
    for index, (request, text) in enumerate(zip(requests, done, strict=True)):
        own = [event for event in events if event.index == index]
        gaps = [*(request.given == MASK).tolist(), True]
        replay(request, writer.first_start(gaps.index(True)), own)
        counts = Counter(type(event) for event in own)
        assert counts[Redrawn] == text.redraws
        assert counts[BlockStarted] == counts[BlockFinished]
        assert counts[Started] == text.redraws + 1
        if stopping == Stopping():
            assert counts[TokenRevealed] - counts[TokenHidden] == text.written


@pytest.mark.parametrize("name", ["remasking", "remasking, causal", "sliding and remasking"])
def test_remasking_hides_tokens_and_other_rules_do_not(name):
    events = list(write(WRITERS[name](MODEL), REQUESTS, watch=True))
    assert any(isinstance(event, TokenHidden) for event in events)
    assert not any(isinstance(e, TokenHidden) for e in write(blocks(MODEL), REQUESTS, watch=True))


def test_blocks_are_finished_in_order_from_the_first_that_is_written():
    requests = [
        Request(prompt(5), 0, 15),
        Request(prompt(0), 0, 6),
        Request(tokens("0131 10_1 3013 _301 1301 1"), 0, 21),
    ]
    started: list[list[tuple[int, int]]] = [[], [], []]
    finished: list[list[tuple[int, int]]] = [[], [], []]
    for event in write(blocks(MODEL), requests, watch=True):
        if isinstance(event, BlockStarted):
            started[event.index].append((event.start, event.stop))
        if isinstance(event, BlockFinished):
            finished[event.index].append((event.start, event.stop))
    assert started == [[(4, 8), (8, 12), (12, 15)], [(0, 4), (4, 6)], [(4, 8), (8, 12), (12, 16)]]
    assert finished == [[(4, 8), (8, 12), (12, 15)], [(0, 4), (4, 6)], [(4, 8), (8, 12), (12, 21)]]


def test_first_hitting_is_told_token_by_token_in_the_order_of_its_passes():
    order = counter_uniform(torch.tensor(3), torch.arange(8), Purpose.ORDER, 1)[:, 0]
    events = write(blocks(MODEL), [Request(prompt(0), 3, 8)], watch=True)
    told = [e.position for e in events if isinstance(e, TokenRevealed)]
    assert told == [
        *sorted(range(4), key=lambda p: -order[p]),
        *sorted(range(4, 8), key=lambda p: -order[p]),
    ]


def test_unwatched_only_ends_and_redraws_are_told():
    events = list(write(blocks(MODEL), REQUESTS, stopping=EARLY, batch_size=2))
    assert {type(event) for event in events} == {Redrawn, Stopped}
    assert sorted(e.index for e in events if isinstance(e, Stopped)) == list(range(len(REQUESTS)))


@pytest.mark.parametrize("name", ["first-hitting", "remasking", "autoregressive", "sliding"])
def test_an_abandoned_iterator_leaves_nothing_broken(name):
    writer = WRITERS[name](MODEL)
    requests = suited(REQUESTS, writer)
    before = [facts(s) for s in sample(writer, requests)]
    abandoned = write(writer, requests, batch_size=3, watch=True)
    for _ in range(20):
        next(abandoned)
        assert torch.is_grad_enabled()  # no_grad does not leak out of a suspended iterator
    assert [facts(s) for s in sample(writer, requests)] == before
    abandoned.close()
    assert [facts(s) for s in sample(writer, requests)] == before


def test_two_iterators_of_one_writer_do_not_touch_each_other():
    writer = blocks(MODEL)
    one, other = (write(writer, REQUESTS, batch_size=2, watch=True) for _ in range(2))
    pairs = list(zip(one, other, strict=True))
    assert len(pairs) > 100
    assert all(repr(a) == repr(b) for a, b in pairs)


def test_samples_share_nothing_with_the_requests_and_keep_no_gradients():
    given = prompt(6)
    full, longer = sample(blocks(MODEL), [Request(given, 0, 6), Request(given, 0, 8)])
    full.tokens.fill_(0)
    longer.tokens.fill_(0)
    assert torch.equal(given, prompt(6))


# --- a text that is already there ---


@every_writer
def test_nothing_to_write_costs_nothing(make):
    network = Counting(MODEL)
    (text,) = sample(make(network), [Request(prompt(9), 5, 9)])
    assert network.rows == []
    assert facts(text) == {
        "tokens": prompt(9).tolist(),
        "given": 9,
        "prompt": 9,
        "written_from": 9,
        "seed": 5,
        "evaluations": 0,
        "fill_passes": 0,
        "stopped_by": "length",
        "stop_string": None,
        "redraws": 0,
        "redrawn_passes": 0,
    }


@every_writer
def test_what_is_given_after_the_last_gap_costs_nothing(make):
    """It is not even read: nothing is left to be written after it."""
    network = Counting(MODEL)
    writer = make(network)
    texts, calls = [], []
    for tail in ("", "0131 1013 3013 0131 1013 3013 0"):
        given = tokens("0__1" + tail)
        (text,) = sample(writer, [Request(given, 7, len(given))])
        texts.append(text)
        calls.append(len(network.rows))
        network.rows.clear()
        assert text.tokens[3:].tolist() == given[3:].tolist()
        assert (text.given, text.written, text.stopped_by) == (len(given) - 2, 2, "length")
    short, long = texts
    assert calls[0] == calls[1] == long.evaluations + long.fill_passes
    assert (short.evaluations, short.fill_passes) == (long.evaluations, long.fill_passes)
    if not isinstance(writer, SlidingWriter):  # to which the tail is context
        assert short.tokens.tolist() == long.tokens[:4].tolist()


def test_a_text_that_goes_on_past_its_template_reads_all_of_it():
    """One more token to write, and the four blocks before it are passes again."""
    (text,) = sample(blocks(MODEL), [Request(tokens("0__1 0131 1013 3013"), 7, 16)])
    assert (text.evaluations, text.fill_passes) == (2, 0)
    (text,) = sample(blocks(MODEL), [Request(tokens("0__1 0131 1013 3013"), 7, 17)])
    assert (text.evaluations, text.fill_passes) == (3, 3)


def test_a_seat_is_free_once_the_last_gap_is_filled():
    """Blocks of two and one seat: one pass over the gap, then the next text, whose block has two."""
    network = Counting(MODEL)
    requests = [Request(tokens("0_ 1301 3013"), 0, 10), Request(prompt(0), 1, 2)]
    events = write(blocks(network, block_size=2), requests, batch_size=1)
    assert [(event.index, len(network.rows)) for event in events] == [(0, 1), (1, 3)]


def test_a_template_without_gaps_at_its_end_is_still_written_inside():
    (text,) = sample(blocks(MODEL), [Request(tokens("01_3 0"), 5, 5)])
    assert (text.evaluations, text.given, text.written) == (1, 4, 1)


# --- what is refused ---

ONE = [Request(prompt(1), 0, 4)]
IN_TRAINING = tiny_transformer(dropout=0.1).train()


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: sample(blocks(MODEL), []), "requests must hold at least one text to write, got none"),
        (lambda: sample(blocks(MODEL), ONE, batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: sample(blocks(IN_TRAINING), ONE), "model must be in evaluation mode"),
        (lambda: sample(sliding(IN_TRAINING), ONE), "model must be in evaluation mode"),
        (lambda: sample(autoregressive(IN_TRAINING), ONE), "model must be in evaluation mode"),
        (
            lambda: sample(autoregressive(MODEL, score_first=False), [Request(prompt(0), 0, 4)]),
            "request 0: given must begin with a token, which this model was not trained to predict, got none",
        ),
        (
            lambda: sample(autoregressive(MODEL, score_first=False), [*ONE, Request(tokens("_1"), 0, 4)]),
            r"request 1: given must begin with a token, which this model .* got \[2\]",
        ),
        (lambda: autoregressive(TIMED), "model must not be conditioned on the noise level"),
        (lambda: autoregressive(MODEL, context=0), "context must be at least 1, got 0"),
        (lambda: blocks(MODEL, context=0), "block_size must be a positive divisor of context 0, got 4"),
        (lambda: blocks(MODEL, context=-4), "block_size must be a positive divisor of context -4, got 4"),
        (lambda: sliding(MODEL, context=0), r"stride must lie in 1\.\.0, the context, got 5"),
        (
            lambda: sample(blocks(MODEL, block_size=CONTEXT), [*ONE, Request(prompt(1), 0, CONTEXT + 1)]),
            "request 1: length must be at most the block size 12, .* got 13; SlidingWriter goes further",
        ),
        (lambda: blocks(MODEL, block_size=5), "block_size must be a positive divisor of context 12, got 5"),
        (lambda: blocks(MODEL, block_size=0), "block_size must be a positive divisor of context 12, got 0"),
        (lambda: blocks(MODEL, block_size=24), "block_size must be .* got 24"),
        (lambda: sliding(MODEL, stride=0), r"stride must lie in 1\.\.12, the context, got 0"),
        (lambda: sliding(MODEL, stride=13), r"stride must lie in 1\.\.12, the context, got 13"),
    ],
)
def test_bad_input_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_the_least_and_the_largest_seed_are_seeds():
    texts = sample(blocks(MODEL), [Request(prompt(1), seed, 20) for seed in (0, 2**63 - 1)])
    assert [text.seed for text in texts] == [0, 2**63 - 1]
    assert texts[0].tokens.tolist() != texts[1].tokens.tolist()


def test_bad_input_is_refused_before_the_first_event_is_asked_for():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got -1"):
        write(blocks(MODEL), ONE, batch_size=-1)


def test_a_network_without_dropout_may_be_in_training_mode():
    trained = tiny_transformer(9, vocab_size=8).train()
    assert [facts(s) for s in sample(blocks(trained), ONE)] == [facts(s) for s in sample(blocks(MODEL), ONE)]
