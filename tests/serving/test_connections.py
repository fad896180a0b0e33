"""Clients of which nothing comes: their connections are closed, and those of others are not."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from bd3lm.serving.server import Connection

PATIENCE = 0.6
HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n"


class Impatient(Connection):
    patience = PATIENCE


async def slow_echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body of a request, once it is whole and a while has passed."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await asyncio.sleep(2 * PATIENCE)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(slow_echo, http=Impatient, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        yield listening.getsockname()
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize("sent", [b"", b"G", HEAD[:-1]], ids=["nothing", "one byte", "half a head"])
def test_a_request_that_does_not_come_is_waited_for_a_while(address: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(address) as wire:
        wire.settimeout(10)
        began = time.monotonic()
        wire.sendall(sent)
        assert wire.recv(100) == b""
        assert 0.9 * PATIENCE < time.monotonic() - began < 5 * PATIENCE


def test_a_head_that_comes_drop_by_drop_is_not_waited_for_longer(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as wire, contextlib.suppress(OSError):
        began = time.monotonic()
        while time.monotonic() - began < 5 * PATIENCE:
            wire.sendall(b"a")
            time.sleep(PATIENCE / 10)
        pytest.fail("the connection was never closed")


def test_who_waits_for_an_answer_is_not_cut_off(address: tuple[str, int]) -> None:
    """Nor is who asks again over the same connection."""
    with httpx.Client(base_url="http://{}:{}".format(*address), timeout=10) as http:
        assert [http.post("/", content=body).text for body in ("ab", "cd")] == ["ab", "cd"]


def test_half_a_second_request_is_not_waited_for_either(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as wire:
        wire.settimeout(10)
        wire.sendall(HEAD + b"ab")
        answer = b""
        while not answer.endswith(b"ab"):
            answer += wire.recv(1000)
        wire.sendall(HEAD[:20])
        assert wire.recv(100) == b""
