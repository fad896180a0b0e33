"""A server of a small joint model, as a user starts it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bd3lm.lm import LanguageModel
from bd3lm.methods import BlockDiffusionMethod
from tests.lm import BYTES, of_method

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def small_model(context: int = 64) -> LanguageModel:
    """It writes bytes, one after the other or in blocks of four."""
    return of_method(
        BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True, law="causal"),
        tokenizer=replace(BYTES, chat_template=TEMPLATE),
        context=context,
    )


@dataclass
class Server:
    """One that runs, and what it said."""

    process: "subprocess.Popen[str]"
    url: str

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0)

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        with self.http as http:
            return http.post(path, json=body)

    def texts(self) -> int:
        """How many are under way."""
        with self.http as http:
            return int(http.get("/health").json()["texts"])

    def until(self, seconds: float, is_so: Any) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.05)

    @property
    def engine(self) -> int:
        """The process that holds the model."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = [each for task in tasks for each in task.read_text().split()]
        names = {int(each): Path(f"/proc/{each}/cmdline").read_text() for each in children}
        (found,) = [number for number, name in names.items() if "spawn_main" in name]
        return found

    def stop(self, number: int = signal.SIGTERM) -> str:
        """End it; says what it wrote to standard error."""
        self.process.send_signal(number)
        _, noted = self.process.communicate(timeout=60)
        return noted


@contextlib.contextmanager
def serving(model: Path | str, *words: str, **environment: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "bd3lm", "serve", str(model), "--port", "0", "--device", "cpu", *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, (line, process.communicate())
        yield Server(process, found[0])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
