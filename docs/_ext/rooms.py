"""`.. room:: bd3lm.sampling`: what a room makes public, by the files that own it.

The names of a room's `__all__` stand under the first lines of their files' docstrings, so that a new name
appears on its page without a change to it. What is public without being named there is listed below the
directive, by its full name.
"""

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, get_args, get_origin

from docstrings import as_restructured_text
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective


class Named(NamedTuple):
    """A public name: the path by which it is imported, and where its source is."""

    path: str
    owner: ModuleType
    name_there: str

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.name_there)

    @property
    def lines(self) -> list[str]:
        """Its docstring. A constant has one if a string stands below it."""
        if inspect.isclass(self.value) or inspect.isroutine(self.value):
            return (inspect.getdoc(self.value) or "").splitlines()
        found = ModuleAnalyzer.for_module(self.owner.__name__).find_attr_docs()
        return found.get(("", self.name_there), [])

    @property
    def line(self) -> int:
        return ModuleAnalyzer.for_module(self.owner.__name__).tags[self.name_there][1] if self._tagged else 0

    @property
    def _tagged(self) -> bool:
        analyzer = ModuleAnalyzer.for_module(self.owner.__name__)
        analyzer.analyze()
        return self.name_there in analyzer.tags


class Room(SphinxDirective):
    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"without": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        room = import_module(self.arguments[0])
        without = self.options.get("without", "").split()
        named = [_public(room, name) for name in getattr(room, "__all__", ()) if name not in without]
        named = [each for each in named if not _elsewhere(each, room)] + [
            _full(path) for path in self.content
        ]
        owners = sorted({each.owner.__name__ for each in named} - {room.__name__})
        for module in (room.__name__, *owners):
            self.env.note_dependency(inspect.getsourcefile(import_module(module)) or "")

        lines = [f".. py:module:: {room.__name__}", "", *as_restructured_text(_doc(room).splitlines())]
        lines += _overview(named)
        for owner in (room.__name__, *owners):
            if owner != room.__name__:
                title = _doc(import_module(owner)).split("\n\n")[0].replace("\n", " ").rstrip(".")
                lines += ["", *_text(title), "-" * 2 * len(title), ""]
            for each in sorted(
                (each for each in named if each.owner.__name__ == owner), key=lambda each: each.line
            ):
                lines += [*_entry(each), ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _text(line: str) -> list[str]:
    return [each for each in as_restructured_text([line]) if each]


def _public(room: ModuleType, name: str) -> Named:
    """A name of a room's `__all__`, with the file that the room imports it from."""
    module, name_there = _imports(room).get(name, (room.__name__, name))
    return Named(f"{room.__name__}.{name}", *_source(module, name_there))


def _full(path: str) -> Named:
    module, _, name = path.rpartition(".")
    return Named(path, *_source(module, name))


def _source(module: str, name: str) -> tuple[ModuleType, str]:
    """Follow imports to the file in which a name is defined."""
    while (found := _imports(import_module(module)).get(name)) is not None:
        module, name = found
    return import_module(module), name


@cache
def _imports(module: ModuleType) -> dict[str, tuple[str, str]]:
    """What a module imports from others of the package, also for type checkers alone: where it is from."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bd3lm.")
        for alias in node.names
        if hasattr(import_module(node.module), alias.name)
    }


def _elsewhere(named: Named, room: ModuleType) -> bool:
    """Whether a name is on the page of another room, whose it is; the page of the package itself has all."""
    other = ".".join(named.owner.__name__.split(".")[:2])
    return room.__name__ not in ("bd3lm", other) and named.name_there in getattr(
        import_module(other), "__all__", ()
    )


def _doc(module: ModuleType) -> str:
    return inspect.getdoc(module) or module.__name__


def _overview(named: list[Named]) -> list[str]:
    """A table of all names, each with the first sentence about it."""
    lines = ["", ".. list-table::", "   :class: overview", ""]
    for each in sorted(named, key=lambda each: each.path.rpartition(".")[2].casefold()):
        first = " ".join(each.lines).split("  ")[0]
        sentence = re.split(r"(?<=[.:])\s+(?=[A-Z`])", first)[0].removesuffix(":")
        lines += [f"   * - :py:obj:`~{each.path}`", f"     - {''.join(_text(sentence))}"]
    return [*lines, ""] if named else []


def _entry(named: Named) -> list[str]:
    value = named.value
    if inspect.isclass(value):
        # A class that another is told by (`Method.Training`) has its own entry.
        others = [
            each
            for each, held in vars(value).items()
            if inspect.isclass(held) and not held.__qualname__.startswith(value.__qualname__)
        ]
        options = ["   :members:", f"   :exclude-members: {', '.join(others)}"]
        if any(base.__module__.startswith("bd3lm") for base in value.__bases__):
            options.append("   :show-inheritance:")
        return [f".. autoclass:: {named.path}", *options]
    if inspect.isroutine(value):
        return [f".. autofunction:: {named.path}"]
    module, _, name = named.path.rpartition(".")
    canonical = f"{named.owner.__name__}.{named.name_there}"
    if get_origin(value) is not None:
        head = [f".. py:type:: {name}", f"   :canonical: {_alias(value)}"]
    else:
        shown = repr(value)
        head = [f".. py:data:: {name}", f"   :canonical: {canonical}"]
        head += [f"   :value: {shown}"] if len(shown) < 80 else []
    return [*head, f"   :module: {module}", "", *(f"   {line}" for line in as_restructured_text(named.lines))]


def _alias(value: Any) -> str:
    """A type alias as one writes it: "a" | "b", Started | Stopped."""
    return " | ".join(each.__name__ if isinstance(each, type) else repr(each) for each in get_args(value))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("room", Room)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
