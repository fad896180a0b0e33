"""Errors as one line for the user of a command."""

import re
import shlex
import shutil
import sys
from pathlib import Path

from bd3lm.io.terminal import one_entry, say

EXPECTED = (ValueError, OSError, FloatingPointError, ImportError)
"""Errors that the user can fix."""


def line_of(error: BaseException) -> str:
    """One line for an expected error or for lack of memory."""
    if isinstance(error, ImportError):
        return _with_own_pip(str(error))
    return str(error) if isinstance(error, EXPECTED) else _out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Recognized by name and message, because importing torch for its class would slow down every command."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return any(
        words in str(error)
        for words in ("DefaultCPUAllocator: ", "CUDA error: out of memory", "Cannot allocate memory")
    )


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line; where it was raised in the source does not help the user."""
    say(f"bd3lm: warning: {one_entry(str(message))}", to=sys.stderr)


def _with_own_pip(said: str) -> str:
    """Name the pip of this environment for installing an extra; the pip on the path may be another one."""
    own = Path(sys.executable).with_name("pip")
    found = shutil.which("pip")
    if not own.exists() or (found is not None and Path(found).parent == own.parent):
        return said
    shown = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own
    return said.replace(": pip install ", f": {shlex.quote(str(shown))} install ")


def _out_of_memory(error: BaseException) -> str:
    """For a failed allocation; torch's own message may be a paragraph about the allocator."""
    found = re.search(r"allocate ([0-9.]+ [A-Za-z]+)", str(error))
    much = f" at {found[1]} more" if found else ""
    return f"out of memory{much}: use a smaller batch (--train.micro_batch in training), context or network"
