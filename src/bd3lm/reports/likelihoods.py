"""The perplexity part of a report: which figures are exact, which are bounds, and on which text."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

from bd3lm.reports import plots
from bd3lm.reports.content import HELD_OUT, OWN, Measured, Record, Report, Run, largest
from bd3lm.reports.document import Part, Plot, Prose, Table
from bd3lm.reports.numbers import SIGNS, bits_text, chain, leaning, perplexity_text, plain
from bd3lm.reports.reproduction import measured_by

_LEGEND = (
    "Figures without a sign are exact, ≤ marks an upper bound, and ≈ marks what is neither. ± is one "
    "standard error over sequences; neighbors do not count as independent, because they are often from one "
    "document."
)
Text = tuple[str, str, bool]
"""The identity of a text: fingerprint of the tokens, split, and whether end tokens follow documents."""


def held_out_alike(report: Report) -> list[Measured]:
    """Comparable measurements of the runs' own held-out text; if there are several texts, of the first."""
    first = next(iter(_own_texts(report)), [])
    return _measured_alike(first) if first and not _trained_on(first) else []


def held_out_plot(report: Report) -> Iterator[Plot]:
    """A plot of the figures of that text, if there are several."""
    alike = held_out_alike(report)
    if alike:
        yield from _plot(report, alike, _own_texts(report)[0], "perplexities")


def perplexity_parts(report: Report) -> Iterator[Part]:
    """A table for each of the runs' own texts, held-out texts first, with a plot unless it is
    `held_out_plot`; one table for all other texts."""
    measured = _measured(report)
    if not measured:
        return
    yield Prose(
        "Perplexity tells how unsure a model is about the tokens of a text: at a perplexity of 50 it is as "
        "unsure as if it had to choose among 50 equally likely tokens each time. Lower is better. For "
        "diffusion models, papers print an upper bound (≤). For small blocks the exact figure can be "
        "computed too, by going through every order in which a block can be uncovered. It is never above the "
        "bound."
    )
    for index, group in enumerate(_own_texts(report)):
        yield _table(report, group, f"{_text_name(group)}, split {group[0][1]['settings']['split']}")
        yield from _unigram(report, group)
        if index or _trained_on(group):
            yield from _plot(report, _measured_alike(group), group, f"perplexities{index or ''}")
    elsewhere = [(run, record) for run, record in measured if not _is_own(record)]
    if elsewhere:
        yield _other_texts(report, elsewhere)


def _measured(report: Report) -> list[Measured]:
    return [(run, record) for run in report.runs for record in _largest(run)]


def _own_texts(report: Report) -> list[list[Measured]]:
    """Everything measured on the runs' own texts, text by text, held-out texts first."""
    own: dict[Text, list[Measured]] = {}
    for run, record in _measured(report):
        if _is_own(record):
            own.setdefault(_text(record), []).append((run, record))
    return sorted(own.values(), key=_trained_on)


def _text_name(group: Sequence[Measured]) -> str:
    return f"{'training' if _trained_on(group) else 'held-out'} text: {_data_name(group[0][0])}"


def _largest(run: Run) -> list[Record]:
    """One record per text, law, order and estimator: the one with the most tokens, then the most draws."""
    return largest(
        run.of_kind("perplexity"),
        lambda record: (record["result"]["tokens"], record["settings"]["replicates"]),
        lambda record: (
            *(_is_own(record), _text(record), run.law_of(record), run.lean_of(record)),
            record["settings"]["estimator"],
        ),
    )


def _is_own(record: Record) -> bool:
    return bool(record["settings"]["data"] == OWN)


def _text(record: Record) -> Text:
    settings = record["settings"]
    return settings["text"], settings["split"], settings["eos_between_documents"]


def _trained_on(group: Sequence[Measured]) -> bool:
    return group[0][1]["settings"]["split"] not in HELD_OUT


def _data_name(run: Run) -> str:
    path: str = run.recipe["data"]["path"]
    return "the documentation that comes with Python" if path == "builtin" else path


def _table(report: Report, group: Sequence[Measured], text: str) -> Table:
    """A row per measurement; the number of tokens gets a column if it differs."""
    found = {figure["meaning"] for _, record in group for figure in record["result"]["figures"]}
    meanings = [meaning for meaning in SIGNS if meaning in found]
    same_size = len({_size(record) for _, record in group}) == 1
    on = f" ({_size(group[0][1])} scored)" if same_size else ""
    headings = [
        "model",
        "tokens seen",
        *(_HEADINGS[meaning] for meaning in meanings),
        "bits per byte",
        "estimator",
    ]
    return Table(
        f"Perplexity per token of {text}{on}. {_LEGEND} Compare models with different tokenizers by bits per "
        f"byte.{report.unknown_starts}{measured_by(group)}",
        headings if same_size else [*headings, "scored tokens"],
        [
            [
                _label(report, run, record),
                chain(run.tokens, run.start),
                *_figures(record["result"]["figures"], meanings),
                _estimator(record, _order(run, record)),
                *([] if same_size else [f"{record['result']['tokens']:,}"]),
            ]
            for run, record in group
        ],
        text_columns=[headings.index("estimator")],
    )


_HEADINGS = {"exact": "perplexity, exact", "bound": "perplexity, bound", "neither": "perplexity, neither"}


def _figures(figures: Sequence[Any], meanings: Sequence[str]) -> list[str]:
    """The perplexities of a record by what they mean, and the bits per byte of the first."""
    by_meaning = {figure["meaning"]: perplexity_text(figure) for figure in figures}
    return [*(by_meaning.get(meaning, "") for meaning in meanings), bits_text(figures[0])]


def _unigram(report: Report, group: Sequence[Measured]) -> Iterator[Prose]:
    """The perplexity of token frequencies alone, if it was computed for the same tokens as the table."""
    measured = {(*_of_split(record), record["result"]["tokens"]) for _, record in group}
    for _, record in report.of_kind("unigram"):
        if (*_of_split(record), record["result"]["tokens"]) in measured:
            yield Prose(
                "To compare: token frequencies of the training text alone, which ignore what stands "
                f"before a token, have a perplexity of {plain(record['result']['perplexity'])}."
            )
            return


def _of_split(record: Record) -> tuple[str, str]:
    return record["settings"]["text"], record["settings"]["split"]


def _order(run: Run, record: Record) -> str:
    if run.law_of(record) != run.law:
        return run.other_order(record)
    return leaning(run.lean_of(record), beside=run.lean)


def _estimator(record: Record, order: str, *, of_draws: bool = True) -> str:
    settings = record["settings"]
    draws = settings["replicates"]
    return settings["estimator"] + order + (f", {draws} draws" if of_draws and draws > 1 else "")


def _label(report: Report, run: Run, record: Record) -> str:
    """The label of a run in a table.

    If a record was measured under another law or lean, which follow the label, the label leaves out the run's
    own, and adds the folder if only these tell runs apart.
    """
    if run.is_own_way(record):
        return report.label(run)
    names = [_without_way(report, each) for each in report.runs]
    name = _without_way(report, run)
    return name if names.count(name) == 1 else f"{name}, {run.folder}"


def _without_way(report: Report, run: Run) -> str:
    title = run.title.removesuffix(f", {run.law} law").removesuffix(leaning(run.lean))
    return title + report.label(run).removeprefix(run.title)


def _measured_alike(group: Sequence[Measured]) -> list[Measured]:
    """Comparable measurements of one text: those of the same sequences.

    Of several such sets, the one with the most measurements, then with the most tokens.
    """
    sets: dict[tuple[Any, ...], list[Measured]] = {}
    for run, record in group:
        settings, result = record["settings"], record["result"]
        cut = (result["sequences"], result["tokens"], settings["context"], settings.get("bos_eos", False))
        sets.setdefault(cut, []).append((run, record))
    return max(sets.values(), key=lambda alike: (len(alike), alike[0][1]["result"]["tokens"]))


def _dots(report: Report, group: Sequence[Measured]) -> Iterator[plots.Dot]:
    """Figures of one run by different estimators or in different orders get separate rows."""
    for run, record in group:
        for figure in record["result"]["figures"]:
            if figure["perplexity"] is not None:
                yield plots.Dot(
                    _row_name(report, group, run, record),
                    figure["perplexity"],
                    figure["perplexity_error"],
                    figure["meaning"],
                )


def _row_name(report: Report, group: Sequence[Measured], run: Run, record: Record) -> str:
    order = "" if run.is_own_way(record) else _order(run, record)
    several = [each.folder for each, _ in group].count(run.folder) > 1
    return _label(report, run, record) + (f", {_estimator(record, order)}" if several else order)


def _left_out(report: Report, shown: Sequence[Measured], others: Sequence[Measured]) -> str:
    """The measurements that a plot leaves out because their sequences differ from the others'."""
    if not others:
        return ""
    group = [*shown, *others]
    names = "; ".join(f"{_row_name(report, group, run, record)} ({_size(record)})" for run, record in others)
    return (
        f" All are of {_size(shown[0][1])}. Left out, because figures of other sequences cannot be compared "
        f"with these: {names}."
    )


def _size(record: Record) -> str:
    result = record["result"]
    return f"{result['sequences']:,} sequences, {result['tokens']:,} tokens"


def _plot(report: Report, alike: Sequence[Measured], group: Sequence[Measured], name: str) -> Iterator[Plot]:
    """Comparable figures, if there are several."""
    dots = list(_dots(report, alike))
    if len(dots) < 2:
        return
    words = "; ".join(f"{dot.label} {SIGNS[dot.meaning]}{plain(dot.value)}" for dot in dots)
    others = [measured for measured in group if measured not in alike]
    yield Plot(
        name,
        plots.perplexities(dots, name),
        f"Perplexity of {_text_name(group)}: {words}.",
        f"Perplexity of {_text_name(group)}. Bars are one standard error to each side, hidden where they are "
        "smaller than the mark. Each model is one training run, and with another seed it would have another "
        f"figure.{_left_out(report, alike, others)}",
    )


def _other_texts(report: Report, group: Sequence[Measured]) -> Table:
    """Models against corpora, a row per model and estimator."""
    column = _columns([record for _, record in group])
    texts: dict[tuple[Any, ...], list[Record]] = {}
    rows: dict[tuple[str, str], dict[tuple[Any, ...], Record]] = {}
    for run, record in group:
        texts.setdefault(column(record), []).append(record)
        way = _estimator(record, _order(run, record), of_draws=False)
        rows.setdefault((_label(report, run, record), way), {})[column(record)] = record
    names = _headings([records[0] for records in texts.values()])
    sizes = {text: {record["result"]["tokens"] for record in records} for text, records in texts.items()}

    def cell(record: Record | None) -> str:
        if record is None:
            return "–"
        figure = record["result"]["figures"][0]
        tokens = f" ({record['result']['tokens']:,} tokens)" if len(sizes[column(record)]) > 1 else ""
        return f"{perplexity_text(figure)}; {bits_text(figure)} bits per byte{tokens}"

    headings = [
        f"{name} ({min(size):,} tokens)" if len(size) == 1 else name
        for name, size in zip(names, sizes.values(), strict=True)
    ]
    differ = len({record["settings"].get("tokenizer") for _, record in group}) > 1
    return Table(
        "Perplexity per token of other texts, with the number of tokens scored, and bits per byte of text. "
        f"{_LEGEND}{_TOKENIZERS_DIFFER if differ else ''}{measured_by(group)}",
        ["model", "estimator", *headings],
        [
            [label, estimator, *(cell(found.get(text)) for text in texts)]
            for (label, estimator), found in rows.items()
        ],
        text_columns=[1],
    )


_TOKENIZERS_DIFFER = (
    " The models have different tokenizers, so their perplexities per token cannot be compared: compare bits "
    "per byte."
)


def _columns(records: Sequence[Record]) -> Callable[[Record], tuple[Any, ...]]:
    """The column of a record: its text.

    Models with different tokenizers, which make different tokens of one text, share a column, unless a text
    has changed between measurements.
    """
    read: dict[tuple[Any, ...], set[tuple[str | None, str]]] = {}

    def name(record: Record) -> tuple[Any, ...]:
        settings = record["settings"]
        own = (settings["data"], settings["split"], settings["eos_between_documents"])
        return (*own, settings.get("field"))

    for record in records:
        settings = record["settings"]
        read.setdefault(name(record), set()).add((settings.get("tokenizer"), settings["text"]))

    def column(record: Record) -> tuple[Any, ...]:
        ways = read[name(record)]
        is_one = len({tokenizer for tokenizer, _ in ways}) == len(ways)
        return name(record) if is_one else _text(record)

    return column


def _headings(records: Sequence[Record]) -> list[str]:
    """The shortest names that tell the texts apart."""
    names = [_names(record) for record in records]
    alike = [Counter(each[level] for each in names) for level in range(len(names[0]))]
    return [next(name for name, count in zip(each, alike, strict=True) if count[name] == 1) for each in names]


def _names(record: Record) -> list[str]:
    """Longer and longer names of a text; the last is unique."""
    settings = record["settings"]
    data: str = settings["data"]
    ends = "with" if settings["eos_between_documents"] else "without"
    names = [PurePath(data).name.partition(".")[0] or data, data]
    for more in (settings["split"], f"{ends} end tokens", settings["text"]):
        names.append(f"{names[-1]}, {more}")
    return names
