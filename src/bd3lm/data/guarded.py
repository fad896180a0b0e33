"""Limits on the `tokenizers` library's work with a tokenizer.json that may come from a stranger.

The library's regular expressions backtrack: a pattern such as (a+)+$ can take forever in some texts. The
library gives up after some millions of steps with a panic, which prints a Rust traceback and is not an
`Exception`. With slower patterns it never gives up. While it works on one text, it ignores Ctrl-C. So slow
work runs in another thread, which is abandoned when its time is up, and whatever the library raises becomes
one line.
"""

import math
import os
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

# The least time for a tokenizer, of the processor and of the clock: a suspended process uses neither.
_SECONDS = 5.0
_SLOWEST = 10_000  # characters per second; the slowest tokenizer in use is twenty times as fast
_PANIC = "PanicException"  # from pyo3, which has no class to import
_STANDARD_ERROR = 2  # the file descriptor
_GLANCE = 0.1  # seconds between two looks at the clocks
_MOST_GROWTH = 1000  # how much replacements may lengthen a text; real ones write one character or two
_redirecting = Lock()


def is_plain(spec: Mapping[str, Any]) -> bool:
    """Whether it is only a byte-level BPE, like GPT-2's and ours: it is fast, and never panics."""
    model = spec.get("model")
    known = isinstance(model, Mapping) and model.get("type") == "BPE"
    return known and all(part.get("type") in ("ByteLevel", "Sequence") for part in _parts(spec))


def patterns(spec: Mapping[str, Any]) -> Iterator[str]:
    """The regular expressions in the steps before and after the model."""
    for part in _parts(spec):
        pattern = part.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            yield pattern["Regex"]


def check_size(spec: Mapping[str, Any]) -> None:
    """Refuse a tokenizer that would let a small file or a short text fill the memory."""
    growth = 1
    for part in _parts(spec):
        for name in ("content", "prepend", "replacement"):
            said = part.get(name)
            growth *= max(1, len(said)) if isinstance(said, str) else 1
        if (table := part.get("precompiled_charsmap")) is not None:
            _check_table(table)
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"its replacements must lengthen a text at most {_MOST_GROWTH:,} times, got "
            f"10^{math.log10(growth):.0f}"
        )


def _check_table(table: Any) -> None:
    """Check Sentencepiece's table. It begins with the length of its first part, which the library allocates
    unchecked."""
    data = b64decode(table) if isinstance(table, str) else bytes(table)
    if int.from_bytes(data[:4], "little") > len(data):
        raise ValueError("its precompiled_charsmap must be as long as its header says")


def _parts(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    waiting = [spec.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += [each for value in part.values() if isinstance(value, list) for each in value]


def in_one_line(work: Callable[[], T], told: str = "") -> T:
    """Run fast work of the library. Its own errors and panics become a ValueError, with `told` added."""
    try:
        return work()
    except BaseException as error:
        if not _is_panic(error) and type(error) is not Exception:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the tokenizer failed: {reason:.300}{told}") from error


def watched(work: Callable[[], T], *, characters: int, told: str) -> T:
    """Run work of the library, with a time limit for this many characters. `told` tells in an error what may
    be slow."""
    allowed = _SECONDS + characters / _SLOWEST
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(in_one_line(work, told))
        except BaseException as error:
            failed.append(error)

    began, used = time.monotonic(), time.process_time()
    thread = Thread(target=run, daemon=True)  # a daemon does not keep the process from ending
    with panics_unsaid():
        thread.start()
        thread.join(_GLANCE)
        while thread.is_alive():
            if min(time.monotonic() - began, time.process_time() - used) > allowed:
                raise ValueError(
                    f"the tokenizer took longer than {allowed:.0f} s for {characters:,} characters{told}"
                )
            thread.join(_GLANCE)
        if failed:
            raise failed[0]
    return done[0]


@contextmanager
def panics_unsaid() -> Iterator[None]:
    """Hide what Rust writes to standard error before it raises a panic. Other output appears a bit later.

    Rust writes directly to the descriptor. If several threads are here at once, the first redirects for all.
    """
    if not _redirecting.acquire(blocking=False):
        yield
        return
    with ExitStack() as done:
        done.callback(_redirecting.release)
        try:
            kept = os.dup(_STANDARD_ERROR)
            done.callback(os.close, kept)
            said = done.enter_context(tempfile.TemporaryFile())
        except OSError:  # there is no standard error, or no room for the file
            yield
            return
        panicked = False
        os.dup2(said.fileno(), _STANDARD_ERROR)
        try:
            yield
        except BaseException as error:
            panicked = _is_panic(error) or _is_panic(error.__cause__)
            raise
        finally:
            os.dup2(kept, _STANDARD_ERROR)
            said.seek(0)
            if not panicked and (text := said.read()):
                os.write(_STANDARD_ERROR, text)


def _is_panic(error: BaseException | None) -> bool:
    return type(error).__name__ == _PANIC
