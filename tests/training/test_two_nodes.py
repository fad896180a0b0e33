"""torchrun over two nodes: the same losses as one process, and what remains when one of the nodes dies."""

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bd3lm.cli import main
from tests.tiny_recipes import BLOCK, plain, prepared
from tests.training.processes import free_port
from tests.training.tiny import rows
from tests.training.two_nodes import Node, torchrun, two_nodes, wait, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
STEPS, EVERY = 60, 5
SECONDS = 120.0  # limit for a run on two nodes, most of which is importing torch


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Blocks of 4, long enough for a node to die in the middle."""
    folder = tmp_path_factory.mktemp("recipe")
    train = {"steps": STEPS, "checkpoint_every": EVERY, "validate_every": 20, "micro_batch": 2}
    changes: dict[str, Any] = {
        "network": {"layers": 2, "dropout": 0.0},
        "optimizer": {"lr": 0.001},
        "train": train,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain(prepared(folder / "data"), BLOCK, changes)))
    return path


@pytest.fixture(scope="module")
def alone(recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main(["train", "--config", str(recipe), "--out", str(out), "--device", "cpu"]) == 0
    return out


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with two_nodes() as made:
        yield made


def start(nodes: tuple[Node, Node], logs: list[Path], *words: str) -> list[Any]:
    started = []
    for number, (node, log) in enumerate(zip(nodes, logs, strict=True)):
        ours = ["train", *words, "--device", "cpu"]
        started.append(node.start(torchrun(node, nodes[0], number, ours, log.with_suffix("")), log))
    return started


def same_losses(two: Path, one: Path) -> None:
    ours, theirs = rows(two), rows(one)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert len(ours) == STEPS
    for mine, other in zip(ours, theirs, strict=True):
        for figure in ("train_nats", "gradient_norm", "valid_nats"):
            if other.get(figure):
                assert float(mine[figure]) == pytest.approx(float(other[figure]), rel=1e-5), mine["step"]


def said(log: Path, stream: str) -> str:
    """The output of our process, without torchrun's."""
    (file,) = log.with_suffix("").rglob(f"{stream}.log")
    return file.read_text()


def logs_in(folder: Path, name: str) -> list[Path]:
    return [folder / f"{name}-{number}.log" for number in range(2)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_nodes_train_as_one_process(parallel, nodes, recipe, alone, tmp_path):
    out, logs = tmp_path / "run", logs_in(tmp_path, "node")
    words = ("--config", str(recipe), "--out", str(out), "--parallel", parallel)
    assert wait(start(nodes, logs, *words), logs, SECONDS) == [0, 0]
    same_losses(out, alone)
    files = {path.name for path in (out / "checkpoints" / f"step-{STEPS:08d}").iterdir()}
    assert ("tensors-00001-of-00002.safetensors" in files) == (parallel == "fsdp")
    assert (out / "model" / "model.safetensors").stat().st_size == (
        alone / "model" / "model.safetensors"
    ).stat().st_size


def test_a_node_that_dies_ends_the_other_with_a_line_and_the_run_goes_on(nodes, recipe, alone, tmp_path):
    out, logs = tmp_path / "run", logs_in(tmp_path, "first")
    words = ("--config", str(recipe), "--out", str(out), "--parallel", "fsdp")
    first, _ = start(nodes, logs, *words)
    until = time.monotonic() + SECONDS
    while not (out / "checkpoints" / f"step-{2 * EVERY:08d}").is_dir():
        assert time.monotonic() < until, logs[0].read_text()
        assert first.poll() is None, logs[0].read_text()
        time.sleep(0.01)
    nodes[1].kill()
    (status,) = wait([first], logs, 60.0)
    assert status != 0
    (line,) = said(logs[0], "stderr").splitlines()
    assert re.fullmatch(
        r"bd3lm: another of the 2 processes has ended or cannot be reached \(noticed by process [01]\); the "
        r"checkpoints are intact: restart all processes with --resume",
        line,
    )
    assert not (out / "model").exists()
    reached = max(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))
    assert 2 * EVERY <= reached < STEPS, "the node died too late to prove anything"
    nodes[0].kill()
    logs = logs_in(tmp_path, "second")
    assert wait(start(nodes, logs, "--resume", "--out", str(out)), logs, SECONDS) == [0, 0]
    assert "resumed at step" in said(logs[0], "stdout") + said(logs[1], "stdout")
    same_losses(out, alone)


def test_a_process_that_is_missing_is_named(tmp_path, monkeypatch, capfd):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    for rank, absent in (("0", 1), ("1", 0)):
        port = free_port()
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("MASTER_PORT", str(port))
        out = tmp_path / f"run{rank}"
        words = ["train", "demo-ar", "--out", str(out), "--device", "cpu", "--join-timeout", "1"]
        assert main(words) == 1
        said = capfd.readouterr().err.splitlines()
        assert said == [
            f"bd3lm: all 2 processes must join at 127.0.0.1:{port} within 1 s (--join-timeout), missing "
            f"processes: {absent}"
        ]
        assert not out.exists()


def test_nothing_is_left_of_the_nodes():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    running = []
    with pytest.raises(KeyError), two_nodes() as made:  # noqa: PT012 - it is what happens inside
        running += [node.start(["sleep", "100"], Path("/dev/null")) for node in made]
        raise KeyError
    assert all(process.poll() is not None for process in running)
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert made[0].name not in left
