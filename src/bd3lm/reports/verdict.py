"""The result of a report in a sentence: which model predicts held-out text best, and how certain that is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bd3lm.reports.content import Report, Run
from bd3lm.reports.likelihoods import held_out_alike
from bd3lm.reports.numbers import capital, perplexity_text

_ABOUT_EQUAL = 1.1  # the most times as large as the best perplexity


@dataclass(frozen=True)
class _Standing:
    """A run and its perplexity on held-out text: the exact one, if it is known."""

    run: Run
    figure: Mapping[str, Any]

    @property
    def value(self) -> float:
        return float(self.figure["perplexity"])

    @property
    def error(self) -> float:
        return float(self.figure["perplexity_error"] or 0.0)

    @property
    def is_exact(self) -> bool:
        return bool(self.figure["meaning"] == "exact")

    @property
    def name(self) -> str:
        return self.run.title + self.run.variant

    def is_trained_like(self, other: "_Standing") -> bool:
        """Whether both have trained on the same number of tokens, including the models they started from."""
        both = (self.run, other.run)
        return all(run.start is None for run in both) and len({sum(run.tokens) for run in both}) == 1


def verdict(report: Report) -> str:
    """Compare the best model on held-out text with the best that trained for as long or, if none did, with
    the best of the others. Empty if nothing was measured."""
    found = _standings(report)
    if not found:
        return ""
    best = min(found, key=lambda each: each.value)
    others = [each for each in found if each is not best]
    if not others:
        return f"Perplexity of held-out text: {perplexity_text(best.figure)}."
    alike = [each for each in others if each.is_trained_like(best)]
    return _compared(report, best, min(alike or others, key=lambda each: each.value))


def _standings(report: Report) -> list[_Standing]:
    """The comparable measurements, one per run, under its own law and in its own order."""
    figures: dict[str, list[_Standing]] = {}
    for run, record in held_out_alike(report):
        if run.is_own_way(record):
            figures.setdefault(run.folder, []).extend(
                _Standing(run, figure)
                for figure in record["result"]["figures"]
                if figure["perplexity"] is not None and figure["meaning"] in ("exact", "bound")
            )
    return [min(each, key=lambda one: (not one.is_exact, one.value)) for each in figures.values() if each]


def _compared(report: Report, best: _Standing, other: _Standing) -> str:
    alike = best.is_trained_like(other)
    after = "after the same number of training tokens, " if alike else ""
    names = [each.name for each in (best, other)]
    if names[0] == names[1] or not alike:
        names = [report.label(each.run) for each in (best, other)]
    first, second = map(_in_a_sentence, names)
    mine, its = perplexity_text(best.figure), perplexity_text(other.figure)
    if not other.is_exact:
        words = (
            f"held-out text has a perplexity of {mine} under {first} and {its} under {second}: the second "
            "figure is an upper bound, so it is not known which model is better."
        )
    elif other.value - best.value <= 2 * math.hypot(best.error, other.error):
        words = (
            f"held-out text has a perplexity of {mine} under {first} and {its} under {second}: the "
            "difference is within the error, so it is not known which model is better."
        )
        if other.value <= _ABOUT_EQUAL * best.value:
            words = (
                f"{first} and {second} predict held-out text about equally well: perplexity {mine} and {its}."
            )
    else:
        words = f"{first} predicts held-out text better than {second}: perplexity {mine} against {its}."
    return capital(after + words)


def _in_a_sentence(name: str) -> str:
    """Put the part after a label's first comma in brackets, for use among other commas."""
    method, _, more = name.partition(", ")
    return f"{method} ({more})" if more else method
