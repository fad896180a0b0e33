"""Blocks written several tokens a pass: the texts of one token a pass, told alike, in as few passes as drafts
are right."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform
from bd3lm.methods import BlockDiffusionMethod, Frame, Settings
from bd3lm.models import Denoiser
from bd3lm.sampling import (
    Ancestral,
    AutoregressiveWriter,
    BlockStarted,
    BlockWriter,
    Drafted,
    Engine,
    EntropyBound,
    Event,
    Extended,
    FirstHitting,
    MostConfident,
    Planned,
    Remasking,
    Request,
    Sample,
    Sharpening,
    Speculation,
    SpeculativeBlockWriter,
    Started,
    Stopped,
    Stopping,
    TokenRevealed,
    UnmaskingRule,
    Writer,
    sample,
    write,
)
from bd3lm.sampling.rows import TALLY, Reveal, Rows
from bd3lm.sampling.unmasking import Pass
from tests.oracles.networks import (
    FAMILIES,
    MASK,
    blocks_of,
    clean_of,
    mask_of,
    network_of,
    tiny_transformer,
)
from tests.oracles.sampling import Tokens, asking, chi_square, in_blocks, leaning, sharpened
from tests.sampling.loop_cases import (
    CONTEXT,
    EARLY,
    EOS,
    LLAMA,
    MODEL,
    REQUESTS,
    TIMED,
    Counting,
    autoregressive,
    blocks,
    drawn,
    how_read,
    one_by_one,
    prompt,
    suited,
    tokens,
)

FITS = 1e-3
M = MASK


class Bursting(SpeculativeBlockWriter):
    """Looks at its device as seldom as at a GPU."""

    def burst(self, device: torch.device) -> int:
        return super().burst(torch.device("cuda"))


def speculative(
    model: Denoiser,
    block_size: int = 4,
    speculation: Any = 3,
    kind: type[SpeculativeBlockWriter] = SpeculativeBlockWriter,
    **options: Any,
) -> SpeculativeBlockWriter:
    """As `blocks`."""
    reading = how_read(block_size, options, mask_of(model))
    how: dict[str, Any] = {**reading, "context": CONTEXT, **options}
    return kind(model, speculation=Speculation.of(speculation), **how)


def text_of(sample: Sample) -> tuple[Any, ...]:
    """What a sample says of its text, and not of what it cost."""
    return (
        sample.tokens.tolist(),
        sample.given,
        sample.prompt,
        sample.seed,
        sample.stopped_by,
        sample.stop_string,
        sample.redraws,
    )


# The same texts ------------------------------------------------------------------------------------------


class InTurn(Planned):
    """A rule of one's own: even places from the right, then odd ones from the left."""

    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        n = masked.shape[1]
        for place in [*range(n - 1 - (n - 1) % 2, -1, -2), *range(1, n, 2)]:
            if masked[:, place].any():
                yield Pass(
                    places=torch.full((len(masked), 1), place),
                    active=masked[:, [place]],
                    mask_rate=torch.ones(len(masked), dtype=torch.float64),
                )


@dataclass(frozen=True)
class FindRun:
    """Ends a text behind the last two equal tokens that are new: where depends on how much is looked at."""

    def __call__(self, text: Tensor, written_from: int, new_from: int) -> tuple[int, str] | None:
        found = [at for at in range(max(new_from, 1), len(text)) if text[at] == text[at - 1]]
        return (found[-1] + 1, "run") if found else None


SHARPENINGS = [
    Sharpening(),
    Sharpening(temperature=0.6),
    Sharpening(top_p=0.8),
    Sharpening(temperature=1.4, top_k=2),
    Sharpening(top_p=0.7, top_p_rule="exclusive"),
    Sharpening(temperature=0.0),
]
STOPPINGS = [
    Stopping(),
    Stopping(eos_id=0),
    Stopping(find_end=FindRun()),
    Stopping(entropy_floor=0.6, entropy_window=3, redraws=2),
    Stopping(eos_id=1, entropy_floor=0.9, entropy_window=4, find_end=FindRun()),
]


def random_request(draw: random.Random, model: Any, longest: int) -> Request:
    """Nothing given, a prompt, or a template; up to twice a context and more."""
    length = draw.randint(1, longest)
    number = draw.choice([0, draw.randint(0, length), length])
    gaps = draw.choice([0.0, 0.3, 0.8])
    given = [mask_of(model) if draw.random() < gaps else draw.choice(clean_of(model)) for _ in range(number)]
    return Request(
        torch.tensor(given, dtype=torch.long),
        draw.randrange(10**9),
        length,
        sharpening=draw.choice(SHARPENINGS),
        stopping=draw.choice(STOPPINGS),
    )


def check_case(number: int) -> None:
    draw = random.Random(number)
    family = draw.choice(list(FAMILIES))
    model = network_of(family, draw.randrange(20))
    block_size = draw.choice([2, 3, 4, 5, 8])
    rule = draw.choice([FirstHitting(), FirstHitting(lean=0.7), FirstHitting(lean=2.0), InTurn()])
    how: dict[str, Any] = {
        "reading": blocks_of(
            block_size,
            mask_id=mask_of(model),
            causal_clean=draw.random() < 0.5,
            previous_token=draw.random() < 0.5,
        ),
        "context": block_size * draw.choice([2, 3, 4]),
        "unmasking": rule,
    }
    speculation = Speculation(drafts=draw.choice([1, 2, 3, 20, None]))
    network = Counting(model)
    kind = draw.choice([SpeculativeBlockWriter, SpeculativeBlockWriter, Bursting])
    writer = kind(network, speculation=speculation, **how)
    longest = 2 * how["context"] + 3
    requests = [random_request(draw, model, longest) for _ in range(draw.choice([1, 1, 3, 5]))]
    side_by_side = draw.choice([1, 2, 5])
    plain = sample(BlockWriter(model, **how), requests, batch_size=side_by_side)
    network.rows.clear()
    found = sample(writer, requests, batch_size=side_by_side)
    assert [text_of(each) for each in found] == [text_of(each) for each in plain]
    if side_by_side == 1 and kind is not Bursting:
        spent = sum(each.evaluations + each.fill_passes + each.redrawn_passes for each in found)
        assert len(network.rows) == spent
    for each in found:
        assert len(each.drafted) in (0, min(speculation.drafts or 7, block_size - 1))
        assert all(right <= asked for right, asked in zip(each.accepted, each.drafted, strict=True))


@pytest.mark.parametrize("some", range(8))
def test_texts_are_those_without_speculation(some: int) -> None:
    """Random networks, blocks, orders, requests, settings, ends and batches, in float64."""
    for number in range(12 * some, 12 * (some + 1)):
        check_case(number)


@pytest.mark.slow
@pytest.mark.parametrize("some", range(20))
def test_texts_are_those_without_speculation_in_many_cases(some: int) -> None:
    for number in range(1_000 + 100 * some, 1_000 + 100 * (some + 1)):
        check_case(number)


@pytest.mark.parametrize("options", [{}, {"causal_clean": True}, {"previous_token": True}], ids=str)
@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["GPT", "Llama"])
def test_a_text_is_the_same_alone_and_beside_others(model: Any, options: dict[str, bool]) -> None:
    writer, plain = speculative(model, **options), blocks(model, **options)
    requests = suited(REQUESTS, writer)
    together = sample(writer, requests, batch_size=3)
    assert [text_of(each) for each in together] == [text_of(each) for each in sample(plain, requests)]
    for request, each in zip(requests, together, strict=True):
        (alone,) = sample(writer, [request])
        assert replace(alone, index=each.index) == each


@pytest.mark.parametrize("kind", [SpeculativeBlockWriter, Bursting])
def test_requests_that_come_and_go_leave_the_others_as_they_are(kind: type[SpeculativeBlockWriter]) -> None:
    """Different settings, some let go of while they are written; seats are taken again."""
    draw = random.Random(5)
    writer = speculative(MODEL, kind=kind)
    plain = blocks(MODEL)
    requests = [random_request(draw, MODEL, 30) for _ in range(24)]
    engine, done, handles, aborted = Engine(seats=4), {}, {}, set()
    told: dict[int, list[int]] = {}
    waiting = list(requests)
    while waiting or len(engine):
        for _ in range(min(draw.randint(0, 3), len(waiting))):
            request = waiting.pop(0)
            handle = engine.submit(request, writer, tell=draw.choice(["end", "pieces"]))
            handles[handle.index] = handle
        for event in engine.step():
            assert event.index not in aborted
            if isinstance(event, Stopped):
                done[event.index] = event.sample
            if isinstance(event, Extended):
                told.setdefault(event.index, []).extend(event.tokens)
        left = [index for index in handles if index not in done and index not in aborted]
        if left and draw.random() < 0.2:
            aborted.add(index := draw.choice(left))
            handles[index].abort()
    assert 2 < len(aborted) < 20
    for index, text in done.items():
        (alone,) = sample(plain, [request := handles[index].request])
        assert text_of(text) == text_of(alone)
        if not text.redraws and index in told:  # pieces, of which the last come with the end
            first = writer.first_start([*(request.given == M).tolist(), True].index(True))
            told_to = first + len(told[index])
            assert told[index][: len(text.tokens) - first] == text.tokens.tolist()[first:told_to]


# The same law --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lean", "given", "length", "drafts"),
    [
        (0.0, (), 5, 3),
        (0.0, (M, 1, M, 0, 3, M, M, 0), 8, 1),
        pytest.param(2.0, (1,), 6, 2, marks=pytest.mark.slow),
        pytest.param(0.9, (M, 0, 1, 3, M), 6, 3, marks=pytest.mark.slow),
    ],
)
def test_texts_follow_the_law_of_the_order(lean: float, given: Tokens, length: int, drafts: int) -> None:
    """Enumerated, with a nucleus and a temperature."""
    model = tiny_transformer(2)
    how = {"temperature": 0.8, "top_p": 0.9}
    law = in_blocks(model, given, length, 4, leaning(lean), context=8, sharpen=sharpened(**how))
    writer = speculative(model, 4, drafts, context=8, unmasking=FirstHitting(lean=lean))
    requests = [
        Request(torch.tensor(given, dtype=torch.long), seed, length, sharpening=Sharpening(**how))
        for seed in range(1_500)
    ]
    assert chi_square([text.tokens for text in sample(writer, requests, batch_size=1_500)], law) > FITS


# What it costs -------------------------------------------------------------------------------------------


@dataclass
class Cost:
    passes: int
    drafted: list[int]
    accepted: list[int]
    wrong: int


def by_hand(model: Any, seed: int, length: int, n: int, copies: int, causal: bool) -> tuple[list[int], Cost]:
    """A text and what it costs, the network asked about one state of one block at a time."""
    text: list[int] = []
    cost = Cost(1, [0] * copies, [0] * copies, 0)  # the first pass is over the first block alone
    for start in range(0, length, n):
        past = tuple(text)

        def sees(query: int, key: int, start: int = start) -> bool:
            return key <= (query if causal and query < start else query // n * n + n - 1)

        ask = asking(model, past, n, sees)
        positions = list(range(start, min(start + n, length)))
        hit = counter_uniform(torch.tensor(seed), torch.tensor(positions), Purpose.ORDER, 1)[:, 0]
        order = [positions[each] - start for each in hit.argsort(descending=True).tolist()]

        def guess(state: list[int], start: int = start, ask: Any = ask) -> list[int]:
            log_p = torch.tensor(ask(tuple(state), None), dtype=torch.float64).log()
            return [drawn(log_p[place], seed, start + place) for place in range(n)]

        state = [MASK] * n
        drafts = guess(state)
        state[order[0]] = drafts[order[0]]
        left = order[1:]
        while left:
            cost.passes += 1
            shown = list(state)
            for copy, place in enumerate(left[:copies]):
                found = guess(shown)
                state[place] = found[place]
                cost.drafted[copy] += 1
                if found[place] != drafts[place]:
                    cost.wrong += 1
                    break
                cost.accepted[copy] += 1
                shown[place] = found[place]
            is_finished = shown == state and all(place in left[:copies] for place in left)
            left = [place for place in left if state[place] == MASK]
            drafts = found
            if is_finished:
                break
        else:  # nothing says what follows yet: the block's last token was just found out, or its only one
            cost.passes += start + n < length
        text += state[: length - start]
    return text, cost


@pytest.mark.parametrize("copies", [1, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_a_pass_for_each_block_and_one_for_each_wrong_draft(copies: int, causal: bool) -> None:
    model, n = tiny_transformer(4, gain=1.2), 6
    writer = speculative(model, n, copies, context=72, causal_clean=causal)
    for seed, length in enumerate((1, 6, 7, 19, 24, 34, 35, 60, 63)):
        (found,) = sample(writer, [Request(prompt(0), seed, length)])
        text, cost = by_hand(model, seed, length, n, copies, causal)
        assert found.tokens.tolist() == text
        assert (found.evaluations, found.fill_passes) == (cost.passes, 0)
        assert (list(found.drafted), list(found.accepted)) == (cost.drafted, cost.accepted)
        if copies == n - 1 and length % n != 1:
            blocks_written = -(-length // n)
            # The last block is read by no pass if its last token was drafted wrong.
            assert cost.passes - 1 - blocks_written - cost.wrong in (0, -1)


class Mute(Counting):
    """A network that says the same whatever it reads: every draft is right."""

    def head(self, states: Tensor) -> Tensor:
        return self.model.head(torch.zeros_like(states))


@pytest.mark.parametrize("block_size", [2, 4, 6])
def test_where_all_drafts_are_right_a_block_takes_one_pass(block_size: int) -> None:
    network = Mute(MODEL)
    writer = speculative(network, block_size, 9)
    requests = [Request(prompt(0), 1, 24), Request(prompt(12), 2, 24)]
    for text in sample(writer, requests, batch_size=2):
        assert text.evaluations == 1 + text.written // block_size
        assert text.accepted == text.drafted
        assert text.drafted == (text.written // block_size,) * (block_size - 1)
        assert text.fill_passes == (1 if text.given else 0)
    assert len(network.rows) == 1 + 1 + 24 // block_size


def test_never_more_passes_than_without() -> None:
    for request, (plain, _) in zip(REQUESTS, one_by_one(blocks), strict=True):
        (text,) = sample(speculative(MODEL), [request])
        assert text.evaluations + text.fill_passes <= plain.evaluations + plain.fill_passes


def test_a_text_that_cannot_be_written_is_told_of() -> None:
    broken = tiny_transformer(3)
    broken.embedding.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="text 0 cannot be written"):
        sample(speculative(broken), [Request(prompt(0), 0, 9)])


# What is told --------------------------------------------------------------------------------------------


def without_cost(event: Event) -> Any:
    return text_of(event.sample) if isinstance(event, Stopped) else event


def events_of(writer: Writer, requests: Sequence[Request], batch_size: int = 3) -> list[list[Any]]:
    events = list(write(writer, requests, batch_size=batch_size, watch=True))
    return [[event for event in events if event.index == index] for index in range(len(requests))]


ASKED = [replace(request, stopping=stopping) for request in REQUESTS for stopping in (Stopping(), EARLY)]


@pytest.mark.parametrize(
    ("drafts", "kind"), [(1, SpeculativeBlockWriter), (3, SpeculativeBlockWriter), (3, Bursting)]
)
@pytest.mark.parametrize(
    "options", [{}, {"previous_token": True, "unmasking": FirstHitting(lean=1.0)}], ids=str
)
def test_what_is_told_is_what_is_told_without_speculation_and_drafts(
    drafts: int, kind: type[SpeculativeBlockWriter], options: dict[str, Any]
) -> None:
    """In the same order, and not a token behind the end of a text."""
    plain = events_of(blocks(MODEL, **options), ASKED)
    number = 0
    for found, expected in zip(
        events_of(speculative(MODEL, 4, drafts, kind, **options), ASKED), plain, strict=True
    ):
        guesses = [event for event in found if isinstance(event, Drafted)]
        told = [without_cost(event) for event in found if not isinstance(event, Drafted)]
        assert told == [without_cost(event) for event in expected]
        number += len(guesses)
    assert number > 20


def test_drafts_are_told_of_masks_of_the_block_under_way() -> None:
    right = wrong = 0
    for own, request in zip(events_of(speculative(MODEL), REQUESTS), REQUESTS, strict=True):
        text: list[int] = []
        drafts: dict[int, int] = {}
        block = range(0)
        for event in own:
            match event:
                case Started():
                    text = request.given.tolist() + [M] * (request.length - len(request.given))
                case BlockStarted(start=start, stop=stop):
                    block = range(start, stop)
                case TokenRevealed(position=position, token=token):
                    right += drafts.get(position) == token
                    wrong += drafts.get(position, token) != token
                    text[position] = token
                case Drafted(positions=positions, tokens=guesses):
                    assert all(at in block and text[at] == M for at in positions)
                    drafts = dict(zip(positions, guesses, strict=True))
    assert min(right, wrong) > 5


# Ends, where several pieces were written at once ---------------------------------------------------------


class Eager:
    """Writes several pieces at a time."""

    def begin(self, requests: Sequence[Request], *, width: int) -> Rows:
        rows: Rows = super().begin(requests, width=width)  # type: ignore[misc]
        rows.extras[TALLY] = torch.zeros(len(rows), 2, 1, dtype=torch.long)
        return rows

    def write(self, rows: Rows) -> Iterator[Reveal]:
        for _ in range(3):
            yield from super().write(rows)  # type: ignore[misc]


class EagerBlocks(Eager, BlockWriter):
    """Three blocks."""


class EagerTokens(Eager, AutoregressiveWriter):
    """Three tokens."""


EAGER = {
    "blocks": (
        blocks(MODEL, block_size=2),
        EagerBlocks(MODEL, reading=blocks_of(2), context=CONTEXT),
    ),
    "tokens": (
        autoregressive(MODEL),
        EagerTokens(MODEL, mask_id=MASK, context=CONTEXT, score_first=True),
    ),
}


@pytest.mark.parametrize("name", EAGER)
@pytest.mark.parametrize(
    "stopping",
    [
        EARLY,
        Stopping(entropy_floor=0.9, entropy_window=4, redraws=1),
        Stopping(eos_id=EOS),
        Stopping(find_end=FindRun()),
        Stopping(eos_id=EOS, find_end=FindRun(), entropy_floor=0.6, entropy_window=3, redraws=3),
    ],
    ids=["early", "redrawn", "end token", "string", "all"],
)
def test_a_text_ends_with_the_first_piece_that_ends_it(name: str, stopping: Stopping) -> None:
    """However many were written at once; what is told is the same, and as if they came one by one."""
    plain, eager = EAGER[name]
    requests = [replace(request, seed=seed, stopping=stopping) for request in REQUESTS for seed in (1, 2, 3)]
    for found, expected in zip(events_of(eager, requests), events_of(plain, requests), strict=True):
        assert list(map(without_cost, found)) == list(map(without_cost, expected))


def test_pieces_are_told_up_to_the_last_that_is_finished() -> None:
    writer, request = speculative(MODEL), Request(prompt(6), 3, 30)
    engine = Engine(seats=2)
    engine.submit(request, writer, tell="pieces")
    told, done = request.given.tolist()[:4], None
    while done is None:
        for event in engine.step():
            if isinstance(event, Extended):
                assert (event.start, len(event.tokens) % 4) == (len(told), 0)
                told += event.tokens
            if isinstance(event, Stopped):
                done = event.sample
    assert done.tokens.tolist()[: len(told)] == told
    assert len(told) >= 24


# What is refused -----------------------------------------------------------------------------------------


class Pairs(InTurn):
    """Two tokens a pass, by a rule of one's own."""

    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        places = torch.arange(masked.shape[1]).expand_as(masked)
        for first in range(0, masked.shape[1], 2):
            pair = slice(first, first + 2)
            yield Pass(places[:, pair], masked[:, pair], torch.ones(len(masked), dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"unmasking": Remasking(steps=6)},
            r"unmasking must not mask tokens again .* got Remasking\(.*steps=6",
        ),
        ({"unmasking": Ancestral(9)}, r"unmasking must reveal one token a pass .* got Ancestral\(steps=9"),
        ({"unmasking": FirstHitting(2)}, "unmasking must reveal one token a pass .* got .*tokens_per_pass=2"),
        ({"unmasking": MostConfident()}, "unmasking must have an order that is known .* what MostConfident"),
        ({"unmasking": EntropyBound(0.5)}, "unmasking must have an order that is known .* what EntropyBound"),
        (
            {"unmasking": UnmaskingRule()},
            "unmasking must be a Planned rule for speculation, got <.*UnmaskingRule object",
        ),
        ({"speculation": 0}, r"speculation\.drafts must be at least 1, .* got 0"),
        (
            {"speculation": Speculation(drafts=2, scheme="rejection")},
            r"speculation\.scheme must be coupled for blocks, .* got 'rejection'",
        ),
        (
            {"speculation": Speculation(drafts=2, candidates=3)},
            r"speculation\.candidates must be 1 for blocks, .* got 3",
        ),
        ({"speculation": Speculation(passes=2)}, r"speculation\.passes must be 1 for blocks, .* got 2"),
        ({"cache": False}, "cache must be on for speculation, .* got False"),
        ({"block_size": CONTEXT}, f"one block, .* got block_size {CONTEXT}, its whole context"),
        ({"block_size": 1}, "blocks of one token, .* got block_size 1"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",  # some have no name that is always the same
)
def test_what_cannot_be_speculated_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        speculative(MODEL, **changes)


def test_a_network_that_is_told_the_noise_level_is_refused() -> None:
    with pytest.raises(
        ValueError, match="speculation must be off for a network that is told the noise level"
    ):
        speculative(TIMED)


def test_a_rule_of_ones_own_that_reveals_several_at_once_is_refused_with_the_request() -> None:
    writer = speculative(MODEL, unmasking=Pairs())
    with pytest.raises(ValueError, match="unmasking must reveal one token a pass, and mask none again"):
        sample(writer, [Request(prompt(0), 0, 8)])
    (one,) = sample(writer, [Request(tokens("0_1_ 3_"), 0, 7)])  # which has none to reveal together
    assert MASK not in one.tokens.tolist()


# How it is asked for -------------------------------------------------------------------------------------


def written_by(method: BlockDiffusionMethod, context: int = 16, **settings: Any) -> Writer:
    model = tiny_transformer(1, context=context)
    settled = method.settled(Settings(**settings))
    return method.writer(model, settled, Frame.of(model.config, MASK))


@pytest.mark.parametrize(
    ("speculation", "block_size", "copies"),
    [(1, 4, 1), (3, 4, 3), (9, 4, 3), ("auto", 4, 3), ("auto", 16, 7), (12, 16, 12)],
)
def test_a_number_of_drafts_is_so_many_copies(speculation: Any, block_size: int, copies: int) -> None:
    method = BlockDiffusionMethod(block_size=block_size, lean=1.5)
    writer = written_by(method, context=64, speculation=speculation)
    assert isinstance(writer, SpeculativeBlockWriter)
    assert (writer.copies, writer.unmasking) == (copies, FirstHitting(lean=1.5))


@pytest.mark.parametrize("settings", [{}, {"speculation": "off"}, {"speculation": 0}], ids=str)
def test_by_default_it_is_off(settings: dict[str, Any]) -> None:
    assert type(written_by(BlockDiffusionMethod(block_size=4), **settings)) is BlockWriter


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 50, "remask": 0.1}, "unmasking must not mask tokens again"),
        ({"steps": 50}, "unmasking must reveal one token a pass"),
        ({"tokens_per_pass": 2}, "unmasking must reveal one token a pass"),
        ({"confidence": 0.9}, "unmasking must have an order that is known beforehand"),
        ({"entropy_bound": 0.9}, "unmasking must have an order that is known beforehand"),
        ({"cache": False}, "cache must be on for speculation"),
        ({"stride": 4}, "stride must be left at its default, got 4: this model writes blocks of 4"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_speculated_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        written_by(BlockDiffusionMethod(block_size=4), speculation=2, **settings)


def test_a_network_of_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="speculation must be off for a network of one block"):
        written_by(BlockDiffusionMethod(), speculation=2)
