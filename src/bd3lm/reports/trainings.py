"""The parts of a report on training: the loss, the clip ranges, and how noisy the loss is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.content import Report, largest
from bd3lm.reports.document import Part, Plot, Prose, Table
from bd3lm.reports.numbers import with_error
from bd3lm.reports.reproduction import measured_by

# The ways of drawing masks, by their names in a record, whose loss has an infinite second moment. With a rate
# of t^p near 0 it is the integral of p²·t^(p − 2), which converges only for p > 1: for the square and the
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
            curves.append(plots.Curve(report.labels[run.folder], tokens, train, *run.column("valid_nats")))
    if not curves:
        return
    marked = any(curve.valid for curve in curves)
    words = [
        f"Lines are the training loss{_of([curve.label for curve in curves])}, averaged over a few steps.",
        _marks(report) if marked else "",
        "Lower is better; a difference of 0.1 nats is about 10 % in perplexity.",
        "A run that started from another model begins again at 0 tokens." if report.has_stages else "",
        _orders(report) if marked else "",
        _no_bounds(report),
        _LOGGED,
    ]
    yield Plot(
        "curves",
        plots.training_curves(curves, list(report.labels.values())),
        "Training loss over tokens seen. Last values in nats per token: "
        + "; ".join(f"{curve.label} {curve.train[-1]:.2f}" for curve in curves)
        + ".",
        " ".join(filter(None, words)),
    )


def _marks(report: Report) -> str:
    drawn = any(run.method != "autoregressive" for run in report.runs)
    how = ", which for diffusion models is estimated from one random draw of masks and so a little noisy"
    return f"Single marks are the loss on held-out text{how if drawn else ''}."


def _orders(report: Report) -> str:
    """Which models have their training loss and their held-out loss measured in different orders."""
    differ = [
        f"{report.labels[run.folder]} (line at lean {run.train_lean:g}, marks at lean {run.valid_lean:g})"
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
    labels = [report.labels[run.folder] for run in report.runs if not run.train_is_bound]
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
        high = run.column("clip_high")[1]
        if low:
            first = run.recipe["method"]["masking"]
            low, high = [first["low"], *low], [first["high"], *high]
            tokens = [0.0, *tokens]
            label, end = report.labels[run.folder], run.log[-1]["tokens"]
            bands.append(plots.Band(label, [*tokens, end], [*low, low[-1]], [*high, high[-1]]))
    if bands:
        yield Plot(
            "clips",
            plots.clip_ranges(bands, list(report.labels.values())),
            "Clip ranges over training. Last: "
            + "; ".join(f"{band.label}, {band.low[-1]:g} to {band.high[-1]:g}" for band in bands)
            + ".",
            f"The range of mask rates that training draws from{_of([band.label for band in bands])}: at "
            "first that of the recipe, then the one whose loss varies least over blocks, which is searched "
            f"for again as training goes on. {_LOGGED}",
        )


def variance_parts(report: Report) -> Iterator[Part]:
    """How much the loss varies, for each way of drawing masks."""
    chosen = [
        (run, largest(found, lambda record: (record["settings"]["batches"], record["settings"]["gradients"])))
        for run in report.runs
        if (found := run.of_kind("variance"))
    ]
    if not chosen:
        return
    measured = {report.labels[run.folder]: record["result"]["rows"] for run, record in chosen}
    yield Prose(
        "A training step hides a random part of each block, so its loss is only a noisy estimate of the "
        "bound. How noisy it is depends on how the masks are drawn. The less the estimate varies, the more "
        "a step can learn from it."
    )
    rows = [row for found in measured.values() for row in found]
    biased = sorted({row["masks"] for row in rows if not row["unbiased"]})
    figures = {
        label: {row["masks"]: row["loss"] for row in found if row["loss"]}
        for label, found in measured.items()
    }
    unbiased = {
        label: [row for row in found if row["unbiased"] and row["loss"]] for label, found in measured.items()
    }
    least = [
        f"{label}, {min(found, key=lambda row: float(row['loss']))['masks']}"
        for label, found in unbiased.items()
        if found
    ]
    yield Plot(
        "variances",
        plots.variances(figures, biased, list(report.labels.values())),
        "Variance of the loss for each way of drawing masks."
        + (f" Least among the unbiased: {'; '.join(least)}." if least else ""),
        f"Variance of the loss over blocks{_of(list(figures))}. Filled marks are unbiased estimates of the "
        "bound; hollow ones estimate something else. Redrawn masks are clipped ones, drawn again until "
        f"the share they hide lies in the range.{measured_by(chosen)}",
    )
    asked = [["loss", *(["gradient"] if record["settings"]["gradients"] else [])] for _, record in chosen]
    by_rule = [{row["masks"]: row for row in found} for found in measured.values()]
    yield Table(
        "The same in figures. The mean of an unbiased estimate is the bound; the mean of the others is not. "
        f"The true variance of {', '.join(NO_FINITE_VARIANCE[:-1])} and {NO_FINITE_VARIANCE[-1]} is "
        "infinite, because rare masks that hide very little have a huge weight; the table has the variance "
        "of this sample. ± is one standard error over batches, rough where a few large losses dominate.",
        [
            "masks",
            "unbiased",
            *(f"{label}: {what}" for label, whats in zip(measured, asked, strict=True) for what in whats),
        ],
        [
            [rule, "no" if rule in biased else "yes"]
            + [
                _variance(each.get(rule), what)
                for each, whats in zip(by_rule, asked, strict=True)
                for what in whats
            ]
            for rule in dict.fromkeys(row["masks"] for row in rows)
        ],
        text_columns=[1],
    )


def _variance(row: Mapping[str, Any] | None, what: str) -> str:
    """A variance ± its error; in a record null stands for one that is not finite."""
    return "–" if row is None else with_error(row[what], row.get(f"{what}_error"))


def _of(labels: Sequence[str]) -> str:
    """The label of the only model, since a plot of one model has no legend."""
    return f" ({labels[0]})" if len(labels) == 1 else ""
