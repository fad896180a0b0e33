"""Merges settings: a file over a preset, flags over both. Plain values, so presets need no torch."""

from collections.abc import Mapping
from typing import Any

from bd3lm.kinds import spelt_out

ONLY = "run"
"""The name of the only stage of a run with one stage."""
USUAL_NETWORK = "transformer"
"""The kind of network in a recipe that names none."""
CHECKPOINT = "checkpoint"
"""The size of a network that is taken from the checkpoint that training starts from."""


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dicts; later ones win.

    A changed `kind` drops the options of the old kind, a changed method drops its training options, and a
    network taken from the checkpoint drops the old shape.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if _is_other(_kind(layer.get("method")), _kind(merged.get("method"))):
            merged.pop("objective", None)
        for key, value in layer.items():
            before = merged.get(key)
            if key == "network":
                before = _network_before(before, value)
            if isinstance(value, Mapping) and isinstance(before, Mapping | str):
                changed = _is_other(_kind(value), _kind(before))
                merged[key] = merge({} if changed else spelt_out(before), value)
            else:
                merged[key] = merge(value) if isinstance(value, Mapping) else value
    return merged


def _network_before(before: Any, value: Any) -> Any:
    """The part of a network's settings that remains when another network is set over it."""
    if not isinstance(before, Mapping) or not isinstance(value, Mapping):
        return before
    if value.get("size") == CHECKPOINT:
        return {name: before[name] for name in ("dropout",) if name in before}
    return {"kind": USUAL_NETWORK, **before} if "kind" in value else before


def _is_other(kind: Any, before: Any) -> bool:
    """Whether a kind is given that differs from the one before."""
    return kind is not None and before is not None and kind != before


def _kind(value: Any) -> Any:
    """The kind given for a member of a family; None if none is given."""
    said = spelt_out(value)
    return said.get("kind") if isinstance(said, Mapping) else None
