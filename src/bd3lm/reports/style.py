"""The style of all plots, and their building blocks.

Text stays text, drawn in the reader's fonts: it can be searched and read aloud, and a plot takes a few
kilobytes. matplotlib computes positions with its own font, which is wider than most.
"""

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bd3lm.reports.colours import AXIS, COLOURS, GRID, INK, PAPER, SOFT
from bd3lm.reports.readable import readable
from bd3lm.reports.svg import portable_svg

_DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.3)), (0, (5, 1.4, 1.2, 1.4)), (0, (8, 1.6, 3, 1.6)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTH = 5.2  # inches; a page shows it about 1.5 times as large, a phone at this size

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "figure.facecolor": PAPER,  # the page's background; dark Markdown viewers still show it light
    "axes.facecolor": "none",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": AXIS,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.6,
    "text.parse_math": False,  # a dollar sign in a name is just a dollar sign
}


@contextmanager
def figure_in_style(name: str, *, height: float) -> Iterator[tuple[Figure, Any]]:
    """A figure in this style, and a function that returns its SVG."""
    written = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure, lambda: portable_svg(written.getvalue(), name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # from a font that no reader sees
            figure.savefig(written, format="svg")


def look(index: int) -> tuple[str, Any, str]:
    """Color, dashes and marker of the index-th model."""
    return COLOURS[index % 7], _DASHES[index % 5], _MARKERS[index % 7]


def legend(figure: Figure, labels: Sequence[str], order: Sequence[str], *, marks: bool = False) -> None:
    """A legend above the plot, where it covers nothing. A single label goes into the caption instead."""
    if len(labels) < 2:
        return
    handles = []
    for label in labels:
        colour, dashes, marker = look(order.index(label))
        line: dict[str, Any] = {"marker": marker, "linestyle": "none"} if marks else {"linestyle": dashes}
        handles.append(Line2D([], [], color=colour, label=readable(label), **line))
    figure.legend(handles=handles, loc="outside upper left", ncols=_legend_columns(labels))


def _legend_columns(labels: Sequence[str]) -> int:
    return 2 if max(map(len, labels)) < 34 else 1


def legend_height(labels: Sequence[str]) -> float:
    """The height of the legend above a plot, in inches."""
    return 0.0 if len(labels) < 2 else 0.18 * -(-len(labels) // _legend_columns(labels))


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Names down the left side, first on top."""
    axes.set_yticks(range(len(labels)), list(map(readable, labels)))
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="y")


def logarithmic_if_wide(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """A logarithmic axis if values span more than a factor of five, with ticks in plain numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axes.margins(0.08)
    axes.grid(visible=True, axis=which)
    if max(values) <= 5 * min(values) or min(values) <= 0:
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    few = max(values) < 300 * min(values)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())
