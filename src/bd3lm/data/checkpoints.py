"""What the files next to a causal language model's tokenizer say: its vocabulary size, special tokens and
chat template."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from bd3lm.data.guarded import in_one_line
from bd3lm.parsing import shown

CAUSAL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of model_type in config.json for which vocab_size gives the mask: the id after all predicted
tokens."""

SDAR_TYPE, SDAR_MASK = "sdar", 151669
"""The model_type of block diffusion models with a mask among their tokens, and the default id of that
token."""

MODEL_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_KEY = "chat_template"

_MOST_VOCABULARY = 2**26

ReadFile = Callable[[str], str | None]
"""Reads a file by name: its text, or None if there is no such file."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a tokenizer needs to know about the causal language model next to it."""

    vocabulary: int
    """How many tokens the model predicts."""
    eos_ids: tuple[int, ...] = ()
    """The tokens that end a text, from generation_config.json or config.json."""
    mask: int | None = None
    """The mask, unless it is the id after all that the model predicts."""


def find_checkpoint(read: ReadFile, vocabulary: int | None, *, where: str) -> Checkpoint | None:
    """The model next to a tokenizer, or a model known only by its vocabulary size; None without either."""
    model = read_object(read, MODEL_FILE, where)
    mask = None
    if vocabulary is None:
        kind = model.get("model_type")
        if "format" in model or kind not in (*CAUSAL_TYPES, SDAR_TYPE):
            return None
        if kind == SDAR_TYPE:
            said = model.get("mask_token_id")
            mask = SDAR_MASK if said is None else said
            if type(mask) is not int or mask < 0:
                raise ValueError(
                    f"mask_token_id in {MODEL_FILE} of {where} must be a token id, got {shown(said)}"
                )
        vocabulary = model.get("vocab_size")
        if type(vocabulary) is not int or not 1 <= vocabulary <= _MOST_VOCABULARY:
            raise ValueError(
                f"vocab_size in {MODEL_FILE} of {where} must be a whole number from 1 to "
                f"{_MOST_VOCABULARY:,}, got {shown(vocabulary)}"
            )
    said = read_object(read, GENERATION_FILE, where).get("eos_token_id")
    said = model.get("eos_token_id") if said is None else said
    ends = said if isinstance(said, list) else [] if said is None else [said]
    if not all(type(each) is int and each >= 0 for each in ends):
        raise ValueError(f"eos_token_id for the tokenizer of {where} must be token ids, got {shown(said)}")
    return Checkpoint(vocabulary=vocabulary, eos_ids=tuple(ends), mask=mask)


def read_object(read: ReadFile, name: str, where: str) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    text = read(name)
    if text is None:
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} of {where} must be valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{name} of {where} must hold a JSON object, got {data!r:.80}")
    return data


def begins_with(backend: Backend, *, where: str) -> int | None:
    """The token that the tokenizer's own post-processor puts before a text, if any."""
    text = "a"
    plain = in_one_line(lambda: backend.encode(text, add_special_tokens=False).ids)
    whole = in_one_line(lambda: backend.encode(text, add_special_tokens=True).ids)
    before = next((start for start in range(len(whole)) if whole[start : start + len(plain)] == plain), 0)
    if before > 1:
        raise ValueError(f"the tokenizer of {where} must put at most one token before a text, got {before}")
    return whole[0] if before else None


def chat_template(config: Mapping[str, Any], read: ReadFile, *, where: str) -> str | None:
    """The chat template: from a file of its own, or from tokenizer_config.json."""
    own = read(TEMPLATE_FILE)
    if own is not None:
        return own
    said = config.get(TEMPLATE_KEY)
    if isinstance(said, list):  # several by name, in older files
        named = {each.get("name"): each.get("template") for each in said if isinstance(each, Mapping)}
        said = named.get("default")
    if said is not None and not isinstance(said, str):
        raise ValueError(f"{TEMPLATE_KEY} of {where} must be a text, got {shown(said)}")
    return said


def with_begin(spec: dict[str, Any], token: str, place: int) -> dict[str, Any]:
    """A tokenizer.json with a post-processor that puts a token before every text."""
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [place], "tokens": [token]}},
    }
    before = spec.get("post_processor")
    both = template if before is None else {"type": "Sequence", "processors": [before, template]}
    return {**spec, "post_processor": both}
