"""The process that holds the model, seen from the server."""

import asyncio
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from bd3lm.serving.engine import RemoteEngine, Unusable
from bd3lm.serving.limits import Limits
from bd3lm.serving.link import send
from bd3lm.serving.worker import Served, work


def tell_what_waits(connection: Connection, served: Served, limits: Limits) -> None:
    """Instead of a model: the signals that have waited since this process began."""
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    send(connection, [{"is": "unusable", "why": " ".join(sorted(each.name for each in waiting))}])


def load_nothing(connection: Connection, served: Served, limits: Limits) -> None:
    """Work, where an extra is missing."""
    import bd3lm.serving.worker as module

    def missing(served: Served) -> Any:
        raise ImportError("the file m.gguf needs gguf: pip install gguf")

    setattr(module, "_loaded", missing)  # noqa: B010
    work(connection, served, limits)


def said(of: Any) -> str:
    async def start() -> None:
        engine = RemoteEngine(Served("none", "none"), Limits(), work=of, notes=print)
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(Unusable) as caught:
        asyncio.run(start())
    return str(caught.value)


def test_ctrl_c_while_the_model_is_loaded_is_for_the_server_alone() -> None:
    """It reaches every process of a terminal; that which imports torch answered with its traceback."""
    assert said(tell_what_waits) == "SIGINT SIGTERM"


def test_a_model_that_needs_an_extra_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert said(load_nothing) == "the file m.gguf needs gguf: pip install gguf"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("grace", [-1.0, float("inf"), float("nan")])
def test_a_grace_without_end_is_refused(grace: float) -> None:
    with pytest.raises(ValueError, match=f"grace must be a number of seconds, at least 0, got {grace}"):
        Limits(grace=grace)
