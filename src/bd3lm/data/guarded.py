"""Work by the `tokenizers` library on a tokenizer.json that a stranger may have written, within limits.

Its regular expressions backtrack: one such as (a+)+$ never finds its end in some texts. The library gives up
after some millions of steps by a panic, which prints a Rust traceback and is no `Exception`; a slower kind of
pattern it does not give up at all. While it works on one text, Ctrl-C is not heard. So what may take long is
done by another thread, and left to itself when it has had its time; and what the library raises becomes one
line.
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

_SECONDS = (
    5.0  # that a tokenizer may take at least, of a processor and of a clock: a suspended one takes neither
)
_SLOWEST = 10_000  # characters a second; the slowest in use is twenty times as quick
_PANIC = "PanicException"  # of pyo3, which has no class that could be imported
_STANDARD_ERROR = 2  # the descriptor
_GLANCE = 0.1  # seconds between two looks at the clocks
_MOST_GROWTH = 1000  # by how much replacements may lengthen a text; those in use write one character or two
_redirecting = Lock()


def is_plain(spec: Mapping[str, Any]) -> bool:
    """Whether it is a byte-level BPE and nothing else, as GPT-2's and ours: it is quick, and never panics."""
    model = spec.get("model")
    known = isinstance(model, Mapping) and model.get("type") == "BPE"
    return known and all(part.get("type") in ("ByteLevel", "Sequence") for part in _parts(spec))


def patterns(spec: Mapping[str, Any]) -> Iterator[str]:
    """The regular expressions in what comes before and after the model."""
    for part in _parts(spec):
        pattern = part.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            yield pattern["Regex"]


def check_size(spec: Mapping[str, Any]) -> None:
    """Refuse what would make a small file or a short text fill the memory."""
    growth = 1
    for part in _parts(spec):
        for name in ("content", "prepend", "replacement"):
            said = part.get(name)
            growth *= max(1, len(said)) if isinstance(said, str) else 1
        if (table := part.get("precompiled_charsmap")) is not None:
            _check_table(table)
    if growth > _MOST_GROWTH:
        raise ValueError(
            f"its replacements may lengthen a text at most {_MOST_GROWTH:,} times, got "
            f"10^{math.log10(growth):.0f}"
        )


def _check_table(table: Any) -> None:
    """Sentencepiece's table begins with the length of its first part, which the library allocates unseen."""
    data = b64decode(table) if isinstance(table, str) else bytes(table)
    if int.from_bytes(data[:4], "little") > len(data):
        raise ValueError("its precompiled_charsmap must be as long as it says")


def _parts(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    waiting = [spec.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield part
            waiting += [each for value in part.values() if isinstance(value, list) for each in value]


def in_one_line(work: Callable[[], T], told: str = "") -> T:
    """What quick work with the library gives; its own errors and panics become a ValueError, to which `told`
    is added."""
    try:
        return work()
    except BaseException as error:
        if not _is_panic(error) and type(error) is not Exception:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the tokenizer cannot do it: {reason:.300}{told}") from error


def watched(work: Callable[[], T], *, characters: int, told: str) -> T:
    """The same within the time for so many characters; `told` says in an error what may be slow."""
    allowed = _SECONDS + characters / _SLOWEST
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(in_one_line(work, told))
        except BaseException as error:
            failed.append(error)

    began, used = time.monotonic(), time.process_time()
    thread = Thread(target=run, daemon=True)  # which does not keep the process from ending
    with panics_unsaid():
        thread.start()
        thread.join(_GLANCE)
        while thread.is_alive():
            if min(time.monotonic() - began, time.process_time() - used) > allowed:
                raise ValueError(
                    f"the tokenizer takes longer than {allowed:.0f} s for {characters:,} characters{told}"
                )
            thread.join(_GLANCE)
        if failed:
            raise failed[0]
    return done[0]


@contextmanager
def panics_unsaid() -> Iterator[None]:
    """Keep from standard error what Rust writes there before it raises a panic; all else comes a bit later.

    Rust writes to the descriptor itself. Where several threads are here at once the first does it for all.
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
