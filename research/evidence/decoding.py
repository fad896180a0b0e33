"""Several tokens a pass: what each rule costs, what the judge says, and where quality breaks."""

import math
from collections.abc import Iterator, Sequence

from bd3lm.reports.document import Table
from bd3lm.sampling import EntropyBound, FirstHitting, MostConfident
from research.evidence.figures import Evidence, Written, is_decoding
from research.evidence.noise import Difference
from research.evidence.tables import TEXT_HEADINGS, text_cells

MORE_PERPLEXITY, LESS_ENTROPY = 0.10, 0.10
ERRORS = 2.0  # standard errors over texts, beyond these limits
BREAKS = (
    f"Quality breaks where texts lie more than {100 * MORE_PERPLEXITY:g} % above the most careful setting "
    f"of their rule in generative perplexity, or more than {LESS_ENTROPY:g} nats below one token a pass in "
    "random order in entropy, in either case by at least two standard errors of the difference beyond that "
    "limit: they are worse, or duller, and dull texts please a judge."
)


def rule_family(written: Written) -> str:
    """A rule without its setting."""
    match written.asked.unmasking:
        case FirstHitting(lean=lean):
            return f"order of lean {lean:g}" if lean else "random order"
        case MostConfident():
            return "confidence"
        case EntropyBound():
            return "entropy"
    raise ValueError(f"unmasking must be a rule of the decoding curves, got {written.asked.unmasking}")


def rule_text(written: Written) -> str:
    match written.asked.unmasking:
        case FirstHitting(tokens_per_pass=tokens, lean=lean):
            order = f"order of lean {lean:g}" if lean else "random order"
            return f"{order}, {tokens} a pass"
        case MostConfident(threshold=threshold):
            return f"confidence above {threshold:g}"
        case EntropyBound(bound=bound):
            return f"entropy up to {bound:g}"
    return rule_family(written)


def decoding_sets(evidence: Evidence) -> dict[str, list[Written]]:
    """By model, the reference first, as the runs declare them."""
    found: dict[str, list[Written]] = {}
    for written in evidence.texts():
        if is_decoding(written.asked):
            found.setdefault(written.run.name, []).append(written)
    return found


def curves(sets: Sequence[Written]) -> dict[str, list[Written]]:
    """The sets of a model by family, those alone that have several settings."""
    found: dict[str, list[Written]] = {}
    for each in sets:
        found.setdefault(rule_family(each), []).append(each)
    return {family: own for family, own in found.items() if len(own) > 1}


def judged_difference(written: Written, other: Written) -> Difference | None:
    """Of generative perplexities, with the error over texts."""
    if written.verdict is None or other.verdict is None:
        return None
    errors = [each["standard_error"] for each in (written.verdict, other.verdict)]
    error = None if None in errors else math.hypot(*errors)
    return Difference(written.verdict["nats"] - other.verdict["nats"], error, ERRORS)


def breaks(written: Written, sets: Sequence[Written]) -> bool | None:
    """Whether texts are worse than the first of their rule in `sets`, or duller than the first of all.

    None where that, or its error, is not known.
    """
    careful = next((each for each in sets if rule_family(each) == rule_family(written)), written)
    reference, worse = sets[0], judged_difference(written, careful)
    if written.verdict is None or reference.verdict is None or worse is None:
        return None
    errors = [each["entropy_error"] for each in (written.verdict, reference.verdict)]
    drop = reference.verdict["entropy"] - written.verdict["entropy"]
    is_worse = worse.is_beyond(MORE_PERPLEXITY)
    if is_worse is None or None in errors:
        return None
    return is_worse or drop - LESS_ENTROPY >= ERRORS * math.hypot(*errors)


def decoding_table(evidence: Evidence) -> Table:
    rows = []
    for name, sets in decoding_sets(evidence).items():
        for each in sets:
            broken = {None: "not judged", True: "yes", False: "no"}[breaks(each, sets)]
            rows.append([name, rule_text(each), *text_cells(each.cost, each.verdict), broken])
    return Table(
        "Texts of one context; none is drawn again. ± is one standard error over texts.",
        ["model", "rule", *TEXT_HEADINGS, "broken"],
        rows,
        text_columns=[1, 6],
    )


def decoding_findings(evidence: Evidence) -> Iterator[str]:
    yield BREAKS
    for name, sets in decoding_sets(evidence).items():
        for family, own in curves(sets).items():
            yield f"`{name}` by {family}: {_until(own, sets)}."
        for each in sets:
            if getattr(each.asked.unmasking, "lean", 0.0) and each.asked.unmasking.tokens_per_pass == 1:
                worse = judged_difference(each, sets[0])
                said = "not judged" if worse is None else f"generative perplexity {worse}"
                yield f"`{name}` by {rule_text(each)}, against random order: {said}."


def _until(sets: Sequence[Written], every: Sequence[Written]) -> str:
    """How far a rule keeps its quality, coming from the careful end."""
    judged = [each for each in sets if breaks(each, every) is not None]
    if len(judged) < len(sets):
        return f"not measured, {len(judged)} of {len(sets)} settings were judged"
    by_cost = sorted(judged, key=lambda each: -(each.evaluations or 0.0))
    bad = next((place for place, each in enumerate(by_cost) if breaks(each, every)), None)
    if bad is None:
        return f"quality does not break, down to {_at(by_cost[-1])}"
    kept = f"the last before is {_at(by_cost[bad - 1])}" if bad else "even the most careful setting"
    return f"quality breaks at {_at(by_cost[bad])}; {kept}"


def _at(written: Written) -> str:
    return f"{rule_text(written)}, {written.evaluations:.2f} evaluations a token"
