"""Check all files of a folder of shards against its meta.json, and report every problem."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bd3lm.data.meta import Meta, Shard
from bd3lm.data.shards import load_lengths, open_answers, open_shard
from bd3lm.data.tokenizer_files import saved_tokenizer
from bd3lm.data.tokenizers import TOKENIZER_FILE
from bd3lm.io.files import local_path


@dataclass(frozen=True)
class Verdict:
    """The result for a shard with its document lengths, for the tokenizer, or for an incomplete split."""

    file: str
    split: str | None = None
    documents: int | None = None
    tokens: int | None = None
    problem: str | None = None
    """What is wrong; None if nothing is."""


def count_verdicts(folder: str | Path) -> int:
    """How many verdicts there will be, for a progress bar."""
    return sum(1 for _ in _checks(local_path(folder)))


def verify(folder: str | Path) -> Iterator[Verdict]:
    """Check each file in turn, read whole even if it was checked before. Raises a ValueError if meta.json is
    not valid."""
    return (check() for check in _checks(local_path(folder)))


def _checks(folder: Path) -> Iterator[Callable[[], Verdict]]:
    meta = Meta.read(folder)
    for name in meta.inputs.splits:
        split = meta.splits.get(name)
        for shard in split.shards if split else ():
            yield partial(_of_shard, folder, meta, name, shard)
        if split is None or not split.complete:
            yield partial(Verdict, "", name, problem=f"split {name} was not prepared completely")
    yield partial(_of_tokenizer, folder, meta)


def _of_shard(folder: Path, meta: Meta, split: str, shard: Shard) -> Verdict:
    def look() -> None:
        open_shard(folder, shard, meta, anew=True)
        load_lengths(folder, shard, meta.inputs.around_documents)
        if meta.inputs.chat is not None:
            open_answers(folder, shard, anew=True)

    return Verdict(shard.file, split, shard.documents, shard.tokens, _problem(look))


def _of_tokenizer(folder: Path, meta: Meta) -> Verdict:
    def look() -> None:
        tokenizer = saved_tokenizer(folder)
        if tokenizer is None:
            raise FileNotFoundError(f"{folder / TOKENIZER_FILE} is missing")
        if tokenizer.fingerprint != meta.inputs.tokenizer_fingerprint:
            raise ValueError(f"{folder / TOKENIZER_FILE} is not the tokenizer that made the shards")

    return Verdict(TOKENIZER_FILE, problem=_problem(look))


def _problem(look: Callable[[], Any]) -> str | None:
    try:
        look()
    except (ValueError, OSError) as error:
        return str(error)
    return None
