"""Figures of others stand beside ours only for the very case that they were measured on."""

from dataclasses import replace

import pytest

from bd3lm.bench import SamplingCase, Shape, TrainingCase
from bd3lm.bench.reference import sampling_reference, training_reference

DIFFERENT = [{"layers": 6}, {"hidden": 384}, {"heads": 6}, {"context": 512}, {"vocabulary": 50257}]


@pytest.mark.parametrize(
    ("shape", "rate"),
    [
        (Shape(), 79_500),
        (Shape(block_size=16), 78_000),
        (Shape(method="mdlm"), 135_700),
        (Shape(method="ar"), 513_000),
        (Shape(method="ar", block_size=16), 513_000),
    ],
)
def test_training_has_a_reference_for_what_was_measured(shape, rate):
    found = training_reference(TrainingCase(shape=shape))
    assert found is not None
    assert found[0] == rate


@pytest.mark.parametrize(
    "case",
    [
        TrainingCase(batch_size=16),
        TrainingCase(shape=Shape(block_size=8)),
        *(TrainingCase(shape=Shape(**change)) for change in DIFFERENT),
    ],
    ids=str,
)
def test_training_has_none_for_anything_else(case):
    assert training_reference(case) is None


MEASURED = SamplingCase(dtype="bfloat16")


def test_sampling_has_a_reference_by_method_and_number_of_texts():
    case = replace(MEASURED, shape=Shape(method="ar"))
    assert sampling_reference(case)[0] == 467.0
    assert sampling_reference(replace(case, batch_size=256))[0] == 52_400.0
    assert sampling_reference(MEASURED)[0] == 57.7
    assert sampling_reference(replace(MEASURED, shape=Shape(block_size=16)))[0] == 68.7


@pytest.mark.parametrize(
    "case",
    [
        SamplingCase(dtype="float32"),
        replace(MEASURED, batch_size=2),
        replace(MEASURED, length=256),
        replace(MEASURED, top_p=1.0),
        replace(MEASURED, shape=Shape(method="mdlm")),
        replace(MEASURED, shape=Shape(block_size=8)),
        *(replace(MEASURED, shape=Shape(**change)) for change in DIFFERENT),
    ],
    ids=str,
)
def test_sampling_has_none_for_anything_else(case):
    assert sampling_reference(case) is None
