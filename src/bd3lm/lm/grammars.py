"""Grammars for texts: a regular expression or a JSON schema, over the tokens of a model (llguidance)."""

import json
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bd3lm.data import Tokenizer
from bd3lm.io.extras import require
from bd3lm.methods import Settings

_LONGEST = 100_000  # characters of a grammar


def guide_of(settings: Settings, tokenizer: Tokenizer | None, vocab_size: int) -> "TextGuide | None":
    """What the settings hold texts to, if anything."""
    if not settings.is_guided:
        return None
    name = "regex" if settings.regex is not None else "json_schema"
    if tokenizer is None:
        raise ValueError(f"{name} needs a tokenizer, and this model was saved without one")
    end = tokenizer.eos_id if settings.eos_id is None else settings.eos_id
    if end is None:
        raise ValueError(f"{name} needs an end token, and the tokenizer has none; eos_id names one")
    if not settings.stop_at_eos:
        raise ValueError(f"{name} needs stop_at_eos, since the end token ends what the grammar allows")
    return TextGuide(tokenizer, vocab_size, end, settings.regex, settings.json_schema)


class TextGuide:
    """A grammar over the tokens of a tokenizer. What comes after its text is the end token."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end: int, regex: str | None, json_schema: str | None
    ) -> None:
        self._library = require("llguidance", "serve", "a regex or a JSON schema for texts")
        name, said = ("json_schema", json_schema) if regex is None else ("regex", regex)
        if said is None:
            raise ValueError("regex or json_schema must be given")
        if len(said) > _LONGEST:
            raise ValueError(f"{name} must have at most {_LONGEST:,} characters, got {len(said):,}")
        self._vocab_size = vocab_size
        self._tokens = _tokens(tokenizer, vocab_size, end)
        matcher = self._library.LLMatcher
        try:
            if regex is None:
                # Without blanks: a model that is free to write any number of them may write nothing else.
                self._grammar = matcher.grammar_from_json_schema(
                    said, overrides={"whitespace_flexible": False}
                )
            else:
                self._grammar = matcher.grammar_from_regex(said)
            why = matcher.validate_grammar(self._grammar, self._tokens)
        except ValueError as error:
            why = str(error)
        if why:
            raise ValueError(f"{name} cannot be used: {' '.join(why.split())[:300]}")

    def begin(self) -> "_State":
        return _State(self._library.LLMatcher(self._tokens, self._grammar), self._vocab_size)


class _State:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
        if not allowed.any():
            raise RuntimeError(f"a grammar allows nothing more: {self._matcher.get_error()}")
        return torch.from_numpy(allowed)

    def take(self, token: int) -> None:
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise RuntimeError(f"a grammar refused a token that it had allowed: {self._matcher.get_error()}")


@lru_cache(maxsize=4)
def _tokens(tokenizer: Tokenizer, vocab_size: int, end: int) -> Any:
    """The vocabulary as the library wants it, which takes a while for a large one."""
    llguidance = require("llguidance", "serve", "a regex or a JSON schema for texts")
    spec = tokenizer.spec
    if tokenizer.size > vocab_size:  # a mask beside the vocabulary, which no text holds
        plain = json.loads(spec)
        plain["added_tokens"] = [each for each in plain.get("added_tokens") or () if each["id"] < vocab_size]
        spec = json.dumps(plain)
    return llguidance.LLTokenizer(spec, n_vocab=vocab_size, eos_token=end)
