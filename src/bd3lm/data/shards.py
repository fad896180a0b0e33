"""Token shards on disk: their format, their origin, and reading them without loading them whole.

For each split a folder holds

    train-00000.bin           token ids, raw little-endian uint16 or uint32, depending on the vocabulary
    train-00000.lengths.npy   the length in tokens of each document of that shard, without its BOS and EOS
    train-00000.answers       for conversations: one bit per token, 1 if it belongs to an answer

It also holds the tokenizer (tokenizer.json, tokenizer_config.json) and meta.json: the counts and the sha256
of every shard, and the fingerprints of the tokenizer and of the source. A shard ends where a document ends.
meta.json is written last, after each shard, so it never names an incomplete file; `prepare` resumes from it.

A folder may come from anywhere, so everything in meta.json that can be checked is checked: its counts must
agree with each other and with the files, the files must have bare names, and each shard must match its sha256
when it is first read (`VerifiedFile`).
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bd3lm.data.meta import Meta, Shard, Split, dumped, on_disk
from bd3lm.data.tokenizer_files import saved_tokenizer
from bd3lm.data.tokenizers import Tokenizer
from bd3lm.io.files import local_path
from bd3lm.io.verified import VerifiedFile

_LONG = 2.0  # seconds


class TokenShards:
    """A finished folder of shards. Opening it reads only meta.json; each shard is checked when it is first
    read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_path(folder)
        self.meta = Meta.read(self.folder)
        if not self.meta.complete:
            raise ValueError(
                f"the preparation of {self.folder} was interrupted: prepare it again with the same inputs "
                "to resume"
            )
        self._open: dict[str, VerifiedFile] = {}
        self._starts = {
            name: np.cumsum([0, *(shard.tokens for shard in split.shards)])
            for name, split in self.meta.splits.items()
        }

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits."""
        return self.meta.inputs.splits

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer saved next to the shards."""
        tokenizer = saved_tokenizer(self.folder)
        if tokenizer is None:
            raise FileNotFoundError(
                f"the tokenizer of the shards in {self.folder} is missing: prepare the folder again, which "
                "restores it"
            )
        self.require_tokenizer(tokenizer)
        return tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the inputs and the output: equal for the same tokens from the same source."""
        meta = replace(self.meta, inputs=replace(self.meta.inputs, source=""))
        return hashlib.sha256(dumped(meta)).hexdigest()

    def require_tokenizer(self, tokenizer: Tokenizer | str) -> None:
        """Refuse a tokenizer, or the fingerprint of a tokenizer, that did not make these shards."""
        given = tokenizer if isinstance(tokenizer, str) else tokenizer.fingerprint
        made_with = self.meta.inputs.tokenizer_fingerprint
        if given != made_with:
            raise ValueError(
                f"the shards in {self.folder} were made with another tokenizer: {made_with[:12]}, "
                f"not {given[:12]}"
            )

    def split(self, name: str) -> Split:
        """The counts of a split."""
        if name not in self.meta.splits:
            raise ValueError(f"split must be one of {', '.join(self.splits)} for {self.folder}, got {name!r}")
        return self.meta.splits[name]

    def read(self, split: str, start: int, stop: int) -> NDArray[Any]:
        """Tokens start..stop of a split, across shards."""
        return self._across(split, start, stop, self._read, np.dtype(on_disk(self.meta.dtype)))

    def answers(self, split: str, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of these tokens belong to answers, in conversations."""
        if self.meta.inputs.chat is None:
            raise ValueError(f"the shards in {self.folder} hold texts, which have no answers")
        return self._across(split, start, stop, self._read_answers, np.dtype(np.bool_))

    def _across(
        self,
        split: str,
        start: int,
        stop: int,
        read: Callable[[Shard, int, int], NDArray[Any]],
        kind: "np.dtype[Any]",
    ) -> NDArray[Any]:
        total = self.split(split).tokens
        if not 0 <= start <= stop <= total:
            raise IndexError(f"tokens {start}..{stop} are not within the {total} of split {split!r}")
        starts = self._starts[split]
        pieces = []
        i = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(starts[i + 1]))
            shard = self.meta.splits[split].shards[i]
            pieces.append(read(shard, start - int(starts[i]), end - int(starts[i])))
            start, i = end, i + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, kind)

    def lengths(self, split: str) -> NDArray[np.uint32]:
        """How many tokens the text of each document has, in order."""
        around, shards = self.meta.inputs.around_documents, self.split(split).shards
        return np.concatenate([load_lengths(self.folder, shard, around) for shard in shards])

    def check(self, say: Callable[[str], object] = lambda line: None) -> None:
        """Check that all shards are whole, before hours of work with them. If this takes long, `say` reports
        it."""
        started, said = time.monotonic(), False
        for name in self.splits:
            for shard in self.meta.splits[name].shards:
                if not said and time.monotonic() - started > _LONG:
                    say(f"checking that the shards in {self.folder} are whole; later starts can skip this")
                    said = True
                self._opened(shard)
                if self.meta.inputs.chat is not None:
                    self._opened_answers(shard)

    def _read_answers(self, shard: Shard, start: int, stop: int) -> NDArray[np.bool_]:
        file, first = self._opened_answers(shard), start // 8
        try:
            data = file.read(first, -(-stop // 8))
        except ValueError as error:
            raise _restorable(error) from None
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[start - 8 * first : stop - 8 * first].astype(np.bool_)

    def _opened_answers(self, shard: Shard) -> VerifiedFile:
        if shard.answers_file not in self._open:
            self._open[shard.answers_file] = open_answers(self.folder, shard)
        return self._open[shard.answers_file]

    def _read(self, shard: Shard, start: int, stop: int) -> NDArray[Any]:
        kind, file = on_disk(self.meta.dtype), self._opened(shard)
        try:
            found = file.read(start * kind.itemsize, stop * kind.itemsize)
        except ValueError as error:
            raise _restorable(error) from None
        return np.frombuffer(found, kind)

    def _opened(self, shard: Shard) -> VerifiedFile:
        if shard.file not in self._open:
            self._open[shard.file] = open_shard(self.folder, shard, self.meta)
        return self._open[shard.file]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenShards, (self.folder,)  # open files stay in their process


def open_shard(folder: Path, shard: Shard, meta: Meta, *, anew: bool = False) -> VerifiedFile:
    """A shard that matches its sha256 and has only tokens of the vocabulary. `anew` ignores earlier
    checks."""
    path, kind, size = folder / shard.file, on_disk(meta.dtype), meta.inputs.vocab_size

    def inspect(piece: bytes) -> None:
        most = np.frombuffer(piece, kind).max(initial=0)
        if most >= size:
            raise ValueError(f"{path} is damaged: it has token {most}, but the vocabulary ends at {size - 1}")

    try:
        return VerifiedFile(
            path, size=shard.tokens * kind.itemsize, digest=shard.sha256, inspect=inspect, anew=anew
        )
    except FileNotFoundError:
        raise FileNotFoundError(f"shard {path} is missing: prepare the folder again to restore it") from None
    except ValueError as error:
        raise _restorable(error) from None


def open_answers(folder: Path, shard: Shard, *, anew: bool = False) -> VerifiedFile:
    """One bit per token of a shard: whether it belongs to an answer."""
    path = folder / shard.answers_file
    try:
        size = -(-shard.tokens // 8)
        return VerifiedFile(path, size=size, digest=shard.answers_sha256 or "", anew=anew)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: prepare the folder again to restore it") from None
    except ValueError as error:
        raise _restorable(error) from None


def _restorable(error: ValueError) -> ValueError:
    return ValueError(f"shard {error}; prepare the folder again to restore it")


def load_lengths(folder: Path, shard: Shard, around: int) -> NDArray[np.uint32]:
    """The lengths of a shard's documents.

    Together with the `around` extra tokens per document they must add up to the tokens of the shard.
    """
    path = folder / shard.lengths_file
    try:
        lengths = _read_lengths(path, shard.documents)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: prepare the folder again to restore it") from None
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header as Python, which may raise anything
        raise ValueError(f"{path} is damaged: {error}; prepare the folder again") from error
    tokens = int(lengths.sum(dtype=np.uint64)) + around * shard.documents
    if tokens != shard.tokens:
        raise ValueError(
            f"{path} is damaged: its lengths add up to {tokens} tokens, not {shard.tokens}; prepare the "
            "folder again"
        )
    return lengths


def _read_lengths(path: Path, documents: int) -> NDArray[np.uint32]:
    """Read without numpy, which would allocate whatever the header claims before noticing missing data."""
    if not path.is_file():  # opening a pipe would wait for its writer
        raise FileNotFoundError(path)
    with open(path, "rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("its version is not 1.0")
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
        if kind != on_disk("uint32") or len(shape) != 1:
            raise ValueError(f"it is an array {shape} of {kind}")
        here = (os.fstat(file.fileno()).st_size - file.tell()) // kind.itemsize
        if not shape == (documents,) == (here,):
            raise ValueError(f"it has {min(shape[0], here)} lengths for {documents} documents")
        return np.fromfile(file, kind, documents).astype(np.uint32)
