"""The pictures of the pages that explain: the files are what the script draws, from what the code does."""

import math
from itertools import permutations
from pathlib import Path
from xml.etree import ElementTree

import pytest

import bd3lm
from research.pictures import idea
from research.pictures.__main__ import FOLDER, PICTURES
from research.pictures.drawing import WIDTH


@pytest.mark.parametrize("name", PICTURES)
def test_the_files_are_what_is_drawn(name: str) -> None:
    svg = str(PICTURES[name]())
    assert (FOLDER / name).read_text(encoding="utf-8") == svg, "python -m research.pictures draws it anew"
    root = ElementTree.fromstring(svg)
    title = root.find("{*}title")
    assert title is not None
    assert title.text
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= WIDTH


def test_each_is_on_its_page_once_and_no_other_lies_there() -> None:
    for folder in ("idea", "speculation"):
        page = (FOLDER.parent / f"{folder}.md").read_text(encoding="utf-8")
        files = sorted(path.relative_to(FOLDER).as_posix() for path in (FOLDER / folder).iterdir())
        assert files == sorted(name for name in PICTURES if Path(name).parent.name == folder)
        assert all(page.count(f"](images/{name})") == 1 for name in files)


def test_the_probabilities_of_the_bound_are_those_of_the_likelihood() -> None:
    _, probability, nll, nelbo = idea.conditionals()
    products = []
    for order in permutations(range(3)):
        known: frozenset[int] = frozenset()
        products.append(1.0)
        for place in order:
            products[-1] *= probability[known, place]
            known |= {place}
    assert -math.log(sum(products) / 6) == pytest.approx(nll, rel=1e-6)
    assert -sum(map(math.log, products)) / 6 == pytest.approx(nelbo, rel=1e-6)
    (measured,) = bd3lm.load("box").with_lean(0).log_likelihood([idea.BEGINNING])
    assert -measured.log_p == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("lean", [0.0, 1.0, 4.0])
def test_every_step_reveals_one_place_and_every_place_is_revealed_once(lean: float) -> None:
    chances = idea.chances_of_places(lean)
    assert [sum(step) for step in chances] == pytest.approx([1.0] * 4)
    assert [sum(place) for place in zip(*chances, strict=True)] == pytest.approx([1.0] * 4)
    assert chances[0][0] / chances[0][1] == pytest.approx(math.exp(lean))
