"""What makes the site: docstrings as Sphinx reads them, its checker and its front page."""

import importlib.util
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import bd3lm

ROOT = Path(__file__).parents[1]


def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DOCSTRINGS = _module("docs/_ext/docstrings.py")
CHECKER = _module("scripts/check_site.py")


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("A `Gap`s mark.", r"A :py:obj:`Gap`\ s mark."),
        ("Of `a b` and `f(x)`.", "Of :code:`a b` and :code:`f(x)`."),
        ("x_i, x_ and |M|, q*p", r"x_i, x\_ and \|M\|, q\*p"),
        ("*This* and **that** stay.", "*This* and **that** stay."),
        ("Code may `break\noff` here.", "Code may :code:`break off` here."),
        ("- one\n- two, which\n  goes on", "- one\n\n- two, which goes on"),
        ("A formula:\n\n    p = x_ |a|", "A formula:\n\n::\n\n        p = x_ |a|"),
        (">>> f(`x`)\n3", ">>> f(`x`)\n3"),
    ],
)
def test_docstrings_become_what_sphinx_reads(written: str, made: str) -> None:
    assert "\n".join(DOCSTRINGS.as_restructured_text(written.splitlines())).rstrip() == made


PAGE = '<html><body id="top"><a href="b.html#there">b</a><a href="#top">up</a>{}</body></html>'


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ('<a href="c.html">', "leads to no file"),
        ('<a href="b.html#gone">', "leads to a page without that place"),
        ('<a href="#gone">', "leads to a page without that place"),
        ('<a href="http:/example.org">', "is no address"),
        ('<a href="https://exa mple.org">', "is no address"),
        ('<a href="javascript:x">', "has a scheme"),
        ('<img src="gone.png">', "not on the site"),
        ('<script src="https://example.org/x.js"></script>', "not on the site"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "not on the site"),
    ],
)
def test_a_broken_link_is_found(added: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text(
        '<h1 id="there">b</h1><a href="https://example.org/x">', encoding="utf-8"
    )
    (tmp_path / "a.html").write_text(PAGE.format(""), encoding="utf-8")
    assert CHECKER.broken(tmp_path) == []
    (tmp_path / "a.html").write_text(PAGE.format(added), encoding="utf-8")
    (fault,) = CHECKER.broken(tmp_path)
    assert fault.startswith("a.html")
    assert said in fault


def test_a_style_may_load_what_is_beside_it_only(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(PAGE.format("").replace("b.html#there", "#top"), encoding="utf-8")
    (tmp_path / "good.css").write_text("a {background: url(data:image/png;base64,xx), url('a.html')}")
    assert CHECKER.broken(tmp_path) == []
    (tmp_path / "bad.css").write_text("@import url(https://example.org/x.css); b {src: url(gone.woff2)}")
    assert len(CHECKER.broken(tmp_path)) == 2


def test_every_page_has_its_place_on_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = "\n".join(re.findall(r"```\{toctree\}\n(.*?)```", index, flags=re.DOTALL))
    listed = [line.partition("<")[2].rstrip(">") or line for line in trees.splitlines()]
    pages = [
        each for part in ("*.md", "project/*.md", "notebooks/*.ipynb") for each in (ROOT / "docs").glob(part)
    ]
    for page in pages:
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert name == "index" or listed.count(name) == 1, f"docs/index.md has no one line for {name}"


def test_the_front_page_is_the_beginning_of_the_readme() -> None:
    """Up to a mark, which must come after what runs and before the first heading."""
    index, readme = ((ROOT / path).read_text(encoding="utf-8") for path in ("docs/index.md", "README.md"))
    (mark,) = re.findall(r"```\{include\} \.\./README\.md\n.*?^:end-before: (.*?)$.*?```", index, re.M | re.S)
    shown, _, rest = readme.partition(mark)
    assert rest.lstrip().startswith("## ")
    assert "```python" in shown
    assert "\n## " not in shown


def test_every_room_with_public_names_has_a_page_of_the_api() -> None:
    package = ROOT / "src" / "bd3lm"
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.rst"))
    shown = set(re.findall(r"^\.\. room:: ([\w.]+)$", pages, flags=re.MULTILINE))
    rooms = [
        each.parent.name for each in package.glob("*/__init__.py") if "__all__" in each.read_text("utf-8")
    ]
    assert len(rooms) >= 12
    for room in rooms:
        names = set(import_module(f"bd3lm.{room}").__all__)
        if f"bd3lm.{room}" not in shown:  # as those of bd3lm.lm, which are on the page of the package itself
            names -= {*bd3lm.__all__, *re.findall(rf"^   bd3lm\.{room}\.(\w+)$", pages, flags=re.MULTILINE)}
            assert not names, f"docs/api shows nothing of bd3lm.{room}: {', '.join(sorted(names))}"
