"""Token shards on disk: what they look like, what they were made from, and reading them without loading them.

A folder holds, for each split,

    train-00000.bin           token ids, raw little-endian uint16 or uint32, whichever the vocabulary needs
    train-00000.lengths.npy   the length in tokens of each document of that shard, without its BOS and EOS
    train-00000.answers       of conversations: a bit for each token, 1 where it is of an answer

then the tokenizer (tokenizer.json, tokenizer_config.json) and meta.json: the counts and the sha256 of every
shard, and the fingerprints of the tokenizer and of the source. A shard ends where a document ends. meta.json
is written last, after each shard, so it never names a file that is not complete; `prepare` goes on from it.

A folder may come from anywhere, so meta.json is believed in nothing that can be checked: its counts agree
with each other and with the files, which have bare names, and a shard has its sha256 when it is first read
(`VerifiedFile`).
"""

import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from bd3lm.data.tokenizer_files import saved_tokenizer
from bd3lm.data.tokenizers import Tokenizer
from bd3lm.io.files import local_path, write_atomically
from bd3lm.io.verified import VerifiedFile

META_FILE = "meta.json"
DType = Literal["uint16", "uint32"]
Count = Annotated[int, Field(ge=0, le=1 << 60)]  # so that sums of offsets fit 64 bits
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]

_BARE_NAME = re.compile(r"[\w-][\w.-]*\.bin", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_META = 1 << 28  # bytes, about a million shards
_LONG = 2.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How conversations became tokens."""

    template: str | None
    """sha256 of the chat template; None for texts and their continuations."""
    answers: Literal["all", "last"]
    """Which answers of a conversation are learned."""
    begin: bool
    """Whether texts begin with BOS; a template writes its own."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that decides the tokens: equal inputs give equal shards, byte for byte."""

    tokenizer_fingerprint: str
    vocab_size: Annotated[int, Field(ge=1, le=1 << 32)]
    mask_id: TokenId
    eos_id: TokenId | None
    bos_id: TokenId | None
    source: str
    source_fingerprint: str
    eos_between_documents: bool
    bos_before_documents: bool
    splits: tuple[str, ...]
    shard_tokens: int
    chat: Chat | None = None
    """None where documents are texts."""

    def __post_init__(self) -> None:
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits must name at least one split, and none twice, got {self.splits}")
        for name in ("mask_id", "eos_id", "bos_id"):
            place = getattr(self, name)
            if place is not None and place >= self.vocab_size:
                raise ValueError(f"{name} must be below the vocab_size of {self.vocab_size}, got {place}")
        if (self.eos_between_documents and self.eos_id is None) or (
            self.bos_before_documents and self.bos_id is None
        ):
            raise ValueError("eos_id and bos_id must be there where documents begin or end with them")
        if self.chat is not None and self.around_documents:
            raise ValueError("a conversation must hold all of its tokens, got more around it")

    @property
    def around_documents(self) -> int:
        """Tokens of a document that are not of its text."""
        return self.eos_between_documents + self.bos_before_documents

    def differences(self, other: "Inputs") -> list[str]:
        """What `other` has that differs, for people; a source may change its name."""
        ours, theirs = (vars(inputs) for inputs in (self, other))
        changed = [key for key in ours if key not in ("source", "chat") and ours[key] != theirs[key]]
        return _chat_differences(self.chat, other.chat) + [
            self._other_source(other)
            if key == "source_fingerprint"
            else f"{key} {_short(ours[key])!r}, not {_short(theirs[key])!r}"
            for key in changed
        ]

    def _other_source(self, other: "Inputs") -> str:
        """A fingerprint tells people nothing; how the source was read may."""
        if self.source == other.source:
            return f"source {self.source!r}, whose text has changed since"
        return f"source {self.source!r}, not {other.source!r}"


def _chat_differences(ours: Chat | None, theirs: Chat | None) -> list[str]:
    if ours == theirs:
        return []
    if ours is None or theirs is None:
        return [f"{'text' if ours is None else 'conversations'}, not {'text' if theirs is None else 'those'}"]
    found = [
        f"{name} {before!r}, not {after!r}"
        for name in ("answers", "begin")
        if (before := getattr(ours, name)) != (after := getattr(theirs, name))
    ]
    return [*found, "another chat template"] if ours.template != theirs.template else found


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of tokens: whole documents."""

    file: str
    documents: Annotated[Count, Field(ge=1)]
    tokens: Count
    text_bytes: Count  # of their UTF-8 text: what bits per byte are counted against
    sha256: str
    answers_sha256: str | None = None
    """Of the bits beside it that say which tokens are of answers; None where documents are texts."""

    def __post_init__(self) -> None:
        if not _BARE_NAME.fullmatch(self.file):
            raise ValueError(f"file must be the bare name of a .bin file beside it, got {self.file!r:.80}")
        for name in ("sha256", "answers_sha256"):
            digest = getattr(self, name)
            if not _DIGEST.fullmatch(digest if digest is not None or name == "sha256" else "0" * 64):
                raise ValueError(f"{name} must be 64 hexadecimal digits, got {digest!r:.80}")

    @property
    def answers_file(self) -> str:
        return str(Path(self.file).with_suffix(".answers"))

    @property
    def lengths_file(self) -> str:
        return str(Path(self.file).with_suffix(".lengths.npy"))


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of a split, and their sums for whoever reads meta.json."""

    complete: bool
    documents: Count
    tokens: Count
    text_bytes: Count
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.complete and not self.shards:
            raise ValueError("shards must not be empty in a split that is complete")
        for name, total in _totals(self.shards).items():
            if getattr(self, name) != total:
                raise ValueError(f"{name} must be {total}, the sum over shards, got {getattr(self, name)}")

    @classmethod
    def of(cls, shards: Iterable[Shard], *, complete: bool) -> "Split":
        shards = tuple(shards)
        return cls(complete=complete, shards=shards, **_totals(shards))


def _totals(shards: Iterable[Shard]) -> dict[str, int]:
    shards = tuple(shards)
    return {
        name: sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens", "text_bytes")
    }


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The contents of meta.json."""

    format: Literal["bd3lm-tokens"] = "bd3lm-tokens"
    version: Literal[1] = 1
    dtype: DType
    inputs: Inputs
    splits: dict[str, Split] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.inputs.vocab_size - 1 > np.iinfo(self.dtype).max:
            raise ValueError(f"dtype must hold {self.inputs.vocab_size} tokens, got {self.dtype}")
        named = Counter(shard.file for split in self.splits.values() for shard in split.shards)
        for file, times in named.most_common(1):
            if times > 1:
                raise ValueError(f"file must differ from shard to shard, got {file!r} {times} times")
        has_answers = {
            each.answers_sha256 is not None for split in self.splits.values() for each in split.shards
        }
        if has_answers - {self.inputs.chat is not None}:
            raise ValueError("answers_sha256 must be there for conversations, and for nothing else")

    @property
    def complete(self) -> bool:
        return all(name in self.splits and self.splits[name].complete for name in self.inputs.splits)

    @staticmethod
    def read(folder: Path) -> "Meta":
        path = folder / META_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no token shards: there is no {META_FILE}")
        if path.stat().st_size > _LARGEST_META:
            raise ValueError(f"{path} must have at most {_LARGEST_META} bytes, got {path.stat().st_size}")
        try:
            return _META.validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"{path} does not describe token shards that can be read here: {where}: "
                f"{first['msg'].removeprefix('Value error, ')}"
            ) from None

    def write(self, folder: Path) -> None:
        write_atomically(folder / META_FILE, _dumped(self, indent=2) + b"\n")


_META = TypeAdapter(Meta)


def _dumped(meta: Meta, *, indent: int | None = None) -> bytes:
    """A folder of texts says nothing of answers, as before there were any: its fingerprint stays."""
    of_chats: dict[str, Any] = {
        "inputs": {"chat"},
        "splits": {"__all__": {"shards": {"__all__": {"answers_sha256"}}}},
    }
    return _META.dump_json(meta, indent=indent, exclude=of_chats if meta.inputs.chat is None else None)


def _short(value: Any) -> Any:
    """As much of a fingerprint as people compare."""
    return value[:12] if isinstance(value, str) else value


def dtype_for(vocab_size: int) -> DType:
    """The narrowest integer that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def on_disk(dtype: DType) -> np.dtype[Any]:
    """The integer as it is written: little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


class TokenShards:
    """A finished folder of shards. Opening reads meta.json only; a shard is checked when it is first read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_path(folder)
        self.meta = Meta.read(self.folder)
        if not self.meta.complete:
            raise ValueError(
                f"the preparation of {self.folder} was interrupted: prepare it again with the same inputs, "
                f"and it goes on where it stopped"
            )
        self._open: dict[str, VerifiedFile] = {}
        self._starts = {
            name: np.cumsum([0, *(shard.tokens for shard in split.shards)])
            for name, split in self.meta.splits.items()
        }

    @property
    def splits(self) -> tuple[str, ...]:
        return self.meta.inputs.splits

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer saved beside the shards."""
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
        """sha256 of what was put in and what came out: the same for the same tokens from the same source."""
        meta = replace(self.meta, inputs=replace(self.meta.inputs, source=""))
        return hashlib.sha256(_dumped(meta)).hexdigest()

    def require_tokenizer(self, tokenizer: Tokenizer | str) -> None:
        """Refuse a tokenizer, or a fingerprint of one, that did not make these shards."""
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
        """Tokens start..stop of a split, across the borders of shards."""
        return self._across(split, start, stop, self._read, np.dtype(on_disk(self.meta.dtype)))

    def answers(self, split: str, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of these tokens are of answers, in conversations."""
        if self.meta.inputs.chat is None:
            raise ValueError(f"the shards in {self.folder} hold texts, in which nothing is an answer")
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
        """Make sure that all shards are whole, before hours of work on them; if it takes long, `say` so."""
        started, said = time.monotonic(), False
        for name in self.splits:
            for shard in self.meta.splits[name].shards:
                if not said and time.monotonic() - started > _LONG:
                    say(f"checking that the shards in {self.folder} are whole; a later start need not")
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
    """A shard that has its sha256 and none but tokens of the vocabulary; `anew` trusts no earlier check."""
    path, kind, size = folder / shard.file, on_disk(meta.dtype), meta.inputs.vocab_size

    def inspect(piece: bytes) -> None:
        most = np.frombuffer(piece, kind).max(initial=0)
        if most >= size:
            raise ValueError(f"{path} is damaged: it has token {most}, and the vocabulary ends at {size - 1}")

    try:
        return VerifiedFile(
            path, size=shard.tokens * kind.itemsize, digest=shard.sha256, inspect=inspect, anew=anew
        )
    except FileNotFoundError:
        raise FileNotFoundError(f"shard {path} is missing: prepare the folder again to restore it") from None
    except ValueError as error:
        raise _restorable(error) from None


def open_answers(folder: Path, shard: Shard, *, anew: bool = False) -> VerifiedFile:
    """Which tokens of a shard are of answers, a bit each."""
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
    """The document lengths of a shard, one for each of its documents.

    With the tokens `around` each text they are as many as the tokens of the shard.
    """
    path = folder / shard.lengths_file
    try:
        lengths = _read_lengths(path, shard.documents)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: prepare the folder again to restore it") from None
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as Python, with whatever that raises
        raise ValueError(f"{path} is damaged: {error}; prepare the folder again") from error
    tokens = int(lengths.sum(dtype=np.uint64)) + around * shard.documents
    if tokens != shard.tokens:
        raise ValueError(
            f"{path} is damaged: its lengths make {tokens} tokens, not {shard.tokens}; prepare the folder "
            "again"
        )
    return lengths


def _read_lengths(path: Path, documents: int) -> NDArray[np.uint32]:
    """By hand: numpy makes room for as many as the header says before it finds that they are not there."""
    if not path.is_file():  # to open a pipe is to wait for its writer
        raise FileNotFoundError(path)
    with open(path, "rb") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("it is of another version than 1.0")
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
        if kind != on_disk("uint32") or len(shape) != 1:
            raise ValueError(f"it is an array {shape} of {kind}")
        here = (os.fstat(file.fileno()).st_size - file.tell()) // kind.itemsize
        if not shape == (documents,) == (here,):
            raise ValueError(f"it has {min(shape[0], here)} lengths for {documents} documents")
        return np.fromfile(file, kind, documents).astype(np.uint32)
