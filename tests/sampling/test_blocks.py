"""Texts written in blocks follow the laws that the rules name, enumerated on networks small enough."""

from collections.abc import Iterator
from math import cos, pi

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Cosine, Linear, NoiseSchedule
from bd3lm.evaluation import exact_likelihood
from bd3lm.models import Transformer
from bd3lm.objectives import TokenBatch
from bd3lm.sampling import (
    Ancestral,
    BlockWriter,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Planned,
    Remasking,
    Request,
    Sharpening,
    UnmaskingRule,
    sample,
)
from bd3lm.sampling.unmasking import Pass
from tests.oracles.likelihood import discrete_nll, every_text, nll, table
from tests.oracles.networks import (
    CLEAN,
    MASK,
    AfterPrevious,
    blocks_of,
    clean_of,
    mask_of,
    network_of,
    tiny_transformer,
)
from tests.oracles.sampling import (
    BlockLaw,
    Conditional,
    Law,
    Tokens,
    by_hitting_times,
    chi_square,
    distance,
    in_blocks,
    in_every_order,
    in_steps,
    leaning,
    least_entropy,
    likeliest,
    sharpened,
    together,
)
from tests.sampling.asking import drawn_by
from tests.sampling.loop_cases import how_read

pytestmark = pytest.mark.sweep(2)

M = MASK
FITS, FAILS = 1e-3, 1e-6  # p-values of samples that follow a law, and of those that do not
AT_ONCE = in_steps([1.0, 0.0])
EVER = 10**12  # in so many steps no two tokens are revealed by the same one

GIVEN = [
    pytest.param((), 4, id="nothing"),
    pytest.param((), 5, id="nothing, and an end inside a block"),
    pytest.param((1, 0, 3), 6, id="a prompt that ends inside a block"),
    pytest.param((M, 1, M, 0, 3, M, M, 0), 8, id="a template, its gaps before given tokens"),
    pytest.param((M, 0, 1, 3, M), 6, id="a whole block after a gap"),
]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_transformer(2)


@pytest.fixture(scope="module")
def clock() -> Transformer:
    """A network that is told the time, and minds."""
    return tiny_transformer(2, adaln=True, time_conditioning=True, conditioning_dim=16)


class LeftToRight(Planned):
    """Not a diffusion: every block in the order of its text."""

    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        for place in range(masked.shape[1]):
            yield Pass(
                places=torch.full((len(seeds), 1), place),
                active=masked[:, [place]],
                mask_rate=torch.ones(len(seeds), dtype=torch.float64),
            )


def written(
    model: Transformer,
    block_size: int,
    unmasking: UnmaskingRule | None = None,
    *,
    given: Tokens = (),
    length: int = 4,
    rows: int = 1_000,
    context: int = 8,
    sharpening: Sharpening | None = None,
    **options: object,
) -> list[Tensor]:
    """Texts of the seeds 0, 1, …"""
    reading = how_read(block_size, options, mask_of(model))
    writer = BlockWriter(model, **reading, context=context, unmasking=unmasking, **options)
    requests = [Request(torch.tensor(given, dtype=torch.long), seed, length) for seed in range(rows)]
    return [text.tokens for text in sample(writer, drawn_by(requests, sharpening), batch_size=rows)]


def same_texts(some: list[Tensor], others: list[Tensor]) -> bool:
    return torch.equal(torch.stack(some), torch.stack(others))


def linear(steps: int) -> list[float]:
    return [j / steps for j in range(steps, -1, -1)]


# First-hitting -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize(("given", "length"), GIVEN)
def test_first_hitting_draws_from_every_order_alike(
    model: Transformer, given: Tokens, length: int, block_size: int
) -> None:
    law = in_blocks(model, given, length, block_size, in_every_order)
    assert chi_square(written(model, block_size, given=given, length=length), law) > FITS


@pytest.mark.parametrize(
    ("block_size", "given", "length"), [(2, (), 5), *((4, *each.values) for each in GIVEN)], ids=str
)
def test_a_lean_draws_from_orders_as_likely_as_they_are(
    model: Transformer, block_size: int, given: Tokens, length: int
) -> None:
    """In large blocks for the most part: there an order has room to lean."""
    law = in_blocks(model, given, length, block_size, leaning(0.9))
    drawn = written(model, block_size, FirstHitting(lean=0.9), given=given, length=length)
    assert chi_square(drawn, law) > FITS


def test_a_lean_is_told_apart_from_none_and_from_its_opposite(model: Transformer) -> None:
    """By a law of orders in which places are counted from the right, too."""

    def mirrored(ask: Conditional, block: Tokens, masked: Tokens) -> Law:
        def flipped(state: Tokens, rate: float | None) -> list[list[float]]:
            return ask(state[::-1], rate)[::-1]

        places = tuple(len(block) - 1 - place for place in masked)
        return {text[::-1]: p for text, p in leaning(2.0)(flipped, block[::-1], places).items()}

    drawn = written(model, 4, FirstHitting(lean=2.0), rows=2_000)
    assert chi_square(drawn, in_blocks(model, (), 4, 4, leaning(2.0))) > FITS
    for other in (in_every_order, leaning(0.9), mirrored):
        assert chi_square(drawn, in_blocks(model, (), 4, 4, other)) < FAILS


@pytest.mark.parametrize(("given", "length"), [((), 4), ((1,), 4), ((M, 0), 7)], ids=str)
def test_tokens_revealed_together_are_the_next_of_a_leaning_order(
    model: Transformer, given: Tokens, length: int
) -> None:
    law = in_blocks(model, given, length, 4, leaning(0.9, together=2))
    drawn = written(model, 4, FirstHitting(2, lean=0.9), given=given, length=length, rows=2_000)
    assert chi_square(drawn, law) > FITS


def test_a_large_lean_is_left_to_right(model: Transformer) -> None:
    leans, plain = (
        written(model, 4, rule, given=(M, 1), length=7, rows=200)
        for rule in (FirstHitting(lean=1e6), LeftToRight())
    )
    assert same_texts(leans, plain)


@pytest.mark.parametrize("options", [{"causal_clean": True}, {"previous_token": True}], ids=str)
def test_other_ways_of_reading_are_none_of_the_leans_business(
    model: Transformer, options: dict[str, bool]
) -> None:
    shown = AfterPrevious(model) if "previous_token" in options else model
    law = in_blocks(shown, (1,), 6, 2, leaning(0.9), causal_clean="causal_clean" in options)
    how = {"given": (1,), "length": 6, **options}
    drawn = written(model, 2, FirstHitting(lean=0.9), **how)
    assert chi_square(drawn, law) > FITS
    assert same_texts(drawn[:20], written(model, 2, FirstHitting(lean=0.9), **how, rows=20, cache=False))


@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("lean", [0.9, 3.0])
def test_the_law_of_a_leaning_sampler_is_its_likelihood(
    model: Transformer, block_size: int, lean: float
) -> None:
    texts = every_text(CLEAN, 4)
    law = in_blocks(model, (), 4, block_size, leaning(lean))
    enumerated = torch.tensor([law[tuple(text)] for text in texts.tolist()], dtype=torch.float64)
    batch = TokenBatch.of(texts, score_first=True)
    found = exact_likelihood(model, batch, blocks_of(block_size), lean=lean)
    torch.testing.assert_close(enumerated, torch.exp(-found.nll.sum(1)), rtol=1e-9, atol=0.0)


def test_a_network_that_is_told_the_time_has_no_lean(clock: Transformer) -> None:
    said = r"unmasking must have a noise level .* \(lean 0\) for a network that is told it, got .*lean=0\.9"
    with pytest.raises(ValueError, match=said):
        BlockWriter(
            clock,
            reading=blocks_of(2),
            context=8,
            unmasking=FirstHitting(lean=0.9),
        )
    BlockWriter(clock, reading=blocks_of(2), context=8, unmasking=FirstHitting(2))


def test_a_rule_of_ones_own_may_be_without_a_noise_level(model: Transformer, clock: Transformer) -> None:
    class Unlevelled(Ancestral):
        @property
        def has_noise_level(self) -> bool:
            return False

    with pytest.raises(ValueError, match="unmasking must have a noise level"):
        BlockWriter(clock, reading=blocks_of(2), context=8, unmasking=Unlevelled())
    BlockWriter(model, reading=blocks_of(2), context=8, unmasking=Unlevelled())


def test_blocks_of_one_token_follow_the_chain_rule(model: Transformer) -> None:
    given, length = (M, 1, M, 0, 3, M, M, 0), 8
    law = in_blocks(model, given, length, 1, in_every_order)
    assert chi_square(written(model, 1, given=given, length=length), law) > FITS


@pytest.mark.parametrize("block_size", [2, 4])
def test_clean_blocks_may_be_read_causally(model: Transformer, block_size: int) -> None:
    """Told apart from the other way wherever a finished block of more than one token is read."""
    law, other = (
        in_blocks(model, (1,), 6, block_size, in_every_order, causal_clean=causal) for causal in (True, False)
    )
    drawn = written(model, block_size, given=(1,), length=6, rows=2_000, causal_clean=True)
    assert chi_square(drawn, law) > FITS
    assert chi_square(drawn, other) < FAILS


@pytest.mark.parametrize("causal_clean", [False, True])
def test_without_a_cache_the_law_is_the_same(model: Transformer, causal_clean: bool) -> None:
    law = in_blocks(model, (1, 0), 5, 2, in_every_order, causal_clean=causal_clean)
    drawn = written(model, 2, given=(1, 0), length=5, rows=300, causal_clean=causal_clean, cache=False)
    assert chi_square(drawn, law) > FITS


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize(("given", "length"), [((), 4), ((1, M, 0), 6)], ids=str)
def test_hidden_tokens_may_be_shown_with_the_token_before(
    model: Transformer, given: Tokens, length: int, block_size: int
) -> None:
    law, other = (
        in_blocks(each, given, length, block_size, in_every_order) for each in (AfterPrevious(model), model)
    )
    drawn = written(model, block_size, given=given, length=length, previous_token=True)
    assert chi_square(drawn, law) > FITS
    assert chi_square(drawn, other) < FAILS


@pytest.mark.parametrize("rule", [FirstHitting(2), MostConfident(threshold=0.6), Ancestral(3)], ids=str)
def test_without_a_cache_the_token_before_is_the_same(model: Transformer, rule: UnmaskingRule) -> None:
    options = {"given": (M, 1, 0, 3), "length": 7, "rows": 20, "previous_token": True}
    cached, recomputed, without = (
        written(model, 2, rule, **{**options, **more})
        for more in ({}, {"cache": False}, {"previous_token": False})
    )
    assert same_texts(cached, recomputed)
    assert not same_texts(cached, without)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_without_a_cache_the_network_is_told_the_same_time(clock: Transformer, block_size: int) -> None:
    cached, recomputed = (
        written(clock, block_size, given=(M, 1, 0, 3), length=7, rows=20, cache=cache)
        for cache in (True, False)
    )
    assert same_texts(cached, recomputed)


@pytest.mark.parametrize(
    ("block_size", "causal_clean", "previous_token"),
    [
        (1, False, False),
        (1, True, True),
        (2, False, True),
        (2, True, False),
        (4, False, False),
        (4, True, True),
    ],
)
def test_the_law_is_that_of_the_likelihoods(
    model: Transformer, block_size: int, causal_clean: bool, previous_token: bool
) -> None:
    """The enumeration, the orders written out, and the recursion over sets are one distribution."""
    texts = every_text(CLEAN, 4)
    asked = AfterPrevious(model) if previous_token else model
    law = in_blocks(asked, (), 4, block_size, in_every_order, causal_clean=causal_clean)
    enumerated = torch.tensor([law[tuple(text)] for text in texts.tolist()], dtype=torch.float64)
    places = range(block_size)
    orders = sum(
        nll(table(asked, texts, start, block_size, places, causal_clean=causal_clean), places)
        for start in range(0, 4, block_size)
    )
    batch = TokenBatch.of(texts, score_first=True)
    exact = exact_likelihood(
        model,
        batch,
        blocks_of(block_size, causal_clean=causal_clean, previous_token=previous_token),
    )
    torch.testing.assert_close(enumerated, torch.exp(-orders), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(enumerated, torch.exp(-exact.nll.sum(1)), rtol=1e-9, atol=0.0)


def test_the_law_of_an_unfinished_block_is_that_of_the_likelihoods(model: Transformer) -> None:
    texts = every_text(CLEAN, 4)
    law = in_blocks(model, (), 3, 4, in_every_order)
    enumerated = torch.tensor([law[tuple(text[:3])] for text in texts.tolist()], dtype=torch.float64)
    orders = nll(table(model, texts, 0, 4, range(3), absent=[3]), range(3))
    torch.testing.assert_close(enumerated, torch.exp(-orders), rtol=1e-9, atol=0.0)
    assert chi_square(written(model, 4, length=3), law) > FITS


@pytest.mark.parametrize(("block_size", "size"), [(4, 3), (4, 4), (2, 2)])
def test_tokens_revealed_together_are_independent(model: Transformer, block_size: int, size: int) -> None:
    law = in_blocks(model, (), 4, block_size, together(size))
    drawn = written(model, block_size, FirstHitting(tokens_per_pass=size))
    assert chi_square(drawn, law) > FITS
    if size == block_size:
        assert distance(law, in_blocks(model, (), 4, block_size, AT_ONCE)) < 1e-12


@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("rule", [LeftToRight(), Ancestral(steps=1)], ids=["left to right", "all at once"])
def test_other_samplers_are_told_apart(model: Transformer, rule: UnmaskingRule, block_size: int) -> None:
    law = in_blocks(model, (), 4, block_size, in_every_order)
    assert chi_square(written(model, block_size, rule), law) < FAILS


@pytest.mark.parametrize(
    ("block_size", "options"),
    [(2, {}), (4, {"sharpening": Sharpening(temperature=0.7)})],
    ids=["smaller blocks", "sharper"],
)
def test_other_laws_are_told_apart(
    model: Transformer, block_size: int, options: dict[str, Sharpening]
) -> None:
    law = in_blocks(model, (), 4, 4, in_every_order)
    assert chi_square(written(model, block_size, **options), law) < FAILS


# Networks of today, whose mask lies beside their vocabulary -----------------------------------------------

OF_TODAY = {name: network_of(name, 2) for name in ("Llama", "Qwen3")}
B = 3  # their mask
of_today = pytest.mark.parametrize(
    ("family", "block_size", "given", "length", "options"),
    [
        ("Llama", 4, (B, 0, 1, 2, B), 6, {}),
        ("Llama", 2, (1,), 5, {"causal_clean": True, "previous_token": True}),
        ("Qwen3", 2, (1, 0, 2), 6, {"causal_clean": True}),
        ("Qwen3", 4, (), 5, {"previous_token": True}),
    ],
    ids=str,
)


@of_today
def test_networks_of_today_write_by_the_same_law(
    family: str, block_size: int, given: Tokens, length: int, options: dict[str, bool]
) -> None:
    model = OF_TODAY[family]
    asked = AfterPrevious(model) if "previous_token" in options else model
    how = {"given": given, "length": length, **options}
    for lean in (0.0, 0.9):
        causal = "causal_clean" in options
        law = in_blocks(asked, given, length, block_size, leaning(lean), causal_clean=causal)
        cached = written(model, block_size, FirstHitting(lean=lean), **how)
        assert chi_square(cached, law) > FITS
        uncached = written(model, block_size, FirstHitting(lean=lean), **how, rows=20, cache=False)
        assert same_texts(cached[:20], uncached)


@pytest.mark.parametrize(("family", "block_size"), [("Llama", 2), ("Qwen3", 4)])
def test_the_law_of_networks_of_today_is_that_of_the_likelihoods(family: str, block_size: int) -> None:
    model = OF_TODAY[family]
    texts = every_text(clean_of(model), 4)
    for lean in (0.0, 0.9):
        law = in_blocks(model, (), 4, block_size, leaning(lean))
        enumerated = torch.tensor([law[tuple(text)] for text in texts.tolist()], dtype=torch.float64)
        batch = TokenBatch.of(texts, score_first=True)
        found = exact_likelihood(model, batch, blocks_of(block_size, mask_id=B), lean=lean)
        torch.testing.assert_close(enumerated, torch.exp(-found.nll.sum(1)), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("family", OF_TODAY)
@pytest.mark.parametrize(
    ("rule", "block_law"),
    [
        (Ancestral(steps=3), in_steps(linear(3), mask=B)),
        (Remasking(steps=3, eta=0.5), in_steps(linear(3), 0.5, mask=B)),
        (MostConfident(threshold=0.6), likeliest(threshold=0.6, mask=B)),
    ],
    ids=["ancestral", "remasking", "threshold"],
)
def test_any_rule_may_fill_the_blocks_of_networks_of_today(
    family: str, rule: UnmaskingRule, block_law: BlockLaw
) -> None:
    law = in_blocks(OF_TODAY[family], (1, 0), 6, 4, block_law)
    drawn = written(OF_TODAY[family], 4, rule, given=(1, 0), length=6)
    assert chi_square(drawn, law) > FITS


@pytest.mark.parametrize("family", OF_TODAY)
@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"top_k": 1}], ids=str)
def test_greedy_blocks_of_networks_of_today_have_the_likeliest_token_of_each_place(
    family: str, greedy: dict[str, float]
) -> None:
    """What is left to chance is the order."""
    law = in_blocks(OF_TODAY[family], (), 4, 4, in_every_order, sharpen=sharpened(top_k=1))
    drawn = written(OF_TODAY[family], 4, sharpening=Sharpening(**greedy))
    assert chi_square(drawn, law) > FITS
    (certain,) = in_blocks(OF_TODAY[family], (), 4, 1, in_every_order, sharpen=sharpened(top_k=1))
    alike = written(OF_TODAY[family], 1, sharpening=Sharpening(**greedy), rows=10)
    assert {tuple(text.tolist()) for text in alike} == {certain}


# Steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "steps"), [(1, 2), (2, 1), (2, 2), (2, 3), (2, 4), (4, 2), (4, 3)])
def test_ancestral_steps_follow_their_chain(model: Transformer, block_size: int, steps: int) -> None:
    law = in_blocks(model, (), 4, block_size, in_steps(linear(steps)))
    assert chi_square(written(model, block_size, Ancestral(steps=steps)), law) > FITS


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [2, 4])
def test_the_law_of_the_chain_is_that_of_the_likelihoods(
    model: Transformer, block_size: int, steps: int
) -> None:
    texts, places = every_text(CLEAN, 4), range(block_size)
    law = in_blocks(model, (), 4, block_size, in_steps(linear(steps)))
    enumerated = torch.tensor([law[tuple(text)] for text in texts.tolist()], dtype=torch.float64)
    nats = sum(
        discrete_nll(table(model, texts, start, block_size, places), places, linear(steps)[::-1])
        for start in range(0, 4, block_size)
    )
    torch.testing.assert_close(enumerated, torch.exp(-nats), rtol=1e-9, atol=0.0)


def test_ancestral_steps_follow_the_schedule(model: Transformer) -> None:
    law = in_blocks(model, (), 4, 4, in_steps([1.0, 1 - cos(pi / 4), 0.0]))
    drawn = written(model, 4, Ancestral(steps=2, schedule=Cosine()), rows=4_000)
    assert chi_square(drawn, law) > FITS
    assert chi_square(drawn, in_blocks(model, (), 4, 4, in_steps(linear(2)))) < FAILS


@pytest.mark.parametrize("block_size", [2, 4])
def test_many_ancestral_steps_are_first_hitting(model: Transformer, block_size: int) -> None:
    law = in_blocks(model, (), 4, block_size, in_every_order)
    assert chi_square(written(model, block_size, Ancestral(steps=1_000)), law) > FITS


@pytest.mark.parametrize("schedule", [Linear(), Cosine()])
@pytest.mark.parametrize("network", ["model", "clock"])
def test_steps_that_reveal_one_token_each_are_first_hitting_seed_by_seed(
    network: str, schedule: NoiseSchedule, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(network)
    hitting, stepping = (
        written(model, 4, rule, given=(1, M, 0), length=8, rows=200)
        for rule in (FirstHitting(), Ancestral(steps=EVER, schedule=schedule))
    )
    assert same_texts(hitting, stepping)


# Networks that are told the time -------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "length", "steps"), [((), 4, 1), ((1, 3, 0), 5, 2), ((), 4, 3)])
def test_ancestral_steps_tell_the_network_their_time(
    clock: Transformer, given: Tokens, length: int, steps: int
) -> None:
    law = in_blocks(clock, given, length, 2, in_steps(linear(steps)))
    assert chi_square(written(clock, 2, Ancestral(steps=steps), given=given, length=length), law) > FITS


def test_first_hitting_tells_the_network_its_time(clock: Transformer) -> None:
    """Told apart from telling it that everything is masked, at all times."""
    given, length = (1, 3), 4
    drawn = written(clock, 2, given=given, length=length)
    assert chi_square(drawn, in_blocks(clock, given, length, 2, by_hitting_times)) > FITS
    timeless = in_blocks(
        clock, given, length, 2, lambda ask, *block: in_every_order(lambda state, _: ask(state, 1.0), *block)
    )
    assert chi_square(drawn, timeless) < FAILS


# Sharpening ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "how"),
    [
        (2, {"temperature": 0.6}),
        (4, {"temperature": 0.6}),
        (4, {"top_p": 0.8}),
        (2, {"top_p": 0.8, "top_p_rule": "exclusive"}),
        (4, {"temperature": 1.5, "top_k": 2, "top_p": 0.7}),
    ],
    ids=str,
)
def test_sharpened_conditionals_are_averaged_over_orders(
    model: Transformer, block_size: int, how: dict[str, float]
) -> None:
    law = in_blocks(model, (), 4, block_size, in_every_order, sharpen=sharpened(**how))
    assert chi_square(written(model, block_size, sharpening=Sharpening(**how)), law) > FITS


# Other rules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "steps", "eta", "given"),
    [(2, 2, 0.5, ()), (2, 3, 0.5, ()), (2, 3, 1.0, (M, 1)), (4, 4, 0.7, (M, M, 0)), (2, 3, 0.0, ())],
)
def test_remasking_follows_its_chain(
    model: Transformer, block_size: int, steps: int, eta: float, given: Tokens
) -> None:
    law = in_blocks(model, given, 4, block_size, in_steps(linear(steps), eta))
    assert chi_square(written(model, block_size, Remasking(steps=steps, eta=eta), given=given), law) > FITS


def test_remasking_is_told_apart_from_ancestral_steps(model: Transformer) -> None:
    drawn = written(model, 4, Remasking(steps=3, eta=1.0), rows=2_000)
    assert chi_square(drawn, in_blocks(model, (), 4, 4, in_steps(linear(3), 1.0))) > FITS
    assert chi_square(drawn, in_blocks(model, (), 4, 4, in_steps(linear(3)))) < FAILS


def test_remasking_follows_the_schedule_and_tells_the_time(clock: Transformer) -> None:
    rates = [1 - cos(pi / 2 * j / 3) for j in (3, 2, 1, 0)]
    drawn = written(clock, 2, Remasking(steps=3, eta=0.8, schedule=Cosine()))
    assert chi_square(drawn, in_blocks(clock, (), 4, 2, in_steps(rates, 0.8))) > FITS


@pytest.mark.parametrize(
    ("block_size", "rule", "block_law"),
    [
        (4, MostConfident(), likeliest()),
        (2, MostConfident(tokens_per_pass=2), AT_ONCE),
        (4, MostConfident(threshold=0.6), likeliest(1, 0.6)),
        (2, EntropyBound(0.0), least_entropy(0.0)),
        (4, EntropyBound(0.9), least_entropy(0.9)),
    ],
    ids=lambda value: str(value) if isinstance(value, MostConfident | EntropyBound) else "",
)
def test_adaptive_rules_follow_what_they_say(
    model: Transformer, block_size: int, rule: UnmaskingRule, block_law: BlockLaw
) -> None:
    law = in_blocks(model, (), 4, block_size, block_law)
    assert chi_square(written(model, block_size, rule), law) > FITS


@pytest.mark.parametrize(("given", "length"), [((), 3), ((M, 1), 4)], ids=["an end inside a block", "a gap"])
def test_adaptive_rules_tell_the_network_the_share_of_masks_it_sees(
    clock: Transformer, given: Tokens, length: int
) -> None:
    """Of those past the end of the text, too: what is to be written alone is told apart."""

    def unseen(ask: Conditional, block: Tokens, masked: Tokens) -> Law:
        past = 4 - length
        return likeliest()(lambda state, rate: ask(state, (4 * rate - past) / 4), block, masked)

    drawn = written(clock, 4, MostConfident(), given=given, length=length, rows=2_000)
    assert chi_square(drawn, in_blocks(clock, given, length, 4, likeliest())) > FITS
    if length < 4:
        assert chi_square(drawn, in_blocks(clock, given, length, 4, unseen)) < FAILS


# Past the context ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal_clean", [False, True])
def test_past_the_context_the_cache_slides(model: Transformer, causal_clean: bool) -> None:
    """A block sees one block; through its keys those before, which computed afresh it would not."""

    def law(afresh: bool) -> Law:
        return in_blocks(
            model, (1, 0, 3), 6, 2, in_every_order, context=4, afresh=afresh, causal_clean=causal_clean
        )

    drawn = written(model, 2, given=(1, 0, 3), length=6, context=4, causal_clean=causal_clean)
    assert chi_square(drawn, law(afresh=False)) > FITS
    assert chi_square(drawn, law(afresh=True)) < FAILS


def test_past_the_context_without_a_cache_all_is_computed_afresh(model: Transformer) -> None:
    drawn = written(model, 2, given=(1, 0, 3), length=6, context=4, cache=False, rows=300)
    law = in_blocks(model, (1, 0, 3), 6, 2, in_every_order, context=4, afresh=True)
    assert chi_square(drawn, law) > FITS


# What does not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "context"), [(3, 8), (4, 0), (4, -8)])
def test_a_block_size_that_does_not_divide_the_context_is_named(
    model: Transformer, block_size: int, context: int
) -> None:
    with pytest.raises(ValueError, match=f"divisor of context {context}, got {block_size}"):
        BlockWriter(model, reading=blocks_of(block_size), context=context)


def test_a_block_that_fills_the_context_is_the_whole_text(model: Transformer) -> None:
    with pytest.raises(ValueError, match="length must be at most the block size 4"):
        written(model, 4, length=5, context=4, rows=1)
    law = in_blocks(model, (1,), 4, 4, in_every_order)
    cached, recomputed = (written(model, 4, given=(1,), context=4, cache=cache) for cache in (True, False))
    assert chi_square(cached, law) > FITS
    assert same_texts(cached, recomputed)
