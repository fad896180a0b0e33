"""Make one stand-alone module: its text, with everything it imports from this package written into it.

Code that leaves the package is thus the package's own, and nothing needs to be kept in sync by hand. The
module's own definitions replace those with the same names elsewhere: a module that defines `attend` gets our
layers with its own attention.
"""

import ast
import builtins
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "bd3lm"

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class _Imported:
    """A name that a module imports from another module, or a whole module if `name` is None."""

    module: str
    name: str | None
    level: int = 0

    def statement(self, own: str) -> str:
        """The statement that imports a whole module."""
        return f"import {self.module}" + (f" as {own}" if own != self.module.partition(".")[0] else "")


@dataclass(frozen=True)
class _Module:
    """A module's text, and the meaning of its names."""

    name: str
    lines: list[str]
    tree: ast.Module
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, _Imported] = field(default_factory=dict)

    def source(self, node: ast.stmt) -> str:
        """A definition with its decorators and the comments directly above it."""
        start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) - 1
        while start and self.lines[start - 1].lstrip().startswith("#"):
            start -= 1
        return "\n".join(self.lines[start : node.end_lineno])


_Graft = tuple[ast.Assign | ast.AnnAssign, _Module, ast.FunctionDef]


@cache
def _read(name: str) -> _Module:
    """A module of this package as text; none of it is run."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"{name} must be a module of this package")
    text = Path(spec.origin).read_text("utf-8")
    module = _Module(name, text.splitlines(), ast.parse(text))
    for node in module.tree.body:
        for own in _names_defined(node):
            module.definitions[own] = node  # type: ignore[assignment]  # it defines a name
        module.imports.update(_names_imported(node))
    return module


def _names_defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _names_imported(node: ast.stmt) -> Iterator[tuple[str, _Imported]]:
    if isinstance(node, ast.Import):
        for each in node.names:
            own = each.asname or each.name.partition(".")[0]
            yield own, _Imported(each.name, None)
    elif isinstance(node, ast.ImportFrom):
        for each in node.names:
            yield each.asname or each.name, _Imported(node.module or "", each.name, node.level)


class _Collector:
    """Collects the definitions of the package that a module needs, each after those it depends on."""

    def __init__(self, top: _Module) -> None:
        self.top = top
        self.taken: dict[str, tuple[_Module, Definition]] = {}
        self.order: list[_Module] = []
        self.outside: dict[str, _Imported] = {}

    def name(self, module: _Module, name: str) -> None:
        """Take the definition of a name in a module, and everything it needs."""
        if module is not self.top and name in self.top.definitions:
            return
        if name in module.definitions:
            if module is not self.top:
                self._definition(module, name)
        elif (imported := module.imports.get(name)) is not None:
            if not imported.level and imported.module.partition(".")[0] == PACKAGE:
                if imported.name is None or imported.name != name:
                    raise ValueError(
                        f"{module.name} must import {name} from {imported.module} by its own name"
                    )
                self.name(_read(imported.module), name)
            elif self.outside.setdefault(name, imported) != imported:
                raise ValueError(f"{name} must stand for one thing, got {self.outside[name]} and {imported}")
        elif not hasattr(builtins, name):
            raise ValueError(f"{name} must be defined in {module.name}, or imported there")

    def _definition(self, module: _Module, name: str) -> None:
        node = module.definitions[name]
        known = self.taken.get(name)
        if known is not None:
            if known[1] is not node:
                raise ValueError(f"{name} must be defined once, got {known[0].name} and {module.name}")
            return
        for own in _names_defined(node):
            self.taken[own] = module, node
        self.uses(module, node)
        if module not in self.order:
            self.order.append(module)

    def uses(self, module: _Module, node: ast.AST) -> None:
        """Take the definitions of all names inside a node; names in annotations only if they are cheap."""
        for used in sorted(names_used(node)):
            if used in module.definitions or used in module.imports:
                self.name(module, used)
        for used in sorted(_names_of_types(node)):
            if used not in self.top.definitions and _is_cheap(module, used):
                self.name(module, used)


def _is_cheap(module: _Module, name: str) -> bool:
    """Whether a name comes from another package, or is a type alias."""
    imported = module.imports.get(name)
    if imported is None:
        return isinstance(module.definitions.get(name), ast.Assign)
    if imported.level or imported.module.partition(".")[0] != PACKAGE:
        return True
    return imported.name is not None and _is_cheap(_read(imported.module), imported.name)


def names_used(node: ast.AST) -> set[str]:
    """The module-level names that code reads when it runs. Local variables and names in annotations, which
    are never evaluated, do not count."""
    skipped = {id(each) for part in _annotations(node) for each in ast.walk(part)}
    found: set[str] = set()

    def look(at: ast.AST, own: frozenset[str]) -> None:
        if id(at) in skipped:
            return
        if isinstance(at, ast.Name) and isinstance(at.ctx, ast.Load) and at.id not in own:
            found.add(at.id)
        inner = own | _variables(at) if isinstance(at, ast.FunctionDef) else own
        outside = () if not isinstance(at, ast.FunctionDef) else (*at.decorator_list, *_defaults(at))
        for child in ast.iter_child_nodes(at):
            look(child, inner if child not in outside and not isinstance(child, ast.arguments) else own)

    look(node, frozenset())
    return found


def _variables(function: ast.FunctionDef) -> frozenset[str]:
    arguments = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    stored = {
        each.id
        for each in ast.walk(function)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return frozenset(arguments | stored)


def _defaults(function: ast.FunctionDef) -> list[ast.expr]:
    return [each for each in (*function.args.defaults, *function.args.kw_defaults) if each is not None]


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    for each in ast.walk(node):
        if isinstance(each, ast.arg | ast.AnnAssign) and each.annotation is not None:
            yield each.annotation
        elif isinstance(each, ast.FunctionDef) and each.returns is not None:
            yield each.returns


def _names_of_types(node: ast.AST) -> set[str]:
    """The names in annotations and in the first arguments of casts, quoted ones too."""
    casts = (
        each.args[0]
        for each in ast.walk(node)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "cast"
    )
    found = set()
    for part in (*_annotations(node), *casts):
        for each in ast.walk(part):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                quoted = ast.walk(ast.parse(each.value, mode="eval"))
                found |= {inner.id for inner in quoted if isinstance(inner, ast.Name)}
            elif isinstance(each, ast.Name):
                found.add(each.id)
    return found


def inlined(module: str, *, heading: str) -> str:
    """The text of a module with no imports from this package, under a heading of comments.

    A class may take a method from another class, as in `forward = Other.forward`: the text of that method
    replaces the line.
    """
    top = _read(module)
    collector = _Collector(top)
    grafts = list(_grafts(top))
    grafted = {id(node) for node, *_ in grafts}
    for _, owner, method in grafts:
        collector.uses(owner, method)
    for node in top.tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            collector.uses(top, _without(node, grafted))
    inside = "\n\n\n".join(_taken(collector))
    docstring = ast.get_source_segment("\n".join(top.lines), top.tree.body[0])
    text = "\n\n".join(
        (
            heading,
            f"{docstring}\n\nfrom __future__ import annotations",
            _import_lines(collector),
            f"# --- from {PACKAGE}'s modules, unchanged ---\n\n\n{inside}",
            f"\n# --- only in this file ---\n\n\n{_own_text(top, grafts)}",
        )
    )
    return _without_foreign_annotations(text.rstrip() + "\n")


def _without(node: ast.stmt, left_out: set[int]) -> ast.stmt:
    """A statement; if it is a class, without some of its parts."""
    if not isinstance(node, ast.ClassDef) or not any(id(each) in left_out for each in node.body):
        return node
    kept = [each for each in node.body if id(each) not in left_out]
    return ast.ClassDef(node.name, node.bases, node.keywords, kept or [ast.Pass()], node.decorator_list)


def _grafts(top: _Module) -> Iterator[_Graft]:
    """Places where a class of the module takes a method of a class imported from the package."""
    for parent in top.tree.body:
        for node in parent.body if isinstance(parent, ast.ClassDef) else ():
            match node:
                case ast.Assign(value=value) | ast.AnnAssign(value=value):
                    taken = value
                case _:
                    continue
            match taken:
                case ast.Attribute(value=ast.Name(id=owner), attr=method) if owner in top.imports:
                    home = _read(top.imports[owner].module)
                    kind = home.definitions.get(owner)
                    for each in kind.body if isinstance(kind, ast.ClassDef) else ():
                        if isinstance(each, ast.FunctionDef) and each.name == method:
                            yield node, home, each


def _own_text(top: _Module, grafts: list[_Graft]) -> str:
    """The module's own definitions, with the methods that its classes take from others."""
    methods = {node.lineno: home.source(method) for node, home, method in grafts}
    ends = {node.lineno: node.end_lineno or node.lineno for node, *_ in grafts}
    number = 1 + max(
        node.end_lineno or 0 for node in top.tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    )
    kept = []
    while number <= len(top.lines):
        kept.append(methods.get(number, top.lines[number - 1]))
        followed = number in methods and ends[number] + 1 in methods
        kept += [""] if followed else []
        number = ends.get(number, number) + 1
    return "\n".join(kept).strip()


def _taken(collector: _Collector) -> Iterator[str]:
    """The definitions that were taken, module by module, in their original order."""
    for module in collector.order:
        nodes = {id(node): node for home, node in collector.taken.values() if home is module}
        text, before = f"# From {module.name}.", None
        for node in sorted(nodes.values(), key=lambda node: node.lineno):
            both_short = all(isinstance(each, ast.Assign | ast.AnnAssign | None) for each in (before, node))
            text += ("\n" if both_short and before is not None else "\n\n\n") + module.source(node)
            before = node
        yield text


def _import_lines(collector: _Collector) -> str:
    """The imports of the module and of what was taken: from the standard library, from other packages, and
    from files next to it."""
    sections: tuple[list[str], ...] = ([], [], [])
    several: dict[tuple[int, str], list[str]] = {}
    for own, imported in collector.outside.items():
        if imported.name is None:
            sections[_section(imported)].append(imported.statement(own))
        else:
            several.setdefault((imported.level, imported.module), []).append(own)
    for section in sections:
        section.sort()
    for (level, module), names in sorted(several.items()):
        listed = ", ".join(_imported_as(collector.outside[own], own) for own in sorted(names))
        section = sections[_section(_Imported(module, "", level))]
        section.append(f"from {'.' * level}{module} import {listed}")
    return "\n\n".join("\n".join(section) for section in sections if section)


def _section(imported: _Imported) -> int:
    if imported.level:
        return 2
    return int(imported.module.partition(".")[0] not in sys.stdlib_module_names)


def _imported_as(imported: _Imported, own: str) -> str:
    return own if imported.name == own else f"{imported.name} as {own}"


def _without_foreign_annotations(text: str) -> str:
    """The text with annotations that use only names it has; other names become `object`."""
    tree = ast.parse(text)
    known = {own for node in tree.body for own in _names_defined(node)}
    known |= {own for node in tree.body for own, _ in _names_imported(node)}
    lines = [line.encode() for line in text.split("\n")]
    foreign = [
        each
        for part in _annotations(tree)
        for each in ast.walk(part)
        if isinstance(each, ast.Name) and each.id not in known and not hasattr(builtins, each.id)
    ]
    for each in sorted(foreign, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        line = lines[each.lineno - 1]
        lines[each.lineno - 1] = line[: each.col_offset] + b"object" + line[each.end_col_offset :]
    return b"\n".join(lines).decode()
