"""An unmasking rule as plain values, as records hold it, and the strings of older records read as such."""

import ast
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from bd3lm.sampling.unmasking import Unmasking


def rule_values(rule: Unmasking | None) -> dict[str, Any] | None:
    """{"kind": the name of its class, and its fields}; a rule that is not a dataclass has its kind alone."""
    return None if rule is None else _of_object(rule)


def read_rule_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were recorded, with the values of their `unmasking` rule.

    Older records have the rule's repr in its place.
    """
    read = dict(settings)
    if isinstance(read.get("unmasking"), str):
        read["unmasking"] = read_rule_values(read["unmasking"])
    return read


def read_rule_values(written: str | Mapping[str, Any]) -> dict[str, Any]:
    """The values of a recorded rule, such as those of "Ancestral(steps=8)" in an older record."""
    if not isinstance(written, str):
        return dict(written)
    try:
        parsed = _of_node(ast.parse(written, mode="eval").body)
        if not isinstance(parsed, dict):
            raise ValueError(f"a rule must be written as a call, got {written!r}")
        values = parsed
    except (SyntaxError, ValueError):
        # A rule of a user's own may have had any repr, most often "<module.Name object at 0x...>".
        name = re.match(r"<?(?:[\w<>]+\.)*(\w+)", written)
        values = {"kind": name[1] if name else written}
    if values["kind"] == "FirstHitting":
        values.setdefault("lean", 0.0)  # was left out where it was 0
    return values


def _of_object(value: Any) -> dict[str, Any]:
    kept = fields(value) if is_dataclass(value) else ()
    return {"kind": type(value).__name__, **{each.name: _plain(getattr(value, each.name)) for each in kept}}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return _of_object(value)


def _of_node(node: ast.expr) -> Any:
    """A call by keywords, Name(key=value, ...), as the values of an object; else a literal."""
    if not isinstance(node, ast.Call):
        return _plain(ast.literal_eval(node))
    if not isinstance(node.func, ast.Name) or node.args:
        raise ValueError(f"a rule must be written as Name(key=value), got {ast.unparse(node)!r}")
    return {"kind": node.func.id, **{str(each.arg): _of_node(each.value) for each in node.keywords}}
