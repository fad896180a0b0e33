"""One module from several: what is included, in which order, and what is refused."""

import sys
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bd3lm.interop import inlining

numbers = count()  # Python caches packages by name

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the inlined text of a module `top` of a package, given as the texts of its modules."""

    def inline_and_run(**modules: str) -> dict[str, Any]:
        package = f"package_{next(numbers)}"
        folder = tmp_path / package
        folder.mkdir()
        for name, text in {"__init__": "", **modules}.items():
            lines = textwrap.dedent(text).replace("OURS", package)
            (folder / f"{name}.py").write_text(lines if name != "top" else f'"""Top."""\n{lines}')
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(inlining, "PACKAGE", package)
        text = inlining.inlined(f"{package}.top", heading="# made")
        assert package not in text.replace(f"# From {package}", "").replace(f"from {package}'s modules", "")
        assert not {name for name in sys.modules if name.startswith(f"{package}.")}  # read, but not run
        found: dict[str, Any] = {"__name__": "inlined", "text": text}
        exec(compile(text, "inlined", "exec"), found)
        return found

    return inline_and_run


def test_only_what_is_used_is_included(run: Run) -> None:
    found = run(
        base="""
            import math

            LIMIT = 3  # of all
            UNUSED = 4


            def limited(x: float) -> float:
                return min(math.sqrt(x), LIMIT)
        """,
        middle="""
            from OURS.base import UNUSED, limited


            def twice(x):
                limit = limited(x)
                return 2 * limit


            def unused():
                return UNUSED
        """,
        top="""
            from OURS.middle import twice


            def answer(x):
                return twice(x) + 1
        """,
    )
    assert (found["answer"](4), found["answer"](100)) == (5, 7)
    assert not {"unused", "UNUSED"} & found.keys()
    assert "# of all" in found["text"]


def test_own_definitions_stand_in_for_others_of_that_name(run: Run) -> None:
    found = run(
        base="def kernel(x):\n    return 'fast'",
        middle="from OURS.base import kernel\n\n\ndef layer(x):\n    return kernel(x)",
        top="from OURS.middle import layer\n\n\ndef kernel(x):\n    return 'plain'",
    )
    assert found["kernel"](0) == "plain"
    assert "layer" not in found  # nothing uses it
    found = run(
        base="def kernel(x):\n    return 'fast'",
        middle="from OURS.base import kernel\n\n\ndef layer(x):\n    return kernel(x)",
        top="from OURS.middle import layer\n\n\ndef kernel(x):\n    return 'plain'\n\n\nmade = layer",
    )
    assert found["made"](0) == "plain"


def test_a_method_is_taken_with_what_it_needs(run: Run) -> None:
    found = run(
        base="""
            import math
            from functools import cached_property


            def half(x):
                return x / 2


            def foreign():
                raise RuntimeError


            class Other:
                def __init__(self):
                    foreign()

                # Of a circle.
                @property
                def area(self) -> "Other":
                    return half(self.width) ** 2 * math.pi
        """,
        top="""
            from OURS.base import Other


            class Circle:
                width = 2.0
                area = Other.area
        """,
    )
    assert round(found["Circle"]().area, 3) == 3.142
    assert not {"Other", "foreign", "cached_property"} & found.keys()
    assert "# Of a circle." in found["text"]


def test_annotations_bring_types_but_no_classes(run: Run) -> None:
    found = run(
        base="""
            from collections.abc import Sequence

            Pair = tuple[int, int]


            class Heavy:
                pass


            def first(pair: Pair, heavy: Heavy, many: "Sequence[Heavy]") -> int:
                return pair[0]
        """,
        top="from OURS.base import first\n\n\ndef answer(pair):\n    return first(pair, None, ())",
    )
    assert found["answer"]((5, 6)) == 5
    assert "Heavy" not in found
    assert "heavy: object" in found["text"]
    assert {"Pair", "Sequence"} <= found.keys()


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        (
            {
                "a": "def same():\n    return 1\n\n\ndef one():\n    return same()",
                "b": "def same():\n    return 2\n\n\ndef two():\n    return same()",
                "top": "from OURS.a import one\nfrom OURS.b import two\n\nboth = one() + two()",
            },
            "same must be defined once",
        ),
        (
            {"a": "def one():\n    return 1", "top": "from OURS.a import one as uno\n\nx = uno()"},
            "must import uno from .* by its own name",
        ),
        (
            {
                "a": "import math\n\n\ndef one():\n    return math.pi",
                "b": "import cmath as math\n\n\ndef two():\n    return math.pi",
                "top": "from OURS.a import one\nfrom OURS.b import two\n\nboth = one() + two()",
            },
            "math must stand for one thing",
        ),
        (
            {"a": "one = 1", "top": "from OURS.a import two\n\nx = two"},
            "two must be defined in .*a, or imported",
        ),
    ],
)
def test_modules_that_cannot_be_combined_are_refused(run: Run, modules: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(**modules)
