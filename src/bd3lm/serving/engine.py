"""The server's side of the process that holds the model: it sends requests and receives results.

If that process dies, its texts are lost, their clients get an error, and the process is started again.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from bd3lm.io.signals import unheard
from bd3lm.serving.limits import Limits
from bd3lm.serving.link import Line, receive, send
from bd3lm.serving.worker import Served, work

_QUICK = 10.0  # seconds; a process that dies sooner is started again after a longer and longer wait
_LONGEST_WAIT = 30.0
_LOOK = 1.0  # seconds between two checks whether a waiting client is still there


class Unusable(ValueError):
    """The model cannot be served."""


class Full(Exception):
    """Too many texts are waiting."""


class Gone(Exception):
    """The process with the model died, or has not loaded it yet."""


class ClientGone(Exception):
    """The client no longer waits for the answer."""


@dataclass
class State:
    """What the server knows about the engine."""

    model: Line | None = None
    """The description that the model's process sent, while it runs."""
    why: str = "the model is being loaded"
    running: int = 0
    waiting: int = 0
    starts: int = 0


@dataclass
class Group:
    """The texts of one request."""

    engine: "RemoteEngine"
    numbers: list[int]
    lines: "asyncio.Queue[tuple[int, Line]]" = field(default_factory=asyncio.Queue)
    open: set[int] = field(default_factory=set)

    async def told(
        self, seconds: float, is_gone: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[tuple[int, Line]]:
        """The lines about these texts, each with the text's place in the request, until all texts are done.

        Raises TimeoutError after `seconds` in total, and `ClientGone` once the client is gone.
        """
        looked = time.monotonic()
        deadline = looked + seconds
        while self.open or not self.lines.empty():
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError
            if now - looked >= _LOOK:
                looked = now
                if await is_gone():
                    raise ClientGone
            try:
                line = await asyncio.wait_for(self.lines.get(), min(deadline - now, _LOOK))
            except TimeoutError:
                continue
            yield line

    def leave(self) -> None:
        """Stop writing the texts that are not done."""
        self.engine.leave(self)


class RemoteEngine:
    """Texts written by a separate process. All methods run on one event loop."""

    def __init__(
        self,
        served: Served,
        limits: Limits,
        *,
        work: Callable[..., None] = work,
        notes: Callable[[str], None],
    ) -> None:
        self.served, self.limits, self.state = served, limits, State()
        self._work, self._notes = work, notes
        self._numbers = itertools.count()
        self._groups: dict[int, tuple[int, Group]] = {}
        self._process: Any = None
        self._outbox: queue.SimpleQueue[list[Line] | None] = queue.SimpleQueue()
        self._closing = False
        self._watching: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        """How many texts are waiting or being written."""
        return len(self._groups)

    # --- the process ---

    async def start(self) -> None:
        """Start the process and wait until it has loaded the model; `Unusable` if it cannot."""
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._keep_alive(first))
        await first

    async def close(self) -> None:
        """Drop everything, including texts being written."""
        self._closing = True
        self._outbox.put(None)
        try:
            if self._watching is not None:
                self._watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._watching
        finally:
            self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.join(1.0)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

    async def _keep_alive(self, first: "asyncio.Future[None]") -> None:
        wait = 1.0
        while not self._closing:
            began = time.monotonic()
            why = await self._run(first)
            if self._closing:
                return
            if not first.done():
                first.set_exception(Unusable(why))
                return
            self.state.model, self.state.why = None, f"{why}; it is being restarted"
            self._lose(why)
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                self._notes(self.state.why)
            wait = 1.0 if time.monotonic() - began > _QUICK else min(2 * wait, _LONGEST_WAIT)
            await asyncio.sleep(wait)

    async def _run(self, first: "asyncio.Future[None]") -> str:
        """Start the process and handle its lines until it ends. Returns why it ended."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=self._work, args=(theirs, self.served, self.limits), name="bd3lm-engine", daemon=True
        )

        def start() -> None:
            with unheard(signal.SIGINT, signal.SIGTERM):  # this process handles them
                process.start()

        await asyncio.to_thread(start)
        self._process = process
        self.state.starts += 1
        theirs.close()
        outbox = self._outbox = queue.SimpleQueue()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def end(why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        def read() -> None:
            why = ""
            try:
                while True:
                    lines = receive(ours)
                    if lines and lines[0]["is"] == "unusable":
                        why = lines[0]["why"]
                        break
                    loop.call_soon_threadsafe(self._take, lines, first)
            except (EOFError, OSError):
                pass
            outbox.put(None)
            process.join(5.0)
            why = why or f"the process that holds the model died with exit code {process.exitcode}"
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(end, why)

        threads = [
            threading.Thread(target=work, daemon=True) for work in (read, lambda: _send_all(ours, outbox))
        ]
        for thread in threads:
            thread.start()
        try:
            return await ended
        finally:
            outbox.put(None)

    def _take(self, lines: Sequence[Line], first: "asyncio.Future[None]") -> None:
        for line in lines:
            match line["is"]:
                case "ready":
                    self.state.model = line
                    if not first.done():
                        first.set_result(None)
                case "load":
                    self.state.running, self.state.waiting = line["running"], line["waiting"]
                case kind:
                    self._give(line, is_last=kind in ("done", "failed", "refused"))

    def _give(self, line: Line, *, is_last: bool) -> None:
        found = self._groups.get(line["text"])
        if found is None:
            return  # its request has left
        index, group = found
        if is_last:
            del self._groups[line["text"]]
            group.open.discard(line["text"])
        group.lines.put_nowait((index, line))

    def give_up(self, why: str) -> None:
        """Drop all texts, and tell their clients why."""
        self._outbox.put([{"do": "leave", "text": number} for number in self._groups])
        self._lose(why)

    def _lose(self, why: str) -> None:
        self.state.running = self.state.waiting = 0
        for number in list(self._groups):
            self._give({"is": "lost", "text": number, "why": why}, is_last=True)

    # --- texts ---

    def write(self, asks: Sequence[Line]) -> Group:
        """Have texts written. Raises `Full` or `Gone` if that is not possible now."""
        if self.state.model is None:
            raise Gone(self.state.why)
        most = self.limits.seats + self.limits.queue
        if len(self._groups) + len(asks) > most:
            raise Full(
                f"{len(self._groups):,} texts are being written or waiting, and at most {most:,} may be; try "
                "again later"
            )
        group = Group(self, [next(self._numbers) for _ in asks])
        group.open.update(group.numbers)
        for index, number in enumerate(group.numbers):
            self._groups[number] = index, group
        self._outbox.put(
            [{**ask, "do": "write", "text": number} for ask, number in zip(asks, group.numbers, strict=True)]
        )
        return group

    def leave(self, group: Group) -> None:
        left = [number for number in group.numbers if self._groups.pop(number, None) is not None]
        group.open.clear()
        if left:
            self._outbox.put([{"do": "leave", "text": number} for number in left])


def _send_all(connection: Connection, outbox: "queue.SimpleQueue[list[Line] | None]") -> None:
    """Send from a thread: a process in the middle of a pass reads nothing, and the event loop must not
    wait."""
    with contextlib.suppress(OSError):
        while (lines := outbox.get()) is not None:
            send(connection, lines)
        send(connection, [{"do": "end"}])
