"""`bd3lm variance`: one row a rule, on the held-out text of a run."""

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from bd3lm import evaluation
from bd3lm.cli import main
from bd3lm.commands.variance import Variance, report_variances, rules
from bd3lm.diffusion import ClippedTimes, Counts, Times
from bd3lm.evaluation import Spread
from bd3lm.reports import with_error
from bd3lm.reports.trainings import NO_FINITE_VARIANCE
from bd3lm.runs.merging import merge
from bd3lm.runs.recipe import recipe_from_dict
from bd3lm.runs.stages import resolve_stages
from bd3lm.runs.train import train_stages

TINY = {
    "network": {"layers": 1, "hidden": 16, "heads": 2},
    "data": {"context": 32, "builtin_vocabulary": 300, "validation_sequences": 8, "validation_batch": 4},
    "train": {"global_batch": 4, "steps": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("variance")
    train_stages(resolve_stages("demo", overrides=TINY), out, console=Console(quiet=True))
    return out


def measured(*models: Path, console: Console, **flags: int) -> list[dict[str, Any]]:
    return report_variances(Variance(models=tuple(map(str, models)), **flags), console=console)


def copied(run, folder, **data):
    """The run with other data settings, beside a copy of its data."""
    for name in ("block", "data"):
        shutil.copytree(run / name, folder / name)
    file = folder / "block" / "recipe.yaml"
    recipe = yaml.safe_load(file.read_text())
    recipe["data"] |= data
    file.write_text(yaml.safe_dump(recipe))
    return folder / "block"


def test_every_rule_is_measured_and_counts_vary_less_than_linear_times(run):
    console = Console(file=io.StringIO(), width=160)
    (record,) = measured(run / "block", batches=2, gradients=2, console=console)
    found = {row["masks"]: row for row in record["result"]["rows"]}
    assert list(found) == list(rules())
    assert all(0 < row[what] < math.inf for row in found.values() for what in ("loss", "gradient"))
    assert found["counts"]["loss"] < found["linear U[0, 1]"]["loss"]
    assert found["counts"]["unbiased"]
    assert not found["clipped U[0.3, 0.8]"]["unbiased"]
    printed = console.file.getvalue()
    assert "blocks of 4" in printed
    assert with_error(found["counts"]["loss"], found["counts"]["loss_error"]) in printed
    assert "loss of 8 sequences" in printed
    assert "gradient of 2 × 4 sequences" in printed
    (file,) = (run / "block" / "measured").glob("variance-*.json")
    assert json.loads(file.read_text()) == record
    assert record["settings"] == {
        "block_size": 4,
        "batches": 2,
        "gradients": 2,
        "batch_size": 4,
        "sequences": 8,
        "seed": 0,
    }


def test_figures_of_many_models_are_printed_whole_on_a_narrow_screen(run):
    """As those of the paper's tables of variances, whose ten or twelve runs are one command."""
    console = Console(file=io.StringIO(), width=80)
    record, *_ = measured(*[run / "block"] * 5, batches=2, gradients=2, console=console)
    printed = console.file.getvalue()
    assert printed.count("Variance, seed 0") > 1
    assert "…" not in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80  # all but the note, which has no lines
    row = next(each for each in record["result"]["rows"] if each["masks"] == "counts")
    cells = [with_error(row[what], row[f"{what}_error"]) for what in ("loss", "gradient")]
    rows = [line.split("│")[2:-2] for line in printed.splitlines() if "counts" in line]
    assert [cell.strip() for row in rows for cell in row] == cells * 5


@pytest.mark.parametrize(
    ("batches", "gradients", "errors"), [(1, 0, False), (2, 0, True), (1, 2, False), (2, 2, True)]
)
def test_the_note_says_what_the_table_has(run, batches, gradients, errors):
    console = Console(file=io.StringIO(), width=160)
    measured(run / "block", batches=batches, gradients=gradients, console=console)
    table, found, note = console.file.getvalue().partition("Variance over blocks")
    assert found
    assert ("±" in table) == ("± is one standard error" in note) == ("its error" in note) == errors
    assert ("gradient" in table) == ("gradient" in note) == bool(gradients)


@pytest.mark.slow
def test_a_smaller_last_batch_has_no_part_in_the_gradient(run, tmp_path):
    ragged = copied(run, tmp_path, validation_sequences=10)
    (record,) = measured(ragged, batches=9, gradients=9, console=Console(quiet=True))
    settings = record["settings"]
    assert (settings["batches"], settings["sequences"], settings["gradients"]) == (3, 10, 2)
    (whole,) = measured(run / "block", batches=2, gradients=2, console=Console(quiet=True))
    rows = zip(record["result"]["rows"], whole["result"]["rows"], strict=True)
    assert all(one["gradient"] == other["gradient"] for one, other in rows)
    few = copied(run, tmp_path / "few", validation_sequences=7)
    said = r"at least 2 batches of 4 sequences to measure .*, got 1; set the batch size with --batch-size .*"
    with pytest.raises(ValueError, match=said):
        measured(few, gradients=2, console=Console(quiet=True))
    (record,) = measured(few, gradients=2, batch_size=3, console=Console(quiet=True))
    assert (record["settings"]["batch_size"], record["settings"]["gradients"]) == (3, 2)


def test_any_model_is_measured_on_the_text_it_is_told(run, tmp_path, capsys):
    """A model that is no run needs --data; on a run's own data it has the run's figures."""
    model, out = tmp_path / "model", tmp_path / "out.json"
    shutil.copytree(run / "block" / "model", model)
    kept = set((run / "block").rglob("variance-*.json"))
    words = ["--batch-size", "4", "--batches", "2", "--gradients", "2", "--device", "cpu", "--out", str(out)]
    sources = [str(model), str(run / "block")]
    assert main(["variance", *sources, "--data", str(run / "data"), *words]) == 0
    alone, beside = json.loads(out.read_text())
    assert alone["result"] == beside["result"]
    assert alone["settings"] == beside["settings"]
    assert alone["settings"]["data"] == str(run / "data")
    assert set((run / "block").rglob("variance-*.json")) == kept  # a report is of what was held out
    (own,) = measured(run / "block", batches=2, gradients=2, console=Console(quiet=True))
    assert own["result"] == alone["result"]
    capsys.readouterr()
    assert main(["variance", str(model)]) == 1
    said = f"{model} is not a training run, so its data is unknown: name the data with --data"
    assert capsys.readouterr().err == f"bd3lm: {said}\n"


def told_the_noise(run, out):
    """A run of one step whose network is told the noise level, on the same text."""
    timed = {
        "network": {"adaln": True, "time_conditioning": True},
        "method": {"causal_clean": False, "lean": 0.0},
        "objective": {"masking": {"kind": "times"}, "next_token": 0.0},
        "train": {"steps": 1},
    }
    recipe = yaml.safe_load((run / "block" / "recipe.yaml").read_text())
    stage = recipe_from_dict(merge(recipe | {"start_from": None}, timed), where="timed")
    train_stages([("timed", stage)], out, console=Console(quiet=True))
    return out


def test_rules_that_draw_no_time_are_left_out_where_the_network_is_told_the_noise(run, tmp_path):
    timed, console = told_the_noise(run, tmp_path / "timed"), Console(file=io.StringIO(), width=200)
    record, other = measured(timed, run / "block", batches=1, gradients=2, console=console)
    assert [row["masks"] for row in record["result"]["rows"]] == [
        name for name in rules() if name != "counts"
    ]
    assert [row["masks"] for row in other["result"]["rows"]] == list(rules())
    row = next(line for line in console.file.getvalue().splitlines() if "counts" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells[:3] == ["counts", "–", "–"]
    assert float(cells[3]) > 0
    assert cells[-1] == "yes"
    alone = Console(file=io.StringIO(), width=200)
    measured(timed, batches=1, console=alone)
    row = next(line for line in alone.file.getvalue().splitlines() if "counts" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["counts", "–", "–"]


def second_moment(rule: Times | ClippedTimes, least: float) -> float:
    """E[weight²; hidden, t > least] of one token, by the midpoint rule in log t."""
    edges = torch.logspace(math.log10(least), 0, 20_001, dtype=torch.float64)
    t, dt = (edges[1:] * edges[:-1]).sqrt(), edges.diff()
    if isinstance(rule, ClippedTimes):
        rate = rule.low + (rule.high - rule.low) * t
        return float((dt / rate).sum())
    rate = rule.schedule.mask_rate(t)
    return float((dt * rule.schedule.elbo_weight(t) ** 2 * rate).sum())


def test_the_rules_that_are_said_to_have_no_finite_variance_are_those(run, capsys):
    moments = {
        name: (second_moment(rule, 1e-4), second_moment(rule, 1e-6))
        for name, rule in rules().items()
        if not isinstance(rule, Counts)
    }
    diverging = {name for name, (cut, less_cut) in moments.items() if less_cut > 1.1 * cut}
    assert diverging == set(NO_FINITE_VARIANCE)
    assert moments["square"][1] == pytest.approx(4.0, rel=1e-3)
    assert moments["cosine"][1] == pytest.approx(4.04, abs=0.01)
    assert main(["variance", str(run / "block"), "--batches", "1"]) == 0
    assert ", ".join(NO_FINITE_VARIANCE) in " ".join(capsys.readouterr().out.split())


def test_what_was_not_asked_for_is_not_infinite(run, monkeypatch):
    (record,) = measured(run / "block", batches=2, console=Console(quiet=True))
    assert record["settings"]["gradients"] == 0
    assert {row["gradient"] for row in record["result"]["rows"]} == {None}
    monkeypatch.setattr(evaluation, "gradient_variance", lambda *_, **__: Spread(math.inf, None))
    console = Console(file=io.StringIO(), width=160)
    (record,) = measured(run / "block", batches=2, gradients=2, console=console)
    assert (record["settings"]["gradients"], record["result"]["rows"][0]["gradient"]) == (2, None)
    assert console.file.getvalue().count("∞") == len(rules())


def test_columns_have_their_own_numbers_and_records_go_to_out(run, tmp_path, capsys):
    smaller, out = copied(run, tmp_path, validation_sequences=4), tmp_path / "out.json"
    assert main(["variance", str(run / "block"), str(smaller), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    records = json.loads(out.read_text())
    assert [record["settings"]["sequences"] for record in records] == [8, 4]
    assert all(f"{number} sequences" in " ".join(printed.split()) for number in (8, 4))


def test_runs_stand_side_by_side(run, capsys):
    assert main(["variance", str(run / "block"), str(run / "block"), "--batches", "1"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "counts" in line)
    first, second = (cell.strip() for cell in row.split("│")[2:4])
    assert first == second
    assert float(first) > 0


def test_a_run_of_several_stages_is_its_last(run, capsys):
    assert main(["variance", str(run), "--batches", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(
        f"{run} is a run of several stages: using the last one begun, {run / 'block'}\n"
    )
    assert "counts" in printed.out


def test_bad_input_is_one_line(run, capsys):
    for words, message in (
        ([str(run / "ar")], "must hold a block diffusion model"),
        ([str(run / "block"), "--gradients", "1"], "--gradients must be 0 or at least 2, got 1"),
        ([str(run / "block"), "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        ([str(run / "block"), "--data", "nowhere"], "nowhere is neither a file or folder nor one of"),
        (["box"], "box is not a training run, so its data is unknown: name the data with --data"),
    ):
        assert main(["variance", *words]) == 1
        assert message in capsys.readouterr().err
