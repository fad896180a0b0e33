"""Settings over settings: a file over a preset, flags over both. Plain values, so presets need no torch."""

from collections.abc import Mapping
from typing import Any

from bd3lm.kinds import spelt_out


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, later ones winning. A `kind` that changes drops the options of the kind before, and a
    method that changes drops those of its training."""
    merged: dict[str, Any] = {}
    for layer in layers:
        if _is_other(_kind(layer.get("method")), _kind(merged.get("method"))):
            merged.pop("objective", None)
        for key, value in layer.items():
            before = merged.get(key)
            if isinstance(value, Mapping) and isinstance(before, Mapping | str):
                changed = _is_other(_kind(value), _kind(before))
                merged[key] = merge({} if changed else spelt_out(before), value)
            else:
                merged[key] = merge(value) if isinstance(value, Mapping) else value
    return merged


def _is_other(kind: Any, before: Any) -> bool:
    """Whether a kind is said, and another than before."""
    return kind is not None and before is not None and kind != before


def _kind(value: Any) -> Any:
    """The kind that is said of a member of a family; None where none is said."""
    said = spelt_out(value)
    return said.get("kind") if isinstance(said, Mapping) else None
