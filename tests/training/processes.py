"""Runs a function in several processes that can talk to each other, as torchrun would start them.

The function is named by its dotted path, takes JSON arguments and returns JSON. It finds torchrun's
variables in its environment, and leaves the group of processes itself (`Engine.close`).
"""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[2]


def run_processes(
    function: str, *arguments: Any, world: int, timeout: float = 90.0, may_die: Collection[int] = ()
) -> list[Any]:
    """The results by rank; None for a rank in `may_die`. Leaves no process running."""
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [Path(scratch) / f"{rank}" for rank in range(world)]
        ranks = [
            _start(function, json.dumps(arguments), output, rank, world, port)
            for rank, output in enumerate(outputs)
        ]
        try:
            _wait(ranks, outputs, time.monotonic() + timeout, may_die)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [
            None if rank in may_die else json.loads(output.with_suffix(".json").read_text())
            for rank, output in enumerate(outputs)
        ]


def _start(
    function: str, arguments: str, output: Path, rank: int, world: int, port: int
) -> "subprocess.Popen[bytes]":
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    with output.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, function, arguments, str(output.with_suffix(".json"))],
            cwd=_ROOT,
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(
    ranks: "list[subprocess.Popen[bytes]]", outputs: list[Path], until: float, may_die: Collection[int]
) -> None:
    """Wait until all are done. The first failure ends the wait, since the others may hang on it."""
    while True:
        for rank, process in enumerate(ranks):
            if process.poll() not in (None, 0) and rank not in may_die:
                raise RuntimeError(f"process {rank} ended with {process.returncode}\n{_logs(outputs)}")
        if all(process.poll() is not None for process in ranks):
            return
        if time.monotonic() > until:
            raise TimeoutError(f"the processes took too long\n{_logs(outputs)}")
        time.sleep(0.05)


def _logs(outputs: list[Path]) -> str:
    return "\n".join(
        f"--- process {rank}\n{output.with_suffix('.log').read_text(errors='replace')[-3000:]}"
        for rank, output in enumerate(outputs)
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _main(function: str, arguments: str, output: str) -> None:
    torch.set_num_threads(1)
    module, _, name = function.rpartition(".")
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
