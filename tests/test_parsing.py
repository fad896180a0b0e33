from dataclasses import dataclass

import pytest

from bd3lm.methods import AutoregressiveMethod, Method
from bd3lm.models import TransformerConfig
from bd3lm.parsing import did_you_mean, parse

NETWORK = TransformerConfig(vocab_size=11, context=16)


def test_parse_takes_any_dataclass() -> None:
    assert parse(TransformerConfig, {"vocab_size": 11, "context": 16}, where="network") == NETWORK
    with pytest.raises(
        ValueError, match=r"^network has a problem:\n  contex: unknown key, did you mean 'context'"
    ):
        parse(TransformerConfig, {"vocab_size": 11, "contex": 16}, where="network")


@dataclass(frozen=True, kw_only=True)
class Inner:
    method: Method
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner | None = None


def test_parse_looks_into_optional_and_nested_parts() -> None:
    method = {"kind": "autoregressive", "score_first": True}
    assert parse(Outer, {}, where="it") == Outer()
    assert parse(Outer, {"inner": None}, where="it") == Outer()
    expected = Outer(inner=Inner(method=AutoregressiveMethod(score_first=True), count=2))
    assert parse(Outer, {"inner": {"method": method, "count": 2}}, where="it") == expected
    wrong = {"inner": {"method": method | {"score_first": "x", "mask": 1}, "count": {"a": 1}, "counts": 1}}
    with pytest.raises(ValueError, match="it has 4 problems") as caught:
        parse(Outer, wrong, where="it")
    for start in (
        "inner.method.mask: unknown",
        "inner.counts: unknown",
        "inner.method.score_first: ",
        "inner.count: ",
    ):
        assert f"\n  {start}" in str(caught.value)


@dataclass(frozen=True)
class Nothing:
    pass


def test_a_key_where_nothing_can_be_set() -> None:
    with pytest.raises(ValueError, match="a: unknown key, no option is allowed here"):
        parse(Nothing, {"a": 1}, where="it")


def test_did_you_mean() -> None:
    assert did_you_mean("smal", ["small", "tiny"]) == ", did you mean 'small'?"
    assert did_you_mean("zebra", ["small", "tiny"]) == ""
