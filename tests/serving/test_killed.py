"""kill -9 while many are served: of the process that holds the model, and of the server."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from bd3lm.lm import LanguageModel
from tests.lm import BYTES
from tests.serving import Server, serving, small_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLIENTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "small"
    small_model().save_pretrained(path)
    return path


def test_when_the_engine_is_killed_everybody_is_told_and_served_again(folder: Path) -> None:
    """Half of the clients stream, half wait for the whole text; two of three still wait for a seat."""
    with serving(folder, "--seats", "8") as server:
        for died in range(1, 3):
            engine = server.engine
            shared = shared_files([engine])
            answers = asyncio.run(
                asked_by_many(server, lambda number=engine: os.kill(number, signal.SIGKILL))
            )
            assert len(answers) == CLIENTS
            for status, body in answers:
                assert set(body["error"]) == {"message", "type", "param", "code"}
                assert body["error"]["type"] == "server_error"
                assert "died with exit code -9" in body["error"]["message"]
                assert status in (200, 503)  # a stream had begun
            with server.http as http:
                server.until(60, lambda: http.get("/health").status_code == 200)
                counts = http.get("/metrics").text.splitlines()
            assert f"bd3lm_engine_starts {died + 1}.0" in counts
            assert "bd3lm_texts_under_way 0.0" in counts
            assert not is_alive(engine)
            assert not any(each.exists() for each in shared)
            right(server, folder)
        server.stop()
    assert server.process.returncode == 0


def test_while_the_engine_is_away_health_says_so_and_requests_are_refused(folder: Path) -> None:
    with serving(folder) as server, server.http as http:
        os.kill(server.engine, signal.SIGKILL)
        server.until(10, lambda: http.get("/health").status_code == 503)
        assert "died with exit code -9; it is being restarted" in http.get("/health").json()["why"]
        refused = server.post(prompt="ab", max_tokens=2)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "server_error"
        server.until(60, lambda: http.get("/health").status_code == 200)
        right(server, folder)


def test_a_server_that_is_killed_leaves_nothing_and_starts_again_where_it_was(folder: Path) -> None:
    port = free_port()
    for _ in range(2):
        with serving(folder, "--port", str(port)) as server:
            assert server.url.endswith(f":{port}")
            right(server, folder)
            family = [server.process.pid, *descendants(server.process.pid)]
            assert len(family) > 1
            shared = shared_files(family)
            answers = asyncio.run(asked_by_many(server, server.process.kill))
            assert all(status is None for status, _ in answers)  # the connection broke
            server.process.wait(timeout=20)
            server.until(20, lambda family=family: not any(map(is_alive, family)))
        assert not any(each.exists() for each in shared)


async def asked_by_many(server: Server, then: Any) -> list[tuple[int | None, dict[str, Any]]]:
    """What clients hear whose texts are under way when something happens: a status, and what came last."""

    async def ask(http: httpx.AsyncClient, number: int) -> tuple[int | None, dict[str, Any]]:
        endless = {"law": "causal", "logit_bias": {str(BYTES.eos_id): -100}}
        body = {"prompt": "ab", "max_tokens": 3000, "seed": number, "stream": number % 2 == 0, **endless}
        try:
            answer = await http.post("/v1/completions", json=body)
        except httpx.TransportError:
            return None, {}
        if number % 2:
            return answer.status_code, answer.json()
        return answer.status_code, json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))

    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        asked = [asyncio.create_task(ask(http, number)) for number in range(CLIENTS)]
        end = time.monotonic() + 30
        while await asyncio.to_thread(server.texts) < CLIENTS:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        then()
        return await asyncio.gather(*asked)


def right(server: Server, folder: Path) -> None:
    (expected,) = LanguageModel.from_pretrained(folder, device="cpu").generate("ab", seed=3, max_new_tokens=9)
    answer = server.post(prompt="ab", max_tokens=9, seed=3)
    assert answer.json()["choices"][0]["text"] == expected.completion


def shared_files(numbers: Sequence[int]) -> set[Path]:
    """What processes use that has a name and is no ordinary file: memory that they share, and sockets."""
    used = set()
    for number in numbers:
        links = [os.readlink(each) for each in Path(f"/proc/{number}/fd").iterdir()]
        mapped = [
            line.split(maxsplit=5)[5:] for line in Path(f"/proc/{number}/maps").read_text().splitlines()
        ]
        used |= {Path(name) for name in links + [name for each in mapped for name in each]}
    return {each for each in used if each.is_relative_to("/dev/shm") or (each.exists() and each.is_socket())}


def descendants(number: int) -> Iterator[int]:
    for task in Path(f"/proc/{number}/task").glob("*/children"):
        for child in task.read_text().split():
            yield int(child)
            yield from descendants(int(child))


def is_alive(number: int) -> bool:
    """A zombie is dead: whoever started it has not yet asked."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
