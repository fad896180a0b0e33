"""What older sessions wrote is read as what a session writes now; what identifies a run stays as it was."""

import json

import pytest

from bd3lm.sampling import EntropyBound, FirstHitting, MostConfident, UnmaskingRule
from research.evidence.measures import Perplexity, Texts, describe
from research.evidence.records import read_lines, read_measure, read_rule
from research.evidence.results import PATTERN
from research.evidence.runs import Run, all_runs
from research.evidence.samples import RESULTS, in_order

KNOWN = {each.digest: each for run in all_runs() for each in run.lineage}


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("FirstHitting(tokens_per_pass=2)", FirstHitting(2)),
        ("FirstHitting(tokens_per_pass=1, lean=4.0)", FirstHitting(1, 4.0)),
        ({"kind": "FirstHitting", "tokens_per_pass": 1, "lean": 0.0}, FirstHitting()),
        ("MostConfident(threshold=0.5, tokens_per_pass=1)", MostConfident(threshold=0.5)),
        ("EntropyBound(bound=0.3)", EntropyBound(0.3)),
        ({"kind": "entropy_bound", "bound": 1.0}, EntropyBound(1.0)),
    ],
)
def test_a_recorded_rule_is_known_however_it_was_written(written: str | dict, rule: UnmaskingRule):
    asked = describe(Texts(unmasking=rule))
    assert read_rule(written) == asked["unmasking"]
    assert read_measure(asked | {"unmasking": written}) == asked == json.loads(json.dumps(asked))


def test_other_rules_are_read_and_nonsense_is_refused():
    assert read_rule("Ancestral(steps=8)") == {"kind": "ancestral", "steps": 8}
    for nonsense in ("FirstHitting(2)", "[1]", "a.Rule()"):
        with pytest.raises(ValueError, match="must be written as Name"):
            read_rule(nonsense)


def test_what_is_not_said_of_a_perplexity_is_what_there_was_before_one_could_say_it():
    asked = describe(Perplexity(estimator="exact"))
    assert read_measure({key: asked[key] for key in asked if key not in ("split", "lean")}) == asked


def test_every_run_that_was_measured_is_still_known():
    """By its digest, whatever the library calls its settings; and what its steps cost."""
    found: dict[str, Run] = {}
    for line in read_lines(in_order(RESULTS, PATTERN)):
        if line["kind"] in ("trained", "timed") and (run := KNOWN.get(line["digest"])):
            assert (line["seed"], line["cost"]) == (run.seed, run.cost)
            found[run.digest] = run
    assert found == KNOWN
