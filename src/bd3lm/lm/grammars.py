"""Grammars that constrain texts: a regular expression or a JSON schema, compiled to tokens by llguidance."""

import json
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bd3lm.data import Tokenizer
from bd3lm.io.extras import require
from bd3lm.methods import Settings

_LONGEST = 100_000  # characters of a grammar
_LIMITS = {  # a fifth to a half of the library's own, so that a stranger's grammar fails quickly
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
_LARGEST_MULTIPLE = 10_000  # of multipleOf, without its decimal point: time and memory grow with it


def guide_of(settings: Settings, tokenizer: Tokenizer | None, vocab_size: int) -> "TextGuide | None":
    """The grammar that the settings ask for, if any."""
    if not settings.is_guided:
        return None
    name = "regex" if settings.regex is not None else "json_schema"
    if tokenizer is None:
        raise ValueError(f"{name} needs a tokenizer, and this model was saved without one")
    end = tokenizer.eos_id if settings.eos_id is None else settings.eos_id
    if end is None:
        raise ValueError(f"{name} needs an end token, and the tokenizer has none; set eos_id")
    if not settings.stop_at_eos:
        raise ValueError(f"{name} needs stop_at_eos, since the end token marks the end of the grammar's text")
    return TextGuide(tokenizer, vocab_size, end, settings.regex, settings.json_schema)


class TextGuide:
    """A grammar over the tokens of a tokenizer. After a complete text it allows the end token."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end: int, regex: str | None, json_schema: str | None
    ) -> None:
        self._limits: Any = None
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
                _check_multiples(json.loads(said))
                # No blanks: a model that may write any number of them may write nothing else.
                self._grammar = matcher.grammar_from_json_schema(
                    said, overrides={"whitespace_flexible": False}
                )
            else:
                self._grammar = matcher.grammar_from_regex(said)
            why = matcher.validate_grammar(self._grammar, self._tokens)
        except ValueError as error:
            why = str(error)
        except RecursionError:
            why = "it is nested too deeply to be read"
        self._limits = self._library.LLParserLimits(**_LIMITS)
        why = why or self.begin().trouble()
        if why:
            raise ValueError(f"{name} cannot be used: {' '.join(why.split())[:300]}")

    def begin(self) -> "_State":
        matcher = self._library.LLMatcher(self._tokens, self._grammar, limits=self._limits)
        return _State(matcher, self._vocab_size)


class _State:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def trouble(self) -> str:
        """What is wrong before anything is written: no text matches, or the grammar takes too long."""
        self.allowed()
        return str(self._matcher.get_error() or "no text matches it") if self._matcher.is_error() else ""

    def allowed(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(bool)
        if self._matcher.is_error():  # otherwise the library would allow the end token
            allowed[:] = False
        return torch.from_numpy(allowed)

    def take(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)  # if this fails, nothing is allowed any more


def _check_multiples(schema: Any) -> None:
    """Refuse a multipleOf with many digits: the library builds an automaton from it."""
    todo = [schema]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            number = each.get("multipleOf")
            if isinstance(number, int | float) and not isinstance(number, bool):
                digits = Decimal(str(number)).normalize().as_tuple()
                size = int("".join(map(str, digits.digits))) * 10 ** max(int(digits.exponent), 0)
                if size > _LARGEST_MULTIPLE:
                    raise ValueError(f"multipleOf must be at most {_LARGEST_MULTIPLE:,}, got {number}")
            todo += each.values()
        elif isinstance(each, list):
            todo += each


@lru_cache(maxsize=4)
def _tokens(tokenizer: Tokenizer, vocab_size: int, end: int) -> Any:
    """The vocabulary as llguidance wants it, cached because a large one takes a while."""
    llguidance = require("llguidance", "serve", "a regex or a JSON schema for texts")
    spec = tokenizer.spec
    if tokenizer.size > vocab_size:  # the mask is outside the vocabulary, and no text holds it
        plain = json.loads(spec)
        plain["added_tokens"] = [each for each in plain.get("added_tokens") or () if each["id"] < vocab_size]
        spec = json.dumps(plain)
    return llguidance.LLTokenizer(spec, n_vocab=vocab_size, eos_token=end)
