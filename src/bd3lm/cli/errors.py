"""Errors in one line, as whoever runs a command reads them."""

import re
import shlex
import shutil
import sys
from pathlib import Path

from bd3lm.io.terminal import one_entry, say

EXPECTED = (ValueError, OSError, FloatingPointError, ImportError)
"""What a command raises for what its user can put right."""


def line_of(error: BaseException) -> str:
    """An expected error, or one for lack of memory, in one line."""
    if isinstance(error, ImportError):
        return _with_own_pip(str(error))
    return str(error) if isinstance(error, EXPECTED) else _out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Told by names and words: to ask torch for its class would import it for every command."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(
        words in str(error)
        for words in ("DefaultCPUAllocator: ", "CUDA error: out of memory", "Cannot allocate memory")
    )


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning is one line; where in the source it arose is of no use to whoever runs a command."""
    say(f"bd3lm: warning: {one_entry(str(message))}", to=sys.stderr)


def _with_own_pip(said: str) -> str:
    """How to install an extra, by the pip of this very environment, which may not be that on the path."""
    own = Path(sys.executable).with_name("pip")
    found = shutil.which("pip")
    if not own.exists() or (found is not None and Path(found).parent == own.parent):
        return said
    shown = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
    return said.replace(": pip install ", f": {shlex.quote(str(shown))} install ")


def _out_of_memory(error: BaseException) -> str:
    """On an allocation that failed, whose own words may be a paragraph about the allocator."""
    found = re.search(r"allocate ([0-9.]+ [A-Za-z]+)", str(error))
    much = f" at {found[1]} more" if found else ""
    return (
        f"out of memory{much}: make the batch smaller (--train.micro_batch in training), the context or the "
        "network"
    )
