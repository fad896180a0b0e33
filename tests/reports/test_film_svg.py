"""The film as an animated SVG shows, at every moment, what the film's own states say."""

import re
from xml.etree import ElementTree

import pytest

from bd3lm.reports.animation import Film
from bd3lm.reports.film_svg import film_svg

SVG = "{http://www.w3.org/2000/svg}"
PLAIN = Film(
    ["The", " cat"],
    [
        *(["block", 2, 4], ["show", 3, " on"], ["show", 2, " sat"]),
        *(["block", 4, 6], ["show", 4, " a"], ["show", 5, " <mat>"]),
    ],
)
REMASKED = Film(
    [],
    [
        *(["block", 0, 3], ["show", 1, " b"], ["show", 0, "a"], ["hide", 1]),
        *(["show", 2, " c"], ["show", 1, " x"], ["cut", 2]),
    ],
)


def frames(svg: str) -> list[tuple[float, list[str]]]:
    """At which shares of the film something changes, each with what is then seen, in reading order."""
    root = ElementTree.fromstring(svg)
    style = root.find(f"{SVG}style")
    assert style is not None
    keyframes = {
        name: [
            (float(at) / 100, float(opacity)) for at, opacity in re.findall(r"([\d.]+)%{opacity:(\d)}", body)
        ]
        for name, body in re.findall(r"@keyframes (\w+){((?:[\d.]+%{opacity:\d})+)}", style.text or "")
    }
    moments = sorted({at for steps in keyframes.values() for at, _ in steps} | {0.0})

    def seen(group: ElementTree.Element, moment: float) -> bool:
        steps = keyframes.get(group.get("style", "").removeprefix("animation-name:"), [(0.0, 1.0)])
        return [opacity for at, opacity in steps if at <= moment][-1] == 1.0

    shown = []
    for moment in moments:
        now = [group[0] for group in root.iter(f"{SVG}g") if seen(group, moment)]
        now.sort(key=lambda each: (round(float(each.get("y", 0)) / 22), float(each.get("x", 0))))
        shown.append((moment, ["▒" if each.tag == f"{SVG}rect" else each.text or "" for each in now]))
    return shown


@pytest.mark.parametrize("film", [PLAIN, REMASKED])
def test_every_state_is_shown_in_its_turn(film):
    states = list(film.states())
    expected = []
    for index, state in enumerate(states):
        pieces = ["▒" if piece is None else piece for piece in state[: len(states[-1])]]
        is_left_at_once = 0 < index < len(film.steps) and film.steps[index][0] == "block"
        if not is_left_at_once and pieces not in expected[-1:]:
            expected.append(pieces)
    assert [pieces for _, pieces in frames(film_svg(film))] == expected


def test_eight_tokens_come_in_a_second():
    svg = film_svg(PLAIN)
    duration = float(re.search(r"animation:none ([\d.]+)s", svg)[1])
    moments = [round(share * duration, 2) for share, _ in frames(svg)]
    assert moments == pytest.approx([0.0, 1.0, 1.125, 1.25, 1.375, 1.5], abs=0.01)
    assert duration == 1.5 + 3.0


def test_lines_break_between_pieces_and_at_line_ends():
    pieces = ["a" * 70, " bbbb", "cc\n", "d"]
    film = Film([], [["block", 0, 4], *(["show", i, piece] for i, piece in enumerate(pieces))])
    root = ElementTree.fromstring(film_svg(film))
    texts = {
        text.text: (float(text.get("x", 0)), float(text.get("y", 0))) for text in root.iter(f"{SVG}text")
    }
    left = texts["a" * 70][0]
    assert texts["bbbb"][0] == left
    assert texts["cc"][0] > left
    assert texts["d"][0] == left
    assert texts["a" * 70][1] < texts["bbbb"][1] == texts["cc"][1] < texts["d"][1]


def test_the_finished_text_needs_no_animation():
    """Whoever asks for reduced motion sees what has no class `gone`."""
    root = ElementTree.fromstring(film_svg(REMASKED))
    kept = [group[0].text for group in root.iter(f"{SVG}g") if group.get("class") != "gone"]
    assert kept == ["a", " x"]
    assert root.find(f"{SVG}title").text == "a x"
