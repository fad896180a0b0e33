"""Load tokenizers from a folder, a run or the hub, and find their special tokens."""

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from bd3lm.data.checkpoints import (
    Checkpoint,
    ReadFile,
    begins_with,
    chat_template,
    find_checkpoint,
    read_object,
)
from bd3lm.data.guarded import check_size, in_one_line, panics_unsaid
from bd3lm.data.tokenizers import (
    BYTES,
    CONFIG_FILE,
    END,
    MASK,
    OWN_KEY,
    TOKENIZER_FILE,
    Tokenizer,
    append_special,
    byte_tokenizer,
    canonical,
)
from bd3lm.io.files import local_path, read_text
from bd3lm.io.hub import hub_reason, is_hub_id, unresolved_hub
from bd3lm.io.places import BOX, RUN_MODEL, box_folder
from bd3lm.parsing import did_you_mean, shown

_MOST_BYTES = 10**8  # per file; the file of a tokenizer with 256,000 tokens has 35 million
_MOST_IDS = 1 << 32

# The config keys that name special tokens, and the names to look for if they are missing.
_MASK_KEYS, _MASK_NAMES = ("mask_token",), ("[MASK]", "<mask>", MASK)
_EOS_KEYS, _EOS_NAMES = ("eos_token", "sep_token"), (END, "</s>", "<eos>", "[SEP]")
_BOS_KEYS, _BOS_NAMES = ("bos_token", "cls_token"), (END, "<s>", "<bos>", "[CLS]")


def load_tokenizer(source: str | Path, *, vocabulary: int | None = None) -> Tokenizer:
    """Load the tokenizer of a local folder, "bytes", or a tokenizer of the hub by name ("gpt2",
    "bert-base-uncased").

    A folder needs a tokenizer.json; tokenizer_config.json next to it names the special tokens. The folder may
    also be a training run. "box" is the tokenizer of the model that comes with this package. The hub is used
    only for a name that cannot be a path and that no local folder has.

    Two cases are special: a tokenizer next to the config.json of a Llama-, Mistral- or Qwen-type checkpoint,
    and a given `vocabulary` size of this type of network. Then the mask is the id after the vocabulary, and
    texts begin with a token only if the tokenizer's own post-processor puts one there: prompts are encoded as
    in transformers.
    """
    if source == BYTES:
        return byte_tokenizer()
    folder = box_folder("tokenizer") if source == BOX else local_path(source)
    if folder.is_dir():
        folder = _folder_of_run(folder)
        file = folder / TOKENIZER_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} is not a tokenizer: it holds no {TOKENIZER_FILE}")

        def read(name: str) -> str | None:
            path = folder / name
            return read_text(path, most=_MOST_BYTES) if path.is_file() else None

        return _from_files(read_text(file, most=_MOST_BYTES), read, source, vocabulary)
    if isinstance(source, Path) or not is_hub_id(source):
        raise FileNotFoundError(f"there is no tokenizer folder {source}")
    return _from_hub(source, vocabulary)


def saved_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer next to a model, or None if the model was saved without one."""
    path = local_path(folder)
    file = path / TOKENIZER_FILE
    if file.is_file():
        return load_tokenizer(path)
    if os.path.lexists(file):  # otherwise the model would seem to have no tokenizer
        raise ValueError(f"{file} must be a file, got a folder, a device or a broken link")
    return None


def saved_template(folder: str | Path) -> str | None:
    """The chat template next to a model, without its tokenizer, which is slower to read."""
    path = local_path(folder)

    def read(name: str) -> str | None:
        file = path / name
        return read_text(file, most=_MOST_BYTES) if file.is_file() else None

    return _template(read, read_object(read, CONFIG_FILE, str(path)), path, None)[1]


def _folder_of_run(folder: Path) -> Path:
    """The folder of the tokenizer; for a training run, that of its model. The stages of a run share
    theirs."""
    if (folder / TOKENIZER_FILE).is_file():
        return folder
    models = [path for pattern in (RUN_MODEL, f"*/{RUN_MODEL}") for path in sorted(folder.glob(pattern))]
    found = {path: load_tokenizer(path).fingerprint for path in models if (path / TOKENIZER_FILE).is_file()}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{folder} holds models with different tokenizers: name one of {', '.join(map(str, found))}"
        )
    return next(iter(found), folder)


def _from_files(text: str, read: ReadFile, source: str | Path, vocabulary: int | None) -> Tokenizer:
    config = read_object(read, CONFIG_FILE, str(source))
    checkpoint, template = _template(read, config, source, vocabulary)
    return from_json(text, config, source=source, checkpoint=checkpoint, template=template)


def _template(
    read: ReadFile, config: Mapping[str, Any], source: str | Path, vocabulary: int | None
) -> tuple[Checkpoint | None, str | None]:
    """The model that a tokenizer belongs to, and its chat template."""
    checkpoint = None if OWN_KEY in config else find_checkpoint(read, vocabulary, where=str(source))
    # Look for the template's own file only if it can exist: on the hub this takes a request.
    beside = read if checkpoint is not None else lambda _: None
    return checkpoint, chat_template(config, beside, where=str(source))


def from_json(
    text: str,
    config: Mapping[str, Any],
    *,
    source: str | Path,
    checkpoint: Checkpoint | None = None,
    template: str | None = None,
) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Its configuration, or the model it belongs to, names the special
    tokens."""
    try:
        spec = json.loads(text)
        check_size(spec)
        with panics_unsaid():
            vocabulary = in_one_line(
                lambda: Backend.from_str(canonical(spec)).get_vocab(with_added_tokens=True)
            )
    except Exception as error:  # the library raises plain Exception
        raise ValueError(
            f"the {TOKENIZER_FILE} of {source} cannot be read as a tokenizer: {error}"
        ) from error
    if OWN_KEY in config:
        return _by_own_ids(spec, vocabulary, config[OWN_KEY], source, template)
    if checkpoint is not None:
        return _of_checkpoint(spec, vocabulary, config, checkpoint, source, template)
    mask = _special(vocabulary, config, _MASK_KEYS, _MASK_NAMES, source)
    eos = _special(vocabulary, config, _EOS_KEYS, _EOS_NAMES, source)
    bos = _special(vocabulary, config, _BOS_KEYS, _BOS_NAMES, source)
    if mask is None:
        mask = append_special(spec, MASK)
    tokenizer = Tokenizer(canonical(spec), mask, eos, bos, chat_template=template)
    if tokenizer.size != max(mask, *vocabulary.values()) + 1:
        raise ValueError(
            f"the vocabulary of {source} has gaps in its ids, so no mask token can be appended to it"
        )
    return tokenizer


def _by_own_ids(
    spec: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    said: object,
    source: str | Path,
    template: str | None,
) -> Tokenizer:
    """A tokenizer with its special tokens given by ids, as `Tokenizer.save` writes them. Only the mask's id
    may lie past the others."""
    ids = said if isinstance(said, Mapping) else {}
    size, mask = 1 + max(vocabulary.values()), ids.get("mask_id")
    eos, bos = ids.get("eos_id"), ids.get("bos_id")
    others = all(each is None or (type(each) is int and 0 <= each < size) for each in (eos, bos))
    if type(mask) is not int or not 0 <= mask < _MOST_IDS or not others:
        raise ValueError(
            f"{OWN_KEY} in {CONFIG_FILE} of {source} must hold mask_id, eos_id and bos_id, ids of tokens or "
            f"null, got {shown(said)}"
        )
    return Tokenizer(canonical(spec), mask, eos, bos, chat_template=template)


def _of_checkpoint(
    spec: dict[str, Any],
    vocabulary: Mapping[str, int],
    config: Mapping[str, Any],
    checkpoint: Checkpoint,
    source: str | Path,
    template: str | None,
) -> Tokenizer:
    """The tokenizer of a causal language model: its mask is the id after all that the model predicts."""
    most, size = checkpoint.vocabulary, 1 + max(vocabulary.values())
    mask = most if checkpoint.mask is None else checkpoint.mask
    if size > most and (checkpoint.mask is not None or vocabulary.get(MASK) != mask):
        raise ValueError(
            f"the tokenizer of {source} must have at most the {most:,} tokens of its model, got {size:,}"
        )
    plain = Backend.from_str(canonical(spec))
    if size == mask and len(vocabulary) == size:  # appending would fill gaps, and put the mask elsewhere
        append_special(spec, MASK)
    eos = _special(vocabulary, config, ("eos_token",), (), source)
    if eos is None:
        eos = next((each for each in checkpoint.eos_ids if each < size), None)
    if eos is None:
        eos = _special(vocabulary, {}, (), _EOS_NAMES, source)
    bos = begins_with(plain, where=str(source))
    return Tokenizer(canonical(spec), mask, eos, bos, chat_template=template)


def _from_hub(name: str, vocabulary: int | None) -> Tokenizer:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unresolved = unresolved_hub()
    fetch = partial(hf_hub_download, local_files_only=True) if unresolved else hf_hub_download

    def read(file: str, *, needed: bool = False) -> str | None:
        try:
            return read_text(Path(fetch(name, file)), most=_MOST_BYTES)
        except Exception as error:  # not all network errors are OSErrors
            unknown = isinstance(error, LocalEntryNotFoundError) and file == CONFIG_FILE
            if isinstance(error, EntryNotFoundError) and not needed and not unknown:
                return None
            reason = f"the name {unresolved} does not resolve" if unresolved else hub_reason(error)
            raise FileNotFoundError(
                f"tokenizer {name!r} is not a local folder, and the Hugging Face hub did not provide its "
                f"{file}: {reason}{did_you_mean(name, (BOX, BYTES))}"
            ) from error

    return _from_files(str(read(TOKENIZER_FILE, needed=True)), read, name, vocabulary)


def _special(
    vocabulary: Mapping[str, int],
    config: Mapping[str, Any],
    keys: Sequence[str],
    names: Sequence[str],
    source: str | Path,
) -> int | None:
    """The id of a special token: the one that the configuration names, or one with a well-known name."""
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
                f"{CONFIG_FILE} of {source} names {shown(content)} as {key}, but its vocabulary lacks it"
            )
        return vocabulary[content]
    return next((vocabulary[name] for name in names if name in vocabulary), None)
