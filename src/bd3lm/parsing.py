"""From plain values to dataclasses: settings from files, flags and presets, checked as a whole.

People write these files by hand, so one error lists every mistake and suggests the nearest valid name for a
misspelled one.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from bd3lm.kinds import Kinded, spelt_out, why_unusable

T = TypeVar("T")

_MOST_SHOWN = 100  # characters of a value or a key in an error
_MOST_PROBLEMS = 25  # problems listed in one error
_MOST_SAID = 1000  # characters of a dataclass's own message


class SettingsError(ValueError):
    """Everything that is wrong with some settings, and the keys that no field takes."""

    def __init__(self, message: str, unknown_keys: Collection[str]) -> None:
        super().__init__(message)
        self.unknown_keys = frozenset(unknown_keys)
        """Dotted, from the outermost: method.maskng."""


def parse(
    kind: type[T], data: Mapping[str, Any], *, where: str, plugins: Mapping[str, str] | None = None
) -> T:
    """Make a dataclass, nested ones included, from plain values; one SettingsError lists all mistakes.

    A field may be a dataclass, a member of a family chosen by `kind`, or None. A dataclass may have a class
    method `types_for` that gives the types of fields that depend on other fields. `plugins` says which plugin
    defines a kind that may be missing here.
    """
    found = list(islice(_key_problems(kind, data, "", plugins or {}), _MOST_PROBLEMS))
    problems = [f"{problem.place}: {problem.what}" for problem in found]
    errors: list[dict[str, Any]] = []
    values = dict(data) if isinstance(data, Mapping) else data
    for name, chosen in _chosen_types(kind, data).items():
        if isinstance(value := values.get(name), Mapping):
            try:
                values[name] = TypeAdapter(chosen).validate_python(value)
            except ValidationError as error:
                del values[name]
                errors += [{**each, "loc": (name, *each["loc"])} for each in _details(error)]
    try:
        parsed = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        errors += _details(error)
    problems += [_describe(details, data) for details in errors if not _told(details)]
    if problems:
        problems = problems[:_MOST_PROBLEMS]
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise SettingsError(
            "\n  ".join([f"{where} has {count}:", *problems]),
            [problem.place for problem in found if problem.is_unknown_key],
        )
    return parsed


def with_plugins(kind: type[T], data: Any, *, where: str) -> T:
    """`parse` for settings that may name, under `plugins`, the file or module of each kind."""
    plugins = data.get("plugins") if isinstance(data, Mapping) else None
    if plugins is None:
        return parse(kind, data, where=where)
    if not isinstance(plugins, Mapping) or not all(isinstance(each, str) for each in plugins.values()):
        raise ValueError(
            f"{where}: plugins must map each kind to its file or module, as a run writes it, got "
            f"{shown(plugins)}; to load a plugin use --plugin"
        )
    rest = {key: value for key, value in data.items() if key != "plugins"}
    return parse(kind, rest, where=where, plugins=plugins)


def types_of(kind: Any, value: object) -> list[Any]:
    """The dataclasses that a field of this type may hold, given its value."""
    kinds = [each for each in (get_args(kind) if isinstance(kind, UnionType) else (kind,)) if is_class(each)]
    chosen: list[Any] = []
    for each in kinds:
        if not is_family(each):
            chosen += [each] if is_dataclass(each) else []
            continue
        said = spelt_out(value)
        named = said.get("kind") if isinstance(said, Mapping) else None
        members = each.members()
        chosen += [members[named]] if isinstance(named, str) and named in members else members.values()
    return chosen


def is_class(kind: Any) -> bool:
    return isinstance(kind, type)


def is_family(kind: Any) -> bool:
    """Whether a type is a family, whose members `kind` selects."""
    return isinstance(kind, type) and issubclass(kind, Kinded) and "kind" not in kind.__dict__


def hints_of(kind: Any, data: object) -> dict[str, Any]:
    """The types of a dataclass's fields, including fields that depend on others."""
    hints = get_type_hints(kind)
    names = {each.name for each in fields(kind)}
    said = {
        name: hint for name, hint in hints.items() if name in names - getattr(kind, "learned", frozenset())
    }
    return {**said, **_chosen_types(kind, data)}


def _chosen_types(kind: Any, data: object) -> Mapping[str, Any]:
    """The types of fields that depend on what other fields hold."""
    types_for = getattr(kind, "types_for", None)
    return types_for(data) if types_for is not None and isinstance(data, Mapping) else {}


def _details(error: ValidationError) -> list[dict[str, Any]]:
    return [dict(details) for details in error.errors(include_url=False)]


def did_you_mean(word: object, options: Collection[str]) -> str:
    """A hint with the nearest option, or an empty text if none is near."""
    near = difflib.get_close_matches(str(word), options, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def did_you_mean_deeper(key: str, kind: Any, data: object) -> str:
    """A hint with the nested dataclass that has this key, one level down; or an empty text."""
    return _deeper(key, hints_of(kind, data), data)


def _deeper(key: str, hints: Mapping[str, Any], data: object) -> str:
    for name, hint in hints.items():
        inside = data.get(name) if isinstance(data, Mapping) else None
        if any(key in hints_of(each, inside) for each in types_of(hint, inside)):
            return f", did you mean '{name}.{key}'?"
    return ""


def shown(value: object) -> str:
    """A value for an error message, kept short however large or deeply nested it is."""
    try:
        text = repr(value)
    except RecursionError:
        return "what is nested too deeply"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def named(key: object) -> str:
    """A key for an error message: as it is, or as a value if it is long or not printable."""
    text = str(key)
    return text if len(text) <= _MOST_SHOWN and text.isprintable() else shown(key)


def raise_problems(problems: Iterator[str]) -> None:
    """Raise one ValueError with all problems, if there are any."""
    if found := list(problems):
        raise ValueError("; ".join(found))


class _Problem(NamedTuple):
    """Something wrong at a place in the settings."""

    place: str
    what: str
    is_unknown_key: bool = False


def _key_problems(kind: Any, data: object, path: str, plugins: Mapping[str, Any]) -> Iterator[_Problem]:
    """Unknown keys and unknown kinds: pydantic says nothing about them, or too little."""
    families = [each for each in (get_args(kind) or (kind,)) if is_family(each)]
    for family in families:
        said, members = spelt_out(data), family.members()
        if not isinstance(said, Mapping):
            return
        given = said.get("kind")
        if given not in list(members):
            found = f"got {shown(given)}" if "kind" in said else "but is missing"
            plugin = plugins.get(given) if isinstance(given, str) else None
            if plugin == "__main__":
                found += f"; {given} was defined in a script or a notebook: define it there first"
            elif plugin:
                found += f"; {given} is of the plugin {plugin}: give --plugin {plugin}, or import it first"
            elif "kind" in said:
                found += did_you_mean(given, members)
            place = f"{path}kind" if isinstance(data, Mapping) else path.removesuffix(".")
            yield _Problem(place, f"must be one of {', '.join(map(repr, members))}, {found}")
            return
        if (why := why_unusable(members[given])) is not None:
            yield _Problem(path.removesuffix("."), f"{given!r} of {members[given].__module__} {why}")
            return
    choices = types_of(kind, data)
    if not isinstance(data, Mapping) or not choices:
        return
    hints = hints_of(choices[0], data)
    names = [*(["kind"] if families else []), *hints]
    allowed = f" allowed are {', '.join(names)}" if names else " no option is allowed here"
    for key, value in data.items():
        if key in hints:
            yield from _number_problems(hints[key], value, f"{path}{key}")
            yield from _key_problems(hints[key], value, f"{path}{key}.", plugins)
        elif key not in names:
            suggestion = did_you_mean(key, names) or _deeper(key, hints, data) or ("," if allowed else "")
            what = f"unknown key{suggestion}{allowed}"
            allowed = ""  # once is enough
            yield _Problem(f"{path}{named(key)}", what, is_unknown_key=True)


def _number_problems(kind: Any, value: object, place: str) -> Iterator[_Problem]:
    """Values that look like another number: pydantic takes true for 1, and octal 010 for 10."""
    if not any(member in (int, float) for member in get_args(kind) or (kind,)):
        return
    for each in value if isinstance(value, list | tuple) else (value,):
        octal = isinstance(each, str) and re.fullmatch(r"[-+]?0[0-9_]+(\.[0-9_]*)?", each)
        if isinstance(each, bool) or octal:
            yield _Problem(place, f"must be a decimal number, got {shown(each)}")


def _told(error: Mapping[str, Any]) -> bool:
    """Whether `_key_problems` reports it better: a mapping with a missing or unknown `kind`."""
    return error["type"] in ("union_tag_invalid", "union_tag_not_found") and isinstance(
        error["input"], Mapping
    )


def _describe(error: Mapping[str, Any], data: object) -> str:
    """One of pydantic's errors as `field: what is allowed, what was given`."""
    place = ".".join(_path(error["loc"], data))
    place = f"{place}: " if place else ""
    match error["type"]:
        case "missing":
            return f"{place}must be given, but is missing"
        case "value_error":  # from a __post_init__, which names the field and the value
            return f"{place}{error['ctx']['error']!s:.{_MOST_SAID}}"
        case "union_tag_invalid" | "union_tag_not_found":
            return f"{place}must be a kind, or a mapping with one, got {shown(error['input'])}"
    return f"{place}{error['msg'][:1].lower()}{error['msg'][1:]}, got {shown(error['input'])}"


def _path(location: tuple[int | str, ...], data: object) -> list[str]:
    """The keys that lead to an error: pydantic's location without the names of chosen union members."""
    path = []
    for index, part in enumerate(location):
        if part == (data.get("kind") if isinstance(data, Mapping) else data):
            continue
        path.append(named(part))
        if isinstance(data, Mapping) and index < len(location) - 1:
            data = data.get(part)
    return path


_BRACES = re.compile(r"\{\{|\}\}|\{(\d+)\}|[{}]")


def template_parts(template: str, argument: str) -> list[str | int]:
    """Split "The {3} sat." into parts. {3} is a gap of 3 tokens; {{ and }} are braces."""
    parts: list[str | int] = []
    text, place = "", 0
    for found in _BRACES.finditer(template):
        text, place = text + template[place : found.start()], found.end()
        if found[0] in ("{{", "}}"):
            text += found[0][0]
        elif found[1] is None or int(found[1]) < 1:
            raise ValueError(
                f"{argument}: a gap is a number of tokens, at least 1, in braces, such as {{3}}; a literal "
                f"brace is written {{{{ or }}}}; got {found[0]!r} in {template!r}"
            )
        else:
            parts += [*([text] if text else []), int(found[1])]
            text = ""
    text += template[place:]
    if not parts:
        raise ValueError(
            f"{argument} must contain a gap, such as {{3}}, got {template!r}; to continue a text, pass it as "
            "a prompt"
        )
    return [*parts, *([text] if text else [])]
