"""`bd3lm variance`: one row a rule, on the held-out text of a run."""

import io
import json
import math

import pytest
from rich.console import Console

from bd3lm.cli import main
from bd3lm.commands.variances import RULES, report_variances
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
    assert f"{found['counts']['loss']:.4g}" in printed
    assert json.loads((run / "block" / "measured" / "variance.json").read_text()) == record


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
