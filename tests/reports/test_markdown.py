"""Markdown: tables that are tables, texts that stay text, plots that are found."""

import re

import pytest

from bd3lm.reports import Film, Report, write_report
from bd3lm.reports.document import Document, Plot, Prose, Quotation, Screening, Section, Table
from bd3lm.reports.markdown import render_markdown
from tests.reports import DRAFTED, FILM, run, whole_document, whole_report

pytestmark = pytest.mark.usefixtures("drawn_once")


def markdown_of(*parts):
    return render_markdown(Document("Title", "Lead", [Section("A section", parts)], "End"), "plots")


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, by unescaped bars."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [[re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()] for block in blocks]


def test_every_row_of_every_table_has_as_many_cells():
    found = tables(render_markdown(whole_document(), "report"))
    assert len(found) == 7
    for table in found:
        assert len({len(row) for row in table}) == 1
        assert all(set(cell.strip()) <= set(":-") for cell in table[1])


def test_a_bar_in_a_cell_does_not_end_it():
    (table,) = tables(markdown_of(Table("Caption", ["a", "b|c"], [["x|y", "`m|n`"]])))
    assert [[cell.strip() for cell in row] for row in table] == [
        ["a", r"b\|c"],
        [":--", "--:"],
        [r"x\|y", r"`m\|n`"],
    ]
    # GitHub takes the first backslash for one that escapes the second, also in code.
    assert r"| m\\\|n |" in markdown_of(Table("Caption", ["a"], [[r"`m\|n`"]]))


@pytest.mark.parametrize("written", ["plain", "```\n# fence\n```", "`````", "<script>&</script>\n| a |"])
def test_texts_are_fenced_by_more_than_they_hold(written):
    text = markdown_of(Quotation("given", written, "note"))
    fence = re.search(r"^(`{3,})text\n", text, re.M).group(1)
    assert f"\ngiven ▸ {written}\n{fence}\n" in text
    assert fence not in written


def test_what_markdown_would_mark_up_is_escaped():
    assert r"a\_b \*c\* \<i\> \[d\] `e_f*` \# \$g\$" in markdown_of(Prose("a_b *c* <i> [d] `e_f*` # $g$"))


def test_plots_are_looked_for_beside():
    assert "![alt](plots/name.svg)\n\n*caption*" in markdown_of(Plot("name", "<svg/>", "alt", "caption"))


def test_a_film_is_its_first_frames():
    lines = markdown_of(Screening(Film.from_json(FILM), "Caption.")).splitlines()
    start = lines.index("```text") + 1
    assert lines[start : start + 4] == ["The", "The░░", "The░ sat", "The cat sat"]
    assert lines[lines.index("```", start) - 1] == "The cat sat."


def test_a_film_with_drafts_is_its_first_passes():
    lines = markdown_of(Screening(Film.from_json(DRAFTED), "Caption.")).splitlines()
    start = lines.index("```text") + 1
    assert lines[start : lines.index("```", start)] == [
        "The",
        "The cat⟨ on a⟩",
        "The cat on the⟨ mat was⟩",
        "The cat on the mat.",
    ]
    assert any(line.startswith("*░ is a mask; in ⟨…⟩ are drafts") for line in lines)


def test_a_line_of_a_film_that_begins_later_says_so():
    film = Film(["0123456789 " * 6], [["block", 1, 3], ["show", 1, "and"], ["show", 2, " so on"]])
    lines = markdown_of(Screening(film, "Caption.")).splitlines()
    assert "…" not in lines[lines.index("```text") + 2]
    last = lines[lines.index("```", lines.index("```text")) - 1]
    assert last == "…" + (film.text)[-71:]


def test_the_files_of_a_report(tmp_path):
    page = write_report(whole_report(), tmp_path / "new" / "place")
    assert page == tmp_path / "new" / "place" / "report.html"
    text = (page.parent / "report.md").read_text("utf-8")
    plots = re.findall(r"\]\((report/[\w]+\.svg)\)", text)
    assert len(plots) == 6
    assert all((page.parent / plot).read_text("utf-8").startswith("<svg") for plot in plots)
    first = {file: file.read_bytes() for file in page.parent.rglob("*.*")}
    write_report(whole_report(), page.parent)
    assert first == {file: file.read_bytes() for file in page.parent.rglob("*.*")}


def test_plots_of_an_earlier_report_are_removed_and_nothing_else(tmp_path):
    write_report(whole_report(), tmp_path)
    (tmp_path / "report" / "mine.svg").write_text("<svg/>", encoding="utf-8")
    write_report(Report(runs=(run(),)), tmp_path)
    assert sorted(file.name for file in (tmp_path / "report").iterdir()) == ["curves.svg", "mine.svg"]
