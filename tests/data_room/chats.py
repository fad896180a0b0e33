"""Made-up conversations for tests, and files of them."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = [
    "red",
    "blue",
    "green",
    "cat",
    "dog",
    "sun",
    "moon",
    "tree",
    "river",
    "house",
    "bird",
    "fish",
    "ünï",
    "語",
    "🙂",
]


def chat(seed: int, *, answers: int | None = None, words: int = 12) -> dict[str, Any]:
    """A conversation with some turns."""
    chance = random.Random(seed)
    messages = []
    for _ in range(answers or chance.randint(1, 4)):
        for role in ("user", "assistant"):
            said = " ".join(chance.choices(WORDS, k=chance.randint(1, words)))
            messages.append({"role": role, "content": said})
    return {"messages": messages}


def chats(number: int, *, first: int = 0, **options: int) -> list[dict[str, Any]]:
    return [chat(first + index, **options) for index in range(number)]


def written(path: Path, rows: Sequence[Any]) -> Path:
    """A file of rows, compressed if its name says so."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
