"""Families of frozen dataclasses, told apart by `kind` in files and flags; anybody can add members.

A family is a base class: masking rules, noise schedules, unmasking rules, methods. A member is a frozen
dataclass that sets `kind`. Defining the class is enough: recipes, saved models and flags can then name it.
Installed packages list modules with members under the entry point group `bd3lm.plugins`; a single file is
loaded by its name.
"""

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points, packages_distributions
from inspect import isabstract
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

PLUGINS = "bd3lm.plugins"
_OWN = __name__.partition(".")[0]


class Kinded:
    """A member of a family, or the family itself: `class MaskingRule(Kinded, family="masking rule")`."""

    kind: ClassVar[str]
    """The name in files and flags."""
    family: ClassVar[str]
    """The name in errors."""
    learned: ClassVar[frozenset[str]] = frozenset()
    """Fields that a member computes while it works; files neither contain nor store them."""
    unsaid: ClassVar[frozenset[str]] = frozenset()
    """Fields that are not written to files while they have their default. They were added after files
    existed, and those files stay as they are."""
    group: ClassVar[str]
    """The entry point group under which installed packages list modules with members."""
    _members: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, *, family: str | None = None, group: str = PLUGINS, **options: Any) -> None:
        super().__init_subclass__(**options)
        if family is not None:
            cls.family, cls.group, cls._members = family, group, {}
        elif "kind" in cls.__dict__:
            before = cls._members.get(cls.kind)
            if before is not None and _place(before) != _place(cls):
                raise ValueError(
                    f"{cls.family} kind {cls.kind!r} is already taken by {before.__qualname__} of "
                    f"{before.__module__}: give {cls.__qualname__} another kind"
                )
            cls._members[cls.kind] = cls

    @classmethod
    def members(cls) -> Mapping[str, type[Self]]:
        """The members of the family by kind, those of installed packages included."""
        load_installed(cls.group)
        return MappingProxyType(cls._members)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema: a member is its dataclass; a family is a choice by `kind`, which may be the bare kind
        if that says everything."""
        if "kind" in cls.__dict__:
            return handler(source)
        choices: dict[str, CoreSchema] = {
            kind: handler.generate_schema(member)
            for kind, member in cls.members().items()
            if why_unusable(member) is None
        }
        chosen = core_schema.tagged_union_schema(choices, discriminator=_kind_of)
        return core_schema.no_info_before_validator_function(spelt_out, chosen)


def why_unusable(member: type[Any]) -> str | None:
    """Why a member cannot be instantiated, or None."""
    if isabstract(member):
        return f"lacks {', '.join(sorted(member.__abstractmethods__))}"
    return None if is_dataclass(member) else "is no dataclass"


def spelt_out(value: Any) -> Any:
    """A bare kind as a mapping: counts becomes {"kind": "counts"}."""
    return {"kind": value} if isinstance(value, str) else value


def _kind_of(value: Any) -> str | None:
    if isinstance(value, Mapping):
        kind = value.get("kind")
        return kind if isinstance(kind, str) else None
    return getattr(type(value), "kind", None)


def plain(value: Any) -> Any:
    """Dataclasses as values for JSON and YAML. A member without fields becomes its bare kind."""
    if isinstance(value, Kinded):
        if "kind" not in type(value).__dict__:
            raise ValueError(
                f"{type(value).__qualname__} must set its own kind to be saved, got {value!r}: files "
                f"identify a {value.family} by its kind"
            )
        if not is_dataclass(value):
            raise ValueError(f"{type(value).__qualname__} must be a dataclass to be saved, got {value!r}")
        said = [
            each.name
            for each in fields(value)
            if each.name not in value.learned
            and not (each.name in value.unsaid and getattr(value, each.name) == each.default)
        ]
        held = {name: plain(getattr(value, name)) for name in said}
        return {"kind": value.kind, **held} if held else value.kind
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def plugins_of(value: Any) -> dict[str, str]:
    """Where the members inside a value come from, by kind, unless they are part of bd3lm: a file name or a
    module, as --plugin takes it."""
    kinds = {each.kind: plugin_of(type(each)) for each in _within(value) if isinstance(each, Kinded)}
    return {kind: plugin for kind, plugin in kinds.items() if plugin is not None}


def plugin_of(member: type[Any]) -> str | None:
    """Where a member comes from, as in `plugins_of`; None for a member of bd3lm."""
    module = member.__module__
    if module.partition(".")[0] == _OWN:
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    of_package = "." in module or module in packages_distributions()
    return module if file is None or of_package else Path(file).name


def _within(value: Any) -> Iterator[Any]:
    """A value and everything inside it."""
    yield value
    if is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _within(getattr(value, each.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _within(item)


@cache
def load_installed(group: str) -> None:
    """Import the modules that installed packages list in a group of entry points, once.

    A broken plugin causes a warning and is left out; everything else still works.
    """
    for entry in entry_points(group=group):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            warnings.warn(
                f"the plugin {entry.name} ({entry.value}) is left out because it could not be imported: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def load_plugin(source: str | Path) -> None:
    """Import a file, or a module by name, for the members that it defines. A file is imported once."""
    path = Path(source).expanduser()
    if path.suffix != ".py" and not path.is_dir():
        with _explained(f"plugin {source}"):
            importlib.import_module(str(source))
        return
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"plugin must be a .py file or a module, got {path}, which {wrong}")
    file = str(path.resolve())
    if any(getattr(module, "__file__", None) == file for module in list(sys.modules.values())):
        return
    name = f"bd3lm_plugin_{sha256(file.encode()).hexdigest()[:12]}_{path.stem}"  # two files get two modules
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"plugin must be a .py file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _explained(f"plugin {path}"):
            spec.loader.exec_module(module)
    except ValueError:
        del sys.modules[name]
        raise


@contextmanager
def _explained(plugin: str) -> Iterator[None]:
    """Raise anything that goes wrong in a plugin as one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{plugin} could not be loaded: {type(error).__name__}: {error}") from error


def _place(member: type[Any]) -> tuple[str, str]:
    return member.__module__, member.__qualname__
