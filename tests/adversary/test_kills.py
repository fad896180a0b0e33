"""Commands killed at random moments: run again they end as if nothing had been, and leave no litter."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bd3lm.runs.folders import is_run
from tests.tiny_recipes import BLOCK, plain
from tests.training.tiny import checkpoint, rows

STEPS = 12
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "home")


class Server:
    """`kill_server` in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.adversary.kill_server"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, words: list[str], cwd: Path, number: int | None = None, after: float = 0.0
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"words": words, "cwd": str(cwd), "signal": number, "after": after}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def home(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, its shards, the recipe of a run of two stages, and a run that is finished."""
    home: Path = tmp_path_factory.mktemp("home")
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=60)) for _ in range(200)]
    (home / "text.txt").write_text("\n\n".join(texts))
    (home / "prompts.txt").write_text("\n".join(texts[:12]))
    done = server.run(["data", "prepare", "text.txt", "shards", "--tokenizer", "bytes"], home)
    assert done["status"] == 0, done["stderr"]
    base = plain(Path("shards"), {"train": {"steps": STEPS, "log_every": 2, "validate_every": 8}})
    stages = {"ar": base, "block": {**base, **BLOCK}}
    (home / "recipe.yaml").write_text(yaml.safe_dump(stages))
    (home / "one.yaml").write_text(yaml.safe_dump({**base, **BLOCK}))
    done = server.run(["train", "--config", "one.yaml", "--out", "run", "--device", "cpu"], home)
    assert done["status"] == 0, done["stderr"]
    return home


def train(folder: Path) -> list[str]:
    resume = ["--resume"] if is_run(folder / "out") else []
    return ["train", "--config", "recipe.yaml", "--out", "out", "--device", "cpu", *resume]


def trained(folder: Path) -> Any:
    found: dict[str, Any] = {}
    for stage in ("ar", "block"):
        out = folder / "out" / stage
        found[stage] = rows(out), contents(out / "model"), checkpoint(out, STEPS)["tensors.safetensors"]
    return found


def measured(folder: Path) -> Any:
    """The records, without when they were made."""
    return {
        name: re.sub(rb'"measured": "[^"]*"', b"", data)
        for name, data in contents(folder / "run" / "measured").items()
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


SCENARIOS: dict[str, tuple[Callable[[Path], list[str]], Callable[[Path], Any]]] = {
    "train": (train, trained),
    "prepare": (
        lambda folder: ["data", "prepare", "text.txt", "out", "--tokenizer", "bytes"],
        lambda folder: contents(folder / "out"),
    ),
    "eval": (lambda folder: ["eval", "run", "--estimator", "nelbo", "--device", "cpu"], measured),
    "sample": (
        lambda folder: [
            *(
                "sample",
                "run",
                "--prompts-from",
                "prompts.txt",
                "--max-new-tokens",
                "16",
                "--batch-size",
                "3",
            ),
            *("--device", "cpu", "--out", "out.jsonl"),
        ],
        lambda folder: (folder / "out.jsonl").read_bytes(),
    ),
    "report": (
        lambda folder: ["report", "run", "--out", "page", "--device", "cpu"],
        lambda folder: (sorted(contents(folder / "page")), sorted(contents(folder / "run" / "measured"))),
    ),
}


@pytest.fixture(scope="module")
def undisturbed(
    server: Server, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, float]]:
    """What a command ends with when nobody kills it, and how long it takes."""
    known: dict[str, tuple[Any, float]] = {}

    def of(command: str) -> tuple[Any, float]:
        if command not in known:
            words, result = SCENARIOS[command]
            folder = tmp_path_factory.mktemp(command) / "whole"
            shutil.copytree(home, folder)
            done = server.run(words(folder), folder)
            assert done["status"] == 0, done["stderr"]
            known[command] = result(folder), done["seconds"]
        return known[command]

    return of


CASES = [
    pytest.param(command, number, seed, id=f"{command}-{number.name}-{seed}")
    for seed in range(6)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
    for command in SCENARIOS
]
ENDS = {  # finished before the signal came, stopped by it, or hit by it at the very end
    signal.SIGTERM: (0, 143, -signal.SIGTERM),
    signal.SIGINT: (0, 130, -signal.SIGINT),
    signal.SIGKILL: (0, -signal.SIGKILL),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("command", "number", "seed"), CASES)
def test_killed_at_a_random_moment_it_ends_as_if_left_alone(
    command: str,
    number: signal.Signals,
    seed: int,
    server: Server,
    home: Path,
    undisturbed: Callable[[str], tuple[Any, float]],
    tmp_path: Path,
) -> None:
    words, result = SCENARIOS[command]
    expected, seconds = undisturbed(command)
    folder = tmp_path / "parts"
    shutil.copytree(home, folder)
    chance = random.Random(f"{command} {number} {seed}")
    for _ in range(2):
        killed = server.run(words(folder), folder, number, after=chance.random() * seconds)
        stopped_and_saved = (130,) if command == "train" else ()
        assert killed["status"] in (*ENDS[number], *stopped_and_saved), killed
        check_words(killed, number)
        if killed["status"] == 0 or (folder / "out.jsonl").exists():  # which is there when all is done
            break
    else:
        done = server.run(words(folder), folder)
        assert done["status"] == 0, done["stderr"]
    assert result(folder) == expected
    assert litter(folder) == []


def check_words(killed: dict[str, Any], number: signal.Signals) -> None:
    """What a command says that was stopped: that it was, and nothing of Python's."""
    said = killed["stderr"]
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    line = {130: "bd3lm: interrupted", 143: "bd3lm: terminated"}.get(killed["status"])
    if line is not None and "then saving" not in said and "then stopping" not in said:
        assert said.splitlines()[-1] == line


def litter(folder: Path) -> list[str]:
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.name.endswith((".tmp", ".partial")) or path.name.startswith(("tmp-", "old-step-"))
    ]
