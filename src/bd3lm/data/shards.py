"""Token shards on disk: what they look like, what they were made from, and reading them without loading them.

A folder holds, for each split,

    train-00000.bin           token ids, raw little-endian uint16 or uint32, whichever the vocabulary needs
    train-00000.lengths.npy   the length in tokens of each document of that shard, without its BOS and EOS

then the tokenizer (tokenizer.json, tokenizer_config.json) and meta.json: the counts and the sha256 of every
shard, and the fingerprints of the tokenizer and of the source. A shard ends where a document ends. meta.json
is written last, after each shard, so it never names a file that is not complete; `prepare` goes on from it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from bd3lm.data.tokenizers import Tokenizer, saved_tokenizer
from bd3lm.io.files import local_path, write_atomically

META_FILE = "meta.json"
DType = Literal["uint16", "uint32"]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that decides the tokens: equal inputs give equal shards, byte for byte."""

    tokenizer_fingerprint: str
    vocab_size: int
    mask_id: int
    eos_id: int | None
    bos_id: int | None
    source: str
    source_fingerprint: str
    eos_between_documents: bool
    bos_before_documents: bool
    splits: tuple[str, ...]
    shard_tokens: int

    def differences(self, other: "Inputs") -> list[str]:
        """What `other` has that differs, for people; a source may change its name."""
        ours, theirs = (vars(inputs) for inputs in (self, other))
        changed = [key for key in ours if key != "source" and ours[key] != theirs[key]]
        return [
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


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of tokens: whole documents."""

    file: str
    documents: int
    tokens: int
    text_bytes: int  # of their UTF-8 text: what bits per byte are counted against
    sha256: str

    @property
    def lengths_file(self) -> str:
        return str(Path(self.file).with_suffix(".lengths.npy"))


@dataclass(frozen=True, kw_only=True)
class Split:
    """The shards of a split, and their sums for whoever reads meta.json."""

    complete: bool
    documents: int
    tokens: int
    text_bytes: int
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, shards: Iterable[Shard], *, complete: bool) -> "Split":
        shards = tuple(shards)
        return cls(
            complete=complete,
            documents=sum(shard.documents for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            text_bytes=sum(shard.text_bytes for shard in shards),
            shards=shards,
        )


@dataclass(frozen=True, kw_only=True)
class Meta:
    """The contents of meta.json."""

    format: Literal["bd3lm-tokens"] = "bd3lm-tokens"
    version: Literal[1] = 1
    dtype: DType
    inputs: Inputs
    splits: dict[str, Split] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(name in self.splits and self.splits[name].complete for name in self.inputs.splits)

    @staticmethod
    def read(folder: Path) -> "Meta":
        path = folder / META_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no token shards: there is no {META_FILE}")
        try:
            return _META.validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ValueError(
                f"{path} does not describe token shards that can be read here: {where}: {first['msg']}"
            ) from None

    def write(self, folder: Path) -> None:
        write_atomically(folder / META_FILE, _META.dump_json(self, indent=2) + b"\n")


_META = TypeAdapter(Meta)


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
    """A finished folder of shards. Opening reads meta.json only; a shard is mapped when it is first read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = local_path(folder)
        self.meta = Meta.read(self.folder)
        if not self.meta.complete:
            raise ValueError(
                f"the preparation of {self.folder} was interrupted: prepare it again with the same inputs, "
                f"and it goes on where it stopped"
            )
        self._open: dict[str, NDArray[Any]] = {}
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
        return hashlib.sha256(_META.dump_json(meta)).hexdigest()

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
        """Tokens start..stop of a split, across the borders of shards; a view where they lie in one."""
        total = self.split(split).tokens
        if not 0 <= start <= stop <= total:
            raise IndexError(f"tokens {start}..{stop} are not within the {total} of split {split!r}")
        starts = self._starts[split]
        pieces = []
        i = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(starts[i + 1]))
            pieces.append(self._map(self.meta.splits[split].shards[i])[start - starts[i] : end - starts[i]])
            start, i = end, i + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, on_disk(self.meta.dtype))

    def lengths(self, split: str) -> NDArray[np.uint32]:
        """How many tokens the text of each document has, in order."""
        return np.concatenate([load_lengths(self.folder, shard) for shard in self.split(split).shards])

    def _map(self, shard: Shard) -> NDArray[Any]:
        if shard.file not in self._open:
            path = check_shard(self.folder, shard, self.meta.dtype)
            self._open[shard.file] = np.memmap(path, on_disk(self.meta.dtype), mode="r")
        return self._open[shard.file]


def check_shard(folder: Path, shard: Shard, dtype: DType) -> Path:
    """The path of a shard that is there and as long as it should be."""
    path = folder / shard.file
    expected = shard.tokens * on_disk(dtype).itemsize
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise FileNotFoundError(f"shard {path} is missing: prepare the folder again to restore it") from None
    if size != expected:
        raise ValueError(
            f"shard {path} is damaged: it has {size} bytes, not {expected}; prepare the folder again"
        )
    return path


def load_lengths(folder: Path, shard: Shard) -> NDArray[np.uint32]:
    """The document lengths of a shard, one for each of its documents."""
    path = folder / shard.lengths_file
    try:
        lengths: NDArray[np.uint32] = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: prepare the folder again to restore it") from None
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; prepare the folder again") from error
    if lengths.shape != (shard.documents,):
        raise ValueError(f"{path} is damaged: it has {lengths.size} lengths for {shard.documents} documents")
    return lengths
