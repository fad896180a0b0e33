"""`bd3lm eval` and `bd3lm zeroshot`: how likely a model finds text, with what the figure is worth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bd3lm.commands.corpora import HELD_OUT, open_sequences
from bd3lm.commands.records import keep, new_record, record_name
from bd3lm.commands.subjects import Subject
from bd3lm.evaluation import CorpusLikelihood, corpus_likelihood
from bd3lm.lm import build_estimator
from bd3lm.reports import leaning, perplexity_text, plain

OWN = "own"  # the text that a run held out
# The paper's zero-shot corpora, in its order.
ZERO_SHOT = ("ptb", "wikitext103", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")


def measure_perplexity(
    subject: Subject,
    *,
    data: str | None = None,
    split: str | None = None,
    estimator: str = "auto",
    replicates: int = 1,
    seed: int = 0,
    batch_size: int = 16,
    eos_between_documents: bool | None = None,
    limit: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """The perplexity of one model on one text, as a record, which is kept beside its run."""
    if batch_size < 1:
        raise ValueError(f"batch must be at least 1, got {batch_size}")
    network = subject.model.network
    chosen = build_estimator(network, subject.model.config, estimator)
    with open_sequences(
        subject, data, split=split, eos_between_documents=eos_between_documents, limit=limit
    ) as text:
        screen = console or Console(stderr=True)
        batches = track(
            text.batches(subject, batch_size),
            f"{subject.title} on {text.name}",
            total=-(-text.number // batch_size),
            console=screen,
            transient=True,
            disable=not screen.is_terminal,
        )
        found = corpus_likelihood(network, chosen, batches, seed=seed, replicates=replicates)
        text_bytes = text.text_bytes(subject)
        record = new_record(
            subject,
            "perplexity",
            settings={
                "data": data or OWN,
                "text": text.fingerprint,
                "split": text.split,
                "estimator": chosen.name,
                "lean": subject.lean,
                "replicates": replicates,
                "seed": seed,
                "eos_between_documents": text.eos_between_documents,
                "context": text.rows.context,
                "batch_size": batch_size,
                "dtype": subject.dtype,
                "limit": limit,
            },
            result={
                "sequences": found[0].sequences,
                "tokens": found[0].tokens,
                "bytes": text_bytes,
                "figures": [figure_record(each, text_bytes) for each in found],
            },
        )
    settings = record["settings"]
    keep(subject, record_name("perplexity", settings, data or OWN, settings["split"], chosen.name), record)
    return record


def report_perplexities(
    subjects: Sequence[Subject], data: Sequence[str | None], *, console: Console, **options: Any
) -> list[dict[str, Any]]:
    """Measure every model on every text, and print a table of all figures."""
    records = [
        measure_perplexity(subject, data=source, console=console, **options)
        for source in data
        for subject in subjects
    ]
    for text, group in _by_text(records).items():
        first = group[0]["result"]
        scored = f"{first['sequences']:,} sequences, {first['tokens']:,} tokens scored"
        table = Table(title=f"{text}: {scored}")
        table.add_column("model", overflow="fold")
        drawn = any(figure["monte_carlo_error"] for record in group for figure in record["result"]["figures"])
        for heading in ("estimator", "perplexity", *_of_draws(drawn), "bits/token", "bits/byte"):
            table.add_column(heading, justify="right", no_wrap=True)
        for record in group:
            for index, figure in enumerate(record["result"]["figures"]):
                table.add_row(
                    "" if index else record["model"], *_cells(figure, record["settings"]["lean"], drawn)
                )
        console.print(table)
    figures = [figure for record in records for figure in record["result"]["figures"]]
    console.print(_legend(figures, _leans(records)), soft_wrap=True)
    return records


def report_zero_shot(
    subjects: Sequence[Subject], data: Sequence[str], *, console: Console, **options: Any
) -> list[dict[str, Any]]:
    """Models against corpora, sequences wrapped to the context and no EOS between them (Suppl. C.4).

    What went wrong with one corpus is said after all the others are measured and shown.
    """
    measured: dict[str, list[dict[str, Any]]] = {}
    problems = []
    for source in data:
        try:
            measured[source] = [
                measure_perplexity(
                    subject, data=source, eos_between_documents=False, console=console, **options
                )
                for subject in subjects
            ]
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if measured:
        _print_zero_shot(subjects, measured, console)
    if problems:
        raise ValueError("; ".join(problems))
    return [record for records in measured.values() for record in records]


def _print_zero_shot(
    subjects: Sequence[Subject], measured: Mapping[str, Sequence[dict[str, Any]]], console: Console
) -> None:
    table = Table(title="Zero-shot perplexity")
    table.add_column("model", overflow="fold")
    table.add_column("estimator")
    names = [Path(source).name.partition(".")[0] or source for source in measured]
    for source, name in zip(measured, names, strict=True):
        table.add_column(name if names.count(name) == 1 else source, justify="right", overflow="fold")
    for index, subject in enumerate(subjects):
        mine = [records[index] for records in measured.values()]
        cells = [perplexity_text(record["result"]["figures"][0]) for record in mine]
        estimator = mine[0]["settings"]["estimator"] + leaning(subject.lean)
        table.add_row(f"{subject.name} ({subject.title})", estimator, *cells)
        scored = [f"{record['result']['tokens']:,}" for record in mine]
        table.add_row("  tokens scored", "", *scored, style="dim")
    console.print(table)
    every = [record for records in measured.values() for record in records]
    shown = [record["result"]["figures"][0] for record in every]
    console.print(_legend(shown, _leans(every)), soft_wrap=True)


def figure_record(found: CorpusLikelihood, text_bytes: int | None) -> dict[str, Any]:
    """A figure as records keep it; without the bytes of its text it has no bits a byte."""
    return {
        "name": found.figure.name,
        "meaning": found.figure.meaning,
        "nats": found.nats,
        "standard_error": found.standard_error,
        "monte_carlo_error": found.monte_carlo_error,
        "perplexity": found.perplexity,
        "perplexity_error": found.perplexity_error,
        "bits_per_token": found.bits_per_token,
        "bits_per_byte": None if not text_bytes else found.bits_per_byte(text_bytes),
    }


def _of_draws(drawn: bool, cell: str = "of draws") -> list[str]:
    return [cell] if drawn else []


def _leans(records: Sequence[dict[str, Any]]) -> bool:
    return any(record["settings"]["lean"] for record in records)


def _cells(figure: dict[str, Any], lean: float, drawn: bool) -> list[str]:
    noise, bits = figure["monte_carlo_error"], figure["bits_per_byte"]
    return [
        figure["name"] + leaning(lean),
        perplexity_text(figure),
        *_of_draws(
            drawn, f"± {plain(noise * figure['perplexity'])}" if noise and figure["perplexity"] else ""
        ),
        f"{figure['bits_per_token']:.3f}",
        "" if bits is None else f"{bits:.3f}",
    ]


def _legend(figures: Sequence[dict[str, Any]], leans: bool) -> str:
    """What the signs in a table of figures mean, and what a lean, where one has one."""
    lines = ["± is one standard error over sequences, neighbours taken to be alike as far as they are."]
    drawn = [figure for figure in figures if figure["monte_carlo_error"] != 0.0]
    estimated = ", or an estimate of one" if drawn else ""
    meanings = {
        "exact": "no sign: an exact figure",
        "bound": f"≤: an upper bound{estimated}",
        "neither": "≈: neither exact nor a bound",
    }
    met = [
        words for meaning, words in meanings.items() if any(each["meaning"] == meaning for each in figures)
    ]
    lines.append("; ".join(met).capitalize() + ".")
    if drawn:
        lines.append("The noise of the draws is in the error.")
    if any(figure["monte_carlo_error"] is None for figure in figures):
        lines.append("With one draw of each text the part of draws is not known: --replicates 4 tells it.")
    if any(figure["name"] == "nelbo" for figure in drawn):
        lines.append(
            "Mask rates near 0 give nelbo no finite variance, so its errors come out too small now and then; "
            "counts is the same bound with less noise."
        )
    if leans:
        lines.append(
            "A lean is how much the order in which a block is revealed leans to the left; without one it is "
            "uniformly random. Another order is another distribution, with a perplexity of its own."
        )
    return " ".join(lines)


def _by_text(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Records by what they were measured on: runs that held out the same text stand in one table."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        settings, result = record["settings"], record["result"]
        key = f"{settings['text']} {settings['split']} {result['sequences']}"
        groups.setdefault(key, []).append(record)
    return {_name(group[0]["settings"]): group for group in groups.values()}


def _name(settings: dict[str, Any]) -> str:
    data = settings["data"]
    split = "" if settings["split"] == "train" and Path(data).is_file() else f", split {settings['split']}"
    own = "held-out text" if settings["split"] in HELD_OUT else "training text"
    return f"{own if data == OWN else data}{split}"
