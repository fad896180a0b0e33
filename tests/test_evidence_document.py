"""What is made of the results of the experiments: tables, findings with their noise, plots, the document."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.evidence", reason="the experiments are not part of an installed package")

from benchmarks.evidence import decoding, document, findings, tables
from benchmarks.evidence.account import cost_table, earlier_table, failure_table
from benchmarks.evidence.figures import NOT_MEASURED, Difference, Evidence, Nats, Written
from benchmarks.evidence.findings import verdict
from benchmarks.evidence.measures import TRAINED_ON, Documents, Measure, Perplexity, Texts, Variance, describe
from benchmarks.evidence.prepare import prepare_tiny
from benchmarks.evidence.real import real_facts, real_samples
from benchmarks.evidence.results import Results
from benchmarks.evidence.runs import Run, all_runs
from benchmarks.evidence.samples import read_verdicts, text_name, write_texts

from bd3lm.commands.sample_files import Samples
from bd3lm.data import TokenShards
from bd3lm.reports.document import Listing, Plot, Table
from bd3lm.sampling import FirstHitting, MostConfident

ALL = all_runs()
RUNS = {run.key: run for run in ALL}
EXACT = Perplexity(estimator="exact")
TRAINED = {"steps": 10, "step_seconds": 0.1, "seconds": 30.0, "graphs": 1, "commit": "abc"}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "evidence.jsonl")


def add(results: Results, key: str, measure: Measure = EXACT, **perplexities: float) -> None:
    figures = [
        {"name": name, "meaning": name, "nats": math.log(value)} for name, value in perplexities.items()
    ]
    _add_result(results, RUNS[key], measure, {"figures": figures})


def _add_result(results: Results, run: Run, measure: Measure, result: dict[str, Any]) -> None:
    fields = {"measure": describe(measure), "training": run.kind, "seconds": 1.0, "result": result}
    results.add("measured", run, **fields)


def judged(perplexity: float, entropy: float = 4.7, error: float = 0.03) -> dict[str, Any]:
    return {
        "settings": {"judge": "a judge", "judge_dtype": "float32"},
        "result": {
            "nats": math.log(perplexity),
            "standard_error": error,
            "perplexity": perplexity,
            "perplexity_error": perplexity * error,
            "bits_per_character": 1.25,
            "entropy": entropy,
            "entropy_error": error,
        },
    }


def set_name(measure: Texts) -> str:
    return re.sub(r"\W+", "-", repr(measure))


def row(table: Table, name: str) -> list[str]:
    return next(list(cells) for cells in table.rows if cells[0] == name)


def test_tables_show_what_was_measured(results: Results):
    for seed, exact in enumerate((40.0, 42.0)):
        add(results, f"ar/{seed}", exact=exact)
        add(results, f"bd3lm-4/{seed}", exact=exact * 1.05, nelbo=exact * 1.2)
    # Neither a part of the text nor that of choices may be mixed with the test split.
    part, valid = replace(EXACT, part=True, sequences=128), replace(EXACT, split="valid")
    add(results, "ar/0", part, exact=50.0)
    add(results, "bd3lm-8/0", part, exact=55.0, nelbo=60.0)
    add(results, "ar/0", valid, exact=70.0)
    evidence = Evidence(Results(results.file), ALL)
    main = tables.main_table(evidence)
    assert row(main, "ar")[1:8] == ["2 of 3", "–", "–", "41.00 ± 1.41", "–", "22.83", "–"]
    cells = row(main, "bd3lm-4")
    assert [cells[place] for place in (2, 4, 6, 7)] == ["≤ 49.20 ± 1.70", "43.05 ± 1.48", "28.23", "+23.7 %"]
    assert cells[3].startswith("+20.0 % ±")
    assert row(main, "bd3lm-8")[2:6] == [NOT_MEASURED, NOT_MEASURED, "–", "–"]
    cells = row(tables.part_table(evidence), "bd3lm-8")
    assert [cells[1], cells[3], cells[4][:7]] == ["≤ 60.00", "55.00", "+10.0 %"]


def test_results_older_than_the_field_are_of_the_test_split(results: Results):
    measure = describe(EXACT)
    del measure["split"]
    result = {"figures": [{"name": "exact", "nats": math.log(40.0)}]}
    results.add("measured", RUNS["ar/0"], measure=measure, training="", seconds=1.0, result=result)
    assert str(Evidence(results, ALL).exact("ar")) == "40.00"


def test_the_noise_of_a_difference_is_that_of_seeds(results: Results):
    nats = {"ar": (1.0, 1.02), "counts-4": (1.1, 1.16), "linear-4": (1.5,)}
    for name, values in nats.items():
        for seed, value in enumerate(values):
            add(results, f"{name}/{seed}", exact=math.exp(value), nelbo=math.exp(value + 1))
    evidence = Evidence(results, ALL)
    pooled = math.sqrt((0.02**2 / 2 + 0.06**2 / 2) / 2)
    assert evidence.spread == pytest.approx(pooled)
    # A single seed has the pooled spread, as has one whose own is less; a larger one of its own counts.
    own = 0.06 / math.sqrt(2)
    for name, error in (
        ("linear-4", math.hypot(pooled, pooled / math.sqrt(2))),
        ("counts-4", math.hypot(own, pooled) / math.sqrt(2)),
    ):
        found = evidence.above_ar(evidence.exact(name))
        ratio = math.exp(evidence.exact(name).mean - 1.01)
        assert found == Difference(pytest.approx(ratio - 1), pytest.approx(ratio * error))
    alone = Evidence(results, [RUNS["ar/0"], RUNS["linear-4/0"]])
    assert alone.above_ar(alone.exact("linear-4")).error is None


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        (None, [-0.1], "not measured"),
        (Difference(-0.05, 0.01), [-0.1, -0.2], "holds"),
        (Difference(0.05, 0.01), [-0.1, -0.2], "does not hold"),
        (Difference(0.019, 0.01), [-0.1], "within noise"),
        (Difference(-0.05, 0.01), [-0.1, 0.2], "the paper has both"),
        (Difference(0.019, 0.01), [0.0], "holds"),
        (Difference(0.021, 0.01), [0.0], "does not hold"),
        (Difference(0.05), [0.1], "holds, noise not known"),
        (Difference(0.05), [-0.1], "does not hold, noise not known"),
        (Difference(0.05), [0.0], "noise not known"),
    ],
)
def test_verdicts(ours: Difference | None, theirs: list[float], word: str):
    assert verdict(ours, theirs) == word


def test_figures_as_people_read_them():
    assert str(Difference(-0.0731, 0.004)) == "−7.3 % ± 0.4"
    assert str(Nats((math.log(40.0),), is_bound=True)) == "≤ 40.00"
    assert str(Nats()) == NOT_MEASURED


def test_the_papers_orderings_are_compared_with_what_was_measured(results: Results):
    for seed in (0, 1):
        noise = 1 + 0.004 * seed
        add(results, f"ar/{seed}", exact=40.0 * noise)
        add(results, f"bd3lm-4/{seed}", exact=50.0 * noise, nelbo=55.0 * noise)
        counts = Perplexity(estimator="counts", replicates=4)
        add(results, f"bd3lm-16/{seed}", counts, counts=70.0 * noise)
        add(results, f"mdlm/{seed}", counts, counts=65.0 * noise)
    said = list(findings.main_findings(Evidence(results, ALL)))
    assert said[0].startswith("Holds: `bd3lm-4` above `ar`, here +37.5 % ±")
    assert "in the paper +23.7 % (LM1B), +18.2 % (OpenWebText)" in said[0]
    assert said[1].startswith("Not measured: `bd3lm-8` above `bd3lm-4`, bounds")
    assert said[3].startswith("Does not hold: `mdlm` above `bd3lm-16`, bounds, here −7.1 %")
    assert "The bound of `bd3lm-4` over its exact perplexity: +10.0 %." in said


def test_variants_are_chosen_on_validation_text(results: Results):
    valid = replace(EXACT, split="valid", sequences=256)
    for name in tables.past_names(Evidence(results, ALL), 4):
        best_on_valid, best_on_test = name == "copies-4", name == "next-4"
        add(results, f"{name}/0", valid, exact=45.0 if best_on_valid else 60.0)
        add(results, f"{name}/0", exact=44.0 if best_on_test else 50.0, nelbo=60.0)
    add(results, "ar/0", exact=40.0)
    said = list(findings.past_findings(Evidence(results, ALL), 4))
    assert any(each.startswith("Best on validation text: `copies-4`") and "+25.0 %" in each for each in said)
    assert said[-1].startswith("Does not hold, noise not known: the aim, `copies-4` less than 5 % over `ar`")


def test_quality_breaks_by_worse_texts_and_by_duller_ones():
    def written(verdict: dict[str, Any] | None, rule: Any = None) -> Any:
        asked = Texts(unmasking=rule or FirstHitting(1), floor=None)
        return Written(RUNS["ar/0"], asked, {"evaluations_per_token": 1.0}, verdict)

    reference = written(judged(100.0, 4.7))
    assert decoding.breaks(written(judged(105.0, 4.7)), reference) is False
    assert decoding.breaks(written(judged(115.0, 4.7)), reference) is True
    assert decoding.breaks(written(judged(115.0, 4.7, error=0.1)), reference) is False
    assert decoding.breaks(written(judged(60.0, 4.5)), reference) is True
    assert decoding.breaks(written(judged(60.0, 4.65)), reference) is False
    assert decoding.breaks(written(None), reference) is None
    assert decoding.rule_text(written(None, MostConfident(threshold=0.9))) == "confidence above 0.9"


def test_what_diverged_or_was_trained_otherwise_is_told(results: Results):
    results.add("failed", RUNS["counts-4/0"], error="the loss is not finite")
    old = replace(RUNS["ar/0"], changes={**RUNS["ar/0"].changes, "optimizer": {"lr": 1.0}})
    results.add("trained", old, **TRAINED)
    _add_result(
        results, old, EXACT, {"figures": [{"name": "exact", "meaning": "exact", "nats": math.log(9.0)}]}
    )
    evidence = Evidence(results, ALL, {text_name(old.name, old.seed, old.digest, "x1"): judged(77.7)})
    assert row(failure_table(evidence), "counts-4/0") == ["counts-4/0", "diverged", "the loss is not finite"]
    assert row(earlier_table(evidence), "ar/0") == ["ar/0", "abc", "10", "9.00", "–", "77.7"]
    assert row(cost_table(evidence), "earlier settings") == ["earlier settings", "1", "30", "1", "31"]
    assert row(cost_table(evidence), "all") == ["all", "1", "30", "1", "31"]
    assert str(evidence.exact("ar")) == NOT_MEASURED


def test_nothing_measured_is_said_to_be_so(results: Results):
    parts = document.build(Evidence(results, ALL))
    assert sorted(parts) == sorted(document.REGIONS)
    assert not [part for each in parts.values() for part in each if isinstance(part, Plot)]
    for name in ("main", "case", "ranges", "schedules", "texts", "decoding", "past-4", "past-16"):
        table, *rest = parts[name]
        assert isinstance(table, Table)
        assert any(NOT_MEASURED in cells for cells in table.rows)
        assert all(isinstance(part, Listing) and "ot measured" in " ".join(part.items) for part in rest)


def fill(results: Results, verdicts: dict[str, Any]) -> None:
    """A result for everything that any run is to measure; the figures mean nothing."""
    known = {each.digest: each for run in ALL for each in run.lineage}
    for trained in known.values():
        results.add("step", trained, step=50, train_nats=5.0)
        results.add("step", trained, step=100, train_nats=4.5)
        learned = {"low": 0.4, "high": 0.9}
        described = {"device": "a GPU", "torch": "2", "precision": "bf16", "data": "0"}
        results.add("trained", trained, learned=learned, **TRAINED, **described)
    for place, run in enumerate(ALL):
        for measure in run.measures:
            _add_result(results, run, measure, _invented(measure, place))
            if isinstance(measure, Texts):
                name = text_name(run.name, run.seed, run.digest, set_name(measure))
                verdicts[name] = judged(100.0 + place)


def _invented(measure: Measure, place: int) -> dict[str, Any]:
    match measure:
        case Perplexity():
            names = ("exact", "nelbo", measure.estimator)
            figures = [{"name": name, "nats": 4.0 + place / 100, "meaning": "exact"} for name in names]
            return {"figures": figures}
        case Variance():
            return {"rules": {rule: {"variance": 2.0 + place} for rule in measure.rules}}
        case Texts():
            cost = {"evaluations_per_token": 0.5 + place / 200, "entropy": 4.7, "redraws": 0}
            return {"set": set_name(measure), **cost}
        case Documents():
            lengths = {"number": 3, "median": 5, "p90": 9, "max": 9, "lengths": [3, 5, 9]}
            return {**lengths, "stopped_by": {"eos": 3}}


REAL = {
    "vocabulary": 300,
    "tokens": 10**7,
    "number": 4,
    "median": 5,
    "p90": 8,
    "max": 8,
    "lengths": [3, 5, 5, 8],
}


def test_the_document_is_made_checked_and_shown(results: Results, tmp_path: Path):
    verdicts = {"real-x1": judged(30.0), "real-x2": judged(29.0)}
    fill(results, verdicts)
    parts = document.build(Evidence(results, ALL, verdicts, REAL))
    file, page = tmp_path / "results.md", tmp_path / "page.html"
    file.write_text(document.DOCUMENT.read_text("utf-8"))
    document.write(file, parts, page)
    text = file.read_text("utf-8")
    assert document.stale(file, parts) == []
    # All that is declared was measured, but for a row of the paper that no run has.
    made = [
        line for line in text.splitlines() if line.startswith(("| ", "- ")) and "does not exist" not in line
    ]
    assert all("sedd" in line for line in made if re.search("ot measured|ot judged", line))
    plots = re.findall(r"\]\((images/results/[\w-]+\.svg)\)", text)
    assert len(plots) == 7
    assert all((tmp_path / plot).read_text("utf-8").startswith("<svg") for plot in plots)
    shown = page.read_text("utf-8")
    assert shown.count("<svg") == 7
    assert shown.count("<table>") == sum(line.startswith("| :--") for line in text.splitlines())
    assert "src=" not in shown
    document.write(file, parts)
    assert file.read_text("utf-8") == text
    (tmp_path / plots[0]).unlink()
    file.write_text(text.replace("Best on validation", "Worst on validation", 1))
    assert document.stale(file, parts) == ["past-4", Path(plots[0]).stem]
    file.write_text(text.replace("# Results", "# Results, 12.34 % better"))
    with pytest.raises(ValueError, match=r"figures in the prose must stand in a region too, got 12\.34 %"):
        document.stale(file, parts)


def test_plots_that_are_no_longer_shown_go(results: Results, tmp_path: Path):
    file = tmp_path / "results.md"
    file.write_text(document.DOCUMENT.read_text("utf-8"))
    old = tmp_path / document.IMAGES / "old.svg"
    old.parent.mkdir(parents=True)
    old.write_text("<svg/>")
    document.main(["--results", str(tmp_path), "--document", str(file)])
    assert not old.exists()
    add(results, "ar/0", exact=40.0)
    with pytest.raises(SystemExit, match=r"results\.md must be made anew, stale: progress, main"):
        document.main(["--results", str(tmp_path), "--document", str(file), "--check"])


def test_regions_are_each_there_once():
    parts = {"one": [Listing(["a"])], "two": [Listing(["b"])]}
    text = "x\n<!-- one -->\nold\n<!-- end -->\ny\n<!-- two -->\n<!-- end -->\n"
    again = document.rewrite(text, parts)
    assert again == "x\n<!-- one -->\n\n- a\n\n<!-- end -->\ny\n<!-- two -->\n\n- b\n\n<!-- end -->\n"
    assert document.rewrite(again, parts) == again
    for wrong in (text.replace("two", "three"), text.replace("two", "one"), text.partition("y")[0]):
        with pytest.raises(ValueError, match="must hold every region once"):
            document.rewrite(wrong, parts)


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
