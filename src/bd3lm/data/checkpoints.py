"""What files beside the tokenizer of a causal language model say of it: its size, its special tokens, its
chat template."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from bd3lm.data.guarded import in_one_line
from bd3lm.parsing import shown

CAUSAL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of model_type in config.json whose vocab_size says where the mask is: past all it predicts."""

SDAR_TYPE, SDAR_MASK = "sdar", 151669
"""The model_type of block diffusion models whose mask is one of their tokens, and that token unless said."""

MODEL_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_KEY = "chat_template"

_MOST_VOCABULARY = 2**26

ReadFile = Callable[[str], str | None]
"""The text of a file of some name, or None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What concerns a tokenizer of the causal language model that it lies beside."""

    vocabulary: int
    """How many tokens it predicts."""
    eos_ids: tuple[int, ...] = ()
    """What ends a text, by generation_config.json or config.json."""
    mask: int | None = None
    """The mask, where it is not the id after all that the model predicts."""


def find_checkpoint(read: ReadFile, vocabulary: int | None, *, where: str) -> Checkpoint | None:
    """The model that a tokenizer lies beside, or of which the vocabulary is known; None without one."""
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
        raise ValueError(f"eos_token_id beside the tokenizer of {where} must be token ids, got {shown(said)}")
    return Checkpoint(vocabulary=vocabulary, eos_ids=tuple(ends), mask=mask)


def read_object(read: ReadFile, name: str, where: str) -> dict[str, Any]:
    """The JSON object in a file, or an empty one where there is no such file."""
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
    """The token that the tokenizer's own post-processor puts before a text, if it puts one."""
    text = "a"
    plain = in_one_line(lambda: backend.encode(text, add_special_tokens=False).ids)
    whole = in_one_line(lambda: backend.encode(text, add_special_tokens=True).ids)
    before = next((start for start in range(len(whole)) if whole[start : start + len(plain)] == plain), 0)
    if before > 1:
        raise ValueError(f"the tokenizer of {where} must put at most one token before a text, got {before}")
    return whole[0] if before else None


def chat_template(config: Mapping[str, Any], read: ReadFile, *, where: str) -> str | None:
    """The template of a conversation: that of the file of its own, or the one in tokenizer_config.json."""
    own = read(TEMPLATE_FILE)
    if own is not None:
        return own
    said = config.get(TEMPLATE_KEY)
    if isinstance(said, list):  # several by name, as older files have them
        named = {each.get("name"): each.get("template") for each in said if isinstance(each, Mapping)}
        said = named.get("default")
    if said is not None and not isinstance(said, str):
        raise ValueError(f"{TEMPLATE_KEY} of {where} must be a text, got {shown(said)}")
    return said


def with_begin(spec: dict[str, Any], token: str, place: int) -> dict[str, Any]:
    """A tokenizer.json whose post-processor puts a token before every text."""
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
