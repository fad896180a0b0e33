"""Rules as plain values, as measured results name them, and the strings of older results read as such."""

import json

import pytest
from benchmarks.evidence.rule_values import read_rule_settings, read_rule_values, rule_values

from bd3lm.diffusion import Cosine
from bd3lm.sampling import Ancestral, EntropyBound, FirstHitting, MostConfident, Remasking

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
    assert json.dumps(rule_values(rule)) == json.dumps(values)  # 2 is not 2.0 in a file
    assert read_rule_values(repr(rule)) == values
    assert read_rule_values(values) == values


def test_strings_of_older_results():
    values = {"kind": "FirstHitting", "tokens_per_pass": 1, "lean": 0.0}
    assert read_rule_values("FirstHitting(tokens_per_pass=1)") == values


def test_settings_are_read_with_the_values_of_their_rule():
    values = {"kind": "EntropyBound", "bound": 0.3}
    assert read_rule_settings({"seed": 1, "unmasking": "EntropyBound(bound=0.3)"}) == {
        "seed": 1,
        "unmasking": values,
    }
    for settings in ({"unmasking": values}, {"unmasking": None}, {"seed": 1}):
        assert read_rule_settings(settings) == settings
