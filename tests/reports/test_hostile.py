"""Whatever names, measured files and models say is text in a report: it changes no format's structure."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, get_args
from xml.etree import ElementTree

import jinja2
import pytest
from hypothesis import example, given
from hypothesis.strategies import text as any_text
from markdown_it import MarkdownIt
from markdown_it.token import Token

from bd3lm.reports import Film, Report, film_svg, plots
from bd3lm.reports.document import (
    Document,
    Heading,
    Listing,
    Part,
    Plot,
    Prose,
    Quotation,
    Screening,
    Section,
    Table,
    code,
    pieces,
)
from bd3lm.reports.markdown import render_markdown
from bd3lm.reports.page import render_page
from bd3lm.reports.readable import readable
from bd3lm.reports.sections import build_document
from tests.reports import FILM, long_text, unigram, whole_report
from tests.reports.test_page import Page

pytestmark = [
    pytest.mark.usefixtures("drawn_once"),
    pytest.mark.filterwarnings("ignore:constrained_layout not applied"),  # such names are too long for a plot
]

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
EVIL = {
    "elements": "</p></script></style></svg><script>alert('x')</script>\"><img src=x onerror=alert(1)>",
    "signs": ']]> <!-- --> <?x?> <![CDATA[ &lt;b&gt; &amp; {{ 7 * 7 }}{% raise %}{# \' id="x" font-family: x',
    "code": "` <i>`` ```\n```\n~~~\n<b>``",
    "blocks": "\n\n# Title\n\n- item\n\n1. item\n\n---\n\n> quoted\n\n|a|b|\n|-|-|\n|c|d|\n\n    code\n",
    "marks": "a|b \\| \\\\| `c|d` `e\\|f` [link](javascript:alert(1)) ![image](x) <http://x> *a* _b_ ~c~ $d$",
    "controls": "\0\a\x1b[31m\x7f\x9b1m\r\v\f\x85 \ud800 \udcff \ufffe\uffff \u2028 \u202etxt\u2066 \ufeff",
}
every_evil = pytest.mark.parametrize("evil", EVIL.values(), ids=EVIL)
in_a_report = pytest.mark.parametrize(
    "evil", [" ".join([*EVIL.values()][::2]), " ".join([*EVIL.values()][1::2])]
)
FIXED = ("kind", "meaning", "unmasking", "stopped_by", "split")  # programs tell by these what a record is


def hostile(value: Any, evil: str) -> Any:
    """The same with a hostile end to each string, unless it is empty."""
    if isinstance(value, str):
        return value if value in ("", "own") else value + evil
    if isinstance(value, Mapping):
        return {key: item if key in FIXED else hostile(item, evil) for key, item in value.items()}
    return [hostile(item, evil) for item in value] if isinstance(value, list | tuple) else value


def hostile_film(evil: str) -> dict[str, Any]:
    steps = [[*step[:2], step[2] + evil] if step[0] == "show" else step for step in FILM["steps"]]
    return {"given": hostile(FILM["given"], evil), "steps": steps}


@cache
def document(evil: str = "") -> Document:
    """A report with all that may be in one, and a hostile end to all that is said in it."""
    report = whole_report()
    runs = []
    for run in report.runs:
        records = [hostile(record, evil) for record in [*run.records, unigram(), long_text()]]
        for record in records:
            if record["kind"] == "denoising":
                record["result"] = hostile_film(evil)
        changes = {name: hostile(getattr(run, name), evil) for name in ("folder", "title", "recipe")}
        changes["recipe"][f"setting{evil}"] = run.folder
        runs.append(replace(run, **changes, variant=evil, start=f"owner/name{evil}", records=records))
    return build_document(
        Report(
            runs=tuple(runs),
            unmeasured={(runs[0].folder, "denoising"): f"no time{evil}"},
            unfinished=[f"runs/later{evil}"],
            versions={f"{name}{evil}": f"{version}{evil}" for name, version in report.versions.items()},
        )
    )


class Outline(Page):
    """The elements of a page and their attributes, but for code in prose and for what is in a drawing."""

    def __init__(self, text: str) -> None:
        self.elements: list[Any] = []
        super().__init__(text)

    def handle_starttag(self, tag, attrs):
        if not {"svg", "code"} & {*self.open, tag} or tag == "svg":
            values = dict(attrs)
            self.elements.append((tag, values.get("id"), values.get("href"), [name for name, _ in attrs]))
        super().handle_starttag(tag, attrs)


def blocks(text: str) -> list[tuple[str, str, int]]:
    """What Markdown makes of a text, and nothing in it but text, code, emphasis and pictures."""
    tokens = MARKDOWN.parse(text)
    inline = {child.type for token in tokens for child in token.children or ()}
    assert inline <= {"text", "text_special", "code_inline", "em_open", "em_close", "image"}
    return [(token.type, token.tag, token.level) for token in tokens]


def shown(token: Token) -> str:
    return "".join(child.content for child in token.children or ())


DRAWN = ("svg", "defs", "style", "g", "path", "use", "text", "clipPath", "rect", "title")


def check_drawing(svg: str) -> ElementTree.Element:
    """An XML parser takes it, and it has nothing but what we draw with."""
    root = ElementTree.fromstring(svg.encode())
    for element in root.iter():
        assert element.tag.rpartition("}")[2] in DRAWN
        assert not [name for name in element.attrib if name.startswith("on")]
    return root


@in_a_report
def test_a_page_has_the_elements_that_it_would_have(evil):
    assert Outline(render_page(document(evil))).elements == Outline(render_page(document())).elements


@in_a_report
def test_markdown_has_the_blocks_that_it_would_have(evil):
    text = render_markdown(document(evil), "report")
    assert blocks(text) == blocks(render_markdown(document(), "report"))
    text.encode()


@in_a_report
def test_plots_and_films_are_drawings_that_say_what_they_were_told(evil):
    drawn = [part for part in document(evil).parts if isinstance(part, Plot)]
    assert len(drawn) == 6
    for plot in drawn:
        assert "font-family: system-ui" in ElementTree.tostring(check_drawing(plot.svg), encoding="unicode")
    film = Film.from_json(hostile_film(evil))
    title = check_drawing(film_svg(film)).find("{*}title")
    assert title.text == film.readable().text


def parts(text: str) -> list[Part]:
    return [
        Prose(text),
        Heading(text),
        Listing([text, text]),
        Table(text, ["a", text], [[text, text]]),
        Plot("p", "<svg></svg>", text, text),
        Quotation(text, text, text),
        Screening(Film([text], [["block", 1, 2], ["show", 1, text]]), text),
    ]


@every_evil
def test_every_part_and_title_keeps_its_structure(evil):
    assert [type(part) for part in parts(evil)] == list(get_args(Part))
    whole, same = (
        Document(text, text, [Section(text, parts(text))], text, verdict=text, shown_first=parts(text))
        for text in (evil, "x")
    )
    tags = [[tag for tag, *_ in Outline(render_page(each)).elements] for each in (whole, same)]
    assert tags[0] == tags[1]
    assert blocks(render_markdown(whole, "p")) == blocks(render_markdown(same, "p"))


def test_plots_take_any_label():
    label = EVIL["controls"] + EVIL["signs"]
    for svg in (
        plots.training_curves([plots.Curve(each, [1, 2], [2, 1]) for each in (label, "b")], [label, "b"]),
        plots.clip_ranges([plots.Band(each, [0, 1], [0, 0], [1, 1]) for each in (label, "b")], [label, "b"]),
        plots.perplexities([plots.Dot(label, 2.0)]),
        plots.variances({label: {label: 1.0}, "b": {}}, [], [label, "b"]),
        plots.length_histograms([plots.Lengths(label, [1, 2])]),
        plots.quality_against_cost([plots.Point(label, 1.0, 2.0, note=label)], [label]),
    ):
        texts = [element.text for element in check_drawing(svg).findall(".//{*}text")]
        assert readable(label) in texts


@in_a_report
def test_nothing_invisible_reaches_a_page(evil):
    for text in (render_page(document(evil)), render_markdown(document(evil), "report")):
        assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)


SPECIAL = any_text("`|\\ a<>&*_[]()!#-+1.~$:=\n\t", min_size=1)


@given(SPECIAL)
@example("&lt;b&gt; &#60;")
@example("- a")
@example("+ a")
@example("12. a")
@example("3) a")
@example("- - -")
@example("1.5 and -1")
def test_prose_and_cells_read_in_markdown_as_they_were_written(text):
    line = " ".join(text.split()) or "x"
    said = "".join(piece.text for piece in pieces(line))
    tokens = MARKDOWN.parse(
        render_markdown(
            Document(
                text,
                "lead",
                [Section("s", [Prose(line), Listing([line]), Table("c", ["a", line], [[line] * 2])])],
                "end",
            ),
            "plots",
        )
    )
    inline = [shown(token) for token in tokens if token.type == "inline"]
    assert inline[3:] == [said, said, "c", "a", said, said, said, "end"]


@given(SPECIAL)
def test_any_text_can_be_code_in_prose(text):
    assert list(pieces(f"a{code(text)}b")) in (
        [("a", False), (text, True), ("b", False)],
        [(f"a{code(text)}b", False)] if set(text) == {"`"} else None,
    )


def test_control_characters_are_shown():
    assert readable("a\0\x1b[31m\x7f\x9b\r\nb\rc\t") == "a␀␛[31m␡\\x9b\nb␍c\t"
    assert readable("\ud800\udcff\ufffe\uffff") == "\ufffd" * 4
    assert readable("👩\u200d🔬 ن\u200cم\u202e\ufeff") == "👩\u200d🔬 ن\u200cم"


def test_a_film_is_readable_with_its_layout():
    film = Film(["a\x1b"], [["block", 1, 2], ["show", 1, "\0"], ["hide", 1], ["show", 1, "\x9b"], ["cut", 2]])
    assert film.readable().text == "a␛\\x9b"
    assert [step[0] for step in film.readable().steps] == [step[0] for step in film.steps]
    assert 'x="30.8" y="30" textLength="33.6"' in film_svg(film)


def test_a_part_that_no_template_knows_is_refused():
    class Unknown(Prose):
        pass

    for render in (render_page, lambda document: render_markdown(document, "p")):
        with pytest.raises(jinja2.UndefinedError, match="unknown"):
            render(Document("", "", [Section("", [Unknown("text")])], ""))
