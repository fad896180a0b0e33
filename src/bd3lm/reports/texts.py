"""The parts of a report about generated texts: an animation, samples, lengths, and a judge's scores."""

from collections.abc import Iterator, Sequence
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.animation import Film
from bd3lm.reports.content import Measured, Record, Report, Run, largest
from bd3lm.reports.document import (
    Heading,
    Part,
    Plot,
    Prose,
    Quotation,
    Screening,
    Table,
    code,
    looks_like_code,
)
from bd3lm.reports.numbers import capital, plain, shortened, with_error
from bd3lm.reports.reproduction import measured_by, unmasking


def film_parts(report: Report) -> Iterator[Part]:
    """One film: the box model's if there is one, else that of the last model that writes in blocks, else the
    last film."""
    if by_box := report.of_kind("box_film"):
        yield _film_by_box(by_box[-1][1])
        return
    films = report.of_kind("denoising")
    if not films:
        return
    run, record = ([each for each in films if each[0].writes_blocks] or films)[-1]
    film = Film.from_json(record["result"])
    yield Screening(film, f"Model: {report.label(run)}. {_way_of_film(film)} {_sampler(record)}")


def _film_by_box(record: Record) -> Screening:
    result = record["result"]
    film = Film.from_json(result["film"])
    return Screening(
        film,
        "Model: `box`, which comes with bd3lm, because the models below have learned too little to write: "
        f"{result['title']}, {shortened(result['parameters'])} parameters, trained on the English Wikipedia. "
        f"{_way_of_film(film)} The text is the first that was drawn. {_sampler(record)}",
    )


def _way_of_film(film: Film) -> str:
    size = max((stop - start for start, stop in film.blocks), default=1)
    blocks = (
        "the whole text as one block"
        if len(film.blocks) == 1
        else f"one block of {size} tokens after another"
    )
    drafts = " A pass writes the correct drafts of the pass before, plus one more token."
    return (
        f"It writes {'token after token' if size == 1 else blocks}.{drafts if film.has_drafts else ''} A "
        "token that has been uncovered stays as it is."
    )


def sample_parts(report: Report) -> Iterator[Part]:
    """Texts by every model."""
    drawn = [(run, run.of_kind("samples")[-1]) for run in report.runs if run.of_kind("samples")]
    if not drawn:
        return
    prompted = any(text["given"] for _, record in drawn for text in record["result"]["texts"])
    given = " Each continues the first words of a held-out document, which are set apart." if prompted else ""
    yield Prose(
        f"These are the first texts drawn, not a selection.{given} An evaluation is one pass through the "
        "network. Nucleus 0.9 (top-p) means that each token is drawn only from the most likely tokens that "
        "together have a probability of 0.9. `bd3lm sample` draws more."
    )
    is_code = any(_is_code(record) for _, record in drawn)  # all as code or none, so they can be compared
    for run, record in drawn:
        if len(report.runs) > 1:
            yield Heading(capital(report.label(run)))
        yield from _quotations(record, is_code=is_code)


def long_text_parts(report: Report) -> Iterator[Part]:
    """The longest text past the context, by the last model that wrote one."""
    for run, record in report.of_kind("long_text")[-1:]:
        context, length = run.recipe["data"]["context"], record["settings"]["length"]
        yield Prose(
            f"{capital(report.label(run))}: its network sees {context:,} tokens at once, and was trained on "
            f"texts of that length. This one has {length:,} tokens. Past the context, each token is written "
            "with only the last ones before it in view."
        )
        yield from _quotations(record, is_code=_is_code(record))


_ENDS = {
    "eos": "ended by the model",
    "string": "ended at a stop string",
    "entropy": "stopped because it repeated itself",
    "length": "cut off at the length limit",
}


def _is_code(record: Record) -> bool:
    return any(looks_like_code(text["given"] + text["written"]) for text in record["result"]["texts"])


def _quotations(record: Record, *, is_code: bool) -> Iterator[Quotation]:
    for text in record["result"]["texts"]:
        cost = f"{text['tokens']} tokens written in {text['evaluations']} evaluations"
        note = f"{cost}, {_ENDS[text['stopped_by']]}. {_sampler(record)}"
        yield Quotation(text["given"], text["written"], note, is_code)


def _sampler(record: Record) -> str:
    settings = record["settings"]
    nucleus = f"Nucleus {settings['top_p']:g}" if settings["top_p"] else "Without a nucleus"
    steps = f", {settings['steps']} steps" if settings["steps"] else ""
    return f"{nucleus}{steps}, seed {settings['seed']}, {record['dtype']}."


def length_parts(report: Report) -> Iterator[Part]:
    """The lengths of texts that a model may end itself, compared with the documents of its training set."""
    found = [(run, record) for run in report.runs for record in _largest_lengths(run)]
    if found:
        labels = [report.label(run) + run.other_order(record) for run, record in found]
        yield _length_plot(labels, [record["result"] for _, record in found], measured_by(found))
        yield _length_table(labels, [record for _, record in found])


def _largest_lengths(run: Run) -> list[Record]:
    """The record with the most texts for each law and order, the run's own first."""

    def way(record: Record) -> tuple[str, float]:
        return run.law_of(record), run.lean_of(record)

    orders = largest(run.of_kind("lengths"), lambda record: record["result"]["samples"]["number"], way)
    return sorted(orders, key=lambda record: (not run.is_own_way(record), way(record)))


def _length_plot(labels: Sequence[str], results: Sequence[Record], how: str) -> Plot:
    lengths = [
        plots.Lengths(label, result["samples"]["lengths"], (result["training"] or {}).get("lengths", ()))
        for label, result in zip(labels, results, strict=True)
    ]
    medians = [
        f"{each.label} {result['samples']['median']:,}" for each, result in zip(lengths, results, strict=True)
    ]
    return Plot(
        "lengths",
        plots.length_histograms(lengths),
        f"Histograms of lengths of texts. Medians in tokens: {'; '.join(medians)}.",
        "Lengths of a model's texts, drawn over the lengths of its training documents. A model may end a "
        "text itself. Texts that were stopped because they repeated themselves or reached the limit are "
        f"included; the table counts them.{how}",
    )


def _length_table(labels: Sequence[str], records: Sequence[Record]) -> Table:
    rows = []
    for label, record in zip(labels, records, strict=True):
        samples, limit = record["result"]["samples"], record["settings"]["length"]
        ends = ", ".join(f"{count:,} by {why}" for why, count in samples["stopped_by"].items() if count)
        number = f"{samples['number']:,}"
        rows.append([label, number, *_statistics(samples), f"{limit:,}" if limit else "–", ends])
    trained_on = {str(record["settings"]["data"]): record["result"]["training"] for record in records}
    for data, training in trained_on.items():
        if training is not None:
            number = f"{training['documents']:,}"
            rows.append([f"training documents, {code(data)}", number, *_statistics(training), "", ""])
    return Table(
        "Lengths in tokens. A text is stopped by eos when the model writes its end token, by entropy when it "
        "repeats itself, and by length at the limit, where it might have continued.",
        ["texts of", "number", "median", "mean", "90th percentile", "longest", "limit", "stopped"],
        rows,
        text_columns=[7],
    )


def _statistics(found: Any) -> list[str]:
    return [f"{found[name]:,.0f}" for name in ("median", "mean", "p90", "max")]


def judgement_parts(report: Report) -> Iterator[Part]:
    """Generative perplexity, with everything needed to interpret it."""
    judged = [(run, record) for run in report.runs for record in _largest_judgements(run)]
    if judged:
        yield from _cost_plots(report, judged)
        yield _judgement_table(report, judged)


def _largest_judgements(run: Run) -> list[Record]:
    """Of judgements that differ only in the number of texts or in MAUVE, the most informative one."""
    return largest(
        run.of_kind("judgement"),
        lambda record: (record["result"]["samples"], record["result"]["mauve"] is not None),
        lambda record: (run.law_of(record), str(sorted(_told_apart(record["settings"])))),
    )


def _told_apart(settings: Record) -> list[tuple[str, Any]]:
    return [item for item in settings.items() if item[0] not in (*_SAYS_MORE, "law")]


_SAYS_MORE = ("count", "mauve_reference")


def _cost_plots(report: Report, judged: Sequence[Measured]) -> Iterator[Plot]:
    """A plot per judge and length of texts, since others cannot be compared."""
    groups: dict[tuple[str, int], list[plots.Point]] = {}
    for run, record in judged:
        settings, result = record["settings"], record["result"]
        if result["evaluations_per_token"] and result["perplexity"]:
            point = plots.Point(
                report.label(run),
                result["evaluations_per_token"],
                result["perplexity"],
                result["perplexity_error"],
                f"nucleus {settings['top_p'] or 1:g}{run.other_order(record)}",
            )
            groups.setdefault((settings["judge"], settings["length"]), []).append(point)
    shown = {key: points for key, points in groups.items() if len(points) > 1}
    for index, ((judge, length), points) in enumerate(shown.items()):
        name = f"judgements{index or ''}"
        said = [f"{point.label}, {point.note}, {plain(point.y)} at {plain(point.x)}" for point in points]
        yield Plot(
            name,
            plots.quality_against_cost(points, report.labels, name),
            f"Generative perplexity of texts of {length:,} tokens under {judge} against evaluations a token: "
            f"{'; '.join(said)}.",
            f"How much texts of {length:,} tokens surprise another language model, {judge}, against the cost "
            "of writing them. Lower and further left is better. Dull texts surprise nobody, so look at the "
            "entropy too.",
        )


def _judgement_table(report: Report, judged: Sequence[Measured]) -> Table:
    """A row per judgement; values that are the same in all rows may move into the caption."""
    cells = [_judgement(run, record) for run, record in judged]
    same = [name for name in _FOLDED if len({each[name] for each in cells}) == 1]
    common = "; ".join(f"{name} {cells[0][name]}" for name in same if cells[0][name] != "–")
    shown = [name for name in cells[0] if name not in same]
    return Table(
        "Generative perplexity is the perplexity of a model's own texts under another model, the judge. It "
        "is neither exact nor a bound on the model's perplexity: it rates texts, not probabilities. Entropy "
        "is that of the tokens of a text, in nats; texts that repeat themselves have little. ± is one "
        f"standard error over texts.{f' In all rows: {common}.' if common else ''}{measured_by(judged)}",
        ["model", *shown],
        [
            [report.label(run) + run.other_order(record), *(each[name] for name in shown)]
            for (run, record), each in zip(judged, cells, strict=True)
        ],
        text_columns=[place for place, name in enumerate(shown, 1) if name in ("sampler", "judge")],
    )


_FOLDED = ("MAUVE", "texts", "length", "redrawn", "degenerate", "sampler", "judge")


def _judgement(run: Run, record: Record) -> dict[str, str]:
    settings, result = record["settings"], record["result"]
    rule = f", {settings['top_p_rule']}" if "top_p_rule" in settings else ""  # inclusive is not recorded
    return {
        "generative perplexity": with_error(result["perplexity"], result["perplexity_error"]),
        "entropy": with_error(result["entropy"], result["entropy_error"]),
        "evaluations a token": _or_dash(result["evaluations_per_token"]),
        "nucleus": "–" if settings["top_p"] is None else f"{settings['top_p']:g}{rule}",
        "MAUVE": _or_dash(result["mauve"]),
        "texts": f"{result['samples']:,}",
        "length": f"{settings['length']:,}",
        "redrawn": f"{result['redraws']:,}",
        "degenerate": f"{result['degenerate']:,}",
        "sampler": ", ".join([*_way_of_writing(run, settings), settings["dtype"]]),
        "judge": f"{settings['judge']}, {settings['judge_dtype']}, window {settings['window']:,}",
    }


def _way_of_writing(run: Run, settings: Any) -> list[str]:
    """How a model wrote: its unmasking rule if it writes in blocks, otherwise its number of steps."""
    if run.writes_blocks and settings.get("unmasking") is not None:
        return _rule_in_words(settings["unmasking"])
    if run.writes_in_order:
        return ["token after token"]
    return [f"{settings['steps']} steps"] if settings["steps"] else []


def _rule_in_words(rule: Any) -> list[str]:
    name, arguments = unmasking(rule)
    said = {key: value for key, value in arguments.items() if value is not None and (key != "lean" or value)}
    words = {key: value["kind"] if isinstance(value, dict) else value for key, value in said.items()}
    return [name.replace("_", " "), *(f"{key.replace('_', ' ')} {value}" for key, value in words.items())]


def _or_dash(value: float | None) -> str:
    return "–" if value is None else plain(value)
