"""Run work in a process with a limit on its memory."""

import io
import resource
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any


def train_within(megabytes: int, words: list[str]) -> dict[str, Any]:
    """`bd3lm` with these words, in a process that may take so much memory beside that of its libraries.

    The limit is RLIMIT_DATA, which counts private memory that can be written to, used or not: heaps, stacks
    and anonymous mappings. RLIMIT_AS would count torch's libraries too: gigabytes of addresses, and no
    memory.
    """
    import torch
    import torch._dynamo
    import torch.distributed.fsdp

    import bd3lm.runs.train  # noqa: F401
    from bd3lm.cli import main

    torch.set_num_threads(1)
    before = _data()
    limit = before + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    said = io.StringIO()
    with redirect_stderr(said):
        status = main(words)
    return {"status": status, "said": said.getvalue(), "before": before >> 20, "after": _data() >> 20}


def _data() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024
