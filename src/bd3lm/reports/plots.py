"""The plots of a report as SVG: the same bytes for the same data, readable in grey and on a phone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bd3lm.reports.colours import BARS, COLOURS, INK, MIDDLE, PAPER, SOFT
from bd3lm.reports.readable import readable
from bd3lm.reports.style import (
    figure_in_style,
    legend,
    legend_height,
    logarithmic_if_wide,
    look,
    name_rows,
)

_MOST_POINTS = 400  # points per line: more than a page has room for


@dataclass(frozen=True)
class Curve:
    """The training loss of a run and, if measured, its held-out loss, over tokens seen."""

    label: str
    tokens: Sequence[float]
    train: Sequence[float]
    valid_tokens: Sequence[float] = ()
    valid: Sequence[float] = ()

    @property
    def window(self) -> int:
        """How many logged losses the line averages; if more than one, they are also drawn faintly."""
        return max(1, len(self.train) // 25)


@dataclass(frozen=True)
class Band:
    """A range that changes over training."""

    label: str
    tokens: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Dot:
    """A figure with its error in the row of a label; `meaning` is exact, bound or neither."""

    label: str
    value: float
    error: float | None = None
    meaning: str = "exact"


@dataclass(frozen=True)
class Lengths:
    """Lengths of a model's texts, and of the documents it was trained on."""

    label: str
    samples: Sequence[int]
    training: Sequence[int] = ()


@dataclass(frozen=True)
class Point:
    """A text's cost, x, and its quality, y."""

    label: str
    x: float
    y: float
    error: float | None = None
    note: str = ""


def training_curves(curves: Sequence[Curve], order: Sequence[str]) -> str:
    """Loss over tokens: for training a smoothed line over the faint raw one, for held-out text marks.

    `order` has the labels of all models in the report, so each looks the same in every plot.
    """
    labels = [curve.label for curve in curves]
    with figure_in_style("curves", height=3.0 + legend_height(labels)) as (figure, svg):
        axes = figure.add_subplot()
        for curve in curves:
            colour, dashes, marker = look(order.index(curve.label))
            x, raw = _thinned(curve.tokens), _thinned(curve.train)
            if curve.window > 1:
                axes.plot(x, raw, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(x, _thinned(_smooth(curve.train, curve.window)), color=colour, linestyle=dashes)
            axes.plot(
                curve.valid_tokens,
                curve.valid,
                color=colour,
                linestyle="none",
                marker=marker,
                markeredgecolor=PAPER,
                markersize=6.5,
                zorder=3,
                clip_on=False,
            )
        # Without a limit, the fall at the start of a long run would hide the differences at its end.
        late = [value for curve in curves for value in curve.train[len(curve.train) // 100 * 5 :]]
        late += [value for curve in curves for value in curve.valid]
        room = 0.05 * (max(late) - min(late) or 1)
        axes.set_ylim(min(late) - room, max(late) + room)
        axes.set_xlim(0, max(max(curve.tokens) for curve in curves) * 1.01)
        axes.set_ylabel("loss, nats per token")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        _over_tokens(axes)
        legend(figure, labels, order)
    return svg()


def clip_ranges(bands: Sequence[Band], order: Sequence[str]) -> str:
    """The range of mask rates over tokens, from one search to the next."""
    labels = [band.label for band in bands]
    with figure_in_style("clips", height=2.4 + legend_height(labels)) as (figure, svg):
        axes = figure.add_subplot()
        for band in bands:
            colour, dashes, _ = look(order.index(band.label))
            axes.fill_between(band.tokens, band.low, band.high, step="post", color=colour, alpha=0.16, lw=0)
            for edge in (band.low, band.high):
                axes.step(band.tokens, edge, where="post", color=colour, linestyle=dashes)
        axes.set_ylim(-0.02, 1.02)
        axes.set_ylabel("mask rate")
        _over_tokens(axes)
        legend(figure, labels, order)
    return svg()


def _over_tokens(axes: Axes) -> None:
    axes.set_xlabel("tokens seen in training")
    axes.xaxis.set_major_formatter(FuncFormatter(_in_units))
    axes.grid(visible=True, axis="y")


_BLUE: dict[str, Any] = {"color": COLOURS[0], "markersize": 6.5}
_MEANINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "exact": ("exact", {**_BLUE, "color": INK, "marker": "o"}),
    "bound": (
        "upper bound: the exact value is here or further left",
        {**_BLUE, "marker": "<", "markerfacecolor": PAPER},
    ),
    "neither": ("neither exact nor a bound", {**_BLUE, "marker": "x"}),
}
"""What a figure means, in words and as a mark."""


def perplexities(dots: Sequence[Dot], name: str = "perplexities") -> str:
    """A row per model; exact figures and bounds have different marks."""
    labels = list(dict.fromkeys(dot.label for dot in dots))
    with figure_in_style(name, height=0.75 + 0.36 * len(labels)) as (figure, svg):
        axes = figure.add_subplot()
        for dot in dots:
            beside = [other for other in dots if other.label == dot.label]
            row = labels.index(dot.label) + 0.22 * (beside.index(dot) - (len(beside) - 1) / 2)
            _, mark = _MEANINGS[dot.meaning]
            axes.errorbar(dot.value, row, xerr=dot.error, elinewidth=1.1, capsize=2.5, **mark)
        name_rows(axes, labels)
        logarithmic_if_wide(axes, "x", [dot.value for dot in dots])
        axes.set_xlabel("perplexity per token, lower is better")
        handles = [
            Line2D([], [], linestyle="none", label=words, **mark)
            for meaning, (words, mark) in _MEANINGS.items()
            if any(dot.meaning == meaning for dot in dots)
        ]
        figure.legend(handles=handles, loc="outside upper left", handletextpad=0.2, handlelength=1.6)
    return svg()


def variances(by_run: Mapping[str, Mapping[str, float]], biased: Sequence[str], order: Sequence[str]) -> str:
    """A row per masking rule, a mark per model; biased rules have hollow marks."""
    rules = list(dict.fromkeys(rule for figures in by_run.values() for rule in figures))
    height = 0.6 + 0.23 * len(rules) + legend_height(list(by_run))
    with figure_in_style("variances", height=height) as (figure, svg):
        axes = figure.add_subplot()
        for label, figures in by_run.items():
            colour, _, marker = look(order.index(label))
            for rule, value in figures.items():
                face = PAPER if rule in biased else colour
                axes.plot(
                    value, rules.index(rule), marker=marker, color=colour, markerfacecolor=face, markersize=6
                )
        name_rows(axes, rules)
        logarithmic_if_wide(axes, "x", [value for figures in by_run.values() for value in figures.values()])
        axes.set_xlabel("variance of the loss over blocks, lower is better")
        legend(figure, list(by_run), order, marks=True)
    return svg()


def length_histograms(found: Sequence[Lengths]) -> str:
    """Shares of texts by length, a panel per model, over the documents it was trained on."""
    longest = max(max([*each.samples, *each.training]) for each in found)
    shortest = max(1, min(min([*each.samples, *each.training]) for each in found))
    bins = np.geomspace(shortest, max(longest, shortest + 1) * 1.0001, 25)
    with figure_in_style("lengths", height=0.9 + 1.35 * len(found)) as (figure, svg):
        panels = figure.subplots(len(found), sharex=True, squeeze=False)[:, 0]
        for axes, each in zip(panels, found, strict=True):
            if each.training:
                _histogram(axes, each.training, bins, color=BARS, label="training documents")
                axes.axvline(float(np.median(each.training)), color=MIDDLE, linewidth=1.2)
            outline: dict[str, Any] = {"histtype": "step", "color": COLOURS[0], "linewidth": 1.6}
            _histogram(axes, each.samples, bins, label="texts it wrote", **outline)
            median = float(np.median(each.samples))
            axes.axvline(median, color=COLOURS[0], linewidth=1.2, linestyle=(0, (4, 2)))
            axes.set_title(readable(each.label), loc="left", fontsize=9, color=INK)
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(_in_units))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
            axes.yaxis.set_major_locator(MaxNLocator(3))
            axes.grid(visible=True, axis="y")
        panels[-1].set_xlabel("length in tokens; lines mark the medians")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
        figure.supylabel("share of texts", fontsize=9, color=SOFT)
    return svg()


def _histogram(axes: Axes, lengths: Sequence[int], bins: Any, **look: Any) -> None:
    """Bars whose heights are shares of the total."""
    axes.hist(lengths, bins, weights=np.full(len(lengths), 1 / len(lengths)), **look)


def quality_against_cost(points: Sequence[Point], order: Sequence[str], name: str = "judgements") -> str:
    """Generative perplexity over network evaluations per token; a mark per model, with its error."""
    labels = list(dict.fromkeys(point.label for point in points))
    middle = float(np.sqrt(min(point.x for point in points) * max(point.x for point in points)))
    with figure_in_style(name, height=2.8 + legend_height(labels)) as (figure, svg):
        axes = figure.add_subplot()
        for point in points:
            colour, _, marker = look(order.index(point.label))
            axes.errorbar(
                point.x, point.y, yerr=point.error, color=colour, marker=marker, markersize=6.5, capsize=2.5
            )
            side = 1 if point.x <= middle else -1  # towards the inside, where there is room
            axes.annotate(
                readable(point.note),
                (point.x, point.y),
                xytext=(7 * side, 0),
                textcoords="offset points",
                ha="left" if side == 1 else "right",
                va="center",
                size=8,
                color=SOFT,
            )
        logarithmic_if_wide(axes, "x", [point.x for point in points])
        logarithmic_if_wide(axes, "y", [point.y for point in points])
        axes.set_xlabel("evaluations of the network per token")
        axes.set_ylabel("generative perplexity")
        axes.margins(x=0.15)
        legend(figure, labels, order, marks=True)
    return svg()


def _in_units(count: float, _: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:g}{name}"
    return f"{count:g}"


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """A centred moving mean; at the ends over fewer values."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    places = np.arange(len(values))
    low, high = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    smoothed: list[float] = ((sums[high] - sums[low]) / (high - low)).tolist()
    return smoothed


def _thinned(values: Sequence[float]) -> list[float]:
    """Every n-th value and the last."""
    every = -(-len(values) // _MOST_POINTS)
    return [*values[: len(values) - 1 : every], values[-1]]
