"""Helpers of this room's tests: corpora in memory, other interpreters, folders as bytes."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bd3lm.data import Corpus
from bd3lm.data.corpus import digest

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "a",
    "block",
    "mask",
    "denoise",
    "ünïcode",
    "語",
    "naïve",
    "🙂",
    "noise\n",
    "x\ty",
]


class ListCorpus(Corpus):
    """Documents in memory. It is in a module of its own, so a spawned process can import it."""

    name = "list"

    def __init__(self, documents: Mapping[str, Sequence[str]]) -> None:
        self._documents = documents

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._documents)

    @property
    def fingerprint(self) -> str:
        return digest({split: list(texts) for split, texts in self._documents.items()})

    def documents(self, split: str) -> Iterator[str]:
        self.check_split(split)
        return iter(self._documents[split])


def random_texts(count: int, *, seed: int = 0, words: int = 30) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, 2 * words))) for _ in range(count)]


def small_corpus(train: int = 60, valid: int = 9, *, seed: int = 0) -> ListCorpus:
    texts = random_texts(train + valid, seed=seed)
    return ListCorpus({"train": texts[:train], "valid": texts[train:]})


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of every file of a folder, by name."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def start_python(program: str, *arguments: object) -> "subprocess.Popen[str]":
    """Another interpreter that finds the same modules, whatever folder the tests run in."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def run_python(program: str, *arguments: object) -> str:
    """The output of a program."""
    process = start_python(program, *arguments)
    printed, _ = process.communicate()
    assert process.returncode == 0
    return printed


class SlowCorpus(ListCorpus):
    """The same documents, one at a time with pauses, so a reader can be interrupted."""

    def __init__(self, documents: Mapping[str, Sequence[str]], *, seconds: float) -> None:
        super().__init__(documents)
        self._seconds = seconds

    def documents(self, split: str) -> Iterator[str]:
        for document in super().documents(split):
            time.sleep(self._seconds)
            yield document


class EndlessCorpus(Corpus):
    """Documents made on demand, about `size` characters in total."""

    name = "endless"
    splits = ("train",)
    fingerprint = "endless"

    def __init__(self, size: int) -> None:
        self._size = size

    def documents(self, split: str) -> Iterator[str]:
        for i in range(self._size // 1000):
            yield f"{i:010d}" * 100


def die(_: object) -> None:
    """A worker that runs out of memory."""
    os._exit(3)
