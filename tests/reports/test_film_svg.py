"""The film as an animated SVG shows, at every moment, what the film's own states say."""

import re
from xml.etree import ElementTree

import pytest

from bd3lm.reports.animation import Film
from bd3lm.reports.film_svg import film_svg
from tests.reports import DRAFTED

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


def elements(svg: str) -> list[tuple[float, list[ElementTree.Element]]]:
    """At which shares of the film something changes, each with what is then drawn, in reading order."""
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
        shown.append((moment, now))
    return shown


def frames(svg: str) -> list[tuple[float, list[str]]]:
    """The same as text."""
    return [
        (moment, ["▒" if each.tag == f"{SVG}rect" else each.text or "" for each in now])
        for moment, now in elements(svg)
    ]


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


def test_drafts_are_pale_then_text_or_struck_through():
    svg = film_svg(Film.from_json(DRAFTED))
    seen = [[(each.get("class"), each.text) for each in now] for _, now in elements(svg)]
    the, cat, on, third, mat = ("given", "The"), (None, " cat"), (None, " on"), (None, " the"), (None, " mat")
    assert seen == [
        [the],
        [the, cat, ("draft", " on"), ("draft", " a")],
        [the, cat, ("draft", " on"), ("wrong", " a")],
        [the, cat, on, third, ("draft", " mat"), ("draft", " was")],
        [the, cat, on, third, ("draft", " mat"), ("wrong", " was")],
        [the, cat, on, third, mat, (None, ".")],
    ]


def test_a_pass_takes_as_long_as_a_token_does_elsewhere():
    svg = film_svg(Film.from_json(DRAFTED))
    duration = float(re.search(r"animation:none ([\d.]+)s", svg)[1])
    moments = [round(share * duration, 2) for share, _ in elements(svg)]
    assert moments == pytest.approx([0.0, 1.125, 1.2, 1.25, 1.325, 1.375], abs=0.01)
    assert duration == pytest.approx(1.375 + 3.0, abs=0.01)


def test_a_draft_is_squeezed_into_its_place_and_never_stretched():
    root = ElementTree.fromstring(film_svg(Film.from_json(DRAFTED)))
    widths = {
        (text.get("class"), text.text): float(text.get("textLength", 0)) for text in root.iter(f"{SVG}text")
    }
    assert widths["draft", " was"] == widths[None, "."] == pytest.approx(8.4)
    assert widths["draft", " a"] == pytest.approx(2 * 8.4, abs=0.05)
    assert widths["draft", " a"] < widths[None, " the"]


def test_drafts_past_the_end_are_not_drawn():
    film = Film.from_json({**DRAFTED, "steps": [*DRAFTED["steps"][:-1], ["draft", [[6, " end"]]]]})
    assert " end" not in film_svg(film)


def test_the_finished_text_has_no_drafts():
    root = ElementTree.fromstring(film_svg(Film.from_json(DRAFTED)))
    kept = [group[0] for group in root.iter(f"{SVG}g") if group.get("class") != "gone"]
    assert [each.text for each in kept] == ["The", " cat", " on", " the", " mat", "."]
    assert not {"draft", "wrong"} & {each.get("class") for each in kept}
    assert root.find(f"{SVG}title").text == "The cat on the mat."
