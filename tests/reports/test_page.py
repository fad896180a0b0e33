"""The page: well-formed, self-contained, and whatever a model wrote is text in it."""

import json
import re
from html.parser import HTMLParser

import pytest

from bd3lm.reports import Film, Report
from bd3lm.reports.document import (
    Document,
    Prose,
    Quotation,
    Screening,
    Section,
    Table,
)
from bd3lm.reports.page import render_page
from bd3lm.reports.sections import build_document
from tests.reports import DRAFTED, FILM, film, run, samples, whole_document, whole_report

pytestmark = pytest.mark.usefixtures("drawn_once")

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Reads a page, and complains of what is not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*parts):
    return render_page(Document("Title", "Lead", [Section("A section", parts)], "End"))


def test_the_whole_report_is_balanced_and_complete():
    text = render_page(whole_document())
    page = Page(text)
    assert page.words["h1"] == ["Two language models, measured"]
    assert page.words["h2"] == [
        "A text being written",
        "Models",
        "Perplexity",
        "Training",
        "Noise in training",
        "Samples",
        "Lengths",
        "Generative perplexity",
        "Recipes",
        "Not measured",
    ]
    assert len(page.named("svg")) == 6
    assert all(len(svg["aria-label"]) > 20 and svg["role"] == "img" for svg in page.named("svg"))


def test_it_needs_nothing_from_anywhere():
    text = render_page(whole_document())
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "url(" not in re.sub(r"url\(#[\w-]+\)", "", text)
    page = Page(text)
    assert not page.named("link")
    assert not [attributes for _, attributes in page.tags if "src" in attributes]
    links = [attributes["href"] for attributes in page.named("a")]
    assert links
    ids = {attributes.get("id") for attributes in page.named("section")}
    assert {link.removeprefix("#") for link in links} == ids


def test_ids_are_unique():
    page = Page(render_page(whole_document()))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_same_bytes_every_time():
    assert render_page(whole_document()) == render_page(build_document(whole_report()))


def test_what_a_model_wrote_can_be_read_again():
    page = Page(page_of(Quotation("Given & ", "<script>x</script>\n  y", "note")))
    assert page.words["span"] == ["Given & "]
    assert page.words["p"][-1] == "<script>x</script>\n  y"


def test_code_in_prose():
    assert "<p>Run <code>bd3lm eval a&lt;b</code>.</p>" in page_of(Prose("Run `bd3lm eval a<b`."))
    assert "<code>a <span>--no-eos</span> b--c</code>" in page_of(Prose("`a --no-eos b--c`"))


def test_tables_say_what_their_cells_are():
    text = page_of(Table("Caption", ["model", "value", "words"], [["a", "1", "x"]], text_columns=[2]))
    assert '<th scope="col" class="words">model</th><th scope="col">value</th>' in text
    assert '<th scope="row" class="words">a</th><td>1</td><td class="words">x</td>' in text


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="a row must have 2 cells"):
        Table("Caption", ["a", "b"], [["1"]])


def test_the_film_is_there_without_scripts_and_with_them():
    text = page_of(Screening(Film.from_json(FILM), "Caption"))
    page = Page(text)
    stage = text[text.index('<p class="stage">') : text.index("</p>", text.index('<p class="stage">'))]
    assert re.sub(r"<[^>]*>", "", stage) == "The cat sat."
    assert stage.count('class="block"') == 2
    assert stage.count("token given") == 2
    assert "hidden" in next(
        attributes for attributes in page.named("div") if attributes["class"] == "controls"
    )
    assert page.named("input")[0]["type"] == "range"
    assert page.named("button")
    assert page.named("select")
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert json.loads(data.group(1)) == FILM


def test_drafts_are_in_a_film_and_its_legend_but_not_in_its_text():
    text = page_of(Screening(Film.from_json(DRAFTED), "Caption"))
    stage = text[text.index('<p class="stage">') : text.index("</p>", text.index('<p class="stage">'))]
    assert re.sub(r"<[^>]*>", "", stage) == "The cat on the mat."
    assert "draft" not in stage
    assert '<span class="token draft">Pale italics</span> are drafts' in text
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert json.loads(data.group(1)) == DRAFTED
    assert "Pale italics" not in page_of(Screening(Film.from_json(FILM), "Caption"))


def test_a_page_without_a_film_has_no_script():
    assert "<script" not in page_of(Prose("text"))


def test_reports_without_measurements_leave_their_sections_out():
    page = Page(render_page(build_document(Report(runs=(run(),)))))
    assert page.words["h1"] == ["Autoregressive"]
    assert page.words["h2"] == ["Models", "Training", "Not measured"]
    few = Report(runs=(run(records=[samples(("", "text")), film()]),))
    assert Page(render_page(build_document(few))).words["h2"] == [
        "A text being written",
        "Models",
        "Training",
        "Samples",
        "Not measured",
    ]
