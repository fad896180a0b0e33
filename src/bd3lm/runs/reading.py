"""Parses settings from flags and YAML files into plain values, which other files check."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args

from bd3lm.io.files import read_text
from bd3lm.io.settings_text import MOST_BYTES, NoYaml, load_settings
from bd3lm.parsing import hints_of, named, shown, types_of

_MOST_PARTS = 20  # names in a flag; fields have six at most


def parse_flags(words: Sequence[str], types_at: Callable[[Sequence[str]], Sequence[Any]]) -> dict[str, Any]:
    """Parse `--train.steps 100 --method.masking.kind=times` into a nested dict. Values of text fields are
    taken as they are; all others are read as YAML."""
    overrides: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ValueError(f"expected --any.field value, got {shown(word)}")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"--{named(name)} needs a value, got none")
            text = rest.pop(0)
        target = overrides
        path = name.replace("-", "_").split(".")
        if len(path) > _MOST_PARTS:
            raise ValueError(f"--any.field must have at most {_MOST_PARTS} names, got {len(path):,}")
        if path[0] == "plugins":
            raise ValueError(
                f"--{named(name)} cannot be a flag: a run writes it; to load a plugin use --plugin"
            )
        *parents, leaf = path
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ValueError(f"--{named(name)} sets a part of a field that another flag sets as a whole")
        if isinstance(target.get(leaf), dict):
            raise ValueError(f"--{named(name)} sets a field as a whole, and another flag sets a part of it")
        try:
            target[leaf] = _flag_value(text, types_at(path) or types_at(path[1:]))  # after a stage's name
        except ValueError as error:
            raise ValueError(f"--{named(name)}: {error}") from None
    return overrides


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in a hand-written YAML file; a ValueError names the file."""
    try:
        text = read_text(path, most=MOST_BYTES, piped=True)
    except FileNotFoundError:
        raise ValueError(f"--config must be a YAML file, and {path} does not exist") from None
    try:
        data = load_settings(text)
    except NoYaml as error:
        raise ValueError(f"{path} {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping of settings, got {type(data).__name__}")
    return data


def types_in(
    kind: type[Any], path: Sequence[str], more: Mapping[Any, Sequence[Any]] | None = None
) -> list[Any]:
    """The types that a field may have, given its path of names; none if it does not exist. `more` gives the
    types behind a dataclass."""
    types: list[Any] = [kind]
    for name in path:
        kinds = [found for each in types for found in types_of(each, None)]
        kinds = [stands for each in kinds for stands in (more or {}).get(each, (each,))]
        found = [hints[name] for each in kinds if name in (hints := hints_of(each, None))]
        types = [
            member for each in found for member in (get_args(each) if isinstance(each, UnionType) else [each])
        ]
    return types


def _flag_value(text: str, types: Sequence[Any]) -> Any:
    """A flag's value for a field of one of these types; the recipe reports what is wrong with it."""
    if NoneType in types and text.lower() in ("null", "none", "~", ""):
        return None
    if str in types:
        return text
    if int in types and re.fullmatch(r"[-+]?[1-9][0-9]*(\.[0-9]*)?[eE]\+?[0-9]+", text):
        return float(text)  # an integer if it is whole
    try:
        return load_settings(text)
    except NoYaml:
        return text
