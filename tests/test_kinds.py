"""Families of dataclasses by kind: what files may say, what is saved, and members from elsewhere."""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bd3lm.kinds import Kinded, load_installed, load_plugin, plain, plugins_of
from bd3lm.parsing import parse


class Shape(Kinded, family="shape"):
    """A family of the test's own."""


@dataclass(frozen=True)
class Dot(Shape):
    kind = "dot"


@dataclass(frozen=True, kw_only=True)
class Ring(Shape):
    kind = "ring"
    radius: float = 1.0
    inside: Shape | None = None


@dataclass(frozen=True, kw_only=True)
class Drawing:
    shape: Shape
    others: tuple[Shape, ...] = field(default=())


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("dot", Dot()),
        ({"kind": "dot"}, Dot()),
        ("ring", Ring()),
        (
            {"kind": "ring", "radius": 2, "inside": {"kind": "ring", "inside": "dot"}},
            Ring(radius=2.0, inside=Ring(inside=Dot())),
        ),
        (Dot(), Dot()),
    ],
    ids=str,
)
def test_what_is_said_and_meant(said: Any, meant: Shape) -> None:
    drawing = parse(Drawing, {"shape": said}, where="it")
    assert drawing == Drawing(shape=meant)
    assert parse(Drawing, plain(drawing), where="it") == drawing


class Grown(Kinded, family="grown"):
    """Another family."""


@dataclass(frozen=True, kw_only=True)
class Tree(Grown):
    """It got a second field when files knew the first alone."""

    kind = "tree"
    unsaid = frozenset({"bare"})
    rings: int = 5
    bare: bool = False


@dataclass(frozen=True, kw_only=True)
class Garden:
    tree: Grown


def test_a_field_that_came_later_is_saved_where_it_says_something() -> None:
    assert plain(Tree()) == {"kind": "tree", "rings": 5}
    assert plain(Tree(bare=True)) == {"kind": "tree", "rings": 5, "bare": True}
    for tree in (Tree(), Tree(bare=True)):
        assert parse(Garden, plain(Garden(tree=tree)), where="it") == Garden(tree=tree)


def test_a_member_without_fields_is_saved_as_its_kind() -> None:
    assert plain(Drawing(shape=Dot(), others=(Ring(),))) == {
        "shape": "dot",
        "others": [{"kind": "ring", "radius": 1.0, "inside": None}],
    }


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("dott", "shape: must be one of 'dot', 'ring', got 'dott', did you mean 'dot'?"),
        ({"kind": "rong"}, "shape.kind: must be one of 'dot', 'ring', got 'rong', did you mean 'ring'?"),
        ({"radius": 2}, "shape.kind: must be one of 'dot', 'ring', but is missing"),
        (3, "shape: must be a kind, or a mapping with one, got 3"),
        (
            {"kind": "ring", "radios": 2},
            "shape.radios: unknown key, did you mean 'radius'? allowed are kind, radius",
        ),
        ({"kind": "ring", "inside": "dit"}, "shape.inside: must be one of 'dot', 'ring', got 'dit'"),
        ({"kind": "ring", "radius": "wide"}, "shape.radius: input should be a valid number"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(said: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"^it has a problem:\n") as caught:
        parse(Drawing, {"shape": said}, where="it")
    assert complaint in str(caught.value)


def test_a_kind_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"shape kind 'dot' is already taken by Dot of tests.test_kinds"):

        @dataclass(frozen=True)
        class Other(Shape):
            kind = "dot"

    assert Shape.members()["dot"] is Dot


def test_only_a_member_with_a_kind_of_its_own_is_saved() -> None:
    class Heir(Dot):
        pass

    with pytest.raises(ValueError, match=r"Heir must set its own kind to be saved"):
        plain(Heir())


PLUGIN = """
from dataclasses import dataclass
from tests.test_kinds import Shape

@dataclass(frozen=True)
class Star(Shape):
    kind = "star"
    points: int = 5
"""


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Members that a test adds are gone after it."""
    before, modules = dict(Shape._members), set(sys.modules)
    yield
    Shape._members.clear()
    Shape._members.update(before)
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_a_file_adds_members(tmp_path: Path) -> None:
    file = tmp_path / "my_shapes.py"
    file.write_text(PLUGIN)
    saved = {"shape": {"kind": "star", "points": 6}}
    with pytest.raises(
        ValueError, match=r"got 'star'; star is of the plugin my_shapes.py: give --plugin my_shapes.py"
    ):
        parse(Drawing, saved, where="it", plugins={"star": "my_shapes.py"})
    load_plugin(file)
    load_plugin(file)  # once more does nothing
    drawing = parse(Drawing, saved, where="it")
    assert plain(drawing) == {**saved, "others": []}
    assert plugins_of(drawing) == {"star": "my_shapes.py"}
    assert plugins_of(Drawing(shape=Dot())) == {"dot": "tests.test_kinds"}


def test_plugins_that_cannot_be_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    leaving = tmp_path / "leaving.py"
    leaving.write_text("import sys; sys.exit(0)")
    for source, complaint in [
        (tmp_path / "none.py", "none.py, which does not exist"),
        (tmp_path, "must be a .py file or a module, got .*, which is a folder"),
        (broken, "could not be loaded: ZeroDivisionError: division by zero"),
        (leaving, "could not be loaded: SystemExit: 0"),
        ("no.such.module", "no.such.module could not be loaded: ModuleNotFoundError"),
        (".", "could not be loaded|which is a folder"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            load_plugin(source)


def test_two_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_shapes.py").write_text(PLUGIN)
    load_plugin(tmp_path / "a" / "my_shapes.py")
    with pytest.raises(
        ValueError, match=r"shape kind 'star' is already taken by Star of bd3lm_plugin_.*_my_shapes"
    ):
        load_plugin(tmp_path / "b" / "my_shapes.py")


def test_a_file_that_was_imported_is_not_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shapes_of_a_test.py"
    file.write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shapes_of_a_test")
    load_plugin(file)
    assert Shape.members()["star"] is module.Star
    assert plugins_of(module.Star()) == {"star": "shapes_of_a_test.py"}  # which --plugin finds again


def test_a_member_that_is_abstract_is_told() -> None:
    class Blob(Shape, ABC):
        kind = "blob"

        @abstractmethod
        def area(self) -> float: ...

    with pytest.raises(ValueError, match=r"shape: 'blob' of tests\.test_kinds lacks area"):
        parse(Drawing, {"shape": "blob"}, where="it")


def test_what_is_learned_is_neither_said_nor_kept() -> None:
    @dataclass(frozen=True)
    class Pupil(Shape):
        kind = "pupil"
        learned = frozenset({"notes"})
        age: int = 7
        notes: tuple[int, ...] = ()

    assert plain(Pupil(notes=(1, 2))) == {"kind": "pupil", "age": 7}
    with pytest.raises(ValueError, match=r"shape\.notes: unknown key"):
        parse(Drawing, {"shape": {"kind": "pupil", "notes": [1]}}, where="it")


def test_a_broken_package_keeps_nobody_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name, value = "broken", "broken_module"

        def load(self) -> None:
            raise RuntimeError("no driver")

    monkeypatch.setattr("bd3lm.kinds.entry_points", lambda group: [Broken()])
    with pytest.warns(
        UserWarning, match=r"the plugin broken \(broken_module\) is left out because .*: no driver"
    ):
        load_installed("a.group.of.the.test")
