"""`--law`: a joint model writes and is measured in either of its laws, by every command that has the flag."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import bd3lm
from bd3lm.cli import main
from bd3lm.commands.shared.records import kept
from bd3lm.commands.shared.subjects import Subject
from bd3lm.lm import LanguageModel
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.reports import perplexity_text
from bd3lm.runs.stages import resolve_stages
from bd3lm.runs.train import train_stages
from tests.commands import documents, fails, saved
from tests.lm import of_bytes, of_method
from tests.tiny_recipes import BLOCK, plain, prepared

QUIET = Console(quiet=True)
NEXT_TOKEN = {"method": {"causal_clean": True}, "objective": {"next_token": 1.0}}


def joint(**changes: Any) -> LanguageModel:
    return of_method(BlockDiffusionMethod(block_size=2, causal_clean=True, joint=True, **changes))


@pytest.fixture
def model(tmp_path) -> str:
    return str(saved(joint(), tmp_path / "joint"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A joint run, blocks of 4."""
    folder = tmp_path_factory.mktemp("joint")
    recipe = plain(prepared(folder / "shards"), BLOCK, NEXT_TOKEN)
    train_stages(resolve_stages(None, overrides=recipe), folder / "run", console=QUIET, device="cpu")
    return folder / "run"


def records_of(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[list[Any], str]:
    out = tmp_path / "records.json"
    assert main([*words, "--out", str(out), "--device", "cpu"]) == 0
    records = json.loads(out.read_text("utf-8"))
    out.unlink()
    return records, " ".join(capsys.readouterr().out.split())


def test_eval_shows_both_laws_the_recorded_one_first(tmp_path, capsys):
    text = str(documents(tmp_path))
    for own, laws in (("block", ["block", "causal"]), ("causal", ["causal", "block"])):
        folder = str(saved(joint(law=own), tmp_path / own))
        words = ["eval", folder, "--data", text, "--sequences", "4"]
        both, printed = records_of(capsys, tmp_path, *words)
        assert [record["settings"]["law"] for record in both] == laws
        assert [record["title"].endswith(", causal law") for record in both] == [
            law == "causal" for law in laws
        ]
        assert printed.index(f"exact, {laws[0]} law") < printed.index(f"exact, {laws[1]} law")
        assert "law: docs/sampling.md" in printed
        for law in laws:
            (record,), alone = records_of(capsys, tmp_path, *words, "--law", law)
            assert record["result"] == both[laws.index(law)]["result"]
            assert f"exact, {law} law" in alone
            assert f"{({*laws} - {law}).pop()} law" not in alone
    found = {record["settings"]["law"]: record["result"]["figures"] for record in both}
    lm = joint().to(dtype=torch.float32)
    subject = Subject.open(folder, device="cpu")
    assert [figure["name"] for figure in found["block"]] == ["exact", "nelbo"]
    assert [figure["name"] for figure in found["causal"]] == ["exact"]
    assert subject.laws == ("causal", "block")
    assert lm.law == "block"


def test_a_model_of_one_law_has_no_word_for_it(tmp_path, capsys):
    models = [str(saved(of_bytes(size), tmp_path / str(size))) for size in (None, 2)]
    words = ["eval", *models, "--data", str(documents(tmp_path)), "--sequences", "4"]
    both, printed = records_of(capsys, tmp_path, *words)
    assert [record["settings"]["law"] for record in both] == ["causal", "block"]
    assert " law" not in printed


def test_an_estimator_picks_the_laws_that_have_it(model, tmp_path, capsys):
    words = ["eval", model, "--data", str(documents(tmp_path)), "--sequences", "4", "--estimator"]
    drawn, _ = records_of(capsys, tmp_path, *words, "counts")
    assert [record["settings"]["law"] for record in drawn] == ["block"]
    paper, printed = records_of(capsys, tmp_path, *words, "paper")
    assert [(of["settings"]["law"], of["settings"]["estimator"]) for of in paper] == [
        ("block", "nelbo"),
        ("block", "exact"),
        ("causal", "exact"),
    ]
    assert printed.count("the paper's") == 1
    assert "nelbo, block law, the paper's" in printed
    causal, printed = records_of(capsys, tmp_path, *words, "paper", "--law", "causal")
    assert len(causal) == 1
    assert "exact, causal law, the paper's" in printed
    assert "estimator must be 'exact'" in fails(capsys, *words, "counts", "--law", "causal")


def test_a_lean_is_of_the_block_law(tmp_path, capsys):
    model = str(saved(joint(law="causal"), tmp_path / "joint"))
    words = ["eval", model, "--data", str(documents(tmp_path)), "--sequences", "4", "--lean", "2"]
    both, printed = records_of(capsys, tmp_path, *words)
    assert [(of["settings"]["law"], of["settings"]["lean"]) for of in both] == [
        ("causal", 0.0),
        ("block", 2.0),
    ]
    assert "exact, lean 2, block law" in printed
    (block,), _ = records_of(capsys, tmp_path, *words, "--law", "block")
    assert block["result"] == both[1]["result"]
    assert fails(capsys, *words, "--law", "causal").endswith(
        "--lean sets the order within a block, and no model here writes under the block law, got 2; --law "
        "block selects it\n"
    )
    assert "lean is for the block law" in fails(capsys, "sample", model, "a", "--lean", "2")


@pytest.mark.parametrize("law", ["block", "causal"])
def test_texts_are_those_of_the_law_and_say_so(law, model, tmp_path, capsys):
    out = tmp_path / "texts.jsonl"
    words = ["sample", model, "ab", "--count", "3", "--length", "12", "--out", str(out), "--device", "cpu"]
    assert main([*words, "--law", law]) == 0
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    expected = bd3lm.load(model, device="cpu", law=law).generate("ab", count=3, length=12)
    assert [line["tokens"] for line in lines] == [each.tokens for each in expected]
    assert {line["law"] for line in lines} == {law}
    other = bd3lm.load(model, device="cpu").with_law({"block": "causal", "causal": "block"}[law])
    assert [each.tokens for each in other.generate("ab", count=3, length=12)] != [
        each.tokens for each in expected
    ]
    capsys.readouterr()
    if law == "causal":
        assert "an autoregressive model writes token by token" in fails(
            capsys, "sample", model, "ab", "--law", law, "--steps", "3"
        )


def test_documents_are_scored_by_the_law(model, tmp_path):
    text, out = documents(tmp_path, 3), tmp_path / "scores.jsonl"
    found = {}
    for law in ("block", "causal"):
        assert main(["score", model, str(text), "--law", law, "--out", str(out), "--device", "cpu"]) == 0
        lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        out.unlink()
        assert {line["settings"]["law"] for line in lines} == {law}
        assert {line["meaning"] for line in lines} == {"exact"}
        found[law] = [line["log_p"] for line in lines]
    assert found["block"] != pytest.approx(found["causal"], rel=1e-4)


def test_lengths_and_zero_shot_name_the_law(model, tmp_path, capsys):
    text = str(documents(tmp_path))
    for law in ("block", "causal"):
        words = ["lengths", model, "--count", "2", "--length", "12", "--entropy-floor", "0", "--law", law]
        (record,), _ = records_of(capsys, tmp_path, *words)
        assert record["settings"]["law"] == law
        assert record["title"].endswith("causal law") == (law == "causal")
        words = ["zeroshot", model, "--data", text, "--sequences", "4", "--law", law]
        (record,), printed = records_of(capsys, tmp_path, *words)
        assert record["settings"]["law"] == law
        assert f"exact, {law} law" in printed or law == "block"
    (record,), _ = records_of(capsys, tmp_path, "zeroshot", model, "--data", text, "--sequences", "4")
    assert record["settings"]["law"] == "block"  # only eval measures both without being asked


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "MODEL", "--data", "TEXT"],
        ["zeroshot", "MODEL", "--data", "TEXT"],
        ["score", "MODEL", "TEXT"],
        ["lengths", "MODEL"],
        ["sample", "MODEL", "a"],
        ["judge", "MODEL", "--length", "40", "--entropy-floor", "0", "--judge", "TEXT"],
    ],
    ids=lambda words: words[0],
)
def test_a_law_that_a_model_does_not_have_is_one_line(words, tmp_path, capsys):
    names = {"TEXT": str(documents(tmp_path))}
    for size, law, said in (
        (None, "block", "law must be causal for autoregressive, got 'block'; only a joint model has both"),
        (2, "causal", "law must be block for block diffusion, got 'causal'; only a joint model has both"),
    ):
        folder = str(saved(of_bytes(size), tmp_path / law))
        names["MODEL"] = folder
        typed = [names.get(word, word) for word in words]
        assert said in fails(capsys, *typed, "--law", law, "--device", "cpu")


def test_a_report_shows_the_run_s_own_law_and_what_was_measured_of_the_other(run, tmp_path, capsys):
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    subject = Subject.open(run, device="cpu")
    records = {record["settings"]["law"]: record for record in kept(subject, "perplexity")}
    assert set(records) == {"block", "causal"}
    assert main(["report", str(run), "--no-measure", "--out", str(tmp_path / "page"), "--device", "cpu"]) == 0
    page = (tmp_path / "page" / "report.md").read_text("utf-8")
    for record in records.values():
        assert perplexity_text(record["result"]["figures"][0]) in printed
        assert perplexity_text(record["result"]["figures"][0]) in page
    assert "exact, causal law" in page
    assert "block law" not in page  # the run's own needs no word
    assert f"bd3lm eval {run} --estimator exact`" in page
    assert f"bd3lm eval {run} --estimator exact --law causal`" in page
    own = perplexity_text(records["block"]["result"]["figures"][0])
    assert f"Perplexity of held-out text: {own}." in page  # the verdict


def test_records_from_before_laws_are_the_model_s_own(run, tmp_path, capsys):
    assert main(["eval", str(run), "--law", "block", "--device", "cpu"]) == 0
    for file in (run / "measured").glob("perplexity-*.json"):
        record = json.loads(file.read_text())
        if record["settings"].pop("law") == "block":
            file.write_text(json.dumps(record))
        else:
            file.unlink()
    words = ["report", str(run), "--no-measure", "--out", str(tmp_path / "page"), "--device", "cpu"]
    assert main(words) == 0
    page = (tmp_path / "page" / "report.md").read_text("utf-8")
    assert " law" not in page
    assert f"bd3lm eval {run} --estimator exact`" in page
