"""Plots: the data is in the SVG, every time as the same bytes, under ids of its own."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import cache

import matplotlib
import pytest

from bd3lm.reports import plots, style
from bd3lm.reports.colours import PAPER, dark_rules
from bd3lm.reports.plots import Band, Curve, Dot, Lengths, Point

pytestmark = pytest.mark.sweep(3)

SVG = "{http://www.w3.org/2000/svg}"
AR, BLOCK = "autoregressive", "block diffusion, blocks of 4"
ORDER = [AR, BLOCK, "third"]


def curves(points: int = 30) -> list[Curve]:
    tokens = [100.0 * index for index in range(1, points + 1)]
    falling = [6 / index**0.1 for index in range(1, points + 1)]
    return [
        Curve(AR, tokens, falling, tokens[9::10], falling[9::10]),
        Curve(BLOCK, tokens, [value + 0.5 for value in falling]),
    ]


MADE = {
    "curves": lambda: plots.training_curves(curves(), ORDER),
    "clips": lambda: plots.clip_ranges([Band(BLOCK, [0, 100, 200], [0, 0.4, 0.4], [1, 0.9, 0.9])], ORDER),
    "perplexities": lambda: plots.perplexities(
        [Dot(AR, 40, 2), Dot(BLOCK, 50, 2), Dot(BLOCK, 60, None, "bound")]
    ),
    "variances": lambda: plots.variances(
        {AR: {"counts": 1, "linear": 90}, BLOCK: {"counts": 2}}, ["linear"], ORDER
    ),
    "lengths": lambda: plots.length_histograms([Lengths(AR, [3, 9, 20], [5, 6, 7]), Lengths(BLOCK, [4, 4])]),
    "judgements": lambda: plots.quality_against_cost(
        [Point(AR, 1, 90, 3, "p 1"), Point(BLOCK, 0.1, 400)], ORDER
    ),
}
every_plot = pytest.mark.parametrize("name", MADE)


@cache
def made(name: str) -> str:
    """A plot, drawn once."""
    return MADE[name]()


@every_plot
def test_its_paper_is_drawn_first_so_that_dark_ink_is_read_on_a_dark_page_of_others(name):
    """Where Markdown is shown, say, which brings no colours for it."""
    first = next(ElementTree.fromstring(made(name)).iter(f"{SVG}path"))
    assert first.get("style") == f"fill: {PAPER}"


@every_plot
def test_every_colour_has_one_for_a_dark_page(name):
    drawn = set(re.findall(r"(?:fill|stroke): (#\w+)", made(name)))
    known = set(re.findall(r'"(?:fill|stroke): (#\w+)"', dark_rules()))
    assert drawn
    assert drawn <= known


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def elements(svg: str, kind: str, **style: str) -> list[ElementTree.Element]:
    """Elements of a kind whose style has these values."""
    wanted = [f"{name.replace('_', '-')}: {value}" for name, value in style.items()]
    found = ElementTree.fromstring(svg).iter(SVG + kind)
    return [each for each in found if all(part in each.get("style", "") for part in wanted)]


@every_plot
def test_the_same_bytes_every_time(name):
    assert MADE[name]() == made(name)


@every_plot
def test_well_formed_and_without_dates_or_outside_addresses(name):
    svg = made(name)
    ElementTree.fromstring(svg)
    assert "<metadata>" not in svg
    assert set(re.findall(r"https?://[^\"']*", svg)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "DejaVu" not in svg  # the reader's fonts


def test_ids_are_unique_over_all_plots_and_every_reference_is_kept():
    ids, references = [], []
    for svg in map(made, MADE):
        ids += re.findall(r' id="([^"]*)"', svg)
        references += re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg)
    assert len(ids) == len(set(ids))
    assert {one or other for one, other in references} <= set(ids)


@every_plot
def test_the_state_of_matplotlib_is_left_alone(name):
    before = dict(matplotlib.rcParams)
    MADE[name]()
    assert dict(matplotlib.rcParams) == before


def test_a_line_for_every_run_and_a_mark_for_every_validation():
    svg = made("curves")
    assert {AR, BLOCK, "tokens seen in training", "loss, nats per token"} <= set(texts(svg))
    lines = {re.sub(r".*stroke: (#\w+).*", r"\1", each.get("style", "")) for each in elements(svg, "path")}
    assert {"#0072b2", "#d55e00"} <= lines
    assert len(elements(svg, "use", fill="#0072b2", stroke="#ffffff")) == 3


def test_lines_follow_the_data():
    """The places of a straight line are those of its values, to a hundredth of a point."""
    values = [5.0 - index for index in range(5)]
    svg = plots.training_curves([Curve(AR, [10, 20, 30, 40, 50], values)], ORDER)
    (line,) = [
        each
        for each in elements(svg, "path", stroke="#0072b2", fill="none")
        if each.get("d", "").count("L") > 0
    ]
    points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", line.get("d", ""))]
    first, last = points[0], points[-1]
    assert first[0] < last[0]
    assert first[1] < last[1]  # y grows downwards
    slope = (last[1] - first[1]) / (last[0] - first[0])
    for x, y in points:
        assert y == pytest.approx(first[1] + slope * (x - first[0]), abs=0.05)


def test_the_raw_loss_is_drawn_faintly_where_it_is_smoothed():
    assert not elements(plots.training_curves(curves(30), ORDER), "path", stroke_opacity="0.25")
    assert len(elements(plots.training_curves(curves(200), ORDER), "path", stroke_opacity="0.25")) == 2


def test_smoothing_is_a_mean_of_what_is_there():
    values = [1.0, 5.0, 3.0, 7.0]
    assert plots._smooth(values, 1) == values
    assert plots._smooth(values, 3) == pytest.approx([3.0, 3.0, 5.0, 5.0])


def test_long_runs_are_thinned_and_keep_their_last_value():
    thinned = plots._thinned(list(range(10_007)))
    assert len(thinned) <= 402
    assert thinned[0] == 0
    assert thinned[-1] == 10_006
    assert plots._thinned([3.0]) == [3.0]


def test_one_model_has_no_legend_and_keeps_its_colour():
    alone = plots.training_curves(curves()[1:], ORDER)
    assert BLOCK not in texts(alone)
    assert elements(alone, "path", stroke="#d55e00")


def test_bounds_look_other_than_exact_figures():
    svg = made("perplexities")
    labels = texts(svg)
    assert {"exact", "upper bound: the exact value is here or further left", AR, BLOCK} <= set(labels)
    assert "neither exact nor a bound" not in labels
    marks = [each.get("style", "") for each in elements(svg, "use")]
    assert sum("fill: #1b1b1b" in mark for mark in marks) >= 2
    assert (
        sum("fill: #ffffff; stroke: #0072b2" in mark for mark in marks) == 2
    )  # the figure, and the legend's


def test_wide_spreads_are_logarithmic_and_narrow_ones_are_not():
    assert "90" not in texts(made("variances"))
    assert {"1", "10"} <= set(texts(made("variances")))
    assert {"45", "50", "55"} <= set(texts(made("perplexities")))


def test_biased_rules_are_hollow():
    svg = plots.variances({AR: {"counts": 1.0, "clipped": 3.0, "linear": 90.0}}, ["clipped"], ORDER)
    assert len(elements(svg, "use", fill="#ffffff", stroke="#0072b2")) == 1
    assert len(elements(svg, "use", fill="#0072b2", stroke="#0072b2")) == 2


def test_a_histogram_has_a_panel_for_each_model():
    svg = made("lengths")
    assert {AR, BLOCK, "training documents", "texts it wrote"} <= set(texts(svg))
    filled = [each for each in elements(svg, "path", fill="#c9cdd2") if each.get("clip-path")]
    assert len(filled) == 24  # bins of the one training set
    assert plots.length_histograms([Lengths(AR, [5, 5, 5])])  # all of one length


def test_points_carry_their_notes_and_errors():
    svg = made("judgements")
    assert "p 1" in texts(svg)
    assert {AR, BLOCK} <= set(texts(svg))


def test_a_dollar_in_a_name_is_a_dollar():
    assert "runs/$x$" in texts(plots.perplexities([Dot("runs/$x$", 2.0), Dot("other", 3.0)]))


def test_more_runs_than_colours():
    many = [Curve(f"run {index}", [1, 2], [2.0 + index, 1.0]) for index in range(40)]
    svg = plots.training_curves(many, [curve.label for curve in many])
    assert all(f"run {index}" in texts(svg) for index in range(40))
    assert len({repr(style.look(index)) for index in range(35)}) == 35


def test_a_loss_that_does_not_change_can_be_drawn():
    assert math.isfinite(
        float(re.findall(r'viewBox="0 0 ([\d.]+)', plots.training_curves([Curve(AR, [1], [2.0])], ORDER))[0])
    )


@pytest.mark.slow
def test_bd3lm_is_imported_without_what_draws_and_renders():
    heavy = "{'matplotlib', 'jinja2'} & {*sys.modules}"
    script = f"import sys, bd3lm, bd3lm.reports, bd3lm.cli; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
