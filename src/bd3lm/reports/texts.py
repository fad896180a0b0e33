"""The parts of a report on what models write: a film, samples, their lengths, and what another model says."""

from collections.abc import Iterator
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.animation import Film
from bd3lm.reports.content import Record, Report
from bd3lm.reports.document import Heading, Part, Plot, Prose, Quotation, Screening, Table
from bd3lm.reports.numbers import capital, plain, with_error


def film_parts(report: Report) -> Iterator[Part]:
    """One film: of the last model that writes in blocks, or else of the last that has one."""
    films = report.of_kind("denoising")
    in_blocks = [each for each in films if each[0].method == "block_diffusion"]
    if not films:
        return
    run, record = (in_blocks or films)[-1]
    film = Film.from_json(record["result"])
    size = max((stop - start for start, stop in film.blocks), default=1)
    blocks = "all in one block" if len(film.blocks) == 1 else f"block after block of {size} tokens"
    yield Screening(
        film,
        f"Written by: {report.labels[run.folder]}, {'token after token' if size == 1 else blocks}. What is "
        f"uncovered does not change. {_sampler(record)}",
    )


def sample_parts(report: Report) -> Iterator[Part]:
    """Texts of every model."""
    drawn = report.of_kind("samples")
    if not drawn:
        return
    prompted = any(text["given"] for _, record in drawn for text in record["result"]["texts"])
    given = " Each goes on from the first words of a held-out document, set apart." if prompted else ""
    yield Prose(
        f"Drawn once and not picked.{given} An evaluation is one pass through the network. More of them: "
        "`bd3lm sample`."
    )
    for run, record in drawn:
        if len(report.runs) > 1:
            yield Heading(capital(report.labels[run.folder]))
        for text in record["result"]["texts"]:
            yield Quotation(text["given"], text["written"], _note(text, record))


_ENDS = {
    "eos": "ended by itself",
    "entropy": "ended for repeating itself",
    "length": "cut off at its length",
}


def _note(text: Any, record: Record) -> str:
    cost = f"{text['tokens']} tokens written in {text['evaluations']} evaluations"
    return f"{cost}, {_ENDS[text['stopped_by']]}. {_sampler(record)}"


def _sampler(record: Record) -> str:
    settings = record["settings"]
    nucleus = f"Nucleus {settings['nucleus_p']:g}" if settings["nucleus_p"] else "No nucleus"
    steps = f", {settings['steps']} steps" if settings["steps"] else ""
    return f"{nucleus}{steps}, seed {settings['seed']}, {record['dtype']}."


def length_parts(report: Report) -> Iterator[Part]:
    """How long texts are that end by themselves, beside the documents of the training set."""
    found = [(run, run.of_kind("lengths")[-1]) for run in report.runs if run.of_kind("lengths")]
    if not found:
        return
    yield Plot(
        "lengths",
        plots.length_histograms(
            [
                plots.Lengths(
                    report.labels[run.folder],
                    record["result"]["samples"]["lengths"],
                    (record["result"]["training"] or {}).get("lengths", ()),
                )
                for run, record in found
            ]
        ),
        "Histograms of lengths of texts. Medians in tokens: "
        + "; ".join(
            f"{report.labels[run.folder]} {record['result']['samples']['median']:,}" for run, record in found
        )
        + ".",
        "How long texts are that a model ends by itself, over those of the documents it was trained on. "
        f"Measured by {report.command('lengths')}.",
    )
    rows = []
    for run, record in found:
        samples = record["result"]["samples"]
        ends = ", ".join(f"{count:,} by {why}" for why, count in samples["stopped_by"].items() if count)
        limit = record["settings"]["length"]
        cells = [report.labels[run.folder], f"{samples['number']:,}", *_statistics(samples)]
        rows.append([*cells, f"{limit:,}" if limit else "–", ends])
    trained_on = {str(record["settings"]["data"]): record["result"]["training"] for _, record in found}
    for data, training in trained_on.items():
        if training is not None:
            cells = [f"training documents, `{data}`", f"{training['documents']:,}", *_statistics(training)]
            rows.append([*cells, "", ""])
    yield Table(
        "Lengths in tokens. The limit is what a text may reach at most: one that was stopped by length might "
        "have gone on.",
        ["texts of", "number", "median", "mean", "90th percentile", "longest", "limit", "stopped"],
        rows,
        text_columns=[7],
    )


def _statistics(found: Any) -> list[str]:
    return [f"{found[name]:,.0f}" for name in ("median", "mean", "p90", "max")]


def judgement_parts(report: Report) -> Iterator[Part]:
    """Generative perplexity, and all that it must not be read without."""
    judged = report.of_kind("judgement")
    if not judged:
        return
    points = [
        plots.Point(
            report.labels[run.folder],
            record["result"]["evaluations_per_token"],
            record["result"]["perplexity"],
            record["result"]["perplexity_error"],
            f"nucleus {record['settings']['nucleus_p'] or 1:g}",
        )
        for run, record in judged
        if record["result"]["evaluations_per_token"] and record["result"]["perplexity"]
    ]
    if len(points) > 1:
        yield Plot(
            "judgements",
            plots.quality_against_cost(points, list(report.labels.values())),
            "Generative perplexity against evaluations a token: "
            + "; ".join(f"{point.label} {plain(point.y)} at {plain(point.x)}" for point in points)
            + ".",
            "How much the texts surprise another language model, against what they cost to write. Lower and "
            "further left is better; but dull texts surprise nobody, so look at the entropy too.",
        )
    cells = [_judgement(record) for _, record in judged]
    same = [name for name in _FOLDED if len({each[name] for each in cells}) == 1]
    common = "; ".join(f"{name} {cells[0][name]}" for name in same if cells[0][name] != "–")
    shown = [name for name in cells[0] if name not in same]
    yield Table(
        "Generative perplexity: that of texts which a model wrote, under another model, the judge. It is "
        "neither exact nor a bound of anything: it judges texts, not likelihoods. Entropy is of the tokens "
        "of a text, in nats: texts that repeat themselves have little. ± is one standard error over texts. "
        + (f"In all rows: {common}. " if common else "")
        + f"Measured by {report.command('judgement')}.",
        ["model", *shown],
        [
            [report.labels[run.folder], *(each[name] for name in shown)]
            for (run, _), each in zip(judged, cells, strict=True)
        ],
        text_columns=[place for place, name in enumerate(shown, 1) if name in ("sampler", "judge")],
    )


_FOLDED = ("MAUVE", "texts", "length", "redrawn", "degenerate", "sampler", "judge")
"""Columns that the caption tells where they are the same in all rows."""


def _judgement(record: Record) -> dict[str, str]:
    settings, result = record["settings"], record["result"]
    sampler = [settings["unmasking"], settings["steps"] and f"{settings['steps']} steps", settings["dtype"]]
    return {
        "generative perplexity": with_error(result["perplexity"], result["perplexity_error"]),
        "entropy": with_error(result["entropy"], result["entropy_error"]),
        "evaluations a token": _or_dash(result["evaluations_per_token"]),
        "nucleus": "–" if settings["nucleus_p"] is None else f"{settings['nucleus_p']:g}",
        "MAUVE": _or_dash(result["mauve"]),
        "texts": f"{result['samples']:,}",
        "length": f"{settings['length']:,}",
        "redrawn": f"{result['redraws']:,}",
        "degenerate": f"{result['degenerate']:,}",
        "sampler": ", ".join(filter(None, sampler)),
        "judge": f"{settings['judge']}, {settings['judge_dtype']}, window {settings['window']:,}",
    }


def _or_dash(value: float | None) -> str:
    return "–" if value is None else plain(value)
