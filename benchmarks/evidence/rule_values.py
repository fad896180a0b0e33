"""An unmasking rule as plain values, as measured results hold it, and the strings of older results."""

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from bd3lm.sampling import UnmaskingRule


def rule_values(rule: UnmaskingRule) -> dict[str, Any]:
    """{"kind": the name of its class, and its fields}."""
    values: dict[str, Any] = _plain(rule)
    return values


def read_rule_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were recorded, with the values of their `unmasking` rule.

    Older results have the rule's repr in its place.
    """
    read = dict(settings)
    if isinstance(read.get("unmasking"), str):
        read["unmasking"] = read_rule_values(read["unmasking"])
    return read


def read_rule_values(written: str | Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recorded rule, such as those of "Ancestral(steps=8)" in an older result."""
    if not isinstance(written, str):
        return dict(written)
    values: dict[str, Any] = _of_node(ast.parse(written, mode="eval").body)
    if values["kind"] == "FirstHitting":
        values.setdefault("lean", 0.0)  # was left out where it was 0
    return values


def _plain(value: Any) -> Any:
    if not is_dataclass(value):
        return value
    return {
        "kind": type(value).__name__,
        **{each.name: _plain(getattr(value, each.name)) for each in fields(value)},
    }


def _of_node(node: ast.expr) -> Any:
    """A call by keywords, Name(key=value, ...), as the values of an object; else a literal."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return {"kind": node.func.id, **{str(each.arg): _of_node(each.value) for each in node.keywords}}
    return ast.literal_eval(node)
