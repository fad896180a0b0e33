"""What is made of the results of the experiments: tables, the account of them, plots, the document."""

import json
import math
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from bd3lm.commands.shared.sample_files import Samples
from bd3lm.data import TokenShards
from bd3lm.reports.document import Listing, Plot, Prose
from research.evidence import digest, document, tables
from research.evidence.account import cost_table, earlier_table, failure_table, setting
from research.evidence.figures import Evidence
from research.evidence.measures import TRAINED_ON, Perplexity, describe
from research.evidence.noise import NOT_MEASURED, Difference
from research.evidence.prepare import prepare_tiny
from research.evidence.real import real_facts, real_samples
from research.evidence.results import Results
from research.evidence.samples import read_verdicts, text_name, write_texts
from research.tests.evidence_results import (
    ALL,
    EXACT,
    REAL,
    RUNS,
    TRAINED,
    add,
    add_result,
    fill,
    judged,
    row,
)

# A README and a digest with nothing but their regions.
SUMMARY = "# A\n\n<!-- preset-orders -->\n<!-- end -->\n"
DIGEST = "# A\n\n" + "".join(f"<!-- {name} -->\n<!-- end -->\n\n" for name in digest.REGIONS)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "evidence.jsonl")


def test_tables_show_what_was_measured(results: Results):
    for seed, exact in enumerate((40.0, 42.0)):
        add(results, f"ar/{seed}", exact=exact)
        add(results, f"bd3lm-4/{seed}", exact=exact * 1.05, nelbo=exact * 1.2)
        for name in ("counts-4", "clipped-4"):
            add(results, f"{name}/{seed}", exact=exact)
        for other in (seed, seed + 2):
            add(results, f"mdlm/{other}", Perplexity(estimator="counts", replicates=4), counts=exact)
    # Neither a part of the text nor that of choices may be mixed with the test split.
    part, valid = replace(EXACT, part=True, sequences=128), replace(EXACT, split="valid")
    add(results, "ar/0", part, exact=50.0)
    add(results, "bd3lm-8/0", part, exact=55.0, nelbo=60.0)
    add(results, "ar/0", valid, exact=70.0)
    evidence = Evidence(Results(results.file), ALL)
    main = tables.main_table(evidence)
    assert row(main, "ar")[1:8] == ["2 of 4", "–", "–", "40.99 ± 1.41", "–", "22.83", "–"]
    cells = row(main, "bd3lm-4")
    assert [cells[place] for place in (2, 4, 6, 7)] == ["≤ 49.19 ± 1.70", "43.04 ± 1.48", "28.23", "+23.7 %"]
    assert cells[3].startswith("+20.0 % ±")
    assert row(main, "bd3lm-8")[2:6] == [NOT_MEASURED, NOT_MEASURED, "–", "–"]
    cells = row(tables.part_table(evidence), "bd3lm-8")
    assert [cells[1], cells[3], cells[4][:7]] == ["≤ 60.00", "55.00", "+10.0 %"]


def test_results_older_than_the_fields_are_of_the_test_split_and_lean_0(results: Results):
    measure = describe(EXACT)
    del measure["split"], measure["lean"]
    result = {"figures": [{"name": "exact", "nats": math.log(40.0), "monte_carlo_error": 0.0}]}
    results.add("measured", RUNS["ar/0"], measure=measure, training="", seconds=1.0, result=result)
    assert str(Evidence(Results(results.file), ALL).exact("ar")) == "40.00"


def test_minutes_are_known_where_such_steps_were_timed_alone(results: Results):
    run = RUNS["bd3lm-4/0"]
    for each in run.lineage:
        results.add("trained", each, **(TRAINED | {"step_seconds": None}), cost=each.cost, training=each.kind)
    assert row(tables.past_table(Evidence(results, ALL), 4), "bd3lm-4")[-2:] == ["10 + 10", "not timed"]
    for each in run.lineage:
        results.add("timed", each, step_seconds=3.0, as_trained=True, cost=each.cost, training=each.kind)
    assert row(tables.past_table(Evidence(results, ALL), 4), "bd3lm-4")[-2:] == ["10 + 10", "1.00"]


def test_what_diverged_or_was_trained_otherwise_is_told(results: Results):
    results.add("failed", RUNS["counts-4/0"], error="the loss is not finite")
    old = replace(RUNS["ar/0"], changes={**RUNS["ar/0"].changes, "optimizer": {"lr": 1.0}})
    results.add("trained", old, **TRAINED)
    results.add("trained", old, **TRAINED)
    others = replace(EXACT, split="valid"), Perplexity(estimator="next-token"), replace(EXACT, data="ptb")
    for measure, value in ((EXACT, 9.0), *((other, 7.0) for other in others)):
        figures = [{"name": "exact", "meaning": "exact", "nats": math.log(value)}]
        add_result(results, old, measure, {"figures": figures})
    evidence = Evidence(results, ALL, {text_name(old.name, old.seed, old.digest, "x1"): judged(77.7)})
    assert row(failure_table(evidence), "counts-4/0") == ["counts-4/0", "diverged", "the loss is not finite"]
    assert earlier_table(evidence).rows == [["ar/0", "abc", "10", "9.00", "–", "7.00", "77.7"]]
    assert row(cost_table(evidence), "earlier settings") == ["earlier settings", "2", "60", "4", "64"]
    assert row(cost_table(evidence), "all") == ["all", "2", "60", "4", "64"]
    assert str(evidence.exact("ar")) == NOT_MEASURED


def test_what_is_not_the_same_in_all_runs_is_told(results: Results):
    network, weights, training, _, stages, *_ = setting(Evidence(results, ALL, real=REAL)).items
    assert re.search(r"With adaptive norms, .* and conditioned on time: `sedd`, `d3pm`, `ssd-lm`\.", network)
    assert weights.startswith("First weights: `identity`, `gpt2` for what begins as `ar`, `long-ar`,")
    assert "But 16.4 M (0.5 times as many) for `ssd-lm`, 34.4 M" in training
    assert re.search(r"falls over 125 of 150 steps \(`bd3lm`\);.* 300 of 500 steps \(.*`from-ar`.*\)", stages)


def test_nothing_measured_is_said_to_be_so(results: Results):
    parts = document.build(Evidence(results, ALL))
    assert sorted(parts) == sorted(document.REGIONS)
    assert not [part for each in parts.values() for part in each if isinstance(part, Plot)]
    told = {
        "verdicts",
        "quality",
        "variants",
        "setting",
        "progress",
        "alternatives",
        "failures",
        "earlier",
        "cost",
    }
    for name in parts.keys() - told:
        (line,) = parts[name]
        assert re.fullmatch(r"Not measured yet: [\w -]+, \d+ runs\.", line.text)
    assert parts["ranges"] == [Prose("Not measured yet: mask ranges, 24 runs.")]
    # What one of them has shows what the others have not.
    add(results, "counts-16/0", Perplexity(estimator="counts", replicates=4), counts=50.0)
    again = document.build(Evidence(results, ALL))
    assert [name for name in again if again[name] != parts[name]] == ["progress", "past-16", "cost"]
    table = again["past-16"][0]
    assert row(table, "counts-16")[3] == "≤ 50.00"
    assert NOT_MEASURED in row(table, "linear-16")


@pytest.mark.slow
def test_the_document_is_made_checked_and_shown(results: Results, tmp_path: Path):
    verdicts = {"real-x1": judged(30.0), "real-x2": judged(29.0)}
    fill(results, verdicts)
    evidence = Evidence(results, ALL, verdicts, REAL)
    parts = document.build(evidence)
    file, page = tmp_path / "results.md", tmp_path / "page.html"
    file.write_text(document.DOCUMENT.read_text("utf-8"))
    document.write(file, parts, page)
    text = file.read_text("utf-8")
    assert document.stale(file, parts) == []
    # All that is declared was measured, and all that the regions show is declared.
    made = "".join(at[0] for at in re.finditer(r"<!-- [\w-]+ -->.*?<!-- end -->", text, re.DOTALL))
    assert not re.findall(r".*(?:ot measured|ot judged|ot timed).*", made)
    plots = re.findall(r"\]\((images/[\w-]+\.svg)\)", text)
    assert len(plots) == 10
    assert all((tmp_path / plot).read_text("utf-8").startswith("<svg") for plot in plots)
    shown = page.read_text("utf-8")
    assert shown.count("<svg") == 10
    assert shown.count("<table>") == sum(line.startswith("| :--") for line in text.splitlines())
    assert "src=" not in shown
    document.write(file, parts)
    assert file.read_text("utf-8") == text
    readme, summary = tmp_path / "README.md", document.build(evidence, document.SUMMARY)
    readme.write_text(SUMMARY)
    document.write(readme, summary, images=document.SUMMARY_IMAGES)
    (plot,) = re.findall(r"\]\((docs/images/readme/[\w-]+\.svg)\)", readme.read_text("utf-8"))
    assert (tmp_path / plot).read_text("utf-8").startswith("<svg")
    assert document.stale(readme, summary, document.SUMMARY_IMAGES) == []
    (tmp_path / plots[0]).unlink()
    file.write_text(text.replace("Variants are chosen", "Variants are not chosen", 1))
    assert document.stale(file, parts) == ["past-4", Path(plots[0]).stem]
    with pytest.raises(ValueError, match=r"in a region of the same section too, got 12\.34 %"):
        document.check_prose(text.replace("# Results", "# Results, 12.34 % better"))
    # What stands in a region of another section is no proof.
    with pytest.raises(ValueError, match=r"in a region of the same section too, got 25\.56"):
        document.check_prose(text.replace("## How to read\n", "## How to read\n\n25.56 and more.\n"))


@pytest.mark.slow
def test_the_digest_is_made_of_the_same_results(results: Results, tmp_path: Path):
    verdicts = {"real-x1": judged(30.0), "real-x2": judged(29.0)}
    fill(results, verdicts)
    parts = document.build(Evidence(results, ALL, verdicts, REAL), digest.REGIONS)
    file = tmp_path / "results.md"
    file.write_text(document.DIGEST.read_text("utf-8"))
    document.write(file, parts, images=document.DIGEST_IMAGES)
    text = file.read_text("utf-8")
    assert document.stale(file, parts, document.DIGEST_IMAGES) == []
    made = "".join(at[0] for at in re.finditer(r"<!-- [\w-]+ -->.*?<!-- end -->", text, re.DOTALL))
    assert not re.findall(r".*(?:ot measured|ot judged|ot timed).*", made)
    # A question has a plot and a table at most, and an answer before them.
    for section in text.split("\n## ")[1:]:
        assert section.count("](images/results/") <= 1
        assert section.count("\n| :--") <= 1
        answer = section.partition("-->\n\n")[2].partition("\n")[0]
        assert re.search(r"\d.*\.$", answer), answer
    plots = re.findall(r"\]\((images/results/[\w-]+\.svg)\)", text)
    assert len(plots) == 8
    assert all((tmp_path / plot).read_text("utf-8").startswith("<svg") for plot in plots)


def test_a_digest_of_nothing_says_so(results: Results):
    parts = document.build(Evidence(results, ALL), digest.REGIONS)
    assert not [part for each in parts.values() for part in each if isinstance(part, Plot)]
    for name in parts.keys() - {"paper", "conditions"}:
        assert parts[name] == [Prose("Not measured yet.")]
    # Some of an answer may be known before the rest of it.
    add(results, "counts-4/0", exact=50.0)
    add(results, "linear-4/0", exact=100.0)
    answer = document.build(Evidence(Results(results.file), ALL), digest.REGIONS)["counts"][0].text
    assert (
        "a model trained with counts lies below one with uniform mask rates, −50.0 %, noise not known"
        in answer
    )
    assert "it against one with the paper's clipped rates is not measured" in answer


def test_a_figure_of_the_digest_is_in_a_region(results: Results):
    document.check_prose(DIGEST, by_hand=False)
    with pytest.raises(ValueError, match=r"must stand in a region, got 61\.0 %"):
        document.check_prose(f"{DIGEST}\n61.0 % less\n<!-- x -->\n61.0 %\n<!-- end -->", by_hand=False)


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (Difference(math.log(0.5), 0.01), "a lies below b, −50.0 % ± 0.5"),
        (Difference(math.log(1.5), 0.01), "a lies above b, +50.0 % ± 1.5"),
        (Difference(0.01, 0.01), "a is within noise of b, +1.0 % ± 1.0"),
        (Difference(math.log(0.5)), "a lies below b, −50.0 %, noise not known"),
        (None, "a against b is not measured"),
    ],
)
def test_the_words_of_the_digest_follow_the_noise(difference: Difference | None, said: str):
    assert digest.lies("a", "b", difference) == said


def test_how_often_an_order_goes_from_left_to_right():
    """By the law itself: of all orders, the one whose every next token is the leftmost that is left."""
    for size, lean in ((1, 3.0), (3, 0.0), (4, 0.7)):
        weights = [math.exp(-lean * place) for place in range(size)]
        chances = [
            math.prod(weights[order[at]] / sum(weights[each] for each in order[at:]) for at in range(size))
            for order in permutations(range(size))
        ]
        assert sum(chances) == pytest.approx(1.0)
        assert digest.left_to_right(size, lean) == pytest.approx(chances[0])  # 0, 1, 2, ...


def test_the_digest_names_runs_that_exist():
    known = {word for run in ALL for word in (run.name, run.table)}
    for words in re.findall(
        r"python -m research\.evidence .*--only (.*)", document.DIGEST.read_text("utf-8")
    ):
        assert set(words.split()) <= known


@pytest.mark.slow
def test_plots_that_are_no_longer_shown_go(results: Results, tmp_path: Path):
    file = tmp_path / "results.md"
    file.write_text(document.DOCUMENT.read_text("utf-8"))
    old = tmp_path / document.IMAGES / "old.svg"
    old.parent.mkdir(parents=True)
    old.write_text("<svg/>")
    readme = tmp_path / "README.md"
    readme.write_text(SUMMARY)
    short = tmp_path / "digest" / "results.md"
    short.parent.mkdir()
    short.write_text(DIGEST)
    words = ["--results", str(tmp_path), "--document", str(file), "--readme", str(readme)]
    words += ["--digest", str(short)]
    document.main(words)
    assert not old.exists()
    before = readme.read_text("utf-8")
    assert "Not measured yet." in before
    add(results, "ar/0", exact=40.0)
    with pytest.raises(SystemExit, match=r"results\.md must be made anew, stale: quality, progress, main"):
        document.main([*words, "--check"])
    earlier = short.read_text("utf-8")
    document.main(words)
    assert readme.read_text("utf-8") == before
    later = short.read_text("utf-8")
    assert "Not measured yet." in later
    for page, old, stale in (
        (
            readme,
            before.replace("Not measured yet.", "Something else."),
            r"README\.md must be made anew, stale: preset-orders",
        ),
        (short, earlier, r"results\.md must be made anew, stale: whole-contexts"),
    ):
        page.write_text(old)
        with pytest.raises(SystemExit, match=stale):
            document.main([*words, "--check"])
        page.write_text(before if page == readme else later)
    file.write_text(file.read_text("utf-8").replace("# Results", "# Results, 12.34 % better"))
    with pytest.raises(SystemExit, match=r"in a region of the same section too, got 12\.34 %"):
        document.main(words)


def test_regions_are_each_there_once():
    parts = {"one": [Listing(["a"])], "two": [Listing(["b"])]}
    text = "x\n<!-- one -->\nold\n<!-- end -->\ny\n<!-- two -->\n<!-- end -->\n"
    again = document.rewrite(text, parts)
    assert again == "x\n<!-- one -->\n\n- a\n\n<!-- end -->\ny\n<!-- two -->\n\n- b\n\n<!-- end -->\n"
    assert document.rewrite(again, parts) == again
    for wrong in (text.replace("two", "three"), text.replace("two", "one"), text.partition("y")[0]):
        with pytest.raises(ValueError, match="must hold every region once"):
            document.rewrite(wrong, parts)


@pytest.mark.slow
def test_the_document_in_this_repository_is_current():
    document.main(["--check"])


def test_real_text_is_judged_like_that_of_a_model(tmp_path: Path):
    prepare_tiny(tmp_path / "data")
    shards = TokenShards(tmp_path / "data" / TRAINED_ON)
    samples = real_samples(shards, 64, 5)
    read = Samples.read(write_texts(tmp_path / "texts" / "real-x1.jsonl", samples))
    read.require_from_nothing()
    assert read.values("length") == [64] * 5
    assert len({str(each) for each in read.values("documents")}) == 5
    tokens = shards.tokenizer.encode("".join(read.records[0]["documents"]))
    assert tokens == [each for each in shards.read("test", 0, 64).tolist() if each != shards.tokenizer.eos_id]
    facts = real_facts(shards)
    assert facts["number"] == len(shards.lengths("train")) >= len(facts["lengths"])
    with pytest.raises(ValueError, match="must hold 1000000 sequences of 64 tokens"):
        real_samples(shards, 64, 10**6)


def test_verdicts_are_named_by_their_texts(tmp_path: Path):
    run = RUNS["ar/0"]
    name = text_name(run.name, run.seed, run.digest, "x1")
    (tmp_path / "judged.json").write_text(json.dumps([{"model": f"some/folder/{name}.jsonl", "result": {}}]))
    assert list(read_verdicts([tmp_path / "judged.json"])) == [name]
