"""Work on hostile input in a process of its own, with little memory and little time."""

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from bd3lm.cli.errors import EXPECTED

MEGABYTE = 2**20
REFUSED = "refused: "
_LONGEST = 7000  # characters of an error that is still a line, or a list of problems


def confined(work: Callable[[], Any], *, megabytes: int = 1000, seconds: int = 60) -> Any:
    """What work gives, as JSON keeps it, in a fork that may allocate so much more than it began with.

    A fork that is killed, that runs into a limit or raises is a failure of the test.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(reader)
            signal.alarm(seconds)
            torch.set_num_threads(1)
            most = _address_space() + megabytes * MEGABYTE
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            with os.fdopen(writer, "w") as out:
                json.dump(work(), out)
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise AssertionError(f"the work was ended by {signal.Signals(os.WTERMSIG(status)).name}")
    assert status == 0, "the work failed; its traceback is on standard error"
    return json.loads(text)


def outcome(work: Callable[[], Any]) -> str:
    """What work gives, or the line with which it refuses; any other error is raised."""
    try:
        return str(work())
    except EXPECTED as error:
        line = str(error)
    assert line.strip(), "the line is empty"
    assert len(line) < _LONGEST, f"{len(line)} characters: {line[:500]}"
    return f"{REFUSED}{line}"


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
