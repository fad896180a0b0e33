"""The error for a folder with a config.json in a format that we do not load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bd3lm.data.checkpoints import SDAR_TYPE
from bd3lm.interop.families import FAMILIES
from bd3lm.parsing import shown

_TYPES = ", ".join((*FAMILIES, SDAR_TYPE))
_LOADED = (
    "format 'bd3lm', the fields hidden_dim and n_blocks of the BD3-LM reference, or a model_type out of "
    f"{_TYPES}"
)
_LISTED = 5  # fields named for an unknown config
_LONGEST = 100  # characters of a name in the message


def unsupported(folder: Path, config: Mapping[str, Any]) -> ValueError:
    """The error for a config in no known format: its architecture if Hugging Face's fields name it, otherwise
    a few of its fields."""
    architecture = _architecture(config)
    if architecture is not None:
        return ValueError(
            f"{folder} holds a model of type {architecture}, which bd3lm does not load; of Hugging Face's "
            f"types it loads {_TYPES}"
        )
    names = [f"{name:.{_LONGEST}}" for name in config]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    found = f"{', '.join(names[:_LISTED])}{more}" if names else "none"
    return ValueError(f"config.json in {folder} must have {_LOADED}, got the fields: {found}")


def _architecture(config: Mapping[str, Any]) -> str | None:
    """The type that a Hugging Face config.json states: its model_type, its architectures, or both."""
    kind, classes = config.get("model_type"), config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else None
    if not isinstance(kind, str):
        return None if named is None else shown(named)
    return shown(kind) if named is None else f"{shown(kind)} ({named:.{_LONGEST}})"
