"""Texts that follow a regular expression or a JSON schema, by the causal law."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from bd3lm import Gap, LanguageModel
from bd3lm.methods import BlockDiffusionMethod
from tests.lm import BYTES, of_bytes, of_method

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,5}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["river", "town"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


def causal(**changes: Any) -> LanguageModel:
    method = BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True, law="causal")
    return of_method(method, context=96, **changes)


def test_json_follows_its_schema_and_a_text_its_expression() -> None:
    """Of a model that would write random bytes."""
    lm = causal()
    for text in lm.generate("a ☂", count=8, max_new_tokens=80, json_schema=SCHEMA, temperature=1.5):
        assert text.stopped_by == "eos"
        found = json.loads(text.completion or "")
        assert set(found) == {"name", "size", "kind"}
        assert re.fullmatch("[a-z]{1,5}", found["name"])
        assert 0 <= found["size"] <= 99
        assert found["kind"] in ("river", "town")
    pattern = r"(é|☂){2,4}-\d{3}"
    texts = lm.generate("x", count=8, max_new_tokens=80, regex=pattern)
    assert all(re.fullmatch(pattern, text.completion or "") for text in texts)
    assert len({text.completion for text in texts}) > 4
    by_text = lm.generate("a", max_new_tokens=80, json_schema=json.dumps(SCHEMA), seed=3)
    assert by_text[0].tokens == lm.generate("a", max_new_tokens=80, json_schema=SCHEMA, seed=3)[0].tokens


def test_other_texts_beside_them_are_their_own() -> None:
    lm = causal()
    engine = lm.engine()
    asked = [{"regex": r"\d+"}, {}, {"json_schema": SCHEMA}, {"regex": "[a-f]{3}"}]
    handles = [engine.submit("a", seed=5, max_new_tokens=40, **each) for each in asked]
    done = {}
    while len(engine):
        for event in engine.step():
            if hasattr(event, "sample"):
                done[event.index] = event.sample.tokens.tolist()
    for handle, each in zip(handles, asked, strict=True):
        (alone,) = lm.generate("a", seeds=[5], max_new_tokens=40, **each)
        assert done[handle.index] == alone.tokens


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"regex": "(a"}, "regex cannot be used: .*unclosed group"),
        ({"json_schema": "{"}, "json_schema cannot be used: "),
        ({"json_schema": {"type": 3}}, "json_schema cannot be used: "),
        ({"regex": "a", "json_schema": "{}"}, "only one of regex and json_schema may be given"),
        ({"regex": 3}, "regex must be a text, got 3"),
        ({"regex": "a", "stop_at_eos": False}, "regex needs stop_at_eos"),
        ({"regex": "a", "speculation": 2}, "speculation must be off for a text with a grammar"),
        ({"regex": "a", "cache": False}, "cache must be on for a text with a grammar"),
        ({"json_schema": "[" * 50_000}, "json_schema cannot be used: it is nested too deeply to be read"),
        ({"json_schema": {"enum": {3}}}, "json_schema must be what JSON can hold: .*set is not JSON"),
        ({"regex": "a" * 200_000}, "regex must have at most 100,000 characters, got 200,000"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_what_cannot_be_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        causal().generate("a", max_new_tokens=8, **changes)


def test_models_that_cannot_be_held_to_a_grammar_say_so() -> None:
    with pytest.raises(ValueError, match="regex is for models that write token by token"):
        of_bytes().generate("a", regex="a")
    with pytest.raises(ValueError, match="a template must not be guided"):
        causal().generate([["a", Gap(2), "b"]], regex="a", fills=1)
    with pytest.raises(ValueError, match="json_schema needs a tokenizer"):
        causal(tokenizer=None, mask_id=BYTES.mask_id).generate([97], json_schema={}, eos_id=1)
    without_end = replace(BYTES, eos_id=None)
    with pytest.raises(ValueError, match="regex needs an end token"):
        causal(tokenizer=without_end).generate("a", regex="a")


def test_a_schema_that_is_nested_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(50_000):
        schema = {"not": schema}
    with pytest.raises(ValueError, match=r"json_schema must be what JSON can hold: .*recursion"):
        causal().generate("a", max_new_tokens=8, json_schema=schema)
