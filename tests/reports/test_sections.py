"""Sections: figures as they were measured, with their errors and what they mean."""

import pytest

from bd3lm.reports import Report
from bd3lm.reports.content import COMMANDS
from bd3lm.reports.document import Listing, Plot, Prose, Table
from bd3lm.reports.sections import build_document
from tests.reports import (
    CLIPPED,
    film,
    judgement,
    lengths,
    log,
    perplexity,
    recipe,
    run,
    samples,
    variance,
    whole_document,
    whole_report,
)

BLOCKS = "block diffusion, blocks of 2"


def section(report: Report, title: str) -> list:
    document = whole_document() if report is whole_report() else build_document(report)
    return next((list(each.parts) for each in document.sections if each.title == title), [])


def tables(report: Report, title: str) -> list[Table]:
    return [part for part in section(report, title) if isinstance(part, Table)]


def one(*records, **changes) -> Report:
    return Report(runs=(run(records=records, **changes),))


def test_perplexities_with_errors_and_signs():
    table, others = tables(whole_report(), "Perplexity")
    assert table.headings == [
        "model",
        "tokens seen",
        "perplexity, exact",
        "perplexity, bound",
        "bits per byte",
        "estimator",
    ]
    assert table.rows == [
        ["autoregressive", "600", "40.0 ± 4.0", "", "1.25", "exact"],
        [BLOCKS, "600 + 600", "50.0 ± 5.0", "≤ 60.0 ± 6.0", "1.25", "exact"],
    ]
    assert "8 sequences, 120 tokens scored" in table.caption
    assert "`bd3lm eval runs/ar runs/block`" in table.caption
    assert others.headings == ["model", "wiki"]
    assert others.rows == [["autoregressive", "80.0 ± 8.0"], [BLOCKS, "≤ 90.0 ± 9.0"]]


def test_what_is_neither_exact_nor_a_bound_says_so():
    (table,) = tables(one(perplexity(("neither", 70.0))), "Perplexity")
    assert table.headings[2] == "neither"
    assert table.rows[0][2:4] == ["≈ 70.0 ± 7.0", "≈ 1.25"]


def test_texts_of_different_size_are_counted_in_the_table():
    runs = (
        run("a", records=[perplexity(("exact", 2.0))]),
        run("b", records=[perplexity(("exact", 2.0), tokens=60)]),
    )
    (table,) = tables(Report(runs=runs), "Perplexity")
    assert [row[-1] for row in table.rows] == ["120", "60"]


def test_runs_with_other_texts_have_tables_of_their_own():
    other = perplexity(("exact", 2.0))
    other["settings"]["text"] = "g"
    runs = (run("a", records=[perplexity(("exact", 2.0))]), run("b", records=[other]))
    assert len(tables(Report(runs=runs), "Perplexity")) == 2


def test_one_figure_makes_no_plot():
    parts = section(one(perplexity(("exact", 2.0))), "Perplexity")
    assert not [part for part in parts if isinstance(part, Plot)]


def test_a_perplexity_past_all_numbers():
    (table,) = tables(one(perplexity(("bound", 2.0), figures=[INFINITE])), "Perplexity")
    assert table.rows[0][2] == "≤ ∞"


INFINITE = {"meaning": "bound", "perplexity": None, "perplexity_error": None, "bits_per_byte": None}


def test_training_says_which_losses_are_no_bounds():
    caption = section(whole_report(), "Training")[0].caption
    assert f"not to be held against the marks: {BLOCKS}." in caption
    full = {"kind": "clipped", "low": 1.0, "high": 1.0, "search": None}
    for masking, size, said in (
        ({"kind": "counts"}, 4, False),
        ({"kind": "clipped", "low": 0.0, "high": 1.0, "search": None}, 4, False),
        ({"kind": "clipped", "low": 0.3, "high": 0.8, "search": None}, 4, True),
        (full, 1, False),
        (full, 4, True),
        (CLIPPED, 4, True),
    ):
        settings = recipe("block_diffusion", block_size=size, masking=masking)
        caption = section(one(recipe=settings), "Training")[0].caption
        assert ("no bound" in caption) == said, masking


def test_clip_ranges_start_with_the_recipes_and_last_to_the_end(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "bd3lm.reports.plots.clip_ranges", lambda bands, order: seen.append(bands) or "<svg/>"
    )
    settings = recipe("block_diffusion", block_size=4, masking=CLIPPED)
    section(one(recipe=settings, log=log(7, clipped=True)), "Training")
    (band,) = seen[0]
    assert band.tokens == [0.0, 300.0, 600.0, 700.0]
    assert band.low == pytest.approx([0.0, 0.3, 0.6, 0.6])
    assert band.high == [1.0, 0.95, 0.95, 0.95]


def test_variances_by_rule():
    (table,) = tables(whole_report(), "Noise in training")
    assert table.headings == ["masks", "unbiased", f"{BLOCKS}: loss", f"{BLOCKS}: gradient"]
    assert table.rows == [
        ["counts", "yes", "1.5", "0.5"],
        ["clipped U[0.5, 1]", "no", "2.5", "0.5"],
        ["linear U[0, 1]", "yes", "40", "0.5"],
    ]
    (without,) = tables(one(variance()), "Noise in training")
    assert without.headings == ["masks", "unbiased", "autoregressive: loss"]


def test_lengths_beside_the_training_set_once():
    (table,) = tables(whole_report(), "Lengths")
    assert [row[0] for row in table.rows] == ["autoregressive", BLOCKS, "training documents, `data/mine`"]
    assert table.rows[0][1:] == ["3", "5", "6", "9", "12", "64", "2 by eos, 1 by length"]
    (alone,) = tables(one(lengths(training=False)), "Lengths")
    assert len(alone.rows) == 1


def test_generative_perplexity_with_all_that_belongs_to_it():
    (table,) = tables(whole_report(), "Generative perplexity")
    assert table.headings == ["model", "generative perplexity", "entropy", "evaluations a token", "nucleus"]
    assert table.rows[2] == [BLOCKS, "220.0 ± 4.0", "5.250 ± 0.050", "0.500", "1"]
    for words in (
        "neither exact nor a bound",
        "texts 30",
        "length 64",
        "redrawn 2",
        "degenerate 1",
        "bfloat16",
    ):
        assert words in table.caption
    assert "judge judge/one, float32, window 1,024" in table.caption


def test_one_judgement_makes_no_plot_and_an_infinite_one_none_either():
    for report in (one(judgement()), one(judgement(), judgement(None))):
        assert [type(part) for part in section(report, "Generative perplexity")] == [Table]
    assert tables(one(judgement(None)), "Generative perplexity")[0].rows[0][1] == "∞"


def test_samples_say_where_they_go_on_from():
    prose = next(part for part in section(whole_report(), "Samples") if isinstance(part, Prose))
    assert "Each goes on from the first words of a held-out document" in prose.text
    assert "goes on" not in section(one(samples(("", "text"))), "Samples")[0].text


def test_the_film_is_of_the_last_model_in_blocks():
    runs = (
        run(
            "a",
            BLOCKS,
            records=[film()],
            recipe=recipe("block_diffusion", block_size=2, masking={"kind": "times"}),
        ),
        run("b", records=[film()]),
    )
    (part,) = section(Report(runs=runs), "A text being written")
    assert f"Written by: {BLOCKS}, block after block of 2 tokens." in part.caption


def test_what_is_missing_comes_with_its_command_and_the_reason():
    blocks = recipe("block_diffusion", block_size=2, masking={"kind": "times"})
    runs = (run("a"), run("b", BLOCKS, recipe=blocks), run("c", "SSD-LM", recipe=recipe("simplex")))
    report = Report(runs=runs, unmeasured={("b", "perplexity"): "about 3 hours here"})
    _, listing = section(report, "Not measured")
    assert isinstance(listing, Listing)
    assert listing.items == [
        "Perplexity (autoregressive): `bd3lm eval a`",
        f"Perplexity ({BLOCKS}), about 3 hours here: `bd3lm eval b`",
        f"Variance of the loss ({BLOCKS}): `bd3lm variance b`",
        f"Lengths of texts (autoregressive; {BLOCKS}; SSD-LM): `bd3lm lengths a b c`",
        f"Generative perplexity (autoregressive; {BLOCKS}; SSD-LM): `bd3lm judge a b c`",
        f"Samples (autoregressive; {BLOCKS}; SSD-LM): `bd3lm report a b c`",
        f"A film of a text being written (autoregressive; {BLOCKS}): `bd3lm report a b`",
    ]


@pytest.mark.parametrize("command", COMMANDS.values())
def test_the_commands_exist(command, capsys):
    from bd3lm.cli import main

    with pytest.raises(SystemExit) as stopped:
        main([command.split()[1], "--help"])
    assert stopped.value.code == 0
    assert command.split()[1] in capsys.readouterr().out


def test_the_colophon_has_dates_and_versions():
    assert whole_document().colophon == ("Measured 2026-11-15. Page made with bd3lm 0.1.0, torch 2.13.0.")


def test_the_recipes_of_one_run_do_not_differ():
    assert not section(one(), "Recipes")
