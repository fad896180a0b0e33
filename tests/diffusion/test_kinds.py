"""Schedules, masking rules and projections as plain values, as recipes and saved models hold them."""

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from bd3lm.diffusion import (
    ClippedTimes,
    ClipSearch,
    Cosine,
    Counts,
    DiscreteTimes,
    Floored,
    GreedyProjection,
    LearnedCounts,
    Linear,
    Logarithmic,
    MaskingRule,
    MultiHotProjection,
    NoiseSchedule,
    Projection,
    SamplingProjection,
    Square,
    SquareRoot,
    Times,
)
from bd3lm.kinds import plain

MEMBERS = [
    (NoiseSchedule, Linear(), "linear"),
    (NoiseSchedule, Square(), "square"),
    (NoiseSchedule, SquareRoot(), "square_root"),
    (NoiseSchedule, Logarithmic(), "logarithmic"),
    (NoiseSchedule, Cosine(), "cosine"),
    (NoiseSchedule, Floored(Cosine()), {"kind": "floored", "schedule": "cosine", "least_alpha": 0.001}),
    (MaskingRule, Times(Square()), {"kind": "times", "schedule": "square"}),
    (MaskingRule, DiscreteTimes(steps=7), {"kind": "discrete", "steps": 7, "schedule": "linear"}),
    (
        MaskingRule,
        ClippedTimes(low=0.3, redraw=True, search=ClipSearch(every=10, widths=(0.5,))),
        {
            "kind": "clipped",
            "low": 0.3,
            "high": 1.0,
            "weight": "reference",
            "redraw": True,
            "search": {"every": 10, "batches": 100, "widths": [0.5], "step": 0.05, "full_range": True},
        },
    ),
    (
        MaskingRule,
        Counts(proposal=(1.0, 2.0), lean=0.5),
        {"kind": "counts", "proposal": [1.0, 2.0], "complementary": False, "lean": 0.5, "weight": "nelbo"},
    ),
    (MaskingRule, LearnedCounts(), "learned_counts"),
    (Projection, GreedyProjection(), "greedy"),
    (Projection, SamplingProjection(), {"kind": "sampling", "top_p": 0.95}),
    (Projection, MultiHotProjection(0.5), {"kind": "multi_hot", "top_p": 0.5}),
]


@pytest.mark.parametrize(("family", "member", "values"), MEMBERS, ids=lambda each: str(each)[:30])
def test_a_member_is_its_kind_and_its_fields(family, member, values):
    assert plain(member) == values == json.loads(json.dumps(values))
    assert TypeAdapter(family).validate_python(values) == member


@pytest.mark.parametrize("family", [NoiseSchedule, MaskingRule, Projection])
def test_every_member_is_known_by_its_kind(family):
    ours = {member for member in family.members().values() if member.__module__.startswith("bd3lm.")}
    assert {type(member) for of, member, _ in MEMBERS if of is family} == ours


def test_what_is_left_out_is_the_default():
    for member in (Counts(), ClippedTimes(), Times(), LearnedCounts()):
        assert TypeAdapter(MaskingRule).validate_python(member.kind) == member


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "counts", "weight": "none"}, "'nelbo' or 'flat'"),
        ({"kind": "clipped", "weight": "none"}, "'reference', 'derivative', 'paper' or 'flat'"),
        ({"kind": "counts", "complementary": True, "lean": 1.0}, "complementary=True needs lean 0, got 1"),
        ({"kind": "counts", "lean": -1.0}, "lean must be"),
        ({"kind": "discrete", "steps": 0}, "steps must be at least 1, got 0"),
        ({"kind": "times", "schedule": {"kind": "floored", "schedule": "sine"}}, "schedule"),
    ],
)
def test_a_mistake_is_named(values, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(MaskingRule).validate_python(values)
