"""The part of a report on perplexities: what is exact, what is a bound, and on which text."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.content import Record, Report, Run
from bd3lm.reports.document import Part, Plot, Prose, Table
from bd3lm.reports.numbers import chain, plain, with_error

_SIGNS = {"exact": "", "bound": "≤ ", "neither": "≈ "}
_OWN = "own"  # how a record names the text that its run held out
Measured = tuple[Run, Record]


def perplexity_parts(report: Report) -> Iterator[Part]:
    """A table and a plot for each text that runs held out, one table for all other texts."""
    measured = report.of_kind("perplexity")
    if not measured:
        return
    yield Prose(
        "Perplexity is the number of equally likely tokens among which a model would be as unsure as it is "
        "about the next piece of the text: lower is better. For diffusion models the literature prints an "
        "upper bound (≤); for small blocks the exact figure can be computed, by counting every order in "
        "which a block can be uncovered, and is never above the bound."
    )
    own: dict[tuple[str, str], list[Measured]] = {}
    for run, record in measured:
        if record["settings"]["data"] == _OWN:
            own.setdefault((record["settings"]["text"], record["settings"]["split"]), []).append(
                (run, record)
            )
    for index, ((_, split), group) in enumerate(own.items()):
        data = _data_name(group[0][0])
        yield _table(report, group, f"{data}, split {split}")
        dots = list(_dots(report, group))
        if len(dots) > 1:
            yield _plot(dots, f"perplexities{index or ''}", data)
    elsewhere = [each for each in measured if each[1]["settings"]["data"] != _OWN]
    if elsewhere:
        yield _other_texts(report, elsewhere)


def _data_name(run: Run) -> str:
    path: str = run.recipe["data"]["path"]
    return "the documentation that comes with Python" if path == "builtin" else path


def _table(report: Report, group: Sequence[Measured], text: str) -> Table:
    """One row a measurement."""
    meanings = [
        meaning
        for meaning in _SIGNS
        if any(figure["meaning"] == meaning for _, record in group for figure in record["result"]["figures"])
    ]
    names = {"exact": "perplexity, exact", "bound": "perplexity, bound", "neither": "neither"}
    sizes = {(record["result"]["sequences"], record["result"]["tokens"]) for _, record in group}
    rows = []
    for run, record in group:
        figures = record["result"]["figures"]
        first = {figure["meaning"]: figure for figure in figures}
        bits = figures[0]["bits_per_byte"]
        rows.append(
            [
                report.labels[run.folder],
                chain(run.tokens),
                *(_cell(first[meaning]) if meaning in first else "" for meaning in meanings),
                "–" if bits is None else _SIGNS[figures[0]["meaning"]] + plain(bits),
                _estimator(record),
                *([f"{record['result']['tokens']:,}"] if len(sizes) > 1 else []),
            ]
        )
    sequences, tokens = min(sizes)
    on = f" ({sequences:,} sequences, {tokens:,} tokens scored)" if len(sizes) == 1 else ""
    return Table(
        f"Perplexity per token of held-out text: {text}{on}. No sign marks an exact figure, ≤ an upper "
        "bound, ≈ what is neither; ± is one standard error over sequences. Compare models with different "
        f"tokenizers by bits per byte. Measured by {_command(group)}.",
        ["model", "tokens seen", *(names[meaning] for meaning in meanings), "bits per byte", "estimator"]
        + (["scored tokens"] if len(sizes) > 1 else []),
        rows,
        text_columns=[3 + len(meanings)],
    )


def _cell(figure: Any) -> str:
    return with_error(figure["perplexity"], figure["perplexity_error"], sign=_SIGNS[figure["meaning"]])


def _estimator(record: Record) -> str:
    settings = record["settings"]
    draws = settings["replicates"]
    return settings["estimator"] + (f", {draws} draws" if draws > 1 else "")


def _command(group: Sequence[Measured]) -> str:
    folders = list(dict.fromkeys(run.folder for run, _ in group))
    return f"`bd3lm eval {' '.join(folders)}`"


def _dots(report: Report, group: Sequence[Measured]) -> Iterator[plots.Dot]:
    for run, record in group:
        for figure in record["result"]["figures"]:
            if figure["perplexity"] is not None:
                yield plots.Dot(
                    report.labels[run.folder],
                    figure["perplexity"],
                    figure["perplexity_error"],
                    figure["meaning"],
                )


def _plot(dots: Sequence[plots.Dot], name: str, data: str) -> Plot:
    words = "; ".join(f"{dot.label} {_SIGNS[dot.meaning]}{plain(dot.value)}" for dot in dots)
    return Plot(
        name,
        plots.perplexities(dots, name),
        f"Perplexity of {data}: {words}.",
        "The same as a picture. Bars are one standard error to each side, hidden where they are smaller than "
        "the mark.",
    )


def _other_texts(report: Report, group: Sequence[Measured]) -> Table:
    """Models against corpora."""
    texts = list(dict.fromkeys(record["settings"]["data"] for _, record in group))
    rows = []
    for run in dict.fromkeys(run.folder for run, _ in group):
        figures = {
            record["settings"]["data"]: _cell(record["result"]["figures"][0])
            for each, record in group
            if each.folder == run
        }
        rows.append([report.labels[run], *(figures.get(text, "–") for text in texts)])
    return Table(
        "Perplexity per token of other texts, which the models were not trained on. No sign marks an exact "
        "figure, ≤ an upper bound, ≈ what is neither; ± is one standard error over sequences. Measured by "
        "`bd3lm zeroshot` or `bd3lm eval --data`.",
        ["model", *(PurePath(text).name.partition(".")[0] or text for text in texts)],
        rows,
    )
