"""Clients that ask a server at once, for a while, some of whom leave in the middle."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bd3lm.lm import LanguageModel
from tests.serving import Server

_WORDS = [
    "the",
    "river",
    "of",
    "a",
    "small",
    "town",
    "in",
    "which",
    "they",
    "had",
    "been",
    "before",
    "it",
    "was",
    "written",
    "down",
]


class Load:
    """What clients asked, and what came of it."""

    def __init__(self, url: str, *, clients: int, seconds: float, leaving: float = 1 / 3) -> None:
        self.url, self.clients, self.seconds, self.leaving = url, clients, seconds, leaving
        self.first: list[float] = []
        self.between: list[float] = []
        self.whole: list[float] = []
        self.done: list[tuple[dict[str, Any], str]] = []
        self.tokens = self.left = self.refused = 0

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self.clients + 8)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            end = time.monotonic() + self.seconds
            await asyncio.gather(*(self._client(http, each, end) for each in range(self.clients)))

    async def _client(self, http: httpx.AsyncClient, number: int, end: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            body: dict[str, Any] = {
                "prompt": " ".join(chance.choices(_WORDS, k=chance.randint(1, 20))),
                "max_tokens": chance.choice((8, 16, 32, 64, 128)),
                "temperature": chance.choice((0.7, 1.0)),
                "seed": chance.randrange(2**31),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            leaves_at = chance.random() * 3 if chance.random() < self.leaving else None
            await self._ask(http, body, leaves_at)

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, Any], leaves_at: float | None) -> None:
        began = last = time.monotonic()
        text = ""
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.refused += 1
                await asyncio.sleep(0.1)
                return
            async for line in answer.aiter_lines():
                now = time.monotonic()
                if leaves_at is not None and now - began > leaves_at:
                    self.left += 1
                    return
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                if chunk.get("usage"):
                    self.tokens += chunk["usage"]["completion_tokens"]
                for choice in chunk["choices"]:
                    (self.between if text else self.first).append(now - (last if text else began))
                    text += choice["text"]
                    last = now
        self.whole.append(time.monotonic() - began)
        self.done.append((body, text))


def compared(lm: LanguageModel, done: Sequence[tuple[dict[str, Any], str]], number: int) -> int:
    """How many of some texts are those of `generate`."""
    right = 0
    for body, text in random.Random(0).sample(done, min(number, len(done))):
        (expected,) = lm.generate(
            body["prompt"],
            seed=body["seed"],
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
        )
        right += text == expected.completion
    return right


def memory(server: Server) -> float:
    """MiB of both processes."""
    kilobytes = 0
    for number in (server.process.pid, server.engine):
        status = Path(f"/proc/{number}/status").read_text("utf-8")
        kilobytes += int(status.split("VmRSS:")[1].split()[0])
    return kilobytes / 1024


def percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cut = statistics.quantiles(values, n=20)
    return {"p50": round(cut[9], 4), "p95": round(cut[18], 4)}
