"""`bd3lm acceptance`: drafters and joint models on their own text and on others, as tables and as records."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.acceptance import USUAL, Acceptance, report_acceptance
from bd3lm.commands.shared.corpora import open_sequences
from bd3lm.commands.shared.records import FOLDER, kept
from bd3lm.commands.shared.subjects import Subject
from bd3lm.evaluation import measure_acceptance
from bd3lm.lm import LanguageModel
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.reports import with_error
from bd3lm.runs.plan import plan_run
from bd3lm.runs.train import train_stages
from bd3lm.sampling import Sharpening
from tests.commands import documents, fails, saved
from tests.lm import SEDD, baseline, of_bytes, of_method
from tests.runs.test_drafter_runs import drafter
from tests.tiny_recipes import prepared, tiny_recipe

JOINT = BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True)
QUIET = Console(quiet=True)


def joint(**changes: Any) -> LanguageModel:
    return of_method(JOINT, **changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A trained drafter of 2 masks, validated at its last step."""
    folder = tmp_path_factory.mktemp("runs")
    data = prepared(folder / "shards")
    base = plan_run(tiny_recipe(data), folder / "ar").build()
    base.trainer.run()
    base.export()
    recipe = drafter(data, folder / "ar", {"optimizer": {"lr": 0.02}}, steps=12, validate_every=12)
    train_stages([("", recipe)], folder / "drafter", console=QUIET, device="cpu")
    return folder / "drafter"


def figures(record: dict[str, Any]) -> dict[tuple[float, float, str], list[dict[str, Any]]]:
    return {
        (each["temperature"], each["top_p"], each["scheme"]): each["places"]
        for each in record["result"]["figures"]
    }


def test_a_drafter_run_is_measured_as_its_validation_was(run, tmp_path, capsys):
    with (run / "metrics.csv").open() as file:
        *_, last = csv.DictReader(file)
    out = tmp_path / "records.json"
    words = ["acceptance", str(run), "--sequences", "8", "--device", "cpu", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    (record,) = json.loads(out.read_text())
    found = figures(record)
    assert [way[:2] for way in found][::2] == list(USUAL)
    places = found[1.0, 1.0, "rejection"]
    assert [each["place"] for each in places] == [2, 3]
    for each in places:
        assert each["accepted"] == pytest.approx(float(last[f"valid_accepted_{each['place']}"]), rel=1e-5)
        assert with_error(each["accepted"], each["accepted_error"]) in printed
        assert with_error(each["tokens_a_round"], each["tokens_a_round_error"]) in printed
    # Groups of 2 in contexts of 16: the last token of a text has no successor to draft.
    assert [each["drafts"] for each in places] == [64, 56]
    assert found[0.0, 1.0, "rejection"] == found[0.0, 1.0, "coupled"]
    for way in USUAL:
        for one, other in zip(found[*way, "coupled"], found[*way, "rejection"], strict=True):
            assert one["accepted"] <= other["accepted"] + 1e-9
    assert record["title"] == "autoregressive, with a drafter"
    assert (record["settings"]["law"], record["settings"]["masks"]) == ("causal", 2)
    assert (record["settings"]["data"], record["settings"]["split"]) == ("own", "valid")
    subject = Subject.open(run, device="cpu")
    assert kept(subject, "acceptance") == [record]
    (file,) = (run / FOLDER).glob("acceptance-own-valid-*.json")
    assert json.loads(file.read_text()) == record


def test_more_masks_than_were_trained_may_be_asked_for(run):
    (record,) = report_acceptance(
        Acceptance(models=(str(run),), masks=5, sequences=4, device="cpu"), console=QUIET
    )
    places = figures(record)[1.0, 1.0, "rejection"]
    assert [each["place"] for each in places] == [2, 3, 4, 5, 6]
    assert {each["drafts"] for each in places} == {12}  # 3 groups of 5 in 16 tokens


def test_sequences_may_be_shorter_than_the_context(run):
    """A drafter has the context of its model, however short the text is that it was trained on."""
    (record,) = report_acceptance(
        Acceptance(models=(str(run),), context=8, sequences=4, device="cpu"), console=QUIET
    )
    assert (record["settings"]["context"], record["result"]["sequences"]) == (8, 4)
    places = figures(record)[1.0, 1.0, "rejection"]
    assert [each["drafts"] for each in places] == [16, 12]  # 4 groups of 2, of which the last has no end


@pytest.mark.parametrize("law", ["block", "causal"])
def test_a_joint_model_drafts_with_its_blocks_whatever_law_it_writes(law, tmp_path):
    of_law = BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True, law=law, lean=1.0)
    folder, file = saved(of_method(of_law), tmp_path / "model"), str(documents(tmp_path))
    console = Console(file=io.StringIO(), width=80)
    (record,) = report_acceptance(
        Acceptance(models=(str(folder),), data=(file,), sequences=5, batch_size=2, device="cpu"),
        console=console,
    )
    assert record["title"].endswith(", causal law")
    assert record["settings"]["law"] == "causal"
    subject = Subject.open(folder, device="cpu")
    drafts = subject.model.record.method.drafts(subject.model.record.frame)
    assert (drafts.masks, list(drafts.places)) == (4, [2, 3, 4])
    with open_sequences(subject, file, limit=5) as text:
        batches = list(text.batches(subject, 5))
    ways = [Sharpening(temperature=t, top_p=p) for t, p in USUAL]
    expected = measure_acceptance(subject.model.network, drafts, batches, ways)
    for each, figure in zip(expected, record["result"]["figures"], strict=True):
        assert figure["scheme"] == each.scheme
        assert [at["accepted"] for at in figure["places"]] == pytest.approx(
            [place.accepted.value for place in each.places]
        )
    printed = console.file.getvalue()
    assert all(len(line.rstrip()) <= 80 for line in printed.splitlines()[:-1])
    for way in ("T 1 ", "T 1, p 0.9", "T 0.6, p 0.9", "greedy"):
        assert way in printed


def test_temperatures_and_nuclei_are_measured_each_with_each():
    def drawn(**flags: Any) -> list[tuple[float, float]]:
        return list(Acceptance(**flags).drawn)

    assert drawn() == list(USUAL)
    assert drawn(temperature=(1.0, 0.6, 0.0), top_p=(1.0, 0.9)) == [
        (1.0, 1.0),
        (1.0, 0.9),
        (0.6, 1.0),
        (0.6, 0.9),
        (0.0, 1.0),
    ]
    assert drawn(temperature=(0.5,)) == [(0.5, 1.0)]
    assert drawn(top_p=(0.9, 0.5)) == [(1.0, 0.9), (1.0, 0.5)]


def test_what_is_typed_is_what_is_measured(tmp_path, capsys):
    folder, out = saved(joint(), tmp_path / "model"), tmp_path / "records.json"
    words = ["acceptance", str(folder), "--data", str(documents(tmp_path)), "--no-eos", "--sequences", "3"]
    words += ["--temperature", "1", "0", "--top-p", "0.9", "--masks", "3", "--out", str(out)]
    assert main([*words, "--device", "cpu"]) == 0
    (record,) = json.loads(out.read_text())
    settings = record["settings"]
    assert settings["drawn"] == [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.0, "top_p": 1.0}]
    assert (settings["masks"], settings["limit"], settings["eos_between_documents"]) == (3, 3, False)
    assert "3 masks; " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (of_bytes(None), [], "which a drafter or a joint model makes, got autoregressive, which has none"),
        (
            of_bytes(4),
            [],
            "a joint model has (trained with next_token), got block diffusion that is not joint",
        ),
        (baseline(SEDD), [], "acceptance is of drafts, which a drafter or a joint model makes, got SEDD"),
        (joint(), ["--masks", "0"], "--masks must be at least 1, got 0"),
        (
            joint(),
            ["--masks", "1"],
            "masks must be 2 to 16, since the first of a block drafts nothing, got 1",
        ),
        (joint(), ["--masks", "17"], "masks must be 2 to 16"),
        (joint(), ["--context", "0"], "--context must be at least 1, got 0"),
        (joint(), ["--temperature", "-1"], "--temperature must lie in [0.001, 1000]"),
        (joint(), ["--temperature", "1", "1e4"], "--temperature must lie in [0.001, 1000]"),
        (joint(), ["--top-p", "0"], "--top-p must lie in (0, 1], got 0.0"),
        (joint(), ["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (joint(), ["--field", "body", "--data", "pydoc"], "--field is for text files"),
        (joint(), [], "is not a training run, so its data is unknown: name the data with --data"),
    ],
)
def test_what_cannot_be_measured_is_one_line(model, words, said, tmp_path, capsys):
    assert said in fails(capsys, "acceptance", str(saved(model, tmp_path)), *words, "--device", "cpu")


def test_it_needs_a_model_and_a_network_without_noise_levels(run, tmp_path, capsys):
    assert "models must name at least one run" in fails(capsys, "acceptance")
    assert "masks must be 1 to 15, less than a context, got 16" in fails(
        capsys, "acceptance", str(run), "--masks", "16", "--device", "cpu"
    )
    told = saved(of_method(JOINT, adaln=True, time_conditioning=True), tmp_path)
    assert "not told the noise level" in fails(capsys, "acceptance", str(told), "--device", "cpu")


def test_a_report_shows_a_drafter_too(run, tmp_path, capsys):
    words = ["report", str(run), "--no-measure", "--out", str(tmp_path / "page"), "--device", "cpu"]
    assert main(words) == 0
    page = (tmp_path / "page" / "report.md").read_text("utf-8")
    assert page.startswith("# Autoregressive, with a drafter")
