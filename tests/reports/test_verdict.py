"""The verdict of a report: whom it compares, and when it says that one is better."""

import pytest

from bd3lm.reports import Report
from bd3lm.reports.verdict import verdict
from tests.reports import perplexity, recipe, run

SHORT = {"steps": (6,), "tokens": (600,)}
LONG = {"steps": (6, 6), "tokens": (600, 600)}
BLOCKS = "block diffusion, blocks of 2"


def of(folder, title, figure, error=0.1, *, meaning="exact", **changes):
    record = perplexity((meaning, figure))
    record["result"]["figures"][0]["perplexity_error"] = error
    return run(folder, title, records=[record], **changes)


def said(*runs) -> str:
    return verdict(Report(runs=runs))


def test_the_best_beside_the_best_of_those_that_were_trained_for_as_long():
    short, long = of("a", "autoregressive", 34.0, **SHORT), of("b", "autoregressive", 28.5, **LONG)
    blocks = of("c", BLOCKS, 30.0, **LONG)
    assert said(short, long, blocks) == (
        "After the same number of training tokens, autoregressive predicts held-out text better than block "
        "diffusion (blocks of 2): perplexity 28.50 ± 0.10 against 30.00 ± 0.10."
    )
    assert said(short, blocks) == (
        "Block diffusion (blocks of 2) predicts held-out text better than autoregressive: perplexity "
        "30.00 ± 0.10 against 34.00 ± 0.10."
    )


@pytest.mark.parametrize(("error", "equal"), [(0.5, False), (1.0, True)])
def test_within_two_standard_errors_none_is_better(error, equal):
    """The difference is 2, and its error √2 of that of each."""
    found = said(of("a", "A", 40.0, error, **SHORT), of("b", "B", 42.0, error, **SHORT))
    assert ("A and B predict held-out text about equally well: perplexity 40.0" in found) == equal
    assert ("A predicts held-out text better than B" in found) != equal


def test_a_bound_is_no_defeat():
    """What is at most 60 may be less than 50; what is at most 30 is less than 50."""
    exact = of("a", "A", 50.0, **SHORT)
    above, below = (of("b", "B", figure, meaning="bound", **SHORT) for figure in (60.0, 30.0))
    assert "it is not known which model is better" in said(exact, above)
    assert "B predicts held-out text better than A: perplexity ≤ 30" in said(exact, below)


def test_without_a_measurement_there_is_no_verdict_and_of_one_model_its_figure():
    assert said(run("a"), run("b", BLOCKS)) == ""
    assert said(of("a", "A", 40.0), run("b")) == "Perplexity of held-out text: 40.00 ± 0.10."


def test_another_order_than_a_models_own_has_no_part_in_it():
    leaning = recipe("block_diffusion", block_size=2, lean=2.0)
    records = [
        perplexity(("exact", value), settings={"lean": lean}) for value, lean in ((30.0, 2.0), (20.0, 4.0))
    ]
    assert (
        said(run("a", BLOCKS, recipe=leaning, records=records)) == "Perplexity of held-out text: 30.0 ± 3.0."
    )


def test_methods_of_one_name_are_told_apart_by_their_labels():
    assert "A (x) predicts held-out text better than A (y)" in said(of("x", "A", 30.0), of("y", "A", 40.0))


def test_a_large_difference_within_a_large_error_is_not_called_equal():
    found = said(of("a", "A", 34.1, 2.9, **SHORT), of("b", "B", 41.0, 2.6, **SHORT))
    assert "equally well" not in found
    assert "within the error, so it is not known which model is better" in found
