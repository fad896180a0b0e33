"""`bd3lm variance`: one row a rule, on the held-out text of a run."""

import io
import json
import math
import shutil

import pytest
import yaml
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands import variances
from bd3lm.commands.variances import RULES, report_variances
from bd3lm.evaluation import Spread
from bd3lm.reports import with_error
from bd3lm.runs import resolve_stages, train_stages

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
    (record,) = report_variances([run / "block"], batches=2, gradients=2, console=console)
    found = {row["masks"]: row for row in record["result"]["rows"]}
    assert list(found) == list(RULES)
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


def test_a_smaller_last_batch_has_no_part_in_the_gradient(run, tmp_path):
    ragged = copied(run, tmp_path, validation_sequences=10)
    (record,) = report_variances([ragged], batches=9, gradients=9, console=Console(quiet=True))
    settings = record["settings"]
    assert (settings["batches"], settings["sequences"], settings["gradients"]) == (3, 10, 2)
    (whole,) = report_variances([run / "block"], batches=2, gradients=2, console=Console(quiet=True))
    rows = zip(record["result"]["rows"], whole["result"]["rows"], strict=True)
    assert all(one["gradient"] == other["gradient"] for one, other in rows)
    few = copied(run, tmp_path / "few", validation_sequences=7)
    with pytest.raises(ValueError, match=r"at least 2 batches of 4 sequences held out .*, got 1"):
        report_variances([few], gradients=2, console=Console(quiet=True))


def test_what_was_not_asked_for_is_not_infinite(run, monkeypatch):
    (record,) = report_variances([run / "block"], batches=2, console=Console(quiet=True))
    assert record["settings"]["gradients"] == 0
    assert {row["gradient"] for row in record["result"]["rows"]} == {None}
    monkeypatch.setattr(variances, "gradient_variance", lambda *_, **__: Spread(math.inf, None))
    console = Console(file=io.StringIO(), width=160)
    (record,) = report_variances([run / "block"], batches=2, gradients=2, console=console)
    assert (record["settings"]["gradients"], record["result"]["rows"][0]["gradient"]) == (2, None)
    assert console.file.getvalue().count("∞") == len(RULES)


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


def test_bad_input_is_one_line(run, capsys):
    for words, message in (
        ([str(run / "ar")], "must hold a block diffusion model"),
        ([str(run)], "name one of them"),
        ([str(run / "block"), "--gradients", "1"], "gradients 0 or at least 2"),
    ):
        assert main(["variance", *words]) == 1
        assert message in capsys.readouterr().err
