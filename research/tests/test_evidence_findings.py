"""What the results of the experiments are said to show, and what their noise leaves unsaid."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import t

from bd3lm.sampling import EntropyBound, FirstHitting, MostConfident
from research.evidence import decoding, findings, plots, tables
from research.evidence.figures import OTHERS, WHOLE, Evidence, Written, family
from research.evidence.findings import verdict
from research.evidence.measures import Perplexity, Texts, Variance, describe
from research.evidence.noise import NOT_MEASURED, Difference, Nats, Spread, comparable, pooled
from research.evidence.results import Results
from research.evidence.runs import validated
from research.tests.evidence_results import ALL, EXACT, RUNS, add, add_result, judged, row


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "evidence.jsonl")


def test_the_noise_of_a_difference_is_that_of_seeds(results: Results):
    nats = {"ar": (1.0, 1.02), "counts-4": (1.1, 1.16), "clipped-4": (1.2, 1.2), "linear-4": (1.5,)}
    for name, values in nats.items():
        for seed, value in enumerate(values):
            add(results, f"{name}/{seed}", exact=math.exp(value), nelbo=math.exp(value + 1))
    evidence = Evidence(results, ALL)
    pooled = math.sqrt((0.02**2 / 2 + 0.06**2 / 2) / 3)
    assert evidence.spreads == {OTHERS: Spread(pytest.approx(pooled), 3)}
    # A single seed has the pooled spread, as has one whose own is less; a larger one of its own counts.
    own = 0.06 / math.sqrt(2)
    for name, error in (
        ("linear-4", math.hypot(pooled, pooled)),
        ("counts-4", math.hypot(own, pooled) / math.sqrt(2)),
    ):
        found = evidence.above_ar(evidence.exact(name))
        # A seed is compared with the same of AR.
        log = evidence.exact(name).mean - (1.01 if name == "counts-4" else 1.0)
        assert found == Difference(pytest.approx(log), pytest.approx(error), 3.18)
    for few in (["ar/0", "linear-4/0"], ["ar/0", "ar/1", "counts-4/0", "counts-4/1", "linear-4/0"]):
        alone = Evidence(results, [RUNS[key] for key in few])
        assert alone.above_ar(alone.exact("linear-4")).error is None


def test_the_noise_of_draws_is_common_to_all_seeds(results: Results):
    counts = Perplexity(estimator="counts", replicates=4)
    for seed in (0, 1):
        for name in ("ar", "counts-4", "clipped-4"):
            add(results, f"{name}/{seed}", exact=40.0)
        add(results, f"bd3lm-16/{seed}", counts, draws=0.03, counts=40.0)
    for seed in range(4):
        add(results, f"mdlm/{seed}", counts, draws=0.04, counts=40.0)
    evidence = Evidence(results, ALL)
    found = evidence.difference(evidence.bound("mdlm"), evidence.bound("bd3lm-16"))
    assert found.error == pytest.approx(0.05)
    assert evidence.above_ar(evidence.bound("mdlm")).error == pytest.approx(0.04)
    add(results, "sedd/0", Perplexity(estimator="nelbo"), draws=None, nelbo=40.0)
    assert evidence.above_ar(evidence.bound("sedd")) == Difference(pytest.approx(0.0))


@pytest.mark.parametrize("freedom", [3, 4, 5, 6, 7, 9, 12, 20, 40, 200])
def test_few_seeds_need_larger_differences(freedom: int):
    needed = Spread(0.01, freedom).errors
    assert t.ppf(0.975, freedom) - 0.005 < needed < 1.05 * t.ppf(0.975, freedom)
    assert Spread(0.01, 2).errors is None


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
        (Difference(0.031, 0.01, 3.18), [0.1], "within noise"),
        (Difference(0.032, 0.01, 3.18), [0.1], "holds"),
        (Difference(0.05), [0.1], "noise not known"),
        (Difference(0.05), [0.0], "noise not known"),
    ],
)
def test_verdicts(ours: Difference | None, theirs: list[float], word: str):
    assert verdict(ours, theirs) == word


def test_noise_is_judged_by_ratios():
    """Half and double are as far from the same, and a large error of a large ratio is no noise."""
    for log in (math.log(2.0), -math.log(2.0)):
        assert [Difference(log, error).is_noise for error in (0.3, 0.4)] == [False, True]
    sixfold = Difference.of(7.0, 1.0)
    large = Difference(sixfold.log, 0.3, 3.18)
    assert str(large) == "+600.0 % (+418.6 to +844.9)"  # the same factor to both sides
    assert not large.is_noise
    assert large.above(0.05).log == pytest.approx(math.log(7.0 / 1.05))
    assert [large.is_beyond(limit) for limit in (1.6, 1.8)] == [True, False]


def test_figures_as_people_read_them():
    assert str(Difference(math.log(1 - 0.0731), 0.004)) == "−7.3 % ± 0.4"
    assert str(Nats((math.log(40.0),), is_bound=True)) == "≤ 40.00"
    assert str(Nats()) == NOT_MEASURED


def test_the_papers_orderings_are_compared_with_what_was_measured(results: Results):
    for seed in (0, 1):
        noise = 1 + 0.004 * seed
        for name in ("ar", "counts-4", "clipped-4"):
            add(results, f"{name}/{seed}", exact=40.0 * noise)
        add(results, f"bd3lm-4/{seed}", exact=50.0 * noise, nelbo=55.0 * noise)
        counts = Perplexity(estimator="counts", replicates=4)
        add(results, f"bd3lm-16/{seed}", counts, counts=70.0 * noise)
        add(results, f"mdlm/{seed}", counts, counts=65.0 * noise)
        add(results, f"mdlm/{seed + 2}", counts, counts=65.0 * noise)
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
    assert any("within noise of it: none; noise not known for `counts-4`" in each for each in said)
    assert said[-1].startswith("Noise not known: the aim, `copies-4` less than 5 % over `ar`")


def test_what_diverged_is_no_choice(results: Results):
    names = [name for name in tables.past_names(Evidence(results, ALL), 4) if name != "linear-4"]
    for run in (run for run in ALL if run.name in names):
        add(
            results,
            run.key,
            replace(EXACT, split="valid", sequences=256),
            exact=50.0 - (run.name == "next-4"),
        )
        add(results, run.key, exact=50.0, nelbo=60.0)
    said = list(findings.past_findings(Evidence(results, ALL), 4))
    number = len([name for name in tables.past_names(Evidence(results, ALL), 4) if "time-" not in name]) - 1
    known = f"so far, {number - 1} of {number} are known: `next-4`"
    assert any(each.startswith(f"Best on validation text {known}") for each in said)
    results.add("failed", RUNS["linear-4/0"], error="the loss is not finite")
    said = list(findings.past_findings(Evidence(results, ALL), 4))
    assert "Diverged, and left out of the choice: `linear-4`." in said
    assert any(
        each.startswith("Best on validation text: `next-4`; within noise of it: none; noise not known for ")
        for each in said
    )


def test_other_settings_are_compared_once_all_are_known(results: Results):
    valid = replace(EXACT, split="valid", sequences=256)
    perplexities = {"ar": 50.0, "ar-rate-0.001": 52.0, "counts-4": 60.0, "counts-4-rate-0.001": 58.0}
    others = {"ar-identity": 51.0, "counts-4-gpt2": 90.0, "ar-tied": 53.0, "counts-4-tied": 61.0}
    for name, value in {**perplexities, **others}.items():
        add(results, f"{name}/0", valid, exact=value)
    (bound,) = validated(None)
    for name in ("mdlm", "mdlm-rate-0.001", "mdlm-rate-0.004", "mdlm-gpt2", "mdlm-tied"):
        add(results, f"{name}/0", bound, counts=80.0 - len(name))
    add(results, "counts-4-rate-0.004/0", valid, exact=70.0)
    assert list(findings.alternatives_findings(Evidence(results, ALL))) == [
        "The best setting of each method is not measured yet."
    ]
    results.add("failed", RUNS["ar-rate-0.004/0"], error="the loss is not finite")
    evidence = Evidence(results, ALL)
    assert row(tables.alternatives_table(evidence), "rate-0.004")[1:] == ["diverged", "70.00", "≤ 65.00"]
    assert row(tables.alternatives_table(evidence), "gpt2")[1:] == ["50.00 (used)", "90.00", "≤ 71.00"]
    assert list(findings.alternatives_findings(evidence)) == [
        "Best on validation text: for `ar` rate-0.002 and gpt2; for `counts-4` rate-0.001; "
        "for `mdlm` rate-0.001 and rate-0.004.",
        "Noise not known: `counts-4-rate-0.001` against `counts-4`, validation text, −3.3 %.",
        "Noise not known: `mdlm-rate-0.001` against `mdlm`, validation text, −14.5 %.",
        "Noise not known: `mdlm-rate-0.004` against `mdlm`, validation text, −14.5 %.",
        "Noise not known: `ar-tied` against `ar`, validation text, +6.0 %.",
        "Noise not known: `counts-4-tied` against `counts-4`, validation text, +1.7 %.",
        "Noise not known: `mdlm-tied` against `mdlm`, validation text, −6.6 %.",
    ]


def test_variants_differ_in_one_thing_from_what_they_are_compared_with():
    for first, second in findings.PAIRS:
        run, other = RUNS[f"{first}-4/0"], RUNS[f"{second}-4/0"]
        if first.startswith("time-"):
            assert run.same_time_as in (other, other.same_time_as)
            continue
        one, two = run.method, other.method
        next_token = "next_token", "causal_clean"
        differ = [
            one["masking"] != two["masking"],
            [one[name] for name in next_token] != [two[name] for name in next_token],
            one.get("previous_token") != two.get("previous_token"),
            run.parent != other.parent,
        ]
        assert sum(differ) == 1, (first, second)
        assert run.tokens == other.tokens


def test_masks_are_not_ranked_without_a_measure_of_noise(results: Results):
    counts = Perplexity(estimator="counts", replicates=4)
    for place, name in enumerate(
        each.name for each in ALL if each.name.startswith("range-16-") and not each.seed
    ):
        run = RUNS[f"{name}/0"]
        add(results, run.key, counts, counts=50.0 + place)
        rules = next(each.rules for each in run.measures if isinstance(each, Variance))
        add_result(
            results,
            run,
            Variance(rules=rules),
            {"rules": {rules[0]: {"variance": 1.0 + place, "error": 0.1}}},
        )
    said = list(findings.range_findings(Evidence(results, ALL)))[4]
    assert said.startswith(
        "Noise not known: the best bound and the least Var are of the same masks; here the best"
    )


def test_a_comparison_at_fewer_tokens_says_so(results: Results):
    said = [each for each in findings.text_findings(Evidence(results, ALL)) if "ssd-lm" in each]
    assert said
    assert all("(`ssd-lm` has seen half of the tokens)" in each for each in said)


def test_quality_breaks_by_worse_texts_and_by_duller_ones():
    def written(verdict: dict[str, Any] | None, rule: Any = None) -> Any:
        asked = Texts(unmasking=rule or FirstHitting(1), floor=None)
        return Written(RUNS["ar/0"], asked, {"evaluations_per_token": 1.0}, verdict)

    reference = [written(judged(100.0, 4.7))]
    assert decoding.breaks(written(judged(105.0, 4.7)), reference) is False
    # Beyond the limit of 10 % by two errors of the difference, each 0.03 √2 of its value.
    assert decoding.breaks(written(judged(119.0, 4.7)), reference) is False
    assert decoding.breaks(written(judged(121.0, 4.7)), reference) is True
    assert decoding.breaks(written(judged(121.0, 4.7, error=0.1)), reference) is False
    assert decoding.breaks(written(judged(60.0, 4.51)), reference) is True
    assert decoding.breaks(written(judged(60.0, 4.52)), reference) is False
    assert decoding.breaks(written(None), reference) is None
    unknown = judged(121.0, 4.7)
    unknown["result"]["entropy_error"] = None
    assert decoding.breaks(written(unknown), reference) is None
    assert decoding.rule_text(written(None, MostConfident(threshold=0.9))) == "confidence above 0.9"
    # Worse is than the most careful setting of its own rule, duller than the first of all.
    careful, hasty = (
        written(judged(value, 4.7), EntropyBound(bound)) for value, bound in ((60.0, 0.1), (90.0, 3.0))
    )
    assert [decoding.breaks(each, [*reference, careful, hasty]) for each in (careful, hasty)] == [False, True]


def test_a_lean_is_compared_with_none_and_with_the_aim(results: Results):
    for seed in (0, 1):
        noise = 1 + 0.004 * seed
        add(results, f"ar/{seed}", exact=40.0 * noise)
        for lean, perplexity in {0.0: 50.0, 0.5: 45.0, 1.0: 41.0, 2.0: 40.0, 4.0: 39.0}.items():
            measure = replace(EXACT, lean=lean)
            add(results, f"from-ar-4/{seed}", measure, exact=perplexity * noise, nelbo=60.0)
    evidence = Evidence(results, ALL)
    assert math.exp(evidence.exact("from-ar-4").values[0]) == pytest.approx(50.0)
    assert math.exp(evidence.exact("from-ar-4", lean=2.0).values[0]) == pytest.approx(40.0)
    said = list(findings.order_findings(evidence, 4))
    assert said[0] == "`from-ar-4` at lean 4 against lean 0, the same weights: −22.0 %."
    assert said[1].startswith(
        "Noise not known: the aim, `from-ar-4` at lean 4 less than 5 % over `ar`, −2.5 %"
    )
    found = row(tables.order_table(evidence, 4), "from-ar-4")
    assert found[1] == "2"
    assert found[2].startswith("50.10 ± 0.14 (+25.0 %")
    assert found[4].startswith("41.08 ± 0.12 (+2.5 %")
    assert row(tables.order_table(evidence, 4), "both-4")[1:] == [
        "–",
        NOT_MEASURED,
        "–",
        NOT_MEASURED,
        "–",
        NOT_MEASURED,
    ]
    assert plots.order_plot(evidence, 4).svg.startswith("<svg")
    assert plots.order_plot(evidence, 16) is None
    add(results, "both-4/0", exact=50.0)
    add(results, "both-4/0", replace(EXACT, lean=4.0), exact=45.0)
    said = list(findings.order_findings(Evidence(results, ALL), 4))
    assert "the aim, `both-4` at lean 4 less than 5 % over `ar`, +12" in said[1]


def test_what_was_trained_for_a_time_is_compared_with_its_like_and_has_no_aim(results: Results):
    add(results, "ar/0", exact=40.0)
    for name, perplexity in (("time-from-ar-4/0", 80.0), ("time-from-ar-early-tied-4/0", 88.0)):
        add(results, name, exact=1.5 * perplexity)
        add(results, name, replace(EXACT, lean=4.0), exact=perplexity)
    said = list(findings.order_findings(Evidence(results, ALL), 4))
    assert said[-1] == (
        "Noise not known: `time-from-ar-early-tied-4` against `time-from-ar-4`, equal time, both at lean 4, "
        "+10.0 %."
    )
    assert not any("the aim" in finding for finding in said)


def test_what_is_tied_is_held_against_tied_ar(results: Results):
    """And the worth of tying is told for each order: AR gains by it, and so do blocks."""
    for seed in range(3):
        noise = 1 + 0.002 * seed
        add(results, f"ar/{seed}", exact=40.0 * noise)
        add(results, f"ar-tied/{seed}", exact=36.0 * noise)
        for lean, untied, tied in ((0.0, 50.0, 45.0), (4.0, 41.0, 36.36)):
            for name, perplexity in (("from-ar-early-4", untied), ("from-ar-early-tied-4", tied)):
                add(
                    results, f"{name}/{seed}", replace(EXACT, lean=lean), exact=perplexity * noise, nelbo=60.0
                )
    evidence = Evidence(results, ALL)
    assert [evidence.ar_beside(name) for name in ("counts-4", "from-ar-early-tied-16", "long-mdlm")] == [
        "ar",
        "ar-tied",
        "long-ar",
    ]
    said = list(findings.order_findings(evidence, 4))
    assert any("`from-ar-early-4` at lean 4 less than 5 % over `ar`, +2.5 %" in each for each in said)
    assert any(
        "`from-ar-early-tied-4` at lean 4 less than 5 % over `ar-tied`, +1.0 %" in each for each in said
    )
    assert row(tables.past_table(evidence, 4), "from-ar-early-tied-4")[6].startswith("+25.0 %")
    assert row(tables.past_table(evidence, 4), "ar-tied")[5:7] == ["36.07 ± 0.07", "–"]
    found = tables.tied_table(evidence)
    assert row(found, "ar-tied")[2] == "36.07 ± 0.07"
    assert row(found, "from-ar-early-tied-4")[6].startswith("36.43 ± 0.07 (+1.0 %")
    assert row(found, "from-ar-early-tied-16")[2] == NOT_MEASURED
    ar, uniform, *_ = findings.tied_findings(evidence)
    assert "`ar-tied` against `ar`, −10.0 %" in ar
    assert "`from-ar-early-tied-4` against `from-ar-early-4`, both at lean 0, −10.0 %" in uniform
    assert "from-ar-early-tied-4" in plots.order_plot(evidence, 4).alt


def test_a_lean_is_compared_on_the_same_weights(results: Results):
    """A seed that was measured in one order alone does not count."""
    add(results, "from-ar-4/0", exact=50.0)
    add(results, "from-ar-4/1", exact=60.0)
    add(results, "from-ar-4/0", replace(EXACT, lean=4.0), exact=43.0)
    (said, _) = findings.order_findings(Evidence(results, ALL), 4)
    assert said == "`from-ar-4` at lean 4 against lean 0, the same weights: −14.0 %."


def test_longer_trainings_are_compared_with_their_own_ar(results: Results):
    for seed in (0, 1):  # their noise is known, that of longer ones is not
        for name in ("ar", "counts-4", "clipped-4"):
            add(results, f"{name}/{seed}", exact=40.0 + 0.1 * seed)
    add(results, "long-ar/0", exact=30.0)
    add(results, "long-bd3lm-4/0", exact=33.0, nelbo=36.0)
    add(results, "long-from-ar-copies-4/0", replace(EXACT, lean=4.0), exact=31.2, nelbo=31.5)
    evidence = Evidence(results, ALL)
    assert row(tables.long_table(evidence), "long-bd3lm-4")[1:5] == ["≤ 36.00", "+20.0 %", "33.00", "+10.0 %"]
    assert row(tables.long_table(evidence), "long-ar")[1:5] == ["–", "–", "30.00", "–"]
    said = list(findings.long_findings(evidence))
    assert said[0].startswith("Noise not known: `long-bd3lm-4` above `long-ar`, here +20.0 %, in the paper")
    assert said[-1] == (
        "Noise not known: the aim, `long-from-ar-copies-4` at lean 4 less than 5 % over `long-ar`, +4.0 %."
    )
    assert not any("long" in name for name in tables.ordered_names(evidence, 4))


def test_what_repeats_the_paper_is_counted_by_verdict(results: Results):
    def counts(section: str) -> dict[str, str]:
        table = findings.verdict_table(Evidence(results, ALL))
        return dict(zip(table.headings[1:], row(table, section)[1:], strict=True))

    assert counts("test perplexity") == {"not measured": "7"}
    assert counts("blocks of one token") == {"not measured": "6"}
    for seed, factor in enumerate((1.0, 1.01)):
        for name in ("ar", "counts-4", "clipped-4"):
            add(results, f"{name}/{seed}", exact=40.0 * factor)
    for name, perplexity in {"ar-random-batch": 48.0, "block-1": 44.0, "block-1-full": 40.1}.items():
        add(results, f"{name}/0", exact=perplexity)
    # Random batches cost what they should, blocks of one token do not, full masks are as good as AR.
    assert counts("blocks of one token") == {"holds": "3", "does not hold": "1", "not measured": "2"}
    add(results, "long-ar/0", exact=30.0)
    add(results, "long-bd3lm-4/0", exact=31.0, nelbo=33.0)
    add(results, "long-from-ar-copies-4/0", exact=31.0, nelbo=33.0)
    found = counts("the same after twice the steps")  # the aim is not the paper's
    assert (found["holds"], found["noise not known"], found["not measured"]) == ("0", "1", "2")


def test_what_starts_from_one_checkpoint_is_compared_pair_by_pair(results: Results):
    """One checkpoint is far worse than the other, and all that starts from it with it."""
    counts = Perplexity(estimator="counts", replicates=4)
    names = ["range-16-0-0.5", "range-16-0.3-0.8", "range-16-0.5-1", "range-16-0-1"]
    logs = {name: 5.0 + 0.1 * place for place, name in enumerate(names)}
    noise = {("range-16-0-1", 1): 0.012}
    for seed, lag in enumerate((0.0, 0.5)):
        for name, log in logs.items():
            nats = log + lag + noise.get((name, seed), 0.0)
            add(results, f"{name}/{seed}", counts, counts=math.exp(nats))
    add(results, "bd3lm-8/0", counts, counts=math.exp(5.02))
    evidence = Evidence(results, ALL)
    # One of eight values is off by 0.012: the means take up all but (1 - 1/4)(1 - 1/2) of its square.
    spread = Spread(pytest.approx(math.sqrt(0.012**2 * 0.75 * 0.5 / 3)), 3)
    assert evidence.paired_spreads == {"base": spread}
    bounds = {name: evidence.bound(name) for name in (*names, "bd3lm-8")}
    found = evidence.difference(bounds["range-16-0.3-0.8"], bounds["range-16-0-0.5"])
    assert found == Difference(pytest.approx(0.1), pytest.approx(evidence.paired_spreads["base"].value), 3.18)
    own = evidence.difference(bounds["range-16-0-1"], bounds["range-16-0-0.5"])
    assert own.log_error == pytest.approx(0.012 / math.sqrt(2) / math.sqrt(2))
    # Of one seed, the pair of that seed.
    single = evidence.difference(bounds["bd3lm-8"], bounds["range-16-0-0.5"])
    assert single.log == pytest.approx(0.02)
    assert single.log_error == pytest.approx(math.sqrt(2) * evidence.paired_spreads["base"].value)
    # Not what has no such checkpoint, whose noise is that of seeds: far more.
    for seed, lag in enumerate((0.0, 0.5, 0.1, 0.2)):
        add(results, f"mdlm/{seed}", counts, counts=math.exp(5.0 + lag))
    again = Evidence(results, ALL)
    assert again.difference(again.bound("mdlm"), again.bound("bd3lm-8")).log_error > 0.2
    assert again.difference(again.bound("bd3lm-8"), again.bound("range-16-0-1")).log_error < 0.02
    # Two rows are one degree of freedom, too few: the noise of seeds is all that is known then.
    few = [run for run in ALL if run.name in ("mdlm", "range-16-0-1", "range-16-0-0.5")]
    alone = Evidence(results, few)
    assert alone.paired_spreads["base"].freedom == 1
    assert alone.difference(alone.bound("range-16-0-1"), alone.bound("range-16-0-0.5")).log_error > 0.2


def write_lines(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def trained(key: str) -> dict[str, Any]:
    run = RUNS[key] if key in RUNS else RUNS["range-16-0-1/0"].parent
    parent = run.parent.key if run.parent else None
    return {"kind": "trained", "run": run.name, "seed": run.seed, "digest": run.digest, "parent": parent}


def measured(key: str, perplexity: float, lean: float = 0.0) -> dict[str, Any]:
    run = RUNS[key]
    exact = run.block_size == 4
    asked = replace(EXACT, lean=lean) if exact else Perplexity(estimator="counts", replicates=4)
    name = "exact" if exact else "counts"
    figures = [{"name": name, "meaning": name, "nats": math.log(perplexity), "monte_carlo_error": 0.0}]
    line = {"kind": "measured", "run": run.name, "seed": run.seed, "digest": run.digest}
    return {**line, "measure": describe(asked), "result": {"figures": figures}}


def test_a_checkpoint_that_was_trained_again_is_another_one(tmp_path: Path):
    """Two files, in each of which the same base was trained, and two rows that start from it."""
    files = [
        write_lines(
            tmp_path / f"evidence-{number}.jsonl",
            trained("base/0"),
            *(line for key in keys for line in (trained(f"{key}/0"), measured(f"{key}/0", value))),
        )
        for number, (value, keys) in enumerate(
            [(50.0, ["range-16-0-1", "range-16-0-0.5"]), (60.0, ["range-16-0.5-1", "range-16-0.3-0.8"])]
        )
    ]
    evidence = Evidence(Results(tmp_path / "none", files), ALL)
    starts = {
        name: evidence.bound(f"range-16-{name}").start_of(0) for name in ("0-1", "0-0.5", "0.5-1", "0.3-0.8")
    }
    assert starts["0-1"] == starts["0-0.5"] == "evidence-0.jsonl:0"
    assert starts["0.5-1"] == starts["0.3-0.8"] == "evidence-1.jsonl:0"
    rows = [evidence.bound(f"range-16-{name}") for name in starts]
    assert comparable(rows[:2], strictly=True) == {0}
    assert comparable(rows, strictly=True) == set()
    assert comparable(rows) == {0}  # as good as can be


def test_the_same_weights_are_those_of_one_training(tmp_path: Path):
    key = "from-ar-copies-4/0"
    first = write_lines(tmp_path / "evidence-1.jsonl", trained(key), measured(key, 50.0))
    second = write_lines(tmp_path / "evidence-2.jsonl", trained(key), measured(key, 40.0, lean=4.0))
    said = list(findings.order_findings(Evidence(Results(tmp_path / "none", [first, second]), ALL), 4))
    assert said[0] == "`from-ar-copies-4` at lean 4 against lean 0, the same weights: not measured."
    both = write_lines(
        tmp_path / "evidence-3.jsonl", trained(key), measured(key, 50.0), measured(key, 40.0, lean=4.0)
    )
    said = list(findings.order_findings(Evidence(Results(tmp_path / "none", [both]), ALL), 4))
    assert said[0] == "`from-ar-copies-4` at lean 4 against lean 0, the same weights: −20.0 %."


def test_masks_are_ranked_over_the_seeds_that_all_rows_have(results: Results):
    """A second seed of one row alone, whose checkpoint is far worse, changes nothing."""
    counts = Perplexity(estimator="counts", replicates=4)
    names = list(dict.fromkeys(each.name for each in ALL if each.name.startswith("range-16-")))
    for place, name in enumerate(names):
        add(results, f"{name}/0", counts, counts=50.0 + place)
        rules = next(each.rules for each in RUNS[f"{name}/0"].measures if isinstance(each, Variance))
        spread = {"rules": {rules[0]: {"variance": 1.0 + place, "error": 0.1}}}
        add_result(results, RUNS[f"{name}/0"], Variance(rules=rules), spread)
    before = list(findings.range_findings(Evidence(results, ALL)))[4]
    add(results, f"{names[0]}/1", counts, counts=90.0)
    rules = next(each.rules for each in RUNS[f"{names[0]}/1"].measures if isinstance(each, Variance))
    add_result(
        results,
        RUNS[f"{names[0]}/1"],
        Variance(rules=rules),
        {"rules": {rules[0]: {"variance": 99.0, "error": 9.0}}},
    )
    evidence = Evidence(results, ALL)
    assert list(findings.range_findings(evidence))[4] == before
    assert "the best bound is of 16, U[0, 0.5] (the next" in before
    assert row(tables.range_table(evidence), "16, U[0, 0.5]")[1:4] == ["1", "≤ 50.00", "1.00 ± 0.10"]


def test_models_that_begin_alike_have_the_seeds_of_the_one_with_most():
    many, few = (1.0, 1.2, 0.9, 1.1), (1.0, 3.0)
    assert pooled([[many, few]]) == pooled([[many]])
    assert pooled([[many], [few]]).freedom == 4


def test_diffusion_of_whole_contexts_has_a_spread_of_its_own(results: Results):
    counts = Perplexity(estimator="counts", replicates=4)
    for seed, lag in enumerate((1.0, 1.5)):
        for name in ("ar", "counts-4", "clipped-4"):
            add(results, f"{name}/{seed}", exact=40.0 + 0.1 * seed)
        for name in ("mdlm", "bd3lm-16"):
            add(results, f"{name}/{seed}", counts, counts=80.0 * lag)
        add(results, f"from-ar-4/{seed}", exact=40.0 + 0.1 * seed)
    # What begins alike has no seeds of its own: one of freedom for mdlm and bd3lm-16, and for ar and from-ar.
    found = Evidence(results, ALL)
    assert {family: each.freedom for family, each in found.spreads.items()} == {WHOLE: 1, OTHERS: 3}
    assert found.above_ar(found.bound("mdlm")).error is None
    for seed, lag in ((2, 1.0), (3, 1.5)):
        add(results, f"mdlm/{seed}", counts, counts=80.0 * lag)
    evidence = Evidence(results, ALL)
    assert evidence.spreads[WHOLE].freedom == 3
    assert evidence.spreads[OTHERS].value == pytest.approx(math.log(40.1 / 40) / math.sqrt(2))
    assert evidence.difference(evidence.exact("counts-4"), evidence.exact("ar")).error < 0.003
    assert evidence.above_ar(evidence.bound("mdlm")).error > 0.4
    assert family(RUNS["from-mdlm-4/0"]) == family(RUNS["sedd/0"]) == WHOLE
    assert family(RUNS["from-ar-4/0"]) == family(RUNS["linear-4/0"]) == OTHERS
