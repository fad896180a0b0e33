"""Sections: figures as they were measured, with their errors and what they mean."""

import pytest

from bd3lm.reports import Report, Run
from bd3lm.reports.content import COMMANDS
from bd3lm.reports.document import Listing, Plot, Prose, Quotation, Table
from bd3lm.reports.sections import build_document
from tests.reports import (
    film,
    judgement,
    lengths,
    log,
    long_text,
    perplexity,
    recipe,
    run,
    samples,
    unigram,
    variance,
    whole_report,
)

pytestmark = pytest.mark.usefixtures("undrawn")

BLOCKS = "block diffusion, blocks of 2"


def held_out_plot(report: Report) -> Plot:
    (plot,) = build_document(report).shown_first
    assert isinstance(plot, Plot)
    return plot


def section(report: Report, title: str) -> list:
    document = build_document(report)
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
    assert "`bd3lm eval runs/ar runs/block --estimator exact`" in table.caption
    assert others.headings == ["model", "estimator", "wiki (120 tokens)"]
    assert others.rows == [
        ["autoregressive", "exact", "80.0 ± 8.0; 1.25 bits per byte"],
        [BLOCKS, "counts", "≤ 90.0 ± 9.0; ≤ 1.25 bits per byte"],
    ]
    assert "trained" not in others.caption


def test_training_text_is_called_so_and_stands_apart():
    train = {"split": "train", "text": "f"}
    runs = (
        run("a", records=[perplexity(("exact", 2.0), settings=train), perplexity(("exact", 3.0))]),
        run("b", records=[perplexity(("exact", 4.0), settings=train)]),
    )
    held_out, trained_on = tables(Report(runs=runs), "Perplexity")
    assert "held-out text: " in held_out.caption
    assert [row[2] for row in held_out.rows] == ["3.00 ± 0.30"]
    assert "training text: " in trained_on.caption
    assert "held-out" not in trained_on.caption
    assert [row[2] for row in trained_on.rows] == ["2.00 ± 0.20", "4.00 ± 0.40"]
    _, listing = section(Report(runs=runs), "Not measured")
    assert listing.items[0] == "Perplexity of held-out text (autoregressive, b): `bd3lm eval b`"


def test_the_largest_record_of_a_text_and_estimator_is_shown_in_table_and_plot():
    records = [
        perplexity(("exact", 2.0)),
        perplexity(("exact", 9.0), tokens=60, settings={"limit": 4}),
        perplexity(("bound", 3.0), estimator="counts"),
    ]
    (table,) = tables(one(*records), "Perplexity")
    assert [(row[-1], row[2], row[3]) for row in table.rows] == [
        ("exact", "2.00 ± 0.20", ""),
        ("counts", "", "≤ 3.00 ± 0.30"),
    ]
    plot = held_out_plot(one(*records))
    assert "autoregressive, exact 2.00; autoregressive, counts ≤ 3.00" in plot.alt
    assert "--sequences" not in table.caption


def leaning(value: float, lean: float, *, settings=None, **options):
    """A perplexity measured at a lean."""
    return perplexity(("exact", value), settings={**(settings or {}), "lean": lean}, **options)


def test_other_orders_stand_in_rows_of_their_own():
    blocks = recipe("block_diffusion", block_size=2)
    report = one(leaning(5.0, 0.0), leaning(4.0, 2.0), leaning(4.5, 0.5), recipe=blocks, title=BLOCKS)
    (table,) = tables(report, "Perplexity")
    assert [(row[0], row[2], row[-1]) for row in table.rows] == [
        (BLOCKS, "5.00 ± 0.50", "exact"),
        (BLOCKS, "4.00 ± 0.40", "exact, lean 2"),
        (BLOCKS, "4.50 ± 0.45", "exact, lean 0.5"),
    ]
    assert table.caption.endswith(
        "Measured by `bd3lm eval runs/ar --estimator exact`, "
        "`bd3lm eval runs/ar --estimator exact --lean 2`, `bd3lm eval runs/ar --estimator exact --lean 0.5`."
    )
    plot = held_out_plot(report)
    assert f"{BLOCKS}, exact 5.00; {BLOCKS}, exact, lean 2 4.00; {BLOCKS}, exact, lean 0.5 4.50" in plot.alt


def test_a_lean_that_is_not_the_runs_own_is_named_wherever_it_stands():
    """Also where a run has one record, and a lean of 0 where the run's own is another."""
    plain = recipe("block_diffusion", block_size=2)
    runs = (
        run("a", BLOCKS, recipe=plain, records=[leaning(5.0, 2.0)]),
        run(
            "b", f"{BLOCKS}, lean 2", recipe=recipe("block_diffusion", lean=2.0), records=[leaning(4.0, 0.0)]
        ),
        run(
            "c", f"{BLOCKS}, lean 3", recipe=recipe("block_diffusion", lean=3.0), records=[leaning(3.0, 3.0)]
        ),
        run("d", "autoregressive", records=[leaning(2.0, 0.0)]),
    )
    (table,) = tables(Report(runs=runs), "Perplexity")
    assert [(row[0], row[-1]) for row in table.rows] == [
        (f"{BLOCKS}, a", "exact, lean 2"),
        (f"{BLOCKS}, b", "exact, lean 0"),
        (f"{BLOCKS}, lean 3", "exact, lean 3"),
        ("autoregressive", "exact"),
    ]
    plot = held_out_plot(Report(runs=runs))
    assert plot.alt.endswith(
        f": {BLOCKS}, a, lean 2 5.00; {BLOCKS}, b, lean 0 4.00; {BLOCKS}, lean 3 3.00; autoregressive 2.00."
    )
    _, listing = section(Report(runs=runs), "Not measured")
    assert listing.items[0].startswith(f"Perplexity of held-out text ({BLOCKS}; {BLOCKS}, lean 2): ")


def test_a_figure_at_another_lean_is_not_named_by_the_lean_of_its_run():
    leans = {"recipe": recipe("block_diffusion", lean=2.0), "title": f"{BLOCKS}, lean 2"}
    others = [leaning(6.0, 0.0, data="ptb"), leaning(5.0, 2.0, data="ptb")]
    report = one(leaning(4.0, 0.0), leaning(3.0, 2.0), *others, **leans)
    for table in tables(report, "Perplexity"):
        assert [row[0] for row in table.rows] == [BLOCKS, f"{BLOCKS}, lean 2"]
    plot = held_out_plot(report)
    assert plot.alt.endswith(f": {BLOCKS}, exact, lean 0 4.00; {BLOCKS}, lean 2, exact 3.00.")


def test_the_largest_record_is_that_of_its_order():
    few = {"tokens": 60, "settings": {"limit": 4}}
    records = [leaning(9.0, 2.0, **few), leaning(5.0, 0.0), leaning(8.0, 0.0, **few), leaning(4.0, 2.0)]
    (table,) = tables(one(*records), "Perplexity")
    assert sorted((row[-1], row[2]) for row in table.rows) == [
        ("exact", "5.00 ± 0.50"),
        ("exact, lean 2", "4.00 ± 0.40"),
    ]


def test_other_texts_have_a_row_for_each_order():
    records = [
        leaning(value, lean, data=data)
        for data, value, lean in (("ptb", 5.0, 0.0), ("ptb", 4.0, 2.0), ("lm1b", 3.0, 2.0))
    ]
    records.append(
        perplexity(("bound", 7.0), data="lm1b", estimator="counts", settings={"lean": 2.0, "replicates": 3})
    )
    (table,) = tables(one(*records), "Perplexity")
    assert [row[1:] for row in table.rows] == [
        ["exact", "5.00 ± 0.50; 1.25 bits per byte", "–"],
        ["exact, lean 2", "4.00 ± 0.40; 1.25 bits per byte", "3.00 ± 0.30; 1.25 bits per byte"],
        ["counts, lean 2", "–", "≤ 7.00 ± 0.70; ≤ 1.25 bits per byte"],
    ]


def test_draws_are_named_after_the_lean():
    record = perplexity(("bound", 7.0), estimator="counts", settings={"lean": 2.0, "replicates": 3})
    (table,) = tables(one(record), "Perplexity")
    assert table.rows[0][-1] == "counts, lean 2, 3 draws"


def test_judgements_name_the_lean_of_the_sampler():
    written = {"unmasking": {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 2.0}}
    report = one(judgement(settings=written), recipe=recipe("block_diffusion", block_size=2), title=BLOCKS)
    (table,) = tables(report, "Generative perplexity")
    assert any(
        "first hitting, tokens per pass 1, lean 2.0" in cell for cell in table.rows[0] + [table.caption]
    )


def test_judgements_of_another_order_are_told_apart():
    records = [
        judgement(settings={"lean": 0.0}),
        judgement(150.0, settings={"lean": 0.0}, samples=40),
        judgement(
            90.0,
            settings={"lean": 2.0, "unmasking": {"kind": "first_hitting", "tokens_per_pass": 1, "lean": 2.0}},
        ),
    ]
    report = one(*records, recipe=recipe("block_diffusion", block_size=2), title=BLOCKS)
    (table,) = tables(report, "Generative perplexity")
    assert [row[:2] for row in table.rows] == [
        [BLOCKS, "150.0 ± 4.0"],
        [f"{BLOCKS}, lean 2", "90.0 ± 4.0"],
    ]
    (plot,) = [part for part in section(report, "Generative perplexity") if isinstance(part, Plot)]
    assert f"{BLOCKS}, nucleus 0.9, 150.0 at 1.00; {BLOCKS}, nucleus 0.9, lean 2, 90.00 at 1.00." in plot.alt
    assert "lean 2" in plot.svg


def test_lengths_of_another_order_are_told_apart():
    more, leans = lengths(), lengths()
    leans["settings"]["lean"], leans["result"]["samples"]["number"] = 2.0, 30
    more["settings"]["lean"] = 0.0
    report = one(leans, lengths(), more, recipe=recipe("block_diffusion", block_size=2), title=BLOCKS)
    (table,) = tables(report, "Lengths")
    assert [row[:2] for row in table.rows[:2]] == [[BLOCKS, "3"], [f"{BLOCKS}, lean 2", "30"]]
    (plot,) = [part for part in section(report, "Lengths") if isinstance(part, Plot)]
    assert f"{BLOCKS} 5; {BLOCKS}, lean 2 5." in plot.alt
    assert "--lean 2" in plot.caption


@pytest.mark.parametrize(
    ("train_lean", "valid_lean", "said"),
    [
        (0.0, 0.0, ""),
        (2.0, 2.0, ""),
        (0.0, 2.0, f"{BLOCKS} (line at lean 0, marks at lean 2)."),
        (0.5, 0.0, f"{BLOCKS} (line at lean 0.5, marks at lean 0)."),
    ],
)
def test_training_says_where_lines_and_marks_are_of_different_orders(train_lean, valid_lean, said):
    report = one(title=BLOCKS, train_lean=train_lean, valid_lean=valid_lean)
    caption = section(report, "Training")[0].caption
    sentence = "the marks are for the order in which the model writes and the line is for another"
    assert (sentence in caption) == bool(said)
    assert said in caption
    no_marks = one(title=BLOCKS, train_lean=train_lean, valid_lean=valid_lean, log=log(2))
    assert "marks" not in section(no_marks, "Training")[0].caption


def test_other_texts_that_look_alike_are_told_apart():
    same = {"data": "a/wiki.txt"}
    records = [
        perplexity(("exact", 1.0), **same),
        perplexity(("exact", 2.0), **same, settings={"eos_between_documents": False}),
        perplexity(("exact", 3.0), **same, settings={"text": "changed"}),
        perplexity(("exact", 4.0), **same, settings={"split": "test"}),
        perplexity(("exact", 5.0), data="b/wiki.txt"),
        perplexity(("exact", 6.0), data="ptb", tokens=60, settings={"limit": 4}),
        perplexity(("exact", 7.0), data="ptb"),
    ]
    (table,) = tables(one(*records), "Perplexity")
    ends = "with end tokens"
    assert [heading.removesuffix(" (120 tokens)") for heading in table.headings[2:]] == [
        f"a/wiki.txt, valid, {ends}, a/wiki.txt",
        "a/wiki.txt, valid, without end tokens",
        f"a/wiki.txt, valid, {ends}, changed",
        "a/wiki.txt, test",
        "b/wiki.txt",
        "ptb",
    ]
    assert [cell[0] for cell in table.rows[0][2:]] == ["1", "2", "3", "4", "5", "7"]


def test_numbers_of_tokens_stand_in_the_cells_where_they_differ():
    runs = (
        run("a", records=[perplexity(("exact", 2.0), data="ptb")]),
        run("b", records=[perplexity(("exact", 2.0), data="ptb", tokens=60)]),
    )
    (table,) = tables(Report(runs=runs), "Perplexity")
    assert table.headings[2] == "ptb"
    assert [row[2] for row in table.rows] == [
        "2.00 ± 0.20; 1.25 bits per byte (120 tokens)",
        "2.00 ± 0.20; 1.25 bits per byte (60 tokens)",
    ]


def test_models_with_different_tokenizers_are_in_one_column_and_a_sentence_says_so():
    """Their tokens of one text differ; but where one tokenizer made two of them, the text has changed."""

    def of(folder: str, text: str, tokenizer: str) -> Run:
        settings = {"text": text, "tokenizer": tokenizer}
        return run(folder, records=[perplexity(("exact", 2.0), data="ptb", settings=settings)])

    runs = (of("a", "f", "T"), of("b", "g", "U"))
    (table,) = tables(Report(runs=runs), "Perplexity")
    assert table.headings[2:] == ["ptb (120 tokens)"]
    assert "different tokenizers, so their perplexities per token cannot be compared" in table.caption
    (table,) = tables(Report(runs=(*runs, of("c", "changed", "T"))), "Perplexity")
    assert len(table.headings[2:]) == 3
    (table,) = tables(Report(runs=(of("a", "f", "T"), of("b", "f", "T"))), "Perplexity")
    assert "different tokenizers" not in table.caption


def test_what_is_not_known_of_a_start_is_said():
    report = one(perplexity(("exact", 2.0)), start="owner/name")
    for title in ("Models", "Perplexity"):
        (table,) = tables(report, title)
        assert "? stands for the training of `owner/name`, which is not known here" in table.caption
        assert table.rows[0][table.headings.index("tokens seen")] == "? + 600"
    assert "A sum means that training started from another model" in tables(report, "Models")[0].caption


def test_what_has_no_model_yet_is_named():
    report = Report(runs=(run(),), unfinished=("runs/block",))
    assert "`runs/block`" in section(report, "Models")[1].text


def test_what_is_neither_exact_nor_a_bound_says_so():
    (table,) = tables(one(perplexity(("neither", 70.0))), "Perplexity")
    assert table.headings[2] == "perplexity, neither"
    assert table.rows[0][2:4] == ["≈ 70.0 ± 7.0", "≈ 1.25"]


def test_texts_of_different_size_are_counted_in_the_table():
    runs = (
        run("a", records=[perplexity(("exact", 2.0))]),
        run("b", records=[perplexity(("exact", 2.0), tokens=60)]),
    )
    (table,) = tables(Report(runs=runs), "Perplexity")
    assert [row[-1] for row in table.rows] == ["120", "60"]


def test_a_plot_has_figures_of_the_same_sequences_and_names_those_left_out():
    few = {"sequences": 4, "tokens": 60, "settings": {"limit": 4}}
    part = perplexity(("bound", 1.9), estimator="iw:4", **few)
    whole = perplexity(("exact", 2.0), ("bound", 3.0))
    plot = held_out_plot(one(part, whole))
    assert plot.alt.endswith(": autoregressive 2.00; autoregressive ≤ 3.00.")
    assert plot.caption.endswith(
        " All are of 8 sequences, 120 tokens. Left out, because figures of other sequences cannot be "
        "compared with these: autoregressive, iw:4 (4 sequences, 60 tokens)."
    )
    runs = (run("a", "A", records=[part, whole]), run("b", "B", records=[perplexity(("exact", 9.0), **few)]))
    plot = held_out_plot(Report(runs=runs))
    assert plot.alt.endswith(": A ≤ 1.90; B 9.00.")  # what most were measured on
    assert plot.caption.endswith(": A, exact (8 sequences, 120 tokens).")
    plot = held_out_plot(one(whole, perplexity(("bound", 2.5), estimator="counts")))
    assert "Left out" not in plot.caption


def test_figures_of_another_context_are_not_in_one_plot():
    """The same numbers of sequences and tokens may be other sequences."""
    runs = [
        run(name, name, records=[perplexity(("exact", value), settings={"context": context})])
        for name, value, context in (("A", 2.0, 16), ("B", 3.0, 16), ("C", 4.0, 32))
    ]
    plot = held_out_plot(Report(runs=tuple(runs)))
    assert plot.alt.endswith(": A 2.00; B 3.00.")
    assert ": C (8 sequences, 120 tokens)." in plot.caption


def test_runs_with_other_texts_have_tables_of_their_own():
    other = perplexity(("exact", 2.0))
    other["settings"]["text"] = "g"
    runs = (run("a", records=[perplexity(("exact", 2.0))]), run("b", records=[other]))
    assert len(tables(Report(runs=runs), "Perplexity")) == 2


def test_one_figure_makes_no_plot():
    parts = section(one(perplexity(("exact", 2.0))), "Perplexity")
    assert not [part for part in parts if isinstance(part, Plot)]


def test_a_perplexity_past_all_numbers(drawn_once):
    (table,) = tables(one(perplexity(("bound", 2.0), figures=[INFINITE])), "Perplexity")
    assert table.rows[0][2] == "≤ ∞"


INFINITE = {"meaning": "bound", "perplexity": None, "perplexity_error": None, "bits_per_byte": None}


def test_training_says_which_losses_are_no_bounds():
    words = "with any other loss, because it is neither exact nor a bound: "
    assert f"{words}{BLOCKS}." in section(whole_report(), "Training")[0].caption
    assert "nor a bound" not in section(one(), "Training")[0].caption


def test_training_says_what_faint_lines_are_where_there_are_some():
    for rows, faint in ((30, False), (60, True)):
        caption = section(one(log=log(rows)), "Training")[0].caption
        assert ("faint lines show it unaveraged" in caption) == faint


def test_clip_ranges_start_with_the_recipes_and_last_to_the_end(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "bd3lm.reports.plots.clip_ranges", lambda bands, order: seen.append(bands) or "<svg/>"
    )
    section(one(clip_range=(0.0, 1.0), log=log(7, clipped=True)), "Training")
    (band,) = seen[0]
    assert band.tokens == [0.0, 300.0, 600.0, 700.0]
    assert band.low == pytest.approx([0.0, 0.3, 0.6, 0.6])
    assert band.high == [1.0, 0.95, 0.95, 0.95]


def test_variances_by_rule():
    (table,) = tables(whole_report(), "Noise in training")
    assert table.headings == [
        "masks",
        "unbiased",
        f"{BLOCKS}: variance of the loss",
        f"{BLOCKS}: variance of the gradient",
    ]
    assert table.rows == [
        ["counts", "yes", "1.50", "0.500"],
        ["clipped U[0.5, 1]", "no", "2.50", "0.500"],
        ["linear U[0, 1]", "yes", "40.00", "0.500"],
    ]
    (without,) = tables(one(variance()), "Noise in training")
    assert without.headings == ["masks", "unbiased", "autoregressive: variance of the loss"]


def test_variances_have_their_errors_and_may_be_infinite(drawn_once):
    record = variance(gradient=0.5)
    first, second, third = record["result"]["rows"]
    first |= {"loss_error": 0.25, "gradient_error": 0.125}
    second |= {"loss": None, "loss_error": None}
    third |= {"gradient": None, "gradient_error": None}
    (table,) = tables(one(record), "Noise in training")
    assert [row[2:] for row in table.rows] == [["1.50 ± 0.25", "0.50 ± 0.12"], ["∞", "0.500"], ["40.00", "∞"]]


def test_the_quietest_rule_is_one_of_the_unbiased():
    record = variance()
    rows = [{**row, "loss": 0.1} if not row["unbiased"] else row for row in record["result"]["rows"]]
    parts = section(one({**record, "result": {"rows": rows}}), "Noise in training")
    plot = next(part for part in parts if isinstance(part, Plot))
    assert plot.alt.endswith("Least among the unbiased: autoregressive, counts.")


def test_the_largest_of_several_variances_and_lengths():
    few = variance(gradient=9.0)
    few["settings"]["batches"] = 1
    (table,) = tables(one(variance(gradient=0.5), few), "Noise in training")
    assert table.rows[0][3] == "0.500"
    tiny = lengths()
    tiny["result"]["samples"]["number"] = 2
    (table,) = tables(one(lengths(), tiny), "Lengths")
    assert table.rows[0][1] == "3"


def test_lengths_beside_the_training_set_once():
    (table,) = tables(whole_report(), "Lengths")
    assert [row[0] for row in table.rows] == ["autoregressive", BLOCKS, "training documents, `data/mine`"]
    assert table.rows[0][1:] == ["3", "5", "6", "9", "12", "64", "2 by eos, 1 by length"]
    (alone,) = tables(one(lengths(training=False)), "Lengths")
    assert len(alone.rows) == 1


def test_generative_perplexity_with_all_that_belongs_to_it():
    (table,) = tables(whole_report(), "Generative perplexity")
    figures = ["generative perplexity", "entropy", "evaluations a token", "nucleus"]
    assert table.headings == ["model", *figures, "sampler"]
    sampler = "first hitting, tokens per pass 1, bfloat16"
    assert table.rows[2] == [BLOCKS, "220.0 ± 4.0", "5.250 ± 0.050", "0.500", "1", sampler]
    for words in (
        "neither exact nor a bound",
        "texts 30",
        "length 64",
        "redrawn 2",
        "degenerate 1",
    ):
        assert words in table.caption
    assert "judge judge/one, float32, window 1,024" in table.caption


def test_one_judgement_makes_no_plot_and_an_infinite_one_none_either(drawn_once):
    for report in (one(judgement()), one(judgement(), judgement(None))):
        assert [type(part) for part in section(report, "Generative perplexity")] == [Table]
    assert tables(one(judgement(None)), "Generative perplexity")[0].rows[0][1] == "∞"


def test_a_plot_for_each_judge_and_length():
    ways = [{}, {"length": 128}, {"judge": "judge/two"}]
    records = [judgement(top_p=p, settings=way) for way in ways for p in (0.9, 1.0)]
    parts = section(one(*records, judgement(settings={"length": 256})), "Generative perplexity")
    found = [part for part in parts if isinstance(part, Plot)]
    assert [plot.name for plot in found] == ["judgements", "judgements1", "judgements2"]
    for plot, words in zip(found, ["64 tokens", "128 tokens", "judge/two"], strict=True):
        assert words in plot.caption
        assert words in plot.alt
        assert plot.alt.count(" at ") == 2


def test_a_judgement_of_fewer_texts_or_without_mauve_gives_way():
    more = judgement(mauve=0.5, settings={"mauve_reference": "human.txt"})
    records = [more, judgement(samples=2, settings={"count": 2}), judgement()]
    (table,) = tables(one(*records), "Generative perplexity")
    assert len(table.rows) == 1
    assert "MAUVE 0.500" in table.caption


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("block_diffusion", {}, "sampler first hitting, tokens per pass 1, bfloat16"),
        (
            "block_diffusion",
            {"unmasking": {"kind": "first_hitting", "lean": 0.0}},
            "sampler first hitting, bfloat16",
        ),
        (
            "block_diffusion",
            {"unmasking": {"kind": "first_hitting", "tokens_per_pass": 2, "lean": 0.0}},
            "sampler first hitting, tokens per pass 2, bfloat16",
        ),
        (
            "block_diffusion",
            {"unmasking": {"kind": "ancestral", "steps": 9, "schedule": "linear"}},
            "sampler ancestral, steps 9, schedule linear, bfloat16",
        ),
        (
            "block_diffusion",
            {"unmasking": {"kind": "most_confident", "threshold": None, "tokens_per_pass": 2}},
            "sampler most confident, tokens per pass 2, bfloat16",
        ),
        ("autoregressive", {}, "sampler token after token, bfloat16"),
        ("score_entropy", {"steps": 64}, "sampler 64 steps, bfloat16"),
    ],
)
def test_samplers_in_words(kind, settings, words):
    report = one(judgement(settings=settings), recipe=recipe(kind, block_size=2))
    assert words in tables(report, "Generative perplexity")[0].caption


def test_only_the_newest_samples_are_shown():
    parts = section(one(samples(("", "old")), samples(("", "new"))), "Samples")
    assert [part.written for part in parts[1:]] == ["new"]


def test_samples_say_where_they_go_on_from():
    prose = next(part for part in section(whole_report(), "Samples") if isinstance(part, Prose))
    assert "Each continues the first words of a held-out document" in prose.text
    assert "continues" not in section(one(samples(("", "text"))), "Samples")[0].text


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
    assert f"Model: {BLOCKS}. It writes one block of 2 tokens after another." in part.caption


def test_the_film_of_the_box_stands_for_those_of_models_that_cannot_write():
    result = {"title": BLOCKS, "parameters": 7_900_000, "film": film()["result"]}
    report = one(film(), {**film(), "kind": "box_film", "result": result})
    (part,) = section(report, "A text being written")
    assert (
        "`box`, which comes with bd3lm, because the models below have learned too little to write: block "
        "diffusion, blocks of 2, 7.9M parameters"
    ) in part.caption
    listing = section(one({**film(), "kind": "box_film", "result": result}), "Not measured")[1]
    assert not [item for item in listing.items if "film" in item]


def test_texts_with_code_are_set_as_code_all_of_them():
    code, words = samples(("", "def f():\n    return 1")), samples(("", "Once.\nUpon a time."))
    runs = Report(runs=(run("a", records=[code]), run("b", records=[words])))
    assert [part.is_code for part in section(runs, "Samples") if isinstance(part, Quotation)] == [True, True]
    assert [part.is_code for part in section(one(words), "Samples") if isinstance(part, Quotation)] == [False]


def test_what_is_missing_comes_with_its_command_and_the_reason():
    blocks = recipe("block_diffusion", block_size=2, masking={"kind": "times"})
    runs = (run("a"), run("b", BLOCKS, recipe=blocks), run("c", "SSD-LM", recipe=recipe("simplex")))
    report = Report(runs=runs, unmeasured={("b", "perplexity"): "about 3 hours here"})
    _, listing = section(report, "Not measured")
    assert isinstance(listing, Listing)
    assert listing.items == [
        "Perplexity of held-out text (autoregressive): `bd3lm eval a`",
        f"Perplexity of held-out text ({BLOCKS}), about 3 hours here: `bd3lm eval b`",
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
    assert build_document(whole_report()).colophon == (
        "Measured 2026-11-15. Page made with bd3lm 0.1.0, torch 2.13.0."
    )


def test_the_recipes_of_one_run_do_not_differ():
    assert not section(one(), "Recipes")


@pytest.mark.parametrize(("method", "drawn"), [("autoregressive", False), ("block_diffusion", True)])
def test_held_out_losses_of_diffusion_are_one_draw(method, drawn):
    found = Report(runs=(run(recipe=recipe(method)),))
    (plot,) = [part for part in section(found, "Training") if isinstance(part, Plot)]
    assert "Single marks are the loss on held-out text" in plot.caption
    assert ("from one random draw" in plot.caption) == drawn


def test_token_frequencies_stand_beside_figures_of_the_same_tokens_alone():
    def said(*records) -> list[str]:
        return [part.text for part in section(one(*records), "Perplexity") if isinstance(part, Prose)][1:]

    figure = perplexity(("exact", 2.0))
    assert said(figure, unigram()) == [
        "To compare: token frequencies of the training text alone, which ignore what stands before a "
        "token, have a perplexity of 385.4."
    ]
    assert said(figure) == said(figure, unigram(text="g")) == said(figure, unigram(split="test")) == []
    assert said(perplexity(("exact", 2.0), tokens=60), unigram()) == []


def test_a_text_past_the_context_says_how_long_both_are():
    prose, quotation = section(one(long_text()), "A text longer than the context")
    assert "its network sees 16 tokens at once" in prose.text
    assert "This one has 64 tokens. Past the context" in prose.text
    assert (quotation.given, quotation.written) == ("Once", " upon a time")
