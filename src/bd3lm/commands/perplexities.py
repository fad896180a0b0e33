"""`bd3lm eval` and `bd3lm zeroshot`: how likely a model finds text, with what the figure is worth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bd3lm.commands.corpora import HELD_OUT, check_texts, open_sequences
from bd3lm.commands.records import keep, new_record, record_name
from bd3lm.commands.subjects import Subject
from bd3lm.evaluation import CorpusLikelihood, Estimator, corpus_likelihood
from bd3lm.lm import build_estimator
from bd3lm.reports import leaning, perplexity_text, plain
from bd3lm.reports.content import OWN as OWN

# The paper's zero-shot corpora, in its order.
ZERO_SHOT = ("ptb", "wikitext103", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
_MISSING = "–"  # in place of a figure that could not be had


def measure_perplexity(
    subject: Subject,
    *,
    data: str | None = None,
    split: str | None = None,
    field: str | None = None,
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
        subject, data, split=split, field=field, eos_between_documents=eos_between_documents, limit=limit
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
                "data": _recorded(data),
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
                **({"bos_eos": True} if text.bos_eos else {}),
                **({} if field is None else {"field": field}),
            },
            result={
                "sequences": found[0].sequences,
                "tokens": found[0].tokens,
                "bytes": text_bytes,
                "figures": [figure_record(each, text_bytes) for each in found],
            },
        )
    settings = record["settings"]
    words = (settings["data"], settings["split"], chosen.name)
    keep(subject, record_name("perplexity", settings, *words), record)
    return record


def report_perplexities(
    subjects: Sequence[Subject], data: Sequence[str | None], *, console: Console, **options: Any
) -> list[dict[str, Any]]:
    """Measure every model on every text, and print a table of all figures."""
    each = _options(subjects, options)
    check_texts(data, options.get("field"))
    records = [
        measure_perplexity(subject, data=source, console=console, **own)
        for source in data
        for subject, own in zip(subjects, each, strict=True)
    ]
    for title, group in _by_text(records):
        table = Table(title=title)
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
    legend = _legend(figures, _leans(records), _less_noise(subjects, records))
    console.print(legend, soft_wrap=True, markup=False)
    return records


def report_zero_shot(
    subjects: Sequence[Subject], data: Sequence[str], *, console: Console, **options: Any
) -> list[dict[str, Any]]:
    """Models against corpora, sequences wrapped to the context and no EOS between them (Suppl. C.4).

    A path that holds no text is an error before anything is measured. What else cannot be measured is a dash
    in the table, with the reason below it, and costs no other figure; it is an error only where there is no
    figure at all.
    """
    each = _options(subjects, options)
    check_texts(data, options.get("field"))
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    problems: dict[tuple[str, str], list[str]] = {}  # by corpus and reason: the models
    for source in dict.fromkeys(data):
        for index, subject in enumerate(subjects):
            try:
                measured[source, index] = measure_perplexity(
                    subject, data=source, eos_between_documents=False, console=console, **each[index]
                )
            except (ValueError, OSError, FloatingPointError) as error:
                reason = " ".join(str(error).split())  # one line
                problems.setdefault((source, reason), []).append(subject.name)
    reasons = list(dict.fromkeys(reason for _, reason in problems))
    lines = [f"{', '.join(names)} on {source}: {reason}" for (source, reason), names in problems.items()]
    if problems and not measured:
        raise ValueError(reasons[0] if len(reasons) == 1 else "; ".join(lines))
    if measured:
        _print_zero_shot(subjects, list(dict.fromkeys(data)), measured, console)
    for line in lines:
        console.print(f"{_MISSING} {line}", soft_wrap=True, markup=False, highlight=False)
    return list(measured.values())


def _print_zero_shot(
    subjects: Sequence[Subject],
    data: Sequence[str],
    measured: Mapping[tuple[str, int], dict[str, Any]],
    console: Console,
) -> None:
    table = Table(title="Zero-shot perplexity")
    table.add_column("model", overflow="fold")
    table.add_column("estimator")
    names = [Path(source).name.partition(".")[0] or source for source in data]
    for source, name in zip(data, names, strict=True):
        table.add_column(name if names.count(name) == 1 else source, justify="right", overflow="fold")
    for index, subject in enumerate(subjects):
        mine = [measured.get((source, index)) for source in data]
        cells = [perplexity_text(each["result"]["figures"][0]) if each else _MISSING for each in mine]
        ways = [each["settings"]["estimator"] + leaning(subject.lean) for each in mine if each]
        table.add_row(f"{subject.name} ({subject.title})", ways[0] if ways else _MISSING, *cells)
        scored = [f"{each['result']['tokens']:,}" if each else _MISSING for each in mine]
        table.add_row("  tokens scored", "", *scored, style="dim")
    console.print(table)
    every = list(measured.values())
    shown = [record["result"]["figures"][0] for record in every]
    legend = _legend(shown, _leans(every), _less_noise(subjects, every))
    console.print(legend, soft_wrap=True, markup=False)


def _options(subjects: Sequence[Subject], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options for each model: replicates are of draws, so a model beside others that draws nothing is
    measured once; they are refused where no model draws."""
    replicates = options.get("replicates", 1)
    if replicates < 1:
        raise ValueError(f"replicates must be at least 1, got {replicates}")
    chosen = [_estimator(subject, options.get("estimator", "auto")) for subject in subjects]
    drawn = [each is None or each.is_random for each in chosen]
    if replicates > 1 and subjects and not any(drawn):
        raise ValueError(f"replicates must be 1 for exact, which draws nothing, got {replicates}")
    return [{**options, "replicates": replicates if random else 1} for random in drawn]


def _estimator(subject: Subject, name: str) -> Estimator | None:
    """An estimator for a model; None where it is not for that, which measuring says in words."""
    try:
        return build_estimator(subject.model.network, subject.model.config, name)
    except ValueError:
        return None


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
    """Of one row. Records have null for what is not finite, and for bits a byte that are not known."""
    noise, bits = figure["monte_carlo_error"], figure["bits_per_token"]
    known = figure["bits_per_byte"] is not None
    return [
        figure["name"] + leaning(lean),
        perplexity_text(figure),
        *_of_draws(
            drawn, f"± {plain(noise * figure['perplexity'])}" if noise and figure["perplexity"] else ""
        ),
        "∞" if bits is None else f"{bits:.3f}",
        f"{figure['bits_per_byte']:.3f}" if known else "",
    ]


def _less_noise(subjects: Sequence[Subject], records: Sequence[dict[str, Any]]) -> str:
    """The advice to take counts instead of a drawn nelbo, for the models that may."""
    drawn = {record["model"] for record in records if record["settings"]["estimator"] == "nelbo"}
    allowed = {
        subject.name: _estimator(subject, "counts") is not None
        for subject in subjects
        if subject.name in drawn
    }
    names = [name for name, has in allowed.items() if has]
    if not names:
        return ""
    which = "" if all(allowed.values()) else f" for {', '.join(names)}"
    return f"; counts is the same bound with less noise{which}"


def _legend(figures: Sequence[dict[str, Any]], leans: bool, less_noise: str) -> str:
    """What the signs in a table of figures mean, as far as it has them; docs/evaluation.md says more."""
    drawn = [figure for figure in figures if figure["monte_carlo_error"] != 0.0]
    with_draws = ", noise of the draws included" if drawn else ""
    words = [f"± one standard error (neighbouring sequences treated as dependent{with_draws})."]
    met = {figure["meaning"] for figure in figures}
    if "bound" in met:
        words.append(f"≤ upper bound{', or an estimate of one' if drawn else ''}.")
    if "neither" in met:
        words.append("≈ neither exact nor a bound.")
    if any(figure["monte_carlo_error"] is None for figure in figures):
        words.append("--replicates 4 tells the part of the draws.")
    if any(figure["name"] == "nelbo" for figure in drawn):
        words.append(f"nelbo has no finite variance, so its ± may be too small{less_noise}.")
    if leans:
        words.append("lean: docs/sampling.md.")
    return " ".join(words)


def _by_text(records: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(Title, records) for each text: runs that held out the same one stand in one table.

    A title says how much was scored, so a table holds only models that were scored on as much: another
    context, a first token that is scored, or BOS and EOS around each sequence makes another table, though it
    may have the same name.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        settings, result = record["settings"], record["result"]
        cut = (settings["context"], settings.get("bos_eos", False))
        key = (settings["text"], settings["split"], *cut, result["sequences"], result["tokens"])
        groups.setdefault(key, []).append(record)
    return [(_title(group[0]), group) for group in groups.values()]


def _title(record: dict[str, Any]) -> str:
    settings, result = record["settings"], record["result"]
    cut = f"{result['sequences']:,} sequences of {settings['context']:,}"
    frame = " with BOS and EOS" if settings.get("bos_eos") else ""
    return f"{_name(settings)}: {cut}{frame}, {result['tokens']:,} tokens scored"


def _recorded(data: str | None) -> str:
    """As a record names a text: a path is never the bare word that stands for the run's own data."""
    return OWN if data is None else f"./{data}" if data == OWN else data


def _name(settings: dict[str, Any]) -> str:
    data = settings["data"]
    split = "" if settings["split"] == "train" and Path(data).is_file() else f", split {settings['split']}"
    own = "held-out text" if settings["split"] in HELD_OUT else "training text"
    return f"{own if data == OWN else data}{split}"
