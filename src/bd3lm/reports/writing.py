"""Writes a report to files: report.html, report.md and a folder of plots."""

import re
from pathlib import Path

from bd3lm.io.files import write_atomically
from bd3lm.reports.content import Report
from bd3lm.reports.document import Plot

PAGE, MARKDOWN, PLOTS = "report.html", "report.md", "report"


def write_report(report: Report, out: Path) -> Path:
    """Write a report into a folder, which is created if it does not exist; return the path of the page."""
    from bd3lm.reports.markdown import render_markdown
    from bd3lm.reports.page import render_page
    from bd3lm.reports.sections import build_document

    document = build_document(report)
    plots = [part for part in document.parts if isinstance(part, Plot)]
    (out / PLOTS).mkdir(parents=True, exist_ok=True)
    _remove_earlier_plots(out)
    for plot in plots:
        write_atomically(out / PLOTS / f"{plot.name}.svg", plot.svg.encode())
    write_atomically(out / MARKDOWN, render_markdown(document, PLOTS).encode())
    page = out / PAGE
    write_atomically(page, render_page(document).encode())  # a link there is replaced, not followed
    return page


def _remove_earlier_plots(out: Path) -> None:
    """Remove the plots of the report that is in `out`, and no other files."""
    earlier = out / MARKDOWN
    if earlier.is_file():
        for name in re.findall(rf"\]\({PLOTS}/(\w+\.svg)\)", earlier.read_text("utf-8", "replace")):
            (out / PLOTS / name).unlink(missing_ok=True)
