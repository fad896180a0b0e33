"""`bd3lm zeroshot`: perplexity of models on corpora that they were not trained on."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bd3lm.commands.eval import Estimate, Likelihoods, legend, measure_perplexity
from bd3lm.commands.shared.flags import (
    named,
)
from bd3lm.io.terminal import say

if TYPE_CHECKING:
    from bd3lm.commands.shared.subjects import Subject
    from bd3lm.io.console import Console

# The paper's corpora, in its order.
CORPORA = ("ptb", "wikitext103", "lm1b", "lambada", "ag_news", "pubmed", "arxiv")
_ALIKE = 0.9  # of a text's bytes: not all models score ends of sequences and first tokens
_MISSING = "–"  # in place of a missing figure


@dataclass(frozen=True, kw_only=True)
class ZeroShot(Likelihoods):
    """Compare models on corpora that they were not trained on.

    The table has perplexity and bits per byte. Documents are wrapped to the context with no end-of-text token
    between them, as in the paper. If a figure cannot be measured, the command still shows and writes the
    others, and exits with status 1.
    """

    kind = "zeroshot"

    data: Annotated[
        tuple[str, ...],
        named("DATA ...", help="Corpora: names, files or folders. Default: the paper's seven, from the hub."),
    ] = ()

    def run(self) -> int:
        from bd3lm.commands.shared.records import write_records
        from bd3lm.io.console import Console

        self.check(self.texts())
        subjects = self.subjects()
        records = report_zero_shot(subjects, self, console=Console())
        write_records(self.out, records)
        asked = len(self.estimates(subjects)) * len(self.texts())
        if missing := asked - len(records):
            say(f"bd3lm: {missing} of {asked} figures could not be measured", to=sys.stderr)
        return int(missing > 0)

    def texts(self) -> list[str]:
        """The corpora, without duplicates."""
        return list(dict.fromkeys(self.data or CORPORA))


def report_zero_shot(
    subjects: "Sequence[Subject]", flags: ZeroShot, *, console: "Console"
) -> list[dict[str, Any]]:
    """Models against corpora: sequences wrapped to the context, with no EOS between documents (Suppl. C.4).

    A figure that cannot be measured becomes a dash in the table, with the reason below; the other figures are
    not affected. It is an error only if there is no figure at all.
    """
    estimates = flags.estimates(subjects)
    data = flags.texts()
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    problems: dict[tuple[str, str], list[str]] = {}  # models by corpus and reason
    try:
        for source in data:
            for index, each in enumerate(estimates):
                try:
                    measured[source, index] = measure_perplexity(
                        each.subject, each.flags, source, eos_between_documents=False, console=console
                    )
                except (ValueError, OSError, FloatingPointError) as error:
                    reason = " ".join(str(error).split())  # one line
                    names = problems.setdefault((source, reason), [])
                    if each.subject.name not in names:  # another of its estimates failed the same way
                        names.append(each.subject.name)
    finally:  # figures known so far are printed even after Ctrl-C
        if measured:
            _print_table(subjects, estimates, data, measured, console)
    reasons = list(dict.fromkeys(reason for _, reason in problems))
    lines = [f"{', '.join(names)} on {source}: {reason}" for (source, reason), names in problems.items()]
    if problems and not measured:
        raise ValueError(reasons[0] if len(reasons) == 1 else "; ".join(lines))
    for line in lines:
        console.print(f"{_MISSING} {line}", soft_wrap=True, markup=False, highlight=False)
    return list(measured.values())


def _print_table(
    subjects: "Sequence[Subject]",
    estimates: Sequence[Estimate],
    data: Sequence[str],
    measured: Mapping[tuple[str, int], dict[str, Any]],
    console: "Console",
) -> None:
    from rich.table import Table

    table = Table(title="Zero-shot perplexity per token, and bits per byte of text")
    table.add_column("model", overflow="fold")
    table.add_column("estimator", overflow="fold")
    names = [Path(source).name.partition(".")[0] or source for source in data]
    for source, name in zip(data, names, strict=True):
        table.add_column(name if names.count(name) == 1 else source, justify="right", overflow="fold")
    for subject in subjects:
        name, scored = f"{subject.name} ({subject.title})", [_MISSING for _ in data]
        framed = False
        for index, each in enumerate(estimates):
            if each.subject is not subject:
                continue
            mine = [measured.get((source, index)) for source in data]
            cells = [_cell(found["result"]["figures"][0]) if found else _MISSING for found in mine]
            ways = [each.name_of(found["settings"]["estimator"]) for found in mine if found]
            table.add_row(name, ways[0] if ways else _MISSING, *cells)
            name = ""
            framed |= any(found["settings"].get("bos_eos", False) for found in mine if found)
            scored = [
                _size(found["result"]) if found else before
                for found, before in zip(mine, scored, strict=True)
            ]
        heading = f"  scored{', in sequences with BOS and EOS' if framed else ''}"
        table.add_row(heading, "", *scored, style="dim")
    console.print(table)
    every = list(measured.values())
    shown = [record["result"]["figures"][0] for record in every]
    console.print(legend(subjects, every, shown), soft_wrap=True, markup=False)
    for source in data:
        sizes = [found["result"]["bytes"] for (text, _), found in measured.items() if text == source]
        known = [size for size in sizes if size is not None]
        if known and min(known) < _ALIKE * max(known):
            limited = estimates[0].flags.sequences is not None
            console.print(
                f"The models scored unequal parts of {Path(source).name}, from {min(known):,} to "
                f"{max(known):,} bytes, so not even bits per byte compare: "
                + ("leave out --sequences, which counts by" if limited else "use a longer text, for")
                + " each model's own context.",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )


def _cell(figure: Mapping[str, Any]) -> str:
    from bd3lm.reports import bits_text, perplexity_text

    return f"{perplexity_text(figure)}\n{bits_text(figure)} bits/byte"


def _size(result: Mapping[str, Any]) -> str:
    known = result["bytes"] is not None
    return (
        f"{result['tokens']:,} tokens\n{result['bytes'] if known else _MISSING:{',' if known else ''}} bytes"
    )
