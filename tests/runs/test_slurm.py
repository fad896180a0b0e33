"""The job script under a scheduler that is none: two nodes, a time limit, the queue, and the run goes on."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bd3lm.cli import main
from tests.runs import slurm
from tests.tiny_recipes import BLOCK, plain, prepared
from tests.training.processes import free_port
from tests.training.tiny import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
SCRIPT = Path(__file__).parents[2] / "scripts" / "train.slurm"
STEPS = 80


def test_a_job_that_reaches_its_limit_is_queued_again_and_goes_on(tmp_path):
    changes: dict[str, Any] = {
        "network": {"dropout": 0.0},
        "optimizer": {"lr": 0.001},
        "train": {"steps": STEPS, "checkpoint_every": 5, "validate_every": 20, "micro_batch": 2},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(plain(prepared(tmp_path / "data"), BLOCK, changes)))
    out, state = tmp_path / "run", tmp_path / "scheduler"
    environment = slurm.install(state, limit_reached=out / "checkpoints" / "step-00000010", processes=1) | {
        "OUT": str(out),
        "RENDEZVOUS_PORT": str(free_port()),
    }
    words = [str(SCRIPT), "--config", str(recipe), "--parallel", "fsdp", "--device", "cpu"]
    done = subprocess.run(
        [str(state / "bin" / "sbatch"), "--nodes", "2", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=260,
    )
    found = slurm.jobs(state)
    assert len(found["jobs"]) == 2, done.stdout + done.stderr
    assert found["jobs"][0] != 0
    assert found["jobs"][1] == 0, done.stdout + done.stderr
    assert "--signal=TERM@300" in found["options"]
    assert done.stdout.count(" everything is saved in") == 1
    assert done.stdout.count(": resumed at step") == 1
    assert not list(out.rglob("STOPPED"))
    one = tmp_path / "one"
    assert main(["train", "--config", str(recipe), "--out", str(one), "--device", "cpu"]) == 0
    ours, theirs = rows(out), rows(one)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert len(ours) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        assert float(mine["train_nats"]) == pytest.approx(float(other["train_nats"]), rel=1e-5)
