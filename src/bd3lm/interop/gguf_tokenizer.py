"""The tokenizer in a GGUF file: a byte-level BPE, converted back to a tokenizer.json."""

import json
import warnings
from typing import Any

from bd3lm.data import Tokenizer
from bd3lm.data.checkpoints import Checkpoint, with_begin
from bd3lm.data.tokenizer_files import from_json
from bd3lm.interop.gguf_file import GGUFFile
from bd3lm.parsing import shown

_BPE = "gpt2"
_UNKNOWN, _CONTROL, _OF_USER = 2, 3, 4  # kinds of tokens that merges do not make

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = _BYTE_LEVEL | {"use_regex": False}
# How texts are cut into words, by llama.cpp's names. The patterns come from the models' own tokenizer.json.
_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _cut(digits: str) -> dict[str, Any]:
    pattern = {"Regex": _LETTERS % digits}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES_ONLY]}


_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": _BYTE_LEVEL,
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
    "llama-bpe": _cut("{1,3}"),
    "qwen2": _cut(""),
}
_NORMALIZERS = {"qwen2": {"type": "NFC"}}
_WHOLE_WORDS = ("llama-bpe",)  # a word that is a token stays whole, whatever the merges say
_BEGIN = ("llama-bpe",)  # texts begin with BOS unless the file says otherwise


def read_tokenizer(file: GGUFFile, vocabulary: int) -> Tokenizer | None:
    """The tokenizer of a model that predicts this many tokens; None, with a warning, for an unsupported
    kind."""
    kind = file.get("tokenizer.ggml.model", str, "none")
    cut = file.get("tokenizer.ggml.pre", str, "default")
    if kind != _BPE or cut not in _PRE_TOKENIZERS:
        named = f"{shown(kind)} with words cut as {shown(cut)}" if kind == _BPE else shown(kind)
        warnings.warn(
            f"the tokenizer in {file.path} is of the kind {named}, which bd3lm does not read: name the "
            "model's own with --tokenizer (tokenizer= in Python)",
            stacklevel=2,
        )
        return None
    tokens = _texts(file, "tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens in {file.path} must not repeat")
    spec = _spec(file, tokens, cut)
    begin = file.get("tokenizer.ggml.bos_token_id", int, None)
    if begin is not None and file.get("tokenizer.ggml.add_bos_token", bool, cut in _BEGIN):
        spec = with_begin(spec, _token(file, tokens, begin, "bos"), begin)
    end = file.get("tokenizer.ggml.eos_token_id", int, None)
    config = {} if end is None else {"eos_token": _token(file, tokens, end, "eos")}
    return from_json(
        json.dumps(spec),
        config,
        source=file.path,
        checkpoint=Checkpoint(vocabulary=vocabulary),
        template=file.get("tokenizer.chat_template", str, None),
    )


def _spec(file: GGUFFile, tokens: list[str], cut: str) -> dict[str, Any]:
    kinds = file.get("tokenizer.ggml.token_type", list, [])
    if len(kinds) not in (0, len(tokens)):
        raise ValueError(
            f"tokenizer.ggml.token_type in {file.path} must have {len(tokens):,} entries, one per token, got "
            f"{len(kinds):,}"
        )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": place, "content": tokens[place], "special": kind != _OF_USER, **flags}
        for place, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _OF_USER)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": _NORMALIZERS.get(cut),
        "pre_tokenizer": _PRE_TOKENIZERS[cut],
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "ignore_merges": cut in _WHOLE_WORDS,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": _texts(file, "tokenizer.ggml.merges"),
        },
    }


def _texts(file: GGUFFile, key: str) -> list[str]:
    found: list[str] = file.get(key, list, ...)
    if not found or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{key} in {file.path} must be a list of texts, got {shown(found)}")
    return found


def _token(file: GGUFFile, tokens: list[str], place: int, name: str) -> str:
    if not 0 <= place < len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id in {file.path} must be below {len(tokens):,}, got {place:,}"
        )
    return tokens[place]
