"""Run a chat template, which is a program that came with a model, where it can do no harm.

It runs in a separate process (`template.py`) with little time and little memory; the system ends that process
if it exceeds them. The process is reused for later templates, because starting one is slow.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_MOST_TEMPLATE = 1_000_000  # characters; long templates have thirty thousand
_MOST_TEXT = 1_000_000  # characters in its output, besides four for each character in the messages
_MOST_SECONDS = 2  # of computing; real templates take milliseconds
_MOST_BYTES = 2**29
_MOST_WAITING = 60.0  # seconds, on a machine that is busy
_FAREWELL = 1.0  # seconds
_PROGRAM = Path(__file__).with_name("template.py")


def rendered(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """The output of a template for some messages. Raises a one-line ValueError if it fails or exceeds a
    limit."""
    if len(template) > _MOST_TEMPLATE:
        raise ValueError(
            f"a chat template must have at most {_MOST_TEMPLATE:,} characters, got {len(template):,}"
        )
    said = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    room = 4 * sum(len(message["content"]) for message in messages)
    answer = _process.answer({"template": template, "said": said, "characters": _MOST_TEXT + room})
    if "error" in answer:
        raise ValueError(f"the chat template of the model cannot be used: {answer['error']}")
    return answer["text"]


class _Process:
    """The process in which templates run, one after another. It is started on first use, and again after it
    ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def answer(self, asked: Mapping[str, Any]) -> dict[str, str]:
        """The answer to a request, or the `error` that ended the process."""
        with self._lock:
            running = self._started()
            try:
                return _exchange(running, json.dumps(asked).encode() + b"\n")
            except TimeoutError:
                self._end(running)
                return {"error": f"it took longer than {_MOST_WAITING:.0f} s"}
            except (BrokenPipeError, EOFError):
                return {"error": self._why_ended(running)}
            except BaseException:  # its late answer must not be taken for the answer to the next request
                self._end(running)
                raise

    def close(self) -> None:
        """End the process if this process started it: a fork of another process did not."""
        if self._running is not None and self._owner == os.getpid():
            self._end(self._running)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is None or self._owner != os.getpid():
            self._running = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(_MOST_SECONDS), str(_MOST_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            self._owner = os.getpid()
        return self._running

    def _end(self, running: subprocess.Popen[bytes]) -> int:
        """Its exit status. Closes its pipes and waits briefly."""
        self._running = None
        for pipe in (running.stdin, running.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            return running.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            running.kill()
            return running.wait()

    def _why_ended(self, running: subprocess.Popen[bytes]) -> str:
        status = self._end(running)
        if status == -signal.SIGXCPU:
            return f"it used more than {_MOST_SECONDS} s of computing time"
        return f"its process ended with status {status}"


def _exchange(running: subprocess.Popen[bytes], line: bytes) -> dict[str, str]:
    """Send one line, read one line back."""
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(line)
    running.stdin.flush()
    last, said = time.monotonic() + _MOST_WAITING, bytearray()
    while not said.endswith(b"\n"):
        if not select.select([running.stdout], [], [], max(0.0, last - time.monotonic()))[0]:
            raise TimeoutError
        piece = os.read(running.stdout.fileno(), 1 << 16)
        if not piece:
            raise EOFError
        said += piece
    answer: dict[str, str] = json.loads(said)
    return answer


_process = _Process()
atexit.register(_process.close)
