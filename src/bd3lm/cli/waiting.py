"""While torch loads, which takes seconds: prints a line on a terminal, and lets signals end the process."""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, ModuleType

from bd3lm.io.signals import end_at_once
from bd3lm.io.terminal import say

_SLOW = "torch"


@contextmanager
def loading_told() -> Iterator[None]:
    """Within this context, the first import of torch prints the line, whoever imports it."""
    if _SLOW in sys.modules:
        yield
        return
    herald = _Herald()
    sys.meta_path.insert(0, herald)
    try:
        yield
    finally:
        with suppress(ValueError):  # it has removed itself already
            sys.meta_path.remove(herald)


class _Herald(MetaPathFinder):
    """Sees every import first. For torch it asks the other finders, once, and wraps the loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _SLOW:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            loader, load = spec.loader, spec.loader.exec_module

            def told(module: ModuleType) -> None:
                if sys.stderr.isatty():
                    say(f"loading {_SLOW} ...", to=sys.stderr)
                with _signals_end_at_once():
                    load(module)

            setattr(loader, "exec_module", told)  # noqa: B010 - the loader stays the same otherwise
        return spec


@contextmanager
def _signals_end_at_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM print their line and end the process, which has nothing to clean up yet.

    Their exceptions would get lost in torch's modules, or come out as other exceptions.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):  # otherwise it is ignored, or ends the process anyway
                before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    end_at_once(number)
