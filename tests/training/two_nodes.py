"""Two machines on one: network namespaces joined by a cable, in each of which torchrun starts a process.

Nothing leaves the namespaces, and nothing of them is left: they are removed whatever happens, with all that
runs in them.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_PORT = 29400  # inside a namespace, where nobody else uses it


@dataclass
class Node:
    """A namespace, its end of the cable, and the processes started in it."""

    name: str
    cable: str
    address: str
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def start(self, words: Sequence[str], log: Path) -> "subprocess.Popen[str]":
        """Start a program in the namespace, with a process group of its own."""
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": self.cable,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise its sockets warn that names do not resolve there
            "PYTHONPATH": os.pathsep.join((str(_ROOT / "src"), os.environ.get("PYTHONPATH", ""))),
        }
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *words],
                cwd=_ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def kill(self) -> None:
        """Kill everything in it at once, as when a machine loses power. The kernel closes open
        connections."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for number in found.stdout.split():
            try:
                os.kill(int(number), signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.started:
            if process.poll() is None:  # on a busy machine it may not have entered the namespace yet
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)


def why_not() -> str | None:
    """Why two nodes are not possible here; None if they are."""
    if shutil.which("ip") is None:
        return "two nodes need the program ip (apt-get install iproute2)"
    name = f"bd3lm-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"two nodes need the right to make network namespaces: {made.stderr.strip()}"
    _run("ip", "netns", "del", name)
    return None


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two namespaces that see each other and nothing else."""
    tag = f"{os.getpid() % 100_000}"
    nodes = (
        Node(f"bd3lm-a-{tag}", f"bda{tag}", "10.77.0.1"),
        Node(f"bd3lm-b-{tag}", f"bdb{tag}", "10.77.0.2"),
    )
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.name)
        ends = [word for node in nodes for word in ("name", node.cable, "netns", node.name)]
        _run("ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for node in nodes:
            _run("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", node.cable)
            for device in ("lo", node.cable):
                _run("ip", "-n", node.name, "link", "set", device, "up")
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            subprocess.run(["ip", "netns", "del", node.name], capture_output=True)


def torchrun(node: Node, at: Node, number: int, words: Sequence[str], said: Path) -> list[str]:
    """The torchrun command on one of two nodes, which meet at the first. Our process's output goes to `said`,
    apart from torchrun's own."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--node-rank", str(number), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{at.address}:{_PORT}"),
        *("--rdzv-conf", f"join_timeout=60,is_host={int(node is at)}", "--local-addr", node.address),
        *("--redirects", "3", "--log-dir", str(said)),
        *("-m", "bd3lm", *words),
    ]


def wait(processes: "Sequence[subprocess.Popen[str]]", logs: Sequence[Path], seconds: float) -> list[int]:
    """The exit statuses of all; a TimeoutError with their output."""
    until = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > until:
            said = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
            raise TimeoutError(f"two nodes took more than {seconds:g} s\n{said}")
        time.sleep(0.1)
    return [process.returncode for process in processes]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
