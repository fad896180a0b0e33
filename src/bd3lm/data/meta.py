"""The contents of meta.json for a folder of token shards: what they were made from, and which files they are.

Everything that can be checked is checked: counts must agree with each other, and files must have bare names.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from bd3lm.io.files import write_atomically

META_FILE = "meta.json"
DType = Literal["uint16", "uint32"]
Count = Annotated[int, Field(ge=0, le=1 << 60)]  # so that sums of offsets fit in 64 bits
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]

_BARE_NAME = re.compile(r"[\w-][\w.-]*\.bin", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LARGEST_META = 1 << 28  # bytes, about a million shards


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How conversations became tokens."""

    template: str | None
    """sha256 of the chat template; None for texts with their continuations."""
    answers: Literal["all", "last"]
    """Which answers of a conversation are learned."""
    begin: bool
    """Whether texts begin with BOS. A template writes its own."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that decides the tokens: equal inputs give equal shards, byte for byte."""

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
    """None if documents are texts."""

    def __post_init__(self) -> None:
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits must name at least one split, each once, got {self.splits}")
        for name in ("mask_id", "eos_id", "bos_id"):
            place = getattr(self, name)
            if place is not None and place >= self.vocab_size:
                raise ValueError(f"{name} must be below the vocab_size of {self.vocab_size}, got {place}")
        if (self.eos_between_documents and self.eos_id is None) or (
            self.bos_before_documents and self.bos_id is None
        ):
            raise ValueError("eos_id and bos_id must be set if documents begin or end with them")
        if self.chat is not None and self.around_documents:
            raise ValueError("conversations must not have tokens added around them")

    @property
    def around_documents(self) -> int:
        """Tokens of a document that are not part of its text."""
        return self.eos_between_documents + self.bos_before_documents

    def differences(self, other: "Inputs") -> list[str]:
        """The differences to `other`, for people. A source may change its name."""
        ours, theirs = (vars(inputs) for inputs in (self, other))
        changed = [key for key in ours if key not in ("source", "chat") and ours[key] != theirs[key]]
        return _chat_differences(self.chat, other.chat) + [
            self._other_source(other)
            if key == "source_fingerprint"
            else f"{key} {_short(ours[key])!r}, not {_short(theirs[key])!r}"
            for key in changed
        ]

    def _other_source(self, other: "Inputs") -> str:
        """Name the source rather than its fingerprint, which tells people nothing."""
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
    text_bytes: Count  # of their UTF-8 text, for bits per byte
    sha256: str
    answers_sha256: str | None = None
    """sha256 of the bits that mark tokens of answers; None if documents are texts."""

    def __post_init__(self) -> None:
        if not _BARE_NAME.fullmatch(self.file):
            raise ValueError(f"file must be the bare name of a .bin file next to it, got {self.file!r:.80}")
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
    """The shards of a split, and their sums for readers of meta.json."""

    complete: bool
    documents: Count
    tokens: Count
    text_bytes: Count
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.complete and not self.shards:
            raise ValueError("shards must not be empty in a complete split")
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
            raise ValueError(f"dtype must have room for {self.inputs.vocab_size} tokens, got {self.dtype}")
        named = Counter(shard.file for split in self.splits.values() for shard in split.shards)
        for file, times in named.most_common(1):
            if times > 1:
                raise ValueError(f"file must differ from shard to shard, got {file!r} {times} times")
        has_answers = {
            each.answers_sha256 is not None for split in self.splits.values() for each in split.shards
        }
        if has_answers - {self.inputs.chat is not None}:
            raise ValueError("answers_sha256 must be set for conversations, and only for them")

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
        write_atomically(folder / META_FILE, dumped(self, indent=2) + b"\n")


_META = TypeAdapter(Meta)


def dumped(meta: Meta, *, indent: int | None = None) -> bytes:
    """The JSON of meta.json. A folder of texts leaves out everything about answers, so older fingerprints
    stay valid."""
    of_chats: dict[str, Any] = {
        "inputs": {"chat"},
        "splits": {"__all__": {"shards": {"__all__": {"answers_sha256"}}}},
    }
    return _META.dump_json(meta, indent=indent, exclude=of_chats if meta.inputs.chat is None else None)


def _short(value: Any) -> Any:
    """The start of a fingerprint, as much as people compare."""
    return value[:12] if isinstance(value, str) else value


def dtype_for(vocab_size: int) -> DType:
    """The narrowest integer that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def on_disk(dtype: DType) -> np.dtype[Any]:
    """The integer type on disk: little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")
