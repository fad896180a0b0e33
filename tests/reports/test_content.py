"""Runs as plain values: what they are called, what differs between them, what is refused."""

import pytest

from bd3lm.reports import Report
from bd3lm.reports.content import differing
from tests.reports import log, perplexity, recipe, run, whole_report


def labels(*runs):
    return Report(runs=runs).labels


def test_a_run_is_called_by_its_method():
    assert labels(run(), run("b", "SEDD")) == ["autoregressive", "SEDD"]


def test_the_same_method_twice_is_told_apart_by_its_folder():
    assert labels(run("runs/a"), run("runs/b")) == ["autoregressive, a", "autoregressive, b"]
    assert labels(run("x/demo/ar"), run("y/demo/ar")) == [
        "autoregressive, x/demo/ar",
        "autoregressive, y/demo/ar",
    ]


def test_runs_that_went_on_from_one_another_are_told_apart_by_their_steps():
    """And what stands beside them has its steps too; runs that only have other steps keep their folders."""
    runs = [run("x/ar"), run("x/longer", steps=(6, 6)), run("x/block", "SEDD", steps=(6, 6))]
    assert labels(*runs) == ["autoregressive, 6 steps", "autoregressive, 12 steps", "SEDD, 12 steps"]
    assert labels(run("a"), run("b", steps=(12,))) == ["autoregressive, a", "autoregressive, b"]
    assert labels(run("a"), run("b", steps=(6, 6), start="owner/name")) == [
        "autoregressive, a",
        "autoregressive, b",
    ]


def test_the_four_runs_of_the_case_study_have_names_of_their_own():
    ones = "block diffusion, blocks of 1"
    runs = [
        run("a"),
        run("b", variant=", random batch size"),
        run("c", ones),
        run("d", ones, variant=", fully masked"),
    ]
    assert labels(*runs) == [
        "autoregressive",
        "autoregressive, random batch size",
        ones,
        f"{ones}, fully masked",
    ]


@pytest.mark.parametrize(("own", "counted"), [(0.0, 0), (2.0, 1)])
def test_held_out_perplexities_are_those_of_its_own_order(own, counted):
    records = [perplexity(("exact", 2.0), settings={"lean": lean}) for lean in (0.0, 2.0)]
    found = run(recipe=recipe("block_diffusion", block_size=4, lean=own), records=records).held_out
    assert [each["settings"] for each in found] == [records[counted]["settings"]]


def test_only_what_differs_between_recipes():
    one, other = recipe(), recipe("block_diffusion", block_size=4)
    other["start_from"] = "runs/ar/model"
    assert differing([one, other]) == {
        "method.kind": ["autoregressive", "block_diffusion"],
        "start_from": [None, "runs/ar/model"],
        "method.block_size": [None, 4],
    }
    assert differing([one, one]) == {}


def test_columns_skip_rows_that_lack_them():
    assert run(log=log(7)).column("valid_nats") == ([300.0, 600.0], pytest.approx([4.9158, 4.2929], abs=1e-3))
    assert run().column("gradient_variance") == ([], [])


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((), "runs must hold at least one run"),
        ((run("a"), run("a")), "runs must be different, got a 2 times"),
        ((run("x/a"), run("x/a/")), "runs must be different, got x/a 2 times"),
        ((run("a", log=[]),), "a/metrics.csv must hold rows of a training log, got none"),
    ],
)
def test_bad_runs(runs, message):
    with pytest.raises(ValueError, match=message):
        Report(runs=runs)


def test_stages():
    assert whole_report().has_stages
    assert not Report(runs=(run(),)).has_stages
    assert Report(runs=(run(start="owner/name"),)).has_stages
