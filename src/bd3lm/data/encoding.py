"""Turn documents into tokens, in order, with one process or several, and little in memory at a time.

The order and the tokens do not depend on the number of workers. Workers are processes with one thread each:
the tokenizer's own threads share one interpreter, which then becomes the limit.
"""

import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.meta import DType, on_disk
from bd3lm.data.tokenizers import Tokenizer
from bd3lm.io.signals import unheard

BATCH_CHARACTERS = 1 << 19
BATCHES_AHEAD = 2  # per worker


@dataclass(frozen=True)
class Encoded:
    """The tokens of some documents, one after the other, including BOS and EOS."""

    tokens: NDArray[Any]
    ends: NDArray[np.int64]  # where each document ends among the tokens
    lengths: NDArray[np.uint32]  # length of each document's text, in tokens
    text_bytes: NDArray[np.int64]  # size of each document's text
    answers: NDArray[np.bool_] | None = None  # in conversations, which of the tokens belong to answers

    def split_at(self, documents: int) -> tuple["Encoded", "Encoded"]:
        """The first documents, and the rest."""
        cut = int(self.ends[documents - 1]) if documents else 0
        first, rest = slice(None, documents), slice(documents, None)
        before, after = (None, None) if self.answers is None else (self.answers[:cut], self.answers[cut:])
        return (
            Encoded(self.tokens[:cut], self.ends[first], self.lengths[first], self.text_bytes[first], before),
            Encoded(
                self.tokens[cut:], self.ends[rest] - cut, self.lengths[rest], self.text_bytes[rest], after
            ),
        )


@dataclass(frozen=True)
class Encoder:
    """Texts in, tokens out, with `before` and `after` around each document."""

    tokenizer: Tokenizer
    dtype: DType
    before: tuple[int, ...]
    after: tuple[int, ...]
    holds_ids: bool = False
    """Whether the texts are already token ids, as JSON lists."""

    def __call__(self, texts: list[str]) -> Encoded:
        ids = list(map(self._ids, texts)) if self.holds_ids else self.tokenizer.encode_batch(texts)
        lengths = np.fromiter(map(len, ids), np.uint32, len(ids))
        ends = np.cumsum(lengths.astype(np.int64) + len(self.before) + len(self.after))
        framed = chain.from_iterable(chain(self.before, document, self.after) for document in ids)
        return Encoded(
            np.fromiter(framed, on_disk(self.dtype), int(ends[-1])),
            ends,
            lengths,
            np.fromiter(map(self._bytes, texts, ids), np.int64, len(texts)),
        )

    def _ids(self, document: str) -> list[int]:
        ids = json.loads(document)
        most = self.tokenizer.vocab_size
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < most for each in ids):
            raise ValueError(f"a document must be a list of token ids below {most:,}, got {document:.80}")
        if self.tokenizer.mask_id in ids:
            raise ValueError(
                f"a document must not hold the mask token {self.tokenizer.mask_id}, got {document:.80}"
            )
        return ids

    def _bytes(self, text: str, ids: list[int]) -> int:
        """The size of a document's text in bytes."""
        if self.holds_ids:
            return self.tokenizer.text_bytes(np.array(ids, np.int64))
        return len(text.encode())


DocumentEncoder = Callable[[list[str]], Encoded]
"""Turns some documents into tokens. It must be picklable, to reach other processes."""
Encode = Callable[[Iterable[str]], Iterator[Encoded]]


@contextmanager
def encoding(encoder: DocumentEncoder, workers: int) -> Iterator[Encode]:
    """A context that gives a function from documents to tokens, both streamed. Its processes end with the
    context."""
    with _one_thread_each():
        if workers == 1:
            yield partial(_encode_here, encoder)
            return
        # Not fork: this process has threads, from torch and the tokenizer, which a fork would leave half
        # copied.
        pool = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(encoder,)
        )
        try:
            # Find out before the queue is full that no process can start, as in a script without a guard:
            # with Python 3.12 a pool was seen to hang in that case.
            with unheard(signal.SIGINT):
                first = [pool.submit(int) for _ in range(workers)]
            for started in first:
                started.result()
            yield partial(_encode_in, pool, BATCHES_AHEAD * workers)
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a worker process ended before its work was done: it ran out of memory, was killed, or the "
                'script that called prepare lacks `if __name__ == "__main__":`; finished shards are kept'
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _encode_here(encoder: DocumentEncoder, documents: Iterable[str]) -> Iterator[Encoded]:
    return map(encoder, _batches(documents))


def _encode_in(pool: ProcessPoolExecutor, ahead: int, documents: Iterable[str]) -> Iterator[Encoded]:
    waiting: deque[Future[Encoded]] = deque()
    for batch in _batches(documents):
        waiting.append(pool.submit(_encode_in_worker, batch))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in non-empty batches of about equal work."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_encoder: DocumentEncoder | None = None  # of this worker process


def _start_worker(encoder: DocumentEncoder) -> None:
    global _encoder
    _encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End with the parent: if the parent was killed, this worker would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> Encoded:
    assert _encoder is not None
    return _encoder(texts)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Turn off the tokenizer's own threads, here and in the workers: `workers` says how many cores are
    used."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
