"""The parts of a report about training: the loss, the clip ranges, and the variance of the loss."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.content import Measured, Report, largest
from bd3lm.reports.document import Part, Plot, Prose, Table
from bd3lm.reports.numbers import with_error
from bd3lm.reports.reproduction import measured_by

# The masking rules, by their names in records, whose loss has an infinite second moment. With a rate of t^p
# near 0 the moment is the integral of p²·t^(p − 2), which converges only for p > 1: for the square and the
# cosine schedule (p = 2), but not for these. Counts have finitely many weights.
NO_FINITE_VARIANCE = (
    *("linear U[0, 1]", "logarithmic", "square root"),
    *("clipped U[0, 0.5]", "redrawn U[0, 0.5]"),
)

_LOGGED = "From `metrics.csv`, which `bd3lm train` writes."


def curve_parts(report: Report) -> Iterator[Part]:
    """The loss of all runs over tokens."""
    curves = []
    for run in report.runs:
        tokens, train = run.column("train_nats")
        if train:
            curves.append(plots.Curve(report.label(run), tokens, train, *run.column("valid_nats")))
    if not curves:
        return
    marked = any(curve.valid for curve in curves)
    words = [
        f"Lines are the training loss{_of([curve.label for curve in curves])}, averaged over a few steps"
        f"{'; faint lines show it unaveraged' if any(curve.window > 1 for curve in curves) else ''}.",
        _marks(report) if marked else "",
        "Lower is better; a difference of 0.1 nats is about 10 % in perplexity.",
        "A run that started from another model begins again at 0 tokens." if report.has_stages else "",
        _orders(report) if marked else "",
        _no_bounds(report),
        _LOGGED,
    ]
    last = "; ".join(f"{curve.label} {curve.train[-1]:.2f}" for curve in curves)
    yield Plot(
        "curves",
        plots.training_curves(curves, report.labels),
        f"Training loss over tokens seen. Last values in nats per token: {last}.",
        " ".join(filter(None, words)),
    )


def _marks(report: Report) -> str:
    is_drawn = not all(run.validation_is_exact for run in report.runs)
    how = ", which for diffusion models is estimated from one random draw of masks and so is a little noisy"
    return f"Single marks are the loss on held-out text{how if is_drawn else ''}."


def _orders(report: Report) -> str:
    """Models whose training loss and held-out loss are measured in different orders."""
    differ = [
        f"{report.label(run)} (line at lean {run.train_lean:g}, marks at lean {run.valid_lean:g})"
        for run in report.runs
        if run.train_lean != run.valid_lean
    ]
    if not differ:
        return ""
    return (
        "Do not compare the line and the marks of the following models, because the marks are for the order "
        f"in which the model writes and the line is for another: {'; '.join(differ)}."
    )


def _no_bounds(report: Report) -> str:
    labels = [report.label(run) for run in report.runs if not run.train_is_bound]
    if not labels:
        return ""
    return (
        "Do not compare the training loss of the following models with any other loss, because it is neither "
        f"exact nor a bound: {'; '.join(labels)}."
    )


def clip_parts(report: Report) -> Iterator[Part]:
    """The ranges of mask rates, for runs that searched for them."""
    bands = []
    for run in report.runs:
        tokens, low = run.column("clip_low")
        _, high = run.column("clip_high")
        if run.clip_range is not None and low:
            first_low, first_high = run.clip_range
            places = [0.0, *tokens, run.log[-1]["tokens"]]
            bands.append(
                plots.Band(
                    report.label(run), places, [first_low, *low, low[-1]], [first_high, *high, high[-1]]
                )
            )
    if bands:
        whose = _of([band.label for band in bands])
        last = [f"{band.label}, {band.low[-1]:g} to {band.high[-1]:g}" for band in bands]
        yield Plot(
            "clips",
            plots.clip_ranges(bands, report.labels),
            f"Clip ranges over training. Last: {'; '.join(last)}.",
            f"The range of mask rates that training draws from{whose}: at first the recipe's range, later "
            "the range with the least variance of the loss over blocks, found by repeated searches. "
            f"{_LOGGED}",
        )


def variance_parts(report: Report) -> Iterator[Part]:
    """The variance of the loss for each masking rule."""
    measured = [
        (run, record)
        for run in report.runs
        for record in largest(
            run.of_kind("variance"),
            lambda record: (record["settings"]["batches"], record["settings"]["gradients"]),
        )
    ]
    if measured:
        rows = [row for _, record in measured for row in record["result"]["rows"]]
        biased = sorted({row["masks"] for row in rows if not row["unbiased"]})
        yield Prose(
            "A training step masks a random part of each block, so its loss is only a noisy estimate of the "
            "bound. How noisy it is depends on how the masks are drawn. The less the estimate varies, the "
            "more a step can learn from it."
        )
        yield _variance_plot(report, measured, biased)
        yield _variance_table(report, measured, biased)


def _variance_plot(report: Report, measured: Sequence[Measured], biased: Sequence[str]) -> Plot:
    figures = {
        report.label(run): {row["masks"]: row["loss"] for row in record["result"]["rows"] if row["loss"]}
        for run, record in measured
    }
    unbiased = {
        label: {masks: loss for masks, loss in found.items() if masks not in biased}
        for label, found in figures.items()
    }
    least = [
        f"{label}, {min(found, key=lambda masks: found[masks])}" for label, found in unbiased.items() if found
    ]
    return Plot(
        "variances",
        plots.variances(figures, biased, report.labels),
        "Variance of the loss for each way of drawing masks."
        + (f" Least among the unbiased: {'; '.join(least)}." if least else ""),
        f"Variance of the loss over blocks{_of(list(figures))}. Filled marks are unbiased estimates of the "
        "bound; hollow ones estimate something else. Redrawn masks are clipped ones, drawn again until "
        f"the share of tokens they mask lies in the range.{measured_by(measured)}",
    )


def _variance_table(report: Report, measured: Sequence[Measured], biased: Sequence[str]) -> Table:
    """A row per masking rule, a column per model and measured quantity."""
    columns = [
        (
            f"{report.label(run)}: variance of the {what}",
            what,
            {row["masks"]: row for row in record["result"]["rows"]},
        )
        for run, record in measured
        for what in (["loss", "gradient"] if record["settings"]["gradients"] else ["loss"])
    ]
    rules = dict.fromkeys(rule for _, _, rows in columns for rule in rows)
    return Table(
        "The same figures in a table. The mean of an unbiased estimate is the bound; the mean of the others "
        f"is not. The true variance of {', '.join(NO_FINITE_VARIANCE[:-1])} and {NO_FINITE_VARIANCE[-1]} is "
        "infinite, because rare draws that mask very little have a huge weight; the table has the variance "
        "of this sample. ± is one standard error over batches, rough where a few large losses dominate.",
        ["masks", "unbiased", *(heading for heading, _, _ in columns)],
        [
            [
                rule,
                "no" if rule in biased else "yes",
                *(_variance(rows.get(rule), what) for _, what, rows in columns),
            ]
            for rule in rules
        ],
        text_columns=[1],
    )


def _variance(row: Mapping[str, Any] | None, what: str) -> str:
    """A variance ± its error; null in a record means that it is not finite."""
    return "–" if row is None else with_error(row[what], row[f"{what}_error"])


def _of(labels: Sequence[str]) -> str:
    """The label if there is only one model, since a plot of one model has no legend."""
    return f" ({labels[0]})" if len(labels) == 1 else ""
