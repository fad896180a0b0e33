"""The plots of the results, in the style of the reports, each with what it shows in words."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from bd3lm.reports.document import Plot
from bd3lm.reports.plots import Lengths, length_histograms
from bd3lm.reports.style import (
    figure_in_style,
    legend,
    legend_height,
    logarithmic_if_wide,
    look,
    name_rows,
)
from research.evidence import paper
from research.evidence.decoding import breaks, curves, decoding_sets, rule_family
from research.evidence.figures import Evidence, Written
from research.evidence.noise import Difference
from research.evidence.runs import DECODED, LONG, PRESET, TIME, UNTIED
from research.evidence.tables import CORPORA, documents, ordered_names, past_names

_GREY = "#8a8a8a"
_ROW_MARKS = {
    "equal tokens": ("o", None),
    "equal time": ("D", "white"),
    "blocks of 4": ("o", None),
    "blocks of 16": ("s", "white"),
    "median": ("o", None),
    "90th percentile": ("D", "white"),
    "longest": ("|", None),
}
"""Marks and their faces, by what they are of."""


def case_plot(evidence: Evidence) -> Plot | None:
    """Training curves without the fall at the start, which would leave no room for the rest.

    Over steps: a random batch learns from fewer tokens than it reads, nobody knows how many.
    """
    curves = {name: list(evidence.curve(name).items()) for name in paper.CASE_STUDY}
    curves = {name: points[len(points) // 10 :] for name, points in curves.items() if points}
    if not curves:
        return None
    with figure_in_style("case-study", height=3.0 + legend_height(list(curves))) as (figure, svg):
        axes = figure.add_subplot()
        for name, points in curves.items():
            colour, dashes, _ = look(list(paper.CASE_STUDY).index(name))
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes)
        axes.set_xlabel("training steps")
        axes.set_ylabel("loss, nats per token")
        axes.grid(visible=True, axis="y")
        legend(figure, list(curves), list(paper.CASE_STUDY))
    last = "; ".join(f"{name} {points[-1][1]:.2f}" for name, points in curves.items())
    return Plot(
        "case-study",
        svg(),
        f"Training loss over steps. Last values in nats a token: {last}.",
        "Training loss after the first tenth, each point a mean over the steps since the last; first seed.",
    )


def block_size_plot(evidence: Evidence) -> Plot | None:
    """How far above AR, over growing blocks up to a whole context."""
    places = {"ar": "AR", "bd3lm-4": "4", "bd3lm-8": "8", "bd3lm-16": "16", "mdlm": "L (MDLM)"}
    lines = {
        "here, bound": _above_ar(evidence, {name: evidence.as_in_paper(name) for name in places}),
        "here, exact": _above_ar(evidence, {name: evidence.exact(name) for name in places}),
        **{
            f"paper, {corpus}, bound": {name: Difference.of(table[name], table["ar"]) for name in places}
            for corpus, table in CORPORA.items()
        },
    }
    lines = {label: values for label, values in lines.items() if len(values) > 1}
    if "here, bound" not in lines:
        return None
    with figure_in_style("block-sizes", height=2.8 + legend_height(list(lines))) as (figure, svg):
        axes = figure.add_subplot()
        # No line leads over what is not measured.
        unknown = dict.fromkeys(places, Difference(math.nan))
        _lines_above_ar(
            axes,
            {
                label: dict(enumerate({**unknown, **values}[name] for name in places))
                for label, values in lines.items()
            },
        )
        axes.set_xticks(range(len(places)), list(places.values()))
        axes.set_xlabel("tokens in a block")
        legend(figure, list(lines), list(lines), marks=True)
    words = [
        f"{label}: {', '.join(f'{places[name]} {value}' for name, value in values.items() if name != 'ar')}"
        for label, values in lines.items()
    ]
    return Plot(
        "block-sizes",
        svg(),
        f"Perplexity above AR by block size. {'; '.join(words)}.",
        "Perplexity above that of AR, which is exact in all lines. Bars are one standard error, where it is "
        "known.",
    )


def digest_block_plot(evidence: Evidence) -> Plot | None:
    """The same bounds, and those after longer trainings, without AR."""
    places = {"bd3lm-4": "4", "bd3lm-8": "8", "bd3lm-16": "16", "mdlm": "whole (MDLM)"}
    long = {name: f"{LONG}{name}" for name in places if evidence.named(f"{LONG}{name}")}
    steps, more = (evidence.named(name)[0].steps for name in ("ar", f"{LONG}ar"))
    lines = {
        f"here, {steps:,} steps": _above_ar(evidence, {name: evidence.as_in_paper(name) for name in places}),
        f"here, {more:,} steps, one seed": {
            name: above
            for name, each in long.items()
            if (above := evidence.above_ar(evidence.as_in_paper(each), ar=f"{LONG}ar"))
        },
        **{
            f"paper, {corpus}": {name: Difference.of(table[name], table["ar"]) for name in places}
            for corpus, table in CORPORA.items()
        },
    }
    lines = {label: values for label, values in lines.items() if len(values) > 1}
    with figure_in_style("block-sizes", height=2.8 + legend_height(list(lines))) as (figure, svg):
        axes = figure.add_subplot()
        order = list(places)
        shares = _draw_lines(
            axes,
            {
                label: {order.index(name): value for name, value in values.items()}
                for label, values in lines.items()
            },
        )
        logarithmic_if_wide(axes, "y", shares)
        axes.set_xticks(range(len(places)), list(places.values()))
        axes.set_xlabel("tokens in a block")
        legend(figure, list(lines), list(lines), marks=True)
    words = [
        f"{label}: {', '.join(f'{places[name]} {value}' for name, value in values.items())}"
        for label, values in lines.items()
    ]
    return Plot(
        "block-sizes",
        svg(),
        f"Perplexity above AR by block size. {'; '.join(words)}.",
        "Bounds of perplexity above AR. Bars are one standard error, where it is known.",
    )


def _lines_above_ar(axes: Axes, lines: Mapping[str, Mapping[float, Difference]]) -> None:
    """By place on the x axis. The scale shows tens of percents beside hundreds: linear around zero,
    logarithmic beyond."""
    shares = _draw_lines(axes, lines)
    if max(shares) > 200:
        axes.set_yscale("symlog", linthresh=20)
        axes.set_ylim(min(0.0, *shares) - 2, 1.4 * max(shares))
        axes.yaxis.set_major_locator(FixedLocator([0, 10, 20, 50, 100, 200, 500, 1000]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _draw_lines(axes: Axes, lines: Mapping[str, Mapping[float, Difference]]) -> list[float]:
    """What they show, in percent."""
    shares: list[float] = []
    for index, values in enumerate(lines.values()):
        colour, dashes, marker = look(index)
        y, errors = _percent(list(values.values()))
        axes.errorbar(list(values), y, errors, color=colour, linestyle=dashes, marker=marker, capsize=2.5)
        shares += [each for each in y if not math.isnan(each)]
    axes.set_ylabel("perplexity, % above AR")
    axes.grid(visible=True, axis="y")
    return shares


def _above_ar(evidence: Evidence, figures: Mapping[str, Any]) -> dict[str, Difference]:
    above = {name: evidence.above_ar(nats) for name, nats in figures.items()}
    return {name: Difference(0.0) if name == "ar" else value for name, value in above.items() if value}


def _percent(values: Sequence[Difference]) -> tuple[list[float], list[list[float]]]:
    """Values, and errors to both sides, no error being none."""
    intervals = [each.interval or (each.value, each.value) for each in values]
    errors = [
        [abs(each.value - end[side]) for each, end in zip(values, intervals, strict=True)] for side in (0, 1)
    ]
    return [100 * each.value for each in values], [[100 * error for error in side] for side in errors]


def past_plot(evidence: Evidence, size: int) -> Plot | None:
    """A row for each variant, at equal tokens and, where that was trained, in equal time."""
    rows: dict[str, dict[str, Difference]] = {}
    for name in past_names(evidence, size):
        if above := evidence.above_ar(evidence.best(name), ar=evidence.ar_beside(name)):
            when = "equal time" if name.startswith(TIME) else "equal tokens"
            rows.setdefault(name.removeprefix(TIME), {})[when] = above
    return above_ar_rows(
        f"past-{size}",
        rows,
        "Perplexity above AR by variant",
        f"perplexity ({'exact' if size == 4 else 'bound'}), % above AR",
        f"Blocks of {size}, perplexity above the exact one of AR, which is tied where a run is. Bars are one "
        f"standard error, where it is known. Equal time is that of `counts-{size}`.",
    )


def above_ar_rows(
    title: str, rows: Mapping[str, Mapping[str, Difference]], what: str, axis: str, caption: str
) -> Plot | None:
    """Distances from AR, a row for each label; those of a row are told apart by their marks."""
    if not rows:
        return None
    colour = look(0)[0]
    with figure_in_style(title, height=0.9 + 0.26 * len(rows)) as (figure, svg):
        axes = figure.add_subplot()
        _mark_rows(axes, rows, colour)
        logarithmic_if_wide(
            axes, "x", [100 * above.value for each in rows.values() for above in each.values()]
        )
        axes.set_xlabel(axis)
        _legend_of_marks(figure, rows, colour)
    return Plot(title, svg(), f"{what}: {_rows_in_words(rows)}.", caption)


def change_rows(
    title: str, rows: Mapping[str, Mapping[str, Difference]], what: str, axis: str, caption: str
) -> Plot | None:
    """Differences to both sides of none, a row for each label."""
    if not rows:
        return None
    colour = look(0)[0]
    with figure_in_style(title, height=0.9 + 0.26 * len(rows)) as (figure, svg):
        axes = figure.add_subplot()
        axes.axvline(0.0, color=_GREY, linewidth=1.0, linestyle=(0, (2, 2)))
        _mark_rows(axes, rows, colour)
        axes.set_xscale("symlog", linthresh=20)
        axes.xaxis.set_major_locator(FixedLocator([-50, -20, -10, 0, 10, 20, 100]))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{value:+g}".replace("-", "−").replace("+0", "0"))
        )
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(axis)
        _legend_of_marks(figure, rows, colour)
    return Plot(title, svg(), f"{what}: {_rows_in_words(rows)}.", caption)


def _mark_rows(axes: Axes, rows: Mapping[str, Mapping[str, Difference]], colour: str) -> None:
    for place, each in enumerate(rows.values()):
        for when, above in each.items():
            marker, face = _ROW_MARKS[when]
            (x,), error = _percent([above])
            axes.errorbar(
                x, place, xerr=error, color=colour, marker=marker, markerfacecolor=face, capsize=2.5
            )
    name_rows(axes, list(rows))


def _legend_of_marks(figure: Figure, rows: Mapping[str, Mapping[str, Any]], colour: str) -> None:
    used = [when for when in _ROW_MARKS if any(when in each for each in rows.values())]
    figure.legend(handles=[_row_mark(when, colour) for when in used], loc="outside upper left", ncols=3)


def _rows_in_words(rows: Mapping[str, Mapping[str, Difference]]) -> str:
    return "; ".join(
        f"{name} {', '.join(f'{above} ({when})' for when, above in each.items())}"
        for name, each in rows.items()
    )


_LEANING = ("both", "from-ar", "from-ar-late", "from-ar-copies", UNTIED, PRESET)


def order_plot(evidence: Evidence, size: int) -> Plot | None:
    """How far above AR, over how much the order leans; of some runs, since more cannot be told apart."""
    names = [name for name in ordered_names(evidence, size) if name.removesuffix(f"-{size}") in _LEANING]
    return _plot_orders(
        evidence,
        f"orders-{size}",
        {name: name for name in names},
        f"Blocks of {size}, perplexity ({'exact' if size == 4 else 'bound'}) above the exact one of AR, the "
        "dashed line, tied where a row is; some rows of the table. Bars are one standard error, where it is "
        "known.",
    )


def preset_order_plot(evidence: Evidence) -> Plot | None:
    """The same of the recommended recipe alone, for readers who do not know the names of runs."""
    return _plot_orders(
        evidence,
        "preset-orders",
        {"blocks of 4 (exact)": f"{PRESET}-4", "blocks of 16 (upper bound)": f"{PRESET}-16"},
        "Perplexity above that of AR (dashed), by the order inside a block. A line is one trained recipe, "
        "with the same weights in every order. Bars are one standard error.",
    )


def digest_order_plot(evidence: Evidence) -> Plot | None:
    """The recommended recipe at both block sizes, and another one beside it."""
    return _plot_orders(
        evidence,
        "lean",
        {
            "wikipedia-block-4 (exact)": f"{PRESET}-4",
            "wikipedia-block-16 (bound)": f"{PRESET}-16",
            "from-ar-4 (exact)": f"{DECODED}-4",
            "from-ar-16 (bound)": f"{DECODED}-16",
        },
        "Perplexity above AR (dashed). Each line is one trained model, read in different orders.",
    )


def _plot_orders(evidence: Evidence, title: str, labels: Mapping[str, str], caption: str) -> Plot | None:
    """A line for each run that was measured in several orders, by its label."""
    lines: dict[str, dict[float, Difference]] = {}
    for label, name in labels.items():
        found, ar = evidence.in_orders(name).items(), evidence.ar_beside(name)
        known = {lean: above for lean, nats in found if (above := evidence.above_ar(nats, ar=ar))}
        if len(known) > 1:
            lines[label] = known
    if not lines:
        return None
    with figure_in_style(title, height=2.8 + legend_height(list(lines))) as (figure, svg):
        axes = figure.add_subplot()
        axes.axhline(0.0, color=_GREY, linewidth=1.0, linestyle=(0, (2, 2)))
        _lines_above_ar(axes, lines)
        axes.set_xlabel("lean of the order, from uniformly random to nearly left to right")
        legend(figure, list(lines), list(lines), marks=True)
    words = [
        f"{label}: {', '.join(f'{above} at {lean:g}' for lean, above in values.items())}"
        for label, values in lines.items()
    ]
    return Plot(title, svg(), f"Perplexity above AR by the lean of the order. {'; '.join(words)}.", caption)


def _row_mark(when: str, colour: str) -> Line2D:
    marker, face = _ROW_MARKS[when]
    return Line2D([], [], color=colour, marker=marker, markerfacecolor=face, linestyle="none", label=when)


def decoding_plot(evidence: Evidence, name: str) -> Plot | None:
    """Generative perplexity and entropy over evaluations a token, a curve for each rule."""
    sets = decoding_sets(evidence).get(name, [])
    known = curves(sets)
    judged = [each for own in known.values() for each in own if each.verdict and each.cost]
    if len(judged) < 2:
        return None
    families = list(dict.fromkeys(map(rule_family, judged)))
    with figure_in_style(f"decoding-{name}", height=4.4 + legend_height(families)) as (figure, svg):
        panels: Sequence[Axes] = figure.subplots(2, sharex=True)
        titles = {"perplexity": "generative perplexity", "entropy": "entropy, nats"}
        for axes, (what, title) in zip(panels, titles.items(), strict=True):
            for index, family in enumerate(families):
                own = [each for each in judged if rule_family(each) == family]
                _decoding_curve(axes, own, what, sets, look(index))
            logarithmic_if_wide(axes, "y", [each.verdict[what] for each in judged if each.verdict])
            _real_line(axes, evidence, what)
            axes.set_ylabel(title)
            axes.grid(visible=True, axis="x")
        panels[-1].set_xlabel("evaluations of the network a token")
        legend(figure, families, families, marks=True)
    broken = sum(bool(breaks(each, sets)) for each in judged)
    by_cost = sorted(judged, key=lambda each: each.evaluations or 0.0)
    return Plot(
        f"decoding-{name}",
        svg(),
        f"Generative perplexity and entropy of {name} by evaluations a token, {len(judged)} settings, "
        f"{broken} of them broken: from {_point(by_cost[-1])} to {_point(by_cost[0])}.",
        f"Texts of `{name}`, from careful on the right to hasty on the left. Hollow marks: quality has "
        "broken, by the rule below. Bars are one standard error over texts.",
    )


def _decoding_curve(
    axes: Axes, sets: Sequence[Written], what: str, every: Sequence[Written], look: Any
) -> None:
    colour, dashes, marker = look
    ordered = sorted(sets, key=lambda each: each.evaluations or 0.0)
    found = [(each.evaluations, each.verdict) for each in ordered if each.verdict]
    axes.plot(
        [x for x, _ in found], [each[what] for _, each in found], color=colour, linestyle=dashes, lw=1.2
    )
    for (x, each), written in zip(found, ordered, strict=True):
        face = "white" if breaks(written, every) else colour
        style = {"color": colour, "marker": marker, "markerfacecolor": face, "capsize": 2.0}
        axes.errorbar(x, each[what], each[f"{what}_error"], **style)


def _real_line(axes: Axes, evidence: Evidence, what: str) -> None:
    real = evidence.real_text(1)
    if real is not None:
        axes.axhline(real[what], color=_GREY, linewidth=1.0, linestyle=(0, (2, 2)))
        where = {"xycoords": ("axes fraction", "data"), "ha": "left", "va": "bottom"}
        axes.annotate("real text", (0.01, real[what]), size=8, color=_GREY, **where)


def _point(written: Written) -> str:
    found = written.verdict or {}
    return f"{found['perplexity']:.1f} and {found['entropy']:.2f} at {written.evaluations:.2f}"


def length_plot(evidence: Evidence) -> Plot | None:
    training = evidence.real["lengths"] if evidence.real else []
    found = {name: result for name, result in documents(evidence) if result}
    if not found:
        return None
    medians = "; ".join(f"{name} {result['median']:,}" for name, result in found.items())
    return Plot(
        "lengths",
        length_histograms([Lengths(name, result["lengths"], training) for name, result in found.items()]),
        f"Shares of documents by length in tokens. Medians: {medians}.",
        "How long the documents of a model are, over those it was trained on.",
    )


def length_rows_plot(evidence: Evidence) -> Plot | None:
    """Median, 90th percentile and longest document of each model, on one scale."""
    rows = {"training text": evidence.real} if evidence.real else {}
    rows |= {name: result for name, result in documents(evidence) if result}
    if not rows:
        return None
    marks = {"median": "median", "90th percentile": "p90", "longest": "max"}
    colour = look(0)[0]
    with figure_in_style("document-lengths", height=0.9 + 0.26 * len(rows)) as (figure, svg):
        axes = figure.add_subplot()
        for place, each in enumerate(rows.values()):
            axes.plot([each["median"], each["max"]], [place, place], color=colour, linewidth=0.8)
            for label, field in marks.items():
                marker, face = _ROW_MARKS[label]
                axes.plot(each[field], place, color=colour, marker=marker, markerfacecolor=face)
        name_rows(axes, list(rows))
        logarithmic_if_wide(axes, "x", [each[field] for each in rows.values() for field in marks.values()])
        axes.set_xlabel("tokens in a document")
        _legend_of_marks(figure, dict.fromkeys(rows, dict.fromkeys(marks)), colour)
    medians = "; ".join(f"{name} {each['median']:,}" for name, each in rows.items())
    return Plot(
        "document-lengths",
        svg(),
        f"Lengths of documents in tokens. Medians: {medians}.",
        "Lengths of the documents that a model writes from nothing, next to the training text.",
    )
