"""Runs commands and sends them signals: torch is imported once, and every command is a fork of this process.

A request is a line of JSON on standard input: words, cwd, signal (or null) and after, in seconds. So is the
answer on standard output: status as `subprocess` has it, stdout, stderr, seconds. A signal waits until the
command answers signals, which it cannot in the first few milliseconds of a new interpreter.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, BinaryIO

SIGNALS = {signal.SIGINT, signal.SIGTERM}


def serve() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    for module in (
        "torch",
        "bd3lm.cli",
        "bd3lm.runs.train",
        "bd3lm.commands.report.measuring",
        "bd3lm.reports.page",
    ):
        importlib.import_module(module)
    setattr(os, "fsync", lambda descriptor: None)  # noqa: B010 - as in every test: nobody cuts the power
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


def run(words: list[str], cwd: str, signal: int | None, after: float) -> dict[str, Any]:
    """The command in a fork of this process, and what became of it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.perf_counter()
        child = os.fork()
        if not child:
            be(words, cwd, out, err)
        if signal is not None:
            time.sleep(after)
            os.kill(child, signal)
        _, status = os.waitpid(child, 0)
        seconds = time.perf_counter() - begun
        out.seek(0)
        err.seek(0)
        return {
            "status": os.waitstatus_to_exitcode(status),
            "stdout": out.read().decode(),
            "stderr": err.read().decode(),
            "seconds": seconds,
        }


def be(words: list[str], cwd: str, out: BinaryIO, err: BinaryIO) -> None:
    """Become the command, as its script runs it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.chdir(cwd)
    sys.argv = ["bd3lm", *words]
    status: Any = 1
    try:
        from bd3lm import __main__ as script
        from bd3lm import cli

        command = cli.main

        def answering() -> int:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return command()

        setattr(cli, "main", answering)  # noqa: B010
        status = script.main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


if __name__ == "__main__":
    serve()
