"""Families of dataclasses by kind: what files may say, what is saved, and members from elsewhere."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bd3lm.kinds import Kinded, load_plugin, plain, plugins_of
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
    with pytest.raises(ValueError, match=r"kind 'dot' is taken among shapes by Dot of tests.test_kinds"):

        @dataclass(frozen=True)
        class Other(Shape):
            kind = "dot"

    assert Shape.members()["dot"] is Dot


def test_only_a_member_with_a_kind_of_its_own_is_saved() -> None:
    class Heir(Dot):
        pass

    with pytest.raises(ValueError, match=r"Heir must set a kind of its own to be saved"):
        plain(Heir())


PLUGIN = """
from dataclasses import dataclass
from tests.test_kinds import Shape

@dataclass(frozen=True)
class Star(Shape):
    kind = "star"
    points: int = 5
"""


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Members that a test adds are gone after it."""
    before, modules = dict(Shape._members), set(sys.modules)
    yield
    Shape._members.clear()
    Shape._members.update(before)
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_a_file_adds_members(tmp_path: Path, forgotten: None) -> None:
    file = tmp_path / "my_shapes.py"
    file.write_text(PLUGIN)
    saved = {"shape": {"kind": "star", "points": 6}}
    with pytest.raises(
        ValueError, match=r"got 'star'; star is of the plugin my_shapes.py: give --plugin my_shapes.py"
    ):
        parse(Drawing, {**saved, "plugins": {"star": "my_shapes.py"}}, where="it")
    load_plugin(file)
    load_plugin(file)  # once more does nothing
    drawing = parse(Drawing, saved, where="it")
    assert plain(drawing) == {**saved, "others": []}
    assert plugins_of(drawing) == {"star": "my_shapes.py"}
    assert plugins_of(Drawing(shape=Dot())) == {"dot": "tests.test_kinds"}


def test_plugins_that_cannot_be_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    for source, complaint in [
        (tmp_path / "none.py", "none.py, which does not exist"),
        (broken, "could not be loaded: ZeroDivisionError: division by zero"),
        ("no.such.module", "must be a .py file or a module that can be imported, got 'no.such.module'"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            load_plugin(source)
