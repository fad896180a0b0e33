"""The kernel that draws tokens, in Triton's interpreter: token for token what `RowSharpening.draw` draws."""

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from bd3lm.sampling import Sharpening
from tests.sampling.drawing_cases import (
    Case,
    assert_equal_tokens,
    assert_it_ends_whatever_the_logits_are,
    assert_the_bound_of_a_gumbel_number_holds,
)

pytestmark = [
    pytest.mark.sweep(2),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

NUCLEI = [
    Sharpening(top_p=p, top_p_rule=rule)
    for p, rule in product((0.05, 0.5, 0.9, 1.0), ("inclusive", "exclusive"))
]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., None]]:
    """Calls a function in a process of its own, in which Triton's kernels are interpreted.

    Triton looks at the variable when it is imported, and here it may have been before.
    """
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("spawn")) as process:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")

        def call(function: Callable[..., Any], *arguments: Any) -> None:
            process.submit(function, *arguments).result()

        yield call


@pytest.mark.parametrize(
    ("logits", "rule"),
    [("random", rule) for rule in NUCLEI]
    + [(logits, rule) for logits in ("flat", "ties", "peaked") for rule in (NUCLEI[2], NUCLEI[5])],
    ids=str,
)
def test_tokens_are_those_of_the_plain_draw(logits, rule, interpreted):
    """200 tokens in four tiles of two chunks, the last tile not full."""
    case = Case(rows=4, vocabulary=200, mask_id=199, rule=rule, logits=logits, tiles=(64, 128), programs=8)
    interpreted(assert_equal_tokens, case)


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [(torch.float32, 0.3), (torch.float32, 2.0), (torch.float16, 0.7), (torch.bfloat16, 2.0)],
    ids=str,
)
def test_any_temperature_and_precision(dtype, temperature, interpreted):
    rule = Sharpening(temperature=temperature, top_p=0.8)
    case = Case(rows=6, vocabulary=100, mask_id=0, rule=rule, dtype=dtype, tiles=(32, 64))
    interpreted(assert_equal_tokens, case)


@pytest.mark.parametrize(
    ("vocabulary", "mask_id", "rule"),
    [  # each size with each p, by turns inclusive and exclusive
        (*size, NUCLEI[2 * p + (p + turn) % 2])
        for turn, size in enumerate(((2, 1), (11, 4), (65, 64)))
        for p in range(4)
    ],
    ids=lambda value: f"{value.top_p}-{value.top_p_rule}" if isinstance(value, Sharpening) else None,
)
def test_small_vocabularies(vocabulary, mask_id, rule, interpreted):
    """Also with the mask alone in the last tile."""
    case = Case(rows=5, vocabulary=vocabulary, mask_id=mask_id, rule=rule, tiles=(64, 64))
    interpreted(assert_equal_tokens, case)


@pytest.mark.parametrize("top_p_rule", ["inclusive", "exclusive"])
def test_of_equal_tokens_the_first_are_in_the_nucleus(top_p_rule, interpreted):
    """About ten of 32 tokens: with one more or one fewer, a tenth of the rows would be drawn otherwise."""
    rule = Sharpening(top_p=0.333, top_p_rule=top_p_rule)
    case = Case(rows=16, vocabulary=33, mask_id=7, rule=rule, logits="equal", tiles=(16, 32))
    interpreted(assert_equal_tokens, case)


@pytest.mark.parametrize(
    ("logits", "temperature", "offset"),
    [("flat", 1.0, 0.0), ("random", 1.0, 1e5), ("ties", 0.01, -1e3)],  # of 1e5 float32 has steps of 2^-7
)
def test_a_program_of_many_tiles_finds_the_highest_score_in_any(logits, temperature, offset, interpreted):
    """12 tiles a program, of which most are seen to hold no highest score and are not computed."""
    case = Case(
        rows=14,
        vocabulary=96,
        mask_id=95,
        rule=Sharpening(temperature=temperature),
        logits=logits,
        dtype=torch.float32,
        offset=offset,
        tiles=(8, 128),
        programs=1,
    )
    interpreted(assert_equal_tokens, case)


def test_impossible_tokens_rows_far_apart_and_a_turn_for_each_row(interpreted):
    rule = Sharpening(top_p=0.6)
    case = Case(rows=6, vocabulary=100, mask_id=3, rule=rule, logits="impossible", padding=28, repeats=6)
    interpreted(assert_equal_tokens, case)


def assert_rows_must_lie_side_by_side() -> None:
    from bd3lm.models.kernels import drawing as kernel

    number = torch.zeros(10, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"logits of a row must be contiguous, got strides \(1, 10\)"):
        kernel.draw(
            *(torch.zeros(5, 10).T, number, number, number),
            mask_id=4,
            temperature=torch.ones(1),
            top_p=None,
            inclusive=torch.ones(1, dtype=torch.bool),
        )


def test_logits_that_do_not_lie_side_by_side_are_refused(interpreted):
    interpreted(assert_rows_must_lie_side_by_side)


def test_it_ends_even_where_logits_are_no_numbers(interpreted):
    interpreted(assert_it_ends_whatever_the_logits_are, torch.device("cpu"))


def test_what_decides_whether_a_score_is_computed_is_never_below_it(interpreted):
    interpreted(assert_the_bound_of_a_gumbel_number_holds, torch.device("cpu"))
