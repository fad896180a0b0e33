"""The life of a server: its address, its engine, and what signals do."""

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bd3lm.io.terminal import say
from bd3lm.serving.app import build_app
from bd3lm.serving.engine import RemoteEngine
from bd3lm.serving.limits import PATIENCE, Limits
from bd3lm.serving.worker import Served

_SLACK = 3  # seconds after the grace period to answer those whose texts are not finished


def serve(
    served: Served,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    origins: Sequence[str] = (),
    limits: Limits | None = None,
    log: bool = False,
    notes: Callable[[str], None] = say,
) -> None:
    """Serve a model until a signal ends it. Running requests then have `limits.grace` seconds.

    `log` writes a line for each request, without any of its text.
    """
    limits = limits or Limits()
    listening = _listening(host, port)
    with listening:
        asyncio.run(_serve(served, listening, key, origins, limits, log, notes))


def _listening(host: str, port: int) -> socket.socket:
    """Listen before the model is loaded, so that nobody waits only to learn that the address is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"host and port must be an address to listen at, got {host}:{port}: {why}") from None


async def _serve(
    served: Served,
    listening: socket.socket,
    key: str | None,
    origins: Sequence[str],
    limits: Limits,
    log: bool,
    notes: Callable[[str], None],
) -> None:
    engine = RemoteEngine(served, limits, notes=notes)
    try:
        await engine.start()
        host, port = listening.getsockname()[:2]
        notes(
            f"{served.name} is served at http://{f'[{host}]' if ':' in host else host}:{port}; Ctrl-C ends it"
        )
        config = uvicorn.Config(
            build_app(engine, key=key, origins=origins),
            log_level="info" if log else "warning",
            access_log=log,
            timeout_graceful_shutdown=math.ceil(limits.grace) + _SLACK,
            server_header=False,
            http=Connection,
            h11_max_incomplete_event_size=64 * 1024,
        )
        await _Server(config, engine, notes).serve(sockets=[listening])
    finally:
        await engine.close()


class Connection(H11Protocol):
    """Closes connections on which no request starts, or whose headers never end."""

    patience: ClassVar[float] = PATIENCE
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def _wait(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # the app limits the body's time
            self._wait_no_more()
        elif self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(self.patience, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _Server(uvicorn.Server):
    """Exits normally on a signal instead of dying from it: a stopped service has not failed."""

    def __init__(self, config: uvicorn.Config, engine: RemoteEngine, notes: Callable[[str], None]) -> None:
        super().__init__(config)
        self._engine, self._notes = engine, notes

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    def _stop(self) -> None:
        loop = asyncio.get_running_loop()
        if self.should_exit:  # the second signal
            self._engine.give_up("the server is stopping")
            loop.call_later(1.0, self._end_at_once)  # waiting clients have been answered by then
            return
        self.should_exit = True
        loop.call_later(
            self._engine.limits.grace,
            self._engine.give_up,
            "the server is stopping, and the text was not finished",
        )
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            self._notes("stopping: finishing running requests first")

    def _end_at_once(self) -> None:
        self.force_exit = True
