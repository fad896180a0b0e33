"""Builds the document of a report. Sections without measurements are left out and listed at the end."""

import shlex
from collections.abc import Iterator
from typing import Any

from bd3lm.reports.content import COMMANDS, Report, Run, differing
from bd3lm.reports.document import Document, Listing, Part, Prose, Section, Table, code
from bd3lm.reports.likelihoods import held_out_plot, perplexity_parts
from bd3lm.reports.numbers import capital, chain, shortened
from bd3lm.reports.texts import film_parts, judgement_parts, length_parts, long_text_parts, sample_parts
from bd3lm.reports.trainings import clip_parts, curve_parts, variance_parts
from bd3lm.reports.verdict import verdict

_LEAD = (
    "A language model tells how likely a text is, and can write one. Its text is made of tokens, which are "
    "words or pieces of words. An autoregressive model writes one token after another. A diffusion model "
    "starts with a mask in every place and uncovers the tokens in random order. A block diffusion model "
    "combines the two: it writes one block after another, and inside a block it uncovers the tokens in "
    "random order, each time looking at everything that is there so far. With blocks of one token it is "
    "autoregressive; with one block as long as the text it is a diffusion model. The order inside a block "
    "may lean to the left: at lean 0 all orders are equally likely, and the larger the lean, the more often "
    "tokens on the left come first."
)
_NUMBERS = dict(enumerate(("Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten"), 2))


def build_document(report: Report) -> Document:
    """The whole report, in the order in which a newcomer would ask."""
    sections = [
        Section("A text being written", list(film_parts(report))),
        Section("Models", list(_models(report))),
        Section("Perplexity", list(perplexity_parts(report))),
        Section("Training", [*curve_parts(report), *clip_parts(report)]),
        Section("Noise in training", list(variance_parts(report))),
        Section("Samples", list(sample_parts(report))),
        Section("A text longer than the context", list(long_text_parts(report))),
        Section("Lengths", list(length_parts(report))),
        Section("Generative perplexity", list(judgement_parts(report))),
        Section("Recipes", list(_recipes(report))),
        Section("Not measured", list(_missing(report))),
    ]
    return Document(
        title=_title(report),
        lead=_LEAD,
        sections=[section for section in sections if section.parts],
        colophon=_colophon(report),
        verdict=verdict(report),
        shown_first=list(held_out_plot(report)),
    )


def _title(report: Report) -> str:
    number = len(report.runs)
    if number == 1:
        return capital(report.label(report.runs[0]))
    return f"{_NUMBERS.get(number, number)} language models, measured"


def _colophon(report: Report) -> str:
    dates = sorted({record["measured"][:10] for run in report.runs for record in run.records})
    measured = f"Measured {' to '.join(dates[:1] + dates[1:][-1:])}. " if dates else ""
    made_with = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    return f"{measured}Page made with {made_with}."


def _models(report: Report) -> Iterator[Part]:
    started = "A sum means that training started from another model, whose own training comes first."
    stages = f" {started}" if report.has_stages else ""
    yield Table(
        f"Context is how many tokens a model sees at once.{stages}{report.unknown_starts}",
        ["model", "parameters", "context", "steps", "tokens seen", "folder"],
        [
            [
                report.label(run),
                shortened(run.parameters),
                f"{run.recipe['data']['context']:,}",
                chain(run.steps, run.start)
                + (f" of {run.stopped_before:,} (stopped)" if run.stopped_before else ""),
                chain(run.tokens, run.start),
                code(run.folder),
            ]
            for run in report.runs
        ],
        text_columns=[5],
    )
    if report.unfinished:
        folders = ", ".join(map(code, report.unfinished))
        yield Prose(f"These runs are left out, because they have not trained a model yet: {folders}.")


def _recipes(report: Report) -> Iterator[Part]:
    table = differing([run.recipe for run in report.runs])
    if table:
        yield Table(
            "Settings that differ between the runs. All settings are in the `recipe.yaml` of each folder.",
            ["setting", *report.labels],
            [[code(name), *map(_setting, values)] for name, values in table.items()],
            text_columns=range(1, len(report.runs) + 1),
        )


def _setting(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else str(value)


_NAMES = {
    "perplexity": "perplexity of held-out text",
    "variance": "variance of the loss",
    "lengths": "lengths of texts",
    "judgement": "generative perplexity",
    "samples": "samples",
    "denoising": "a film of a text being written",
}


def _missing(report: Report) -> Iterator[Part]:
    items = []
    for kind, name in _NAMES.items():
        reasons: dict[str, list[Run]] = {}
        for run in report.runs:
            if _is_missed(run, kind, has_film=bool(report.of_kind("box_film"))):
                reasons.setdefault(report.unmeasured.get((run.folder, kind), ""), []).append(run)
        for why, runs in reasons.items():
            whose = "; ".join(map(report.label, runs))
            command = COMMANDS[kind].format(folders=shlex.join(run.folder for run in runs))
            items.append(f"{name} ({whose}){f', {why}' if why else ''}: {code(command)}")
    if items:
        yield Prose("These measurements are missing. Run the commands, and then `bd3lm report` again:")
        yield Listing([capital(item) for item in items])


def _is_missed(run: Run, kind: str, *, has_film: bool) -> bool:
    """Whether a run lacks a measurement that it could have."""
    match kind:
        case "perplexity":
            return run.has_likelihood and not run.held_out
        case "variance":
            return run.masks_by_rule and not run.of_kind(kind)
        case "denoising":
            return run.uncovers and not run.of_kind(kind) and not has_film
    return not run.of_kind(kind)
