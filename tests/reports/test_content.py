"""Runs as plain values: what they are called, what differs between them, what is refused."""

import pytest

from bd3lm.reports import Report
from bd3lm.reports.content import differing
from tests.reports import log, perplexity, recipe, run, whole_report


def labels(*runs):
    return list(Report(runs=runs).labels.values())


def test_a_run_is_called_by_its_method():
    assert labels(run(), run("b", "SEDD")) == ["autoregressive", "SEDD"]


def test_the_same_method_twice_is_told_apart_by_its_folder():
    assert labels(run("runs/a"), run("runs/b")) == ["autoregressive, a", "autoregressive, b"]
    assert labels(run("x/demo/ar"), run("y/demo/ar")) == [
        "autoregressive, x/demo/ar",
        "autoregressive, y/demo/ar",
    ]


def test_the_four_runs_of_the_case_study_have_names_of_their_own():
    full = {"kind": "clipped", "low": 1.0, "high": 1.0, "search": None}
    ones = "block diffusion, blocks of 1"
    runs = [
        run("a"),
        run("b", recipe=recipe(random_batch=True)),
        run("c", ones, recipe=recipe("block_diffusion", block_size=1, masking={"kind": "times"})),
        run("d", ones, recipe=recipe("block_diffusion", block_size=1, masking=full)),
    ]
    assert labels(*runs) == [
        "autoregressive",
        "autoregressive, random batch size",
        ones,
        f"{ones}, fully masked",
    ]


def test_an_order_that_was_trained_for_is_part_of_the_name():
    fours, masking = "block diffusion, blocks of 4", {"kind": "counts", "lean": 0.5}
    runs = [
        run(
            "a",
            fours,
            recipe=recipe("block_diffusion", block_size=4, masking={"kind": "counts", "lean": 0.0}),
        ),
        run("b", fours, recipe=recipe("block_diffusion", block_size=4, masking=masking)),
        run(
            "c", f"{fours}, lean 2", recipe=recipe("block_diffusion", block_size=4, lean=2.0, masking=masking)
        ),
    ]
    assert labels(*runs) == [
        fours,
        f"{fours}, trained for lean 0.5",
        f"{fours}, lean 2, trained for lean 0.5",
    ]


@pytest.mark.parametrize(
    ("own", "leans", "counted"),
    [(None, [None, 0.0, 2.0], [0, 1]), (0.0, [None, 0.0, 2.0], [0, 1]), (2.0, [None, 0.0, 2.0], [2])],
)
def test_held_out_perplexities_are_those_of_its_own_order(own, leans, counted):
    """None: from before there was a lean."""
    records = [
        perplexity(("exact", 2.0 + index), settings={} if lean is None else {"lean": lean})
        for index, lean in enumerate(leans)
    ]
    method = {} if own is None else {"lean": own}
    found = run(recipe=recipe("block_diffusion", block_size=4, **method), records=records).held_out
    assert [each["result"] for each in found] == [records[index]["result"] for index in counted]


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
        ((run("a"), run("a")), "runs must be different ones, got a 2 times"),
        ((run("x/a"), run("x/a/")), "runs must be different ones, got x/a 2 times"),
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
