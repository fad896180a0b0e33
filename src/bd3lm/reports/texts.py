"""The parts of a report on what models write: a film, samples, lengths, and another model's judgement."""

from collections.abc import Iterator, Sequence
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.animation import Film
from bd3lm.reports.content import Record, Report, Run, largest
from bd3lm.reports.document import Heading, Part, Plot, Prose, Quotation, Screening, Table
from bd3lm.reports.numbers import capital, plain, with_error
from bd3lm.reports.reproduction import measured_by, unmasking


def film_parts(report: Report) -> Iterator[Part]:
    """One film: that of the last model that writes in blocks, otherwise the last one there is."""
    films = report.of_kind("denoising")
    in_blocks = [each for each in films if each[0].method == "block_diffusion"]
    if not films:
        return
    run, record = (in_blocks or films)[-1]
    film = Film.from_json(record["result"])
    size = max((stop - start for start, stop in film.blocks), default=1)
    blocks = "all in one block" if len(film.blocks) == 1 else f"one block of {size} tokens after another"
    yield Screening(
        film,
        f"Written by: {report.labels[run.folder]}; {'token after token' if size == 1 else blocks}. A token "
        f"that has been uncovered stays as it is. {_sampler(record)}",
    )


def sample_parts(report: Report) -> Iterator[Part]:
    """Texts by every model."""
    drawn = [(run, run.of_kind("samples")[-1]) for run in report.runs if run.of_kind("samples")]
    if not drawn:
        return
    prompted = any(text["given"] for _, record in drawn for text in record["result"]["texts"])
    given = " Each continues the first words of a held-out document, which are set apart." if prompted else ""
    yield Prose(
        f"These texts were drawn once, none was picked.{given} An evaluation is one pass through the "
        "network. Nucleus 0.9 means that a token is drawn only from the most likely ones, which together "
        "have a probability of 0.9. `bd3lm sample` draws more."
    )
    for run, record in drawn:
        if len(report.runs) > 1:
            yield Heading(capital(report.labels[run.folder]))
        for text in record["result"]["texts"]:
            yield Quotation(text["given"], text["written"], _note(text, record))


def long_text_parts(report: Report) -> Iterator[Part]:
    """The longest text past the context, by the last model that wrote one."""
    found = report.of_kind("long_text")
    if not found:
        return
    run, record = found[-1]
    context, length = run.recipe["data"]["context"], record["settings"]["length"]
    yield Prose(
        f"{capital(report.labels[run.folder])}: its network sees {context:,} tokens at once, and was trained "
        f"on texts of that length. This one has {length:,} tokens; past the context, each is written with "
        "only the last ones before it in view."
    )
    for text in record["result"]["texts"]:
        yield Quotation(text["given"], text["written"], _note(text, record))


_ENDS = {
    "eos": "ended by the model",
    "string": "ended at a stop string",
    "entropy": "stopped because it repeated itself",
    "length": "cut off at the length limit",
}


def _note(text: Any, record: Record) -> str:
    cost = f"{text['tokens']} tokens written in {text['evaluations']} evaluations"
    return f"{cost}, {_ENDS[text['stopped_by']]}. {_sampler(record)}"


def _sampler(record: Record) -> str:
    settings = record["settings"]
    nucleus = f"Nucleus {settings['nucleus_p']:g}" if settings["nucleus_p"] else "Without a nucleus"
    steps = f", {settings['steps']} steps" if settings["steps"] else ""
    return f"{nucleus}{steps}, seed {settings['seed']}, {record['dtype']}."


def length_parts(report: Report) -> Iterator[Part]:
    """How long the texts are that a model may end itself, beside the documents of its training set."""
    found = [
        (run, largest(records, lambda record: record["result"]["samples"]["number"]))
        for run in report.runs
        for records in _by_order(run, "lengths")
    ]
    if not found:
        return
    labels = [report.labels[run.folder] + run.other_order(record) for run, record in found]
    yield Plot(
        "lengths",
        plots.length_histograms(
            [
                plots.Lengths(
                    label,
                    record["result"]["samples"]["lengths"],
                    (record["result"]["training"] or {}).get("lengths", ()),
                )
                for label, (_, record) in zip(labels, found, strict=True)
            ]
        ),
        "Histograms of lengths of texts. Medians in tokens: "
        + "; ".join(
            f"{label} {record['result']['samples']['median']:,}"
            for label, (_, record) in zip(labels, found, strict=True)
        )
        + ".",
        "How long the texts of a model are, drawn over the documents it was trained on. A model may end a "
        "text itself; texts that were stopped because they repeated themselves or reached the limit are "
        f"included, and the table counts them.{measured_by(found)}",
    )
    rows = []
    for label, (_, record) in zip(labels, found, strict=True):
        samples = record["result"]["samples"]
        ends = ", ".join(f"{count:,} by {why}" for why, count in samples["stopped_by"].items() if count)
        limit = record["settings"]["length"]
        cells = [label, f"{samples['number']:,}", *_statistics(samples)]
        rows.append([*cells, f"{limit:,}" if limit else "–", ends])
    trained_on = {str(record["settings"]["data"]): record["result"]["training"] for _, record in found}
    for data, training in trained_on.items():
        if training is not None:
            cells = [f"training documents, `{data}`", f"{training['documents']:,}", *_statistics(training)]
            rows.append([*cells, "", ""])
    yield Table(
        "Lengths in tokens. Texts end by eos, the end token, by entropy when they repeat themselves, or by "
        "length at the limit, where they might have gone on.",
        ["texts of", "number", "median", "mean", "90th percentile", "longest", "limit", "stopped"],
        rows,
        text_columns=[7],
    )


def _by_order(run: Run, kind: str) -> list[list[Record]]:
    """Records of a kind by the lean of their order, the run's own first."""
    orders: dict[float, list[Record]] = {}
    for record in run.of_kind(kind):
        orders.setdefault(run.lean_of(record), []).append(record)
    return [orders[lean] for lean in sorted(orders, key=lambda lean: (lean != run.lean, lean))]


def _statistics(found: Any) -> list[str]:
    return [f"{found[name]:,.0f}" for name in ("median", "mean", "p90", "max")]


def judgement_parts(report: Report) -> Iterator[Part]:
    """Generative perplexity, with all that is needed to read it rightly."""
    judged = [(run, record) for run in report.runs for record in _largest_judgements(run)]
    if not judged:
        return
    yield from _cost_plots(report, judged)
    cells = [_judgement(run, record) for run, record in judged]
    same = [name for name in _FOLDED if len({each[name] for each in cells}) == 1]
    common = "; ".join(f"{name} {cells[0][name]}" for name in same if cells[0][name] != "–")
    shown = [name for name in cells[0] if name not in same]
    yield Table(
        "Generative perplexity is the perplexity of a model's own texts under another model, the judge. It "
        "is neither exact nor a bound on the model's perplexity: it rates texts, not probabilities. Entropy, "
        "in nats, is that of the tokens of a text; texts that repeat themselves have little. ± is one "
        "standard error over texts." + (f" In all rows: {common}." if common else "") + measured_by(judged),
        ["model", *shown],
        [
            [report.labels[run.folder] + run.other_order(record), *(each[name] for name in shown)]
            for (run, record), each in zip(judged, cells, strict=True)
        ],
        text_columns=[place for place, name in enumerate(shown, 1) if name in ("sampler", "judge")],
    )


def _largest_judgements(run: Run) -> list[Record]:
    """Among judgements that differ only in the number of texts or in MAUVE, the most informative one."""
    alike: dict[str, list[Record]] = {}
    for record in run.of_kind("judgement"):
        ways = {name: way for name, way in record["settings"].items() if name not in _SAYS_MORE + _SAID_TWICE}
        alike.setdefault(str(sorted(ways.items())), []).append(record)
    return [largest(records, _says) for records in alike.values()]


_SAYS_MORE = ("count", "mauve_reference")
_SAID_TWICE = ("lean",)  # the way of unmasking has it too; in older records nothing else has


def _says(record: Record) -> tuple[int, bool]:
    return record["result"]["samples"], record["result"]["mauve"] is not None


def _cost_plots(report: Report, judged: Sequence[tuple[Run, Record]]) -> Iterator[Plot]:
    """A plot for each judge and length of texts, since others cannot be compared."""
    groups: dict[tuple[str, int], list[plots.Point]] = {}
    for run, record in judged:
        settings, result = record["settings"], record["result"]
        if result["evaluations_per_token"] and result["perplexity"]:
            point = plots.Point(
                report.labels[run.folder],
                result["evaluations_per_token"],
                result["perplexity"],
                result["perplexity_error"],
                f"nucleus {settings['nucleus_p'] or 1:g}{run.other_order(record)}",
            )
            groups.setdefault((settings["judge"], settings["length"]), []).append(point)
    shown = {key: points for key, points in groups.items() if len(points) > 1}
    for index, ((judge, length), points) in enumerate(shown.items()):
        name = f"judgements{index or ''}"
        yield Plot(
            name,
            plots.quality_against_cost(points, list(report.labels.values()), name),
            f"Generative perplexity of texts of {length:,} tokens under {judge} against evaluations a token: "
            + "; ".join(
                f"{point.label}, {point.note}, {plain(point.y)} at {plain(point.x)}" for point in points
            )
            + ".",
            f"How much texts of {length:,} tokens surprise another language model, {judge}, against what "
            "they cost to write. Lower and further left is better; but dull texts surprise nobody: look at "
            "the entropy too.",
        )


_FOLDED = ("MAUVE", "texts", "length", "redrawn", "degenerate", "sampler", "judge")
"""Columns that move into the caption where they are the same in all rows."""


def _judgement(run: Run, record: Record) -> dict[str, str]:
    settings, result = record["settings"], record["result"]
    rule = f", {settings['nucleus_rule']}" if "nucleus_rule" in settings else ""  # inclusive is not recorded
    return {
        "generative perplexity": with_error(result["perplexity"], result["perplexity_error"]),
        "entropy": with_error(result["entropy"], result["entropy_error"]),
        "evaluations a token": _or_dash(result["evaluations_per_token"]),
        "nucleus": "–" if settings["nucleus_p"] is None else f"{settings['nucleus_p']:g}{rule}",
        "MAUVE": _or_dash(result["mauve"]),
        "texts": f"{result['samples']:,}",
        "length": f"{settings['length']:,}",
        "redrawn": f"{result['redraws']:,}",
        "degenerate": f"{result['degenerate']:,}",
        "sampler": ", ".join([*_way_of_writing(run, settings), settings["dtype"]]),
        "judge": f"{settings['judge']}, {settings['judge_dtype']}, window {settings['window']:,}",
    }


def _way_of_writing(run: Run, settings: Any) -> list[str]:
    """How a model wrote: its way of unmasking for block diffusion, a number of steps for other methods."""
    if run.method == "block_diffusion":
        name, arguments = unmasking(settings["unmasking"])
        spaced = name.replace("_", " ")
        said = {key: value for key, value in arguments.items() if value is not None}
        if not said.get("lean"):
            said.pop("lean", None)
        words = {key: value["kind"] if isinstance(value, dict) else value for key, value in said.items()}
        return [spaced, *(f"{key.replace('_', ' ')} {value}" for key, value in words.items())]
    if run.method == "autoregressive":
        return ["token after token"]
    return [f"{settings['steps']} steps"] if settings["steps"] else []


def _or_dash(value: float | None) -> str:
    return "–" if value is None else plain(value)
