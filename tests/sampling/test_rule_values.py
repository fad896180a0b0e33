"""Unmasking rules as plain values: what records hold and recipes say, and the rules read from them again."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from bd3lm.diffusion import Cosine
from bd3lm.kinds import plain
from bd3lm.sampling import (
    Adaptive,
    Ancestral,
    BlockWriter,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Remasking,
    Request,
    UnmaskingRule,
    sample,
)
from tests.oracles.networks import blocks_of, tiny_transformer

RULES = [
    (FirstHitting(), {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 0.0}),
    (FirstHitting(2, lean=2), {"kind": "first_hitting", "tokens_per_pass": 2, "lean": 2.0}),
    (
        FirstHitting(np.int64(2), np.float32(0.5)),
        {"kind": "first_hitting", "tokens_per_pass": 2, "lean": 0.5},
    ),
    (Ancestral(9), {"kind": "ancestral", "steps": 9, "schedule": "linear"}),
    (Ancestral(np.int32(9), Cosine()), {"kind": "ancestral", "steps": 9, "schedule": "cosine"}),
    (Remasking(steps=5, eta=1), {"kind": "remasking", "steps": 5, "eta": 1.0, "schedule": "linear"}),
    (MostConfident(), {"kind": "most_confident", "threshold": None, "tokens_per_pass": 1}),
    (MostConfident(threshold=1), {"kind": "most_confident", "threshold": 1.0, "tokens_per_pass": 1}),
    (EntropyBound(np.float64(0.3)), {"kind": "entropy_bound", "bound": 0.3}),
]


@pytest.mark.parametrize(("rule", "values"), RULES, ids=lambda each: str(each)[:40])
def test_a_rule_is_its_kind_and_its_fields(rule, values):
    assert json.dumps(plain(rule)) == json.dumps(values)  # 2 is not 2.0 in a file
    assert TypeAdapter(UnmaskingRule).validate_python(values) == rule


def test_every_rule_is_known_by_its_kind():
    ours = {rule for rule in UnmaskingRule.members().values() if rule.__module__.startswith("bd3lm.")}
    assert {type(rule) for rule, _ in RULES} == ours


def test_a_rule_of_ones_own_is_recorded_once_it_has_a_kind():
    class LeftFirst(Adaptive):
        def choose(self, log_p: Tensor, drawn: Tensor, masked: Tensor) -> Tensor:
            raise NotImplementedError

    with pytest.raises(ValueError, match="LeftFirst must set its own kind to be saved"):
        plain(LeftFirst())


def test_a_rule_is_planned_or_adaptive():
    @dataclass(frozen=True)
    class Neither(UnmaskingRule):
        pass

    writer = BlockWriter(tiny_transformer(0), reading=blocks_of(4), context=4, unmasking=Neither())
    with pytest.raises(ValueError, match=r"unmasking must be a Planned or an Adaptive rule, got .*Neither"):
        sample(writer, [Request(given=torch.zeros(1, dtype=torch.long), seed=0, length=4)])
