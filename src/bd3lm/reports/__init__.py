"""Reports: the measurements of some runs as one HTML page, and as Markdown with plots.

Plain values in, text out: this room opens no model and reads no run. matplotlib and Jinja are imported when a
document is built.
"""

from bd3lm.reports.animation import Film, record_film
from bd3lm.reports.content import KINDS, Report, Run
from bd3lm.reports.film_svg import film_svg
from bd3lm.reports.numbers import bits_text, leaning, perplexity_text, plain, with_error
from bd3lm.reports.writing import MARKDOWN, PAGE, write_report

__all__ = [
    "KINDS",
    "MARKDOWN",
    "PAGE",
    "Film",
    "Report",
    "Run",
    "bits_text",
    "film_svg",
    "leaning",
    "perplexity_text",
    "plain",
    "record_film",
    "with_error",
    "write_report",
]
