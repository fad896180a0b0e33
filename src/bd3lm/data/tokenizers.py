"""Text to token ids and back: any Hugging Face tokenizer, bytes, or a byte-level BPE of your own.

A tokenizer is a value: the text of its tokenizer.json and the ids of its special tokens. Nothing else decides
what it does. So its fingerprint is a hash of these, it can be sent to another process, and the copy saved
next to the shards is exactly the one that made them. The fast library (`tokenizers`) does the work;
`transformers` is not needed.

Three rules hold for every tokenizer here:

- There is a mask token. If the vocabulary has none, it is appended after all other ids. For a causal language
  model it is the id after all that the model predicts, which may lie past the vocabulary.
- Encoding adds no special tokens: a post-processor that would put [CLS] and [SEP] around documents does not
  run, and truncation and padding are off.
- Encoding never turns text into special tokens: "<|mask|>" in a text is harmless punctuation and letters, not
  a mask, so no text can put a mask or an end of document into the training data.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from bd3lm.data.checkpoints import (
    TEMPLATE_KEY,
    begins_with,
    with_begin,
)
from bd3lm.data.guarded import in_one_line, is_plain, patterns, watched
from bd3lm.io.files import local_path, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

BYTES = "bytes"
END = "<|endoftext|>"
MASK = "<|mask|>"

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

OWN_KEY = "bd3lm"  # in tokenizer_config.json: ids that no token name gives

SMALLEST_BPE = 256 + 2  # the bytes, the end of a document and the mask


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and a mask token. `eos_id` and `bos_id` are None if it has none, and may be equal."""

    spec: str = field(repr=False)
    mask_id: int
    """In the vocabulary or past it. No text is ever encoded to it."""
    eos_id: int | None
    bos_id: int | None
    """The token that texts begin with."""
    chat_template: str | None = field(default=None, repr=False)
    """How a conversation becomes a text (Jinja), unchanged. It is not part of the fingerprint."""

    def __post_init__(self) -> None:
        for name in ("mask_id", "eos_id", "bos_id"):
            place = getattr(self, name)
            if place is not None and not 0 <= place < 1 << 32:
                raise ValueError(f"{name} must be a token id, got {place}")

    def encode(self, text: str) -> list[int]:
        """The ids of a text. Raises a ValueError if encoding takes too long or the library fails."""
        if self._told_when_watched is not None:
            return self.encode_batch([text])[0]  # other threads run meanwhile
        return in_one_line(lambda: self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts. The library uses all cores unless TOKENIZERS_PARALLELISM is false."""

        def work() -> list[list[int]]:
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

        told = self._told_when_watched
        if told is None:
            return in_one_line(work)
        return watched(work, characters=sum(map(len, texts)), told=told)

    def decode(
        self, ids: "Sequence[int] | np.ndarray[Any, Any] | Tensor", *, skip_special: bool = True
    ) -> str:
        """The text of `ids`. Special tokens are left out, or written by name.

        Ids without a token (a network may have more ids than its tokenizer) have no text.
        """
        listed = list(ids) if isinstance(ids, Sequence) else ids.tolist()
        if skip_special or self.mask_id < self.size or self.mask_id not in listed:
            return in_one_line(lambda: self._backend.decode(listed, skip_special_tokens=skip_special))
        pieces = [
            MASK * len(run) if is_mask else self.decode(run, skip_special=False)
            for is_mask, group in groupby(listed, lambda token: token == self.mask_id)
            for run in [list(group)]
        ]
        return "".join(pieces)

    def text_bytes(
        self, ids: "np.ndarray[Any, Any]", before: "Sequence[int] | np.ndarray[Any, Any]" = ()
    ) -> int:
        """How many bytes of UTF-8 `ids` add to the text `before` them, without special tokens. Bits per byte
        use this count.

        Byte-level vocabularies have a number of bytes for each token, even if a text begins or ends inside a
        character. For others, it is the growth of the decoded text: whether the first token of a word begins
        with a space or continues a word shows only after another token.
        """
        if self._bytes_of is not None:
            return int(self._bytes_of[ids].sum())
        given = list(map(int, before))
        return len(self.decode([*given, *map(int, ids)]).encode()) - len(self.decode(given).encode())

    @cached_property
    def _bytes_of(self) -> "np.ndarray[Any, Any] | None":
        """The bytes of each id, if each character of a token stands for one byte; None for other kinds."""
        spec = json.loads(self.spec)
        decoder = spec.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        special = {token["id"] for token in spec.get("added_tokens", ()) if token.get("special")}
        added = {token["id"] for token in spec.get("added_tokens", ())}
        for token, place in self._backend.get_vocab(with_added_tokens=True).items():
            if place not in special:
                lengths[place] = len(token.encode()) if place in added else len(token)
        return lengths

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes of a token. For byte-level vocabularies they need not be whole characters; for others, it
        is the text of the token alone. Empty for a special token; None if unknown."""
        if self._bytes_of is not None and token < len(self._bytes_of):
            name = self._backend.id_to_token(token)
            if not self._bytes_of[token] or name is None:
                return b""
            if all(sign in self._byte_of_sign for sign in name):
                return bytes(self._byte_of_sign[sign] for sign in name)
        text = self.decode([token])
        return None if "\ufffd" in text else text.encode()

    @cached_property
    def _byte_of_sign(self) -> dict[str, int]:
        """The byte that each character of a byte-level token stands for."""
        return {sign: byte for byte, sign in enumerate(_byte_characters())}

    @cached_property
    def _told_when_watched(self) -> str | None:
        """What to add to an error when work fails; None for a tokenizer that needs no time limit."""
        spec = json.loads(self.spec)
        if is_plain(spec):
            return None
        found = ", ".join(f"{pattern:.100}" for pattern in patterns(spec))
        return f" (the patterns in its {TOKENIZER_FILE}: {found})" if found else ""

    @cached_property
    def size(self) -> int:
        """How many ids the vocabulary has."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def vocab_size(self) -> int:
        """How many ids there are, including the mask and all ids before it: one more than the highest id."""
        return max(self.size, self.mask_id + 1)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that decides which ids a text becomes and which of them are special."""
        specials = f"mask={self.mask_id} eos={self.eos_id} bos={self.bos_id}"
        return hashlib.sha256(f"{specials}\n{self.spec}".encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load_tokenizer` and transformers read."""
        folder = local_path(folder)
        names = {"mask_token": self.mask_id, "eos_token": self.eos_id, "bos_token": self.bos_id}
        unsaid = [name for name, token in names.items() if token is None or token >= self.size]
        config = self._config([name for name in names if name not in unsaid])
        if unsaid:  # otherwise a name that happens to be in the vocabulary would be taken for one of these
            config[OWN_KEY] = {"mask_id": self.mask_id, "eos_id": self.eos_id, "bos_id": self.bos_id}
        self._write(folder, self.spec, config)

    @property
    def own_ids(self) -> int:
        """One more than the highest id of any token except the mask."""
        places = self._backend.get_vocab(with_added_tokens=True).values()
        return 1 + max((place for place in places if place != self.mask_id), default=-1)

    def with_mask(self, place: int) -> "Tokenizer":
        """The same tokens with the mask past them, at an id. If that is the next id, the mask is appended as
        a token."""
        if place == self.mask_id:
            return self
        if place < self.own_ids:
            raise ValueError(f"the mask id must be at least {self.own_ids:,}, past all others, got {place}")
        spec = json.loads(self.spec)
        added = spec.get("added_tokens") or []
        spec["added_tokens"] = [token for token in added if token["id"] != self.mask_id]
        if place == self.own_ids:
            append_special(spec, MASK)
        return replace(self, spec=canonical(spec), mask_id=place)

    def with_begin(self) -> "Tokenizer":
        """The same tokenizer with a post-processor that puts BOS before texts, as other programs expect. Our
        own encoding does not use it."""
        if self.bos_id is None or begins_with(self._backend, where="this model") is not None:
            return self
        spec = with_begin(json.loads(self.spec), str(self._backend.id_to_token(self.bos_id)), self.bos_id)
        return replace(self, spec=canonical(spec))

    def save_for_others(self, folder: str | Path) -> None:
        """Write the same files for other programs: without an appended mask, and with a post-processor that
        puts BOS before texts as we do. transformers then encodes a text as we encode a prompt."""
        spec = json.loads(self.spec)
        last = {"id": self.mask_id, "content": MASK}
        added = spec.get("added_tokens") or []
        names = ["mask_token", "eos_token", "bos_token"]
        if added and last.items() <= added[-1].items() and self.mask_id == self.size - 1:
            spec["added_tokens"] = added[:-1]
            names.remove("mask_token")
        elif self.mask_id >= self.size:
            names.remove("mask_token")
        begun = replace(self, spec=canonical(spec)).with_begin()
        self._write(local_path(folder), begun.spec, self._config(names))

    def _config(self, names: Collection[str]) -> dict[str, object]:
        """The tokenizer_config.json that names these special tokens, if they exist."""
        places = {name: getattr(self, name.replace("_token", "_id")) for name in names}
        config: dict[str, object] = {
            name: self._backend.id_to_token(place) for name, place in places.items() if place is not None
        }
        if self.chat_template is not None:
            config[TEMPLATE_KEY] = self.chat_template
        # transformers would otherwise remove spaces before punctuation where it thinks this is right.
        return config | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }

    @staticmethod
    def _write(folder: Path, spec: str, config: Mapping[str, object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TOKENIZER_FILE, spec.encode())
        write_atomically(folder / CONFIG_FILE, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())

    @cached_property
    def _backend(self) -> Backend:
        backend = Backend.from_str(self.spec)
        backend.encode_special_tokens = True
        return backend

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[object, ...]]:
        """Pickle only the value; the other process makes its own library object."""
        return Tokenizer, (self.spec, self.mask_id, self.eos_id, self.bos_id, self.chat_template)


def byte_tokenizer() -> Tokenizer:
    """One id for each of the 256 bytes, then the end of a document, then the mask."""
    # Written out, since versions of the library write the same tokenizer differently: the fingerprint stays.
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return _with_own_specials(spec)


def train_bpe(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids, including two special ones. Equal texts give equal
    results.

    It starts from all 256 bytes, so it can encode every text and decode it unchanged. The vocabulary is
    smaller than requested if the texts have too few pairs that occur `min_frequency` times.
    """
    if vocab_size < SMALLEST_BPE:
        raise ValueError(
            f"vocab_size must be at least {SMALLEST_BPE} (256 bytes and two special tokens), got {vocab_size}"
        )
    if min_frequency < 1:
        raise ValueError(f"min_frequency must be at least 1, got {min_frequency}")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _with_own_specials(json.loads(backend.to_str()))


def _with_own_specials(spec: dict[str, Any]) -> Tokenizer:
    eos, mask = append_special(spec, END), append_special(spec, MASK)
    return Tokenizer(canonical(spec), mask_id=mask, eos_id=eos, bos_id=eos)


def append_special(spec: dict[str, Any], content: str) -> int:
    """Add a special token to a tokenizer.json after all other ids, and return its id.

    This edits the file without the library: versions of the library write the rest of the file differently,
    which would change the fingerprint.
    """
    vocabulary = spec["model"]["vocab"]
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    added = spec.setdefault("added_tokens", [])
    new = 1 + max(max(ids), *(token["id"] for token in added), -1)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": new, "content": content, "special": True, **flags})
    return new


def canonical(spec: Mapping[str, Any]) -> str:
    """The same text for the same tokenizer, without truncation and padding, which we do not use."""
    kept = {key: value for key, value in spec.items() if key not in ("truncation", "padding")}
    return json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers use for each byte: the byte itself if it is printable
    Latin-1."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + rest.index(byte)) for byte in range(256)]
