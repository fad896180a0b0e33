"""Rules as plain values: what records hold, the same in every process, and what older ones held instead."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from torch import Tensor

from bd3lm.diffusion import Cosine
from bd3lm.sampling import (
    Adaptive,
    Ancestral,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Pass,
    Planned,
    Remasking,
)
from bd3lm.sampling.rule_values import read_rule_settings, read_rule_values, rule_values


class LeftFirst(Adaptive):
    def choose(self, log_p: Tensor, drawn: Tensor, hidden: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Own(Planned):
    weights: tuple[float, ...]
    inner: object

    def plan(self, seeds: Tensor, positions: Tensor, hidden: Tensor) -> Iterator[Pass]:
        raise NotImplementedError


LINEAR = {"kind": "Linear"}
RULES = [
    (FirstHitting(), {"kind": "FirstHitting", "tokens_per_pass": 1, "lean": 0.0}),
    (FirstHitting(2, lean=2), {"kind": "FirstHitting", "tokens_per_pass": 2, "lean": 2.0}),
    (Ancestral(9), {"kind": "Ancestral", "steps": 9, "schedule": LINEAR}),
    (Ancestral(9, Cosine()), {"kind": "Ancestral", "steps": 9, "schedule": {"kind": "Cosine"}}),
    (Remasking(steps=5, eta=0.5), {"kind": "Remasking", "steps": 5, "eta": 0.5, "schedule": LINEAR}),
    (MostConfident(), {"kind": "MostConfident", "threshold": None, "tokens_per_pass": 1}),
    (EntropyBound(0.3), {"kind": "EntropyBound", "bound": 0.3}),
]


@pytest.mark.parametrize(("rule", "values"), RULES, ids=lambda each: str(each)[:40])
def test_a_rule_is_its_class_and_its_fields(rule, values):
    assert rule_values(rule) == values == json.loads(json.dumps(values))
    assert json.dumps(rule_values(rule)) == json.dumps(values)  # 2 is not 2.0 in a file


@pytest.mark.parametrize(("rule", "values"), RULES, ids=lambda each: str(each)[:40])
def test_what_a_rule_printed_as_is_read_as_its_values(rule, values):
    assert read_rule_values(repr(rule)) == values
    assert read_rule_values(values) == values


def test_numbers_of_numpy_are_numbers():
    values = rule_values(FirstHitting(np.int64(2), lean=np.float32(0.5)))
    assert json.dumps(values) == '{"kind": "FirstHitting", "tokens_per_pass": 2, "lean": 0.5}'


def test_a_rule_of_ones_own():
    assert rule_values(None) is None
    assert rule_values(LeftFirst()) == {"kind": "LeftFirst"}
    own = Own((0.5, 1.0), object())
    assert rule_values(own) == {"kind": "Own", "weights": [0.5, 1.0], "inner": {"kind": "object"}}


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("FirstHitting(tokens_per_pass=1)", {"kind": "FirstHitting", "tokens_per_pass": 1, "lean": 0.0}),
        ("FirstHitting()", {"kind": "FirstHitting", "lean": 0.0}),
        ("<__main__.LeftFirst object at 0x7f1c>", {"kind": "LeftFirst"}),
        ("<mine.f.<locals>.Left object at 0x7f1c>", {"kind": "Left"}),
        ("Own(weights=tensor([0.5]))", {"kind": "Own"}),
        ("Own(inner=<object object at 0x7f1c>)", {"kind": "Own"}),
        ("Own(2)", {"kind": "Own"}),
        ("from left to right", {"kind": "from"}),
        ("", {"kind": ""}),
    ],
)
def test_strings_of_older_records(written, values):
    assert read_rule_values(written) == values


def test_settings_are_read_with_the_values_of_their_rule():
    values = {"kind": "EntropyBound", "bound": 0.3}
    assert read_rule_settings({"seed": 1, "unmasking": "EntropyBound(bound=0.3)"}) == {
        "seed": 1,
        "unmasking": values,
    }
    for settings in ({"unmasking": values}, {"unmasking": None}, {"seed": 1}):
        assert read_rule_settings(settings) == settings
