"""Texts written in strides follow MDLM's scheme, enumerated on networks small enough."""

import pytest
import torch
from torch import Tensor

from bd3lm.models import Transformer
from bd3lm.sampling import (
    Ancestral,
    FirstHitting,
    MostConfident,
    Remasking,
    Request,
    Sharpening,
    SlidingWriter,
    UnmaskingRule,
    sample,
)
from tests.oracles.networks import MASK, AfterPrevious, blocks_of, tiny_transformer
from tests.oracles.sampling import (
    BlockLaw,
    Tokens,
    by_hitting_times,
    chi_square,
    in_blocks,
    in_every_order,
    in_steps,
    in_strides,
    leaning,
    likeliest,
    sharpened,
)
from tests.sampling.asking import drawn_by
from tests.sampling.loop_cases import how_read

pytestmark = pytest.mark.sweep(3)

M = MASK
FITS, FAILS = 1e-3, 1e-6  # p-values of samples that follow a law, and of those that do not
HALVES = [1.0, 0.5, 0.0]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_transformer(2)


@pytest.fixture(scope="module")
def clock() -> Transformer:
    """A network that is told the time, and minds."""
    return tiny_transformer(2, adaln=True, time_conditioning=True, conditioning_dim=16)


def written(
    model: Transformer,
    *,
    given: Tokens = (),
    length: int = 4,
    context: int = 4,
    rows: int = 1_000,
    sharpening: Sharpening | None = None,
    **options: object,
) -> list[Tensor]:
    """Texts of the seeds 0, 1, …"""
    writer = SlidingWriter(model, **how_read(context, options), context=context, **options)
    requests = [Request(torch.tensor(given, dtype=torch.long), seed, length) for seed in range(rows)]
    return [text.tokens for text in sample(writer, drawn_by(requests, sharpening), batch_size=rows)]


@pytest.mark.parametrize(("given", "length"), [((), 4), ((1,), 3), ((M, 0, M, 3), 4)], ids=str)
def test_up_to_one_context_a_text_is_one_block(model: Transformer, given: Tokens, length: int) -> None:
    law = in_blocks(model, given, length, 4, in_every_order)
    assert chi_square(written(model, given=given, length=length), law) > FITS


@pytest.mark.parametrize(("given", "length"), [((), 4), ((M, 0, M, 3), 6)], ids=str)
def test_hidden_tokens_may_be_shown_with_the_token_before(
    model: Transformer, given: Tokens, length: int
) -> None:
    law = in_strides(AfterPrevious(model), given, length, 4, 2, in_every_order)
    assert chi_square(written(model, given=given, length=length, previous_token=True), law) > FITS
    with pytest.raises(ValueError, match="stride must be below the context 4 for a network that sees"):
        SlidingWriter(model, reading=blocks_of(4, previous_token=True), context=4, stride=4)
    SlidingWriter(model, reading=blocks_of(1, previous_token=True), context=1)  # there is no other stride


@pytest.mark.parametrize(
    ("stride", "given", "length"),
    [
        (2, (1, 0, 3), 6),
        (2, (1, 0, 3, 0), 7),
        (2, (1, 0, 3, 0, 3), 8),
        (2, (M, 1, M, 0, 3, M, M, 0), 8),
        (1, (1, 0, 3), 6),
        (4, (1, 0, 3), 7),
    ],
    ids=str,
)
def test_past_the_context_a_stride_follows_the_end_of_the_text(
    model: Transformer, stride: int, given: Tokens, length: int
) -> None:
    law = in_strides(model, given, length, 4, stride, in_every_order)
    assert chi_square(written(model, given=given, length=length, stride=stride), law) > FITS


def test_other_strides_are_told_apart(model: Transformer) -> None:
    drawn = written(model, given=(1, 0, 3), length=6, stride=1)
    assert chi_square(drawn, in_strides(model, (1, 0, 3), 6, 4, 2, in_every_order)) < FAILS


@pytest.mark.parametrize(("context", "half"), [(4, 2), (5, 3)])
def test_the_default_stride_is_half_a_context(model: Transformer, context: int, half: int) -> None:
    default, named, other = (
        torch.stack(written(model, length=9, context=context, rows=100, stride=stride))
        for stride in (None, half, half - 1)
    )
    assert torch.equal(default, named)
    assert not torch.equal(default, other)


@pytest.mark.parametrize(
    ("rule", "block_law"),
    [
        (Ancestral(steps=2), in_steps(HALVES)),
        (Remasking(steps=3, eta=1.0), in_steps([1, 2 / 3, 1 / 3, 0], 1.0)),
        (FirstHitting(lean=0.9), leaning(0.9)),
        (FirstHitting(2, lean=0.9), leaning(0.9, together=2)),
    ],
    ids=["ancestral", "remasking", "leaning", "leaning, two at once"],
)
def test_any_rule_may_fill_a_stride(model: Transformer, rule: UnmaskingRule, block_law: BlockLaw) -> None:
    law = in_strides(model, (1, 0), 6, 4, 2, block_law)
    assert chi_square(written(model, given=(1, 0), length=6, unmasking=rule), law) > FITS


def test_a_lean_is_told_apart_from_none(model: Transformer) -> None:
    given, length = (M, 0), 4
    drawn = written(model, given=given, length=length, rows=4_000, unmasking=FirstHitting(lean=3.0))
    assert chi_square(drawn, in_strides(model, given, length, 4, 2, leaning(3.0))) > FITS
    assert chi_square(drawn, in_strides(model, given, length, 4, 2, in_every_order)) < FAILS


def test_a_network_that_is_told_the_time_has_no_lean(clock: Transformer) -> None:
    with pytest.raises(ValueError, match=r"unmasking must have a noise level .* got .*lean=0\.9"):
        SlidingWriter(
            clock,
            reading=blocks_of(4),
            context=4,
            unmasking=FirstHitting(lean=0.9),
        )


def test_strides_are_sharpened(model: Transformer) -> None:
    how = {"temperature": 1.5, "top_p": 0.8}
    law = in_strides(model, (1, 0, 3), 6, 4, 2, in_every_order, sharpen=sharpened(**how))
    assert chi_square(written(model, given=(1, 0, 3), length=6, sharpening=Sharpening(**how)), law) > FITS


@pytest.mark.parametrize(
    ("rule", "block_law"),
    [(None, by_hitting_times), (Ancestral(steps=2), in_steps(HALVES))],
    ids=["first-hitting", "ancestral"],
)
def test_strides_tell_the_network_their_time(
    clock: Transformer, rule: UnmaskingRule | None, block_law: BlockLaw
) -> None:
    """Of all its tokens: of what was written before, too, as it was trained."""
    given = (1, 0, 3, 0)
    law = in_strides(clock, given, 6, 4, 2, block_law)
    drawn = written(clock, given=given, length=6, unmasking=rule)
    assert chi_square(drawn, law) > FITS
    without = in_blocks(clock, given[2:], 4, 2, block_law)  # what was written before has no noise
    assert chi_square([text[2:] for text in drawn], without) < FAILS


def test_an_adaptive_rule_tells_the_share_of_masks_in_the_whole_context(clock: Transformer) -> None:
    """One of four, then none that is left: of the stride alone it would be one of two."""
    law = in_strides(clock, (1, 0, 3, 0), 6, 4, 2, likeliest())
    drawn = written(clock, given=(1, 0, 3, 0), length=6, unmasking=MostConfident())
    assert chi_square(drawn, law) > FITS
    of_the_stride = in_strides(
        clock,
        (1, 0, 3, 0),
        6,
        4,
        2,
        lambda ask, *block: likeliest()(lambda state, rate: ask(state, 2 * rate), *block),
    )
    assert chi_square(drawn, of_the_stride) < FAILS


@pytest.mark.parametrize(("stride", "context"), [(0, 4), (5, 4)])
def test_a_stride_beyond_the_context_is_named(model: Transformer, stride: int, context: int) -> None:
    with pytest.raises(ValueError, match=rf"stride must lie in 1\.\.{context}, the context, got {stride}"):
        SlidingWriter(model, reading=blocks_of(context), context=context, stride=stride)


def test_a_context_of_several_blocks_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="one block of the whole context 4, got blocks of 2"):
        SlidingWriter(model, reading=blocks_of(2), context=4)
