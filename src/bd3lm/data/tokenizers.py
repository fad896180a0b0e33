"""Text to token ids and back: any Hugging Face tokenizer, bytes, or a byte-level BPE of one's own.

A tokenizer is a value: the text of its tokenizer.json and the ids of its special tokens. Nothing else decides
what it does, so its fingerprint is a hash of these, it can be sent to another process, and what is saved
beside the shards is what made them. The fast library (`tokenizers`) does the work; `transformers` is not
needed.

Three rules hold for every tokenizer here:

- The vocabulary has a mask token. Where there is none it is appended, after all other ids.
- Encoding adds no special token: documents are wrapped raw, so a post-processor that would put [CLS] and
  [SEP] around them does not run, and truncation and padding are off.
- Encoding makes no special token either: "<|mask|>" in a text is harmless punctuation and letters, not a
  mask, so no text can put a mask or an end of document into the training data.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from bd3lm.data.guarded import check_size, in_one_line, is_plain, panics_unsaid, patterns, watched
from bd3lm.io.files import local_path, read_text, write_atomically
from bd3lm.io.hub import hub_reason, is_hub_id, unresolved_hub
from bd3lm.io.places import BOX, RUN_MODEL, box_folder
from bd3lm.parsing import did_you_mean, shown

if TYPE_CHECKING:
    from torch import Tensor

BYTES = "bytes"
END = "<|endoftext|>"
MASK = "<|mask|>"

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

_MOST_BYTES = 10**8  # of a file; that of 256,000 tokens has 35 million

SMALLEST_BPE = 256 + 2  # the bytes, the end of a document and the mask

# Where a configuration names a special token, and the names to look for where it does not.
_MASK_KEYS, _MASK_NAMES = ("mask_token",), ("[MASK]", "<mask>", MASK)
_EOS_KEYS, _EOS_NAMES = ("eos_token", "sep_token"), (END, "</s>", "<eos>", "[SEP]")
_BOS_KEYS, _BOS_NAMES = ("bos_token", "cls_token"), (END, "<s>", "<bos>", "[CLS]")


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with a mask token. `eos_id` and `bos_id` are None where it has none, and may be equal."""

    spec: str = field(repr=False)
    mask_id: int
    eos_id: int | None
    bos_id: int | None

    def encode(self, text: str) -> list[int]:
        """The ids of a text; a ValueError where that takes too long or the library fails."""
        if self._told_when_watched is not None:
            return self.encode_batch([text])[0]  # during which other threads run
        return in_one_line(lambda: self._backend.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts; the library uses all cores unless TOKENIZERS_PARALLELISM says false."""

        def work() -> list[list[int]]:
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

        told = self._told_when_watched
        if told is None:
            return in_one_line(work)
        return watched(work, characters=sum(map(len, texts)), told=told)

    def decode(
        self, ids: "Sequence[int] | np.ndarray[Any, Any] | Tensor", *, skip_special: bool = True
    ) -> str:
        """The text of `ids`; special tokens are left out, or written by their names."""
        listed = list(ids) if isinstance(ids, Sequence) else ids.tolist()
        return in_one_line(lambda: self._backend.decode(listed, skip_special_tokens=skip_special))

    def text_bytes(
        self, ids: "np.ndarray[Any, Any]", before: "Sequence[int] | np.ndarray[Any, Any]" = ()
    ) -> int:
        """How many bytes of UTF-8 `ids` add to the text of what stands `before` them, special tokens aside:
        what bits per byte count.

        Byte-level vocabularies have their bytes token by token, also where a text begins or ends inside a
        character. For others it is by how much the decoded text grows: that the first token of a word begins
        with a space, or goes on with a word, shows only after another.
        """
        if self._bytes_of is not None:
            return int(self._bytes_of[ids].sum())
        given = list(map(int, before))
        return len(self.decode([*given, *map(int, ids)]).encode()) - len(self.decode(given).encode())

    @cached_property
    def _bytes_of(self) -> "np.ndarray[Any, Any] | None":
        """The bytes of each id, where every character of a token stands for one; None for other kinds."""
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

    @cached_property
    def _told_when_watched(self) -> str | None:
        """What an error adds where its work fails; None for a tokenizer whose work need not be watched."""
        spec = json.loads(self.spec)
        if is_plain(spec):
            return None
        found = ", ".join(f"{pattern:.100}" for pattern in patterns(spec))
        return f", by the patterns {found} of its {TOKENIZER_FILE}" if found else ""

    @cached_property
    def vocab_size(self) -> int:
        """How many ids there are, the mask included."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all that decides which ids a text becomes and which of them are special."""
        specials = f"mask={self.mask_id} eos={self.eos_id} bos={self.bos_id}"
        return hashlib.sha256(f"{specials}\n{self.spec}".encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `load_tokenizer` and transformers read."""
        folder = local_path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = {"mask_token": self.mask_id, "eos_token": self.eos_id, "bos_token": self.bos_id}
        config: dict[str, object] = {
            key: self._backend.id_to_token(token) for key, token in names.items() if token is not None
        }
        # transformers would otherwise put a space before punctuation back to where it thinks it belongs.
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        write_atomically(folder / TOKENIZER_FILE, self.spec.encode())
        write_atomically(folder / CONFIG_FILE, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())

    @cached_property
    def _backend(self) -> Backend:
        backend = Backend.from_str(self.spec)
        backend.encode_special_tokens = True
        return backend

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[str, int, int | None, int | None]]:
        """Travel to another process as the value alone; the library's object is made again there."""
        return Tokenizer, (self.spec, self.mask_id, self.eos_id, self.bos_id)


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer in a local folder, "bytes", or one of the hub by its name ("gpt2", "bert-base-uncased").

    A folder needs a tokenizer.json; tokenizer_config.json beside it names the special tokens. A training
    run's folder will do, and "box" is that of the model that comes with this package. The hub is asked only
    for a name that cannot be a path and that no folder here has.
    """
    if source == BYTES:
        return byte_tokenizer()
    folder = box_folder("tokenizer") if source == BOX else local_path(source)
    if folder.is_dir():
        folder = _folder_of_run(folder)
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} is not a tokenizer: it holds no {TOKENIZER_FILE}")
        config = folder / CONFIG_FILE
        said = read_text(config, most=_MOST_BYTES) if config.is_file() else "{}"
        return _from_json(read_text(file, most=_MOST_BYTES), said, source)
    if isinstance(source, Path) or not is_hub_id(source):
        raise FileNotFoundError(f"there is no tokenizer folder {source}")
    return _from_hub(source)


def _folder_of_run(folder: Path) -> Path:
    """The folder of the tokenizer, for a training run that of its model; stages of a run share theirs."""
    if (folder / TOKENIZER_FILE).is_file():
        return folder
    models = [path for pattern in (RUN_MODEL, f"*/{RUN_MODEL}") for path in sorted(folder.glob(pattern))]
    found = {path: load_tokenizer(path).fingerprint for path in models if (path / TOKENIZER_FILE).is_file()}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{folder} holds models of different tokenizers: name one of {', '.join(map(str, found))}"
        )
    return next(iter(found), folder)


def byte_tokenizer() -> Tokenizer:
    """One id for each of the 256 bytes, then the end of a document, then the mask."""
    # Written out, since the library's versions write the same tokenizer differently: the fingerprint stays.
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


def saved_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer beside a model, or None where it was saved without one."""
    path = local_path(folder)
    file = path / TOKENIZER_FILE
    if file.is_file():
        return load_tokenizer(path)
    if os.path.lexists(file):  # else its model would be taken for one without
        raise ValueError(f"{file} must be a file, got a folder, a device or a broken link")
    return None


def train_bpe(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids, the two special ones included; equal texts, equal result.

    It starts from all 256 bytes, so every text can be encoded and comes back unchanged. The vocabulary is
    smaller than asked where the texts hold no more pairs that occur `min_frequency` times.
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
    eos, mask = _append(spec, END), _append(spec, MASK)
    return Tokenizer(_canonical(spec), mask_id=mask, eos_id=eos, bos_id=eos)


def _config_of(text: str, source: str | Path) -> dict[str, Any]:
    """What a tokenizer_config.json says."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE} of {source} must be valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG_FILE} of {source} must hold a JSON object, got {config!r:.80}")
    return config


def _from_json(text: str, config_text: str, source: str | Path) -> Tokenizer:
    config = _config_of(config_text, source)
    try:
        spec = json.loads(text)
        check_size(spec)
        with panics_unsaid():
            vocabulary = in_one_line(
                lambda: Backend.from_str(_canonical(spec)).get_vocab(with_added_tokens=True)
            )
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"{source} holds no tokenizer that can be read, in {TOKENIZER_FILE}: {error}"
        ) from error
    mask = _special(vocabulary, config, _MASK_KEYS, _MASK_NAMES, source)
    eos = _special(vocabulary, config, _EOS_KEYS, _EOS_NAMES, source)
    bos = _special(vocabulary, config, _BOS_KEYS, _BOS_NAMES, source)
    if mask is None:
        mask = _append(spec, MASK)
    tokenizer = Tokenizer(_canonical(spec), mask_id=mask, eos_id=eos, bos_id=bos)
    if tokenizer.vocab_size != max(mask, *vocabulary.values()) + 1:
        raise ValueError(
            f"the vocabulary of {source} has gaps in its ids, so no mask token can be appended to it"
        )
    return tokenizer


def _from_hub(name: str) -> Tokenizer:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unresolved = unresolved_hub()
    fetch = partial(hf_hub_download, local_files_only=True) if unresolved else hf_hub_download
    try:
        text = read_text(Path(fetch(name, TOKENIZER_FILE)), most=_MOST_BYTES)
        try:
            config = read_text(Path(fetch(name, CONFIG_FILE)), most=_MOST_BYTES)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            config = "{}"
    except Exception as error:  # not all errors of the network are OSErrors
        reason = f"the name {unresolved} does not resolve" if unresolved else hub_reason(error)
        raise FileNotFoundError(
            f"tokenizer {name!r} is no folder here, and the Hugging Face hub did not give its "
            f"{TOKENIZER_FILE}: {reason}{did_you_mean(name, (BOX, BYTES))}"
        ) from error
    return _from_json(text, config, name)


def _special(
    vocabulary: Mapping[str, int],
    config: Mapping[str, Any],
    keys: Sequence[str],
    names: Sequence[str],
    source: str | Path,
) -> int | None:
    """The id of a special token: the one the configuration names, or else a well-known name."""
    for key in keys:
        token = config.get(key)
        if token is None:
            continue
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str):
            raise ValueError(
                f"{key} in {CONFIG_FILE} of {source} must be a token, or an object with its content, got "
                f"{token!r:.80}"
            )
        if content not in vocabulary:
            raise ValueError(
                f"{CONFIG_FILE} of {source} names {shown(content)} as {key}, which its vocabulary does not "
                "hold"
            )
        return vocabulary[content]
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def _append(spec: dict[str, Any], content: str) -> int:
    """Add a special token to a tokenizer.json after all other ids, and return its id.

    Done on the file and not by the library, whose versions write the rest of the file differently: the
    fingerprint must not change with them.
    """
    vocabulary = spec["model"]["vocab"]
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    added = spec.setdefault("added_tokens", [])
    new = 1 + max(max(ids), *(token["id"] for token in added), -1)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added.append({"id": new, "content": content, "special": True, **flags})
    return new


def _canonical(spec: Mapping[str, Any]) -> str:
    """The same text for the same tokenizer; truncation and padding are not wanted here."""
    kept = {key: value for key, value in spec.items() if key not in ("truncation", "padding")}
    return json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _byte_characters() -> list[str]:
    """The character by which byte-level tokenizers write each byte: itself where it is printable Latin-1."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + rest.index(byte)) for byte in range(256)]
