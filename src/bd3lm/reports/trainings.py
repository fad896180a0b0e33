"""The parts of a report on training: the loss, the clip ranges, and how noisy the loss is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.content import Report, Run, largest
from bd3lm.reports.document import Part, Plot, Prose, Table
from bd3lm.reports.numbers import with_error
from bd3lm.reports.reproduction import commands

# Of the ways to draw masks, by the names in a record: those whose loss has an infinite second moment. With a
# rate of t^p near 0 it is the integral of p²·t^(p − 2), which converges for p > 1 alone: for the square and
# the cosine schedule (p = 2), not for these. Counts have finitely many weights.
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
    no_bound = [report.labels[run.folder] for run in report.runs if _trains_on_no_bound(run)]
    words = [
        f"Loss in training{_of([curve.label for curve in curves])}, the mean over a few steps.",
        _marks(report) if marked else "",
        _orders(report) if marked else "",
        "Lower is better; a difference of 0.1 nats is about 10 % in perplexity.",
        "A run that went on from another model starts again at 0 tokens." if report.has_stages else "",
        f"In training no bound, so not to be held against the marks: {'; '.join(no_bound)}."
        if no_bound
        else "",
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
    how = ", of diffusion by one random draw: measured with more, it comes out a little different"
    return f"Single marks are the loss on held-out text{how if drawn else ''}."


def _orders(report: Report) -> str:
    """What the marks are of where an order leans, and which lines are of another order than their marks."""
    for_a_lean = [run for run in report.runs if (run.recipe["method"].get("masking") or {}).get("lean")]
    leaning = [report.labels[run.folder] for run in report.runs if run.lean or run in for_a_lean]
    if not leaning:
        return ""
    marks = "The marks of these are bounds of uniformly random orders of reveal, not of one that leans"
    words = f"{marks}: {'; '.join(leaning)}."
    if for_a_lean:
        labels = "; ".join(report.labels[run.folder] for run in for_a_lean)
        words += f" In training of an order that leans, so not to be held against the marks: {labels}."
    return words


def _trains_on_no_bound(run: Run) -> bool:
    masking = run.recipe["method"].get("masking") or {}
    if masking.get("kind") != "clipped":
        flat = masking.get("weight") == "flat" and run.recipe["method"]["block_size"] != 1
        return flat or run.method == "simplex"
    # All rates are the bound itself, and so is full masking for blocks of one token.
    whole = (masking["low"], masking["high"]) == (0.0, 1.0)
    single = (masking["low"], run.recipe["method"]["block_size"]) == (1.0, 1)
    return masking["search"] is not None or not (whole or single)


def clip_parts(report: Report) -> Iterator[Part]:
    """The ranges of mask rates that were found, where they were searched."""
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
            f"Mask rates that training draws from{_of([band.label for band in bands])}: first those of the "
            "recipe, then the range whose loss varies least over blocks, searched again as training goes on. "
            f"{_LOGGED}",
        )


def variance_parts(report: Report) -> Iterator[Part]:
    """How much the loss varies, by the way masks are drawn."""
    chosen = [
        (run, largest(found, lambda record: (record["settings"]["batches"], record["settings"]["gradients"])))
        for run in report.runs
        if (found := run.of_kind("variance"))
    ]
    if not chosen:
        return
    measured = {report.labels[run.folder]: record["result"]["rows"] for run, record in chosen}
    yield Prose(
        "A training step looks at one random masking of each block, so its loss is a noisy estimate of the "
        "bound. The less the estimate varies, the more a step can learn from it, and that depends on how "
        "masks are drawn."
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
        "Variance of the loss by the way masks are drawn."
        + (f" Least of the unbiased: {'; '.join(least)}." if least else ""),
        f"Variance of the loss over blocks{_of(list(figures))}. Filled marks are unbiased estimates of the "
        f"bound; hollow ones estimate something else. Measured by {commands(chosen)}.",
    )
    asked = [["loss", *(["gradient"] if record["settings"]["gradients"] else [])] for _, record in chosen]
    by_rule = [{row["masks"]: row for row in found} for found in measured.values()]
    yield Table(
        "The same in figures. An unbiased estimate has the bound as its mean; the others have a mean that is "
        "no bound. These have no finite variance, since rates near 0 weigh too much: "
        f"{', '.join(NO_FINITE_VARIANCE)}. Theirs is that of this sample. "
        "± is one standard error over batches, rough where a few large losses decide.",
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
    """A variance ± its error; a record has null for one that is not finite."""
    return "–" if row is None else with_error(row[what], row.get(f"{what}_error"))


def _of(labels: Sequence[str]) -> str:
    """Whose it is, where a plot of one model has no legend to say so."""
    return f" ({labels[0]})" if len(labels) == 1 else ""
