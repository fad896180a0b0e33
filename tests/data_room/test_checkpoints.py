"""Tokenizers next to causal language models: where the mask is, what begins and ends a text, templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from bd3lm.data import Tokenizer, load_tokenizer
from bd3lm.data.checkpoints import CAUSAL_TYPES
from bd3lm.interop.families import FAMILIES
from tests.data_room.documents import random_texts
from tests.data_room.test_tokenizers import BPE, gpt_like

TEXTS = [*random_texts(20), "", " ", "12 345,6 é 漢字 👩‍👩‍👧\r\n\ttab", "<|mask|> <|endoftext|>"]
SIZE = 300  # vocabulary size of gpt_like


def beside(folder: Path, vocabulary: int, *, begin: bool = False, **files: Any) -> Backend:
    """A tokenizer next to the config.json of a Llama model. With `begin` it begins texts with a token."""
    backend = gpt_like(folder, files.pop("tokenizer_config", {"eos_token": "<|endoftext|>"}))
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 299)]
        )
        backend.save(str(folder / "tokenizer.json"))
    model = {"model_type": "llama", "vocab_size": vocabulary} | files.pop("config", {})
    (folder / "config.json").write_text(json.dumps(model))
    for name, data in files.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return backend


def by_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_the_types_are_those_that_load() -> None:
    assert set(CAUSAL_TYPES) == set(FAMILIES)


@pytest.mark.parametrize("vocabulary", [SIZE, SIZE + 1, SIZE + 100])
@pytest.mark.parametrize("begin", [False, True])
def test_the_mask_follows_the_model_s_vocabulary(vocabulary: int, begin: bool, tmp_path: Path) -> None:
    backend = beside(tmp_path, vocabulary, begin=begin)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.mask_id, tokenizer.vocab_size) == (vocabulary, vocabulary + 1)
    assert tokenizer.bos_id == (299 if begin else None)
    assert tokenizer.eos_id == 299
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert vocabulary not in ids
        assert tokenizer.decode(ids) == text
        if "<|" not in text:
            whole = [299, *ids] if begin else ids
            assert whole == backend.encode(text).ids
    tokenizer.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert again == tokenizer
    assert again.fingerprint == tokenizer.fingerprint


def test_a_mask_in_the_place_of_an_appended_one_keeps_the_fingerprint(tmp_path: Path) -> None:
    """With or without a model next to it, only the beginning of texts may differ."""
    beside(tmp_path, SIZE, begin=True)
    there = load_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    assert load_tokenizer(tmp_path).fingerprint == there.fingerprint


def test_the_vocabulary_may_be_given(tmp_path: Path) -> None:
    gpt_like(tmp_path)
    assert load_tokenizer(tmp_path).mask_id == 300
    given = load_tokenizer(tmp_path, vocabulary=512)
    assert (given.mask_id, given.bos_id) == (512, None)


def test_a_mask_past_the_vocabulary_is_skipped_or_written(tmp_path: Path) -> None:
    beside(tmp_path, SIZE + 50)
    tokenizer = load_tokenizer(tmp_path)
    mask, ids = tokenizer.mask_id, tokenizer.encode("the noise")
    mixed = [mask, *ids, mask, mask, 299]
    assert tokenizer.decode(mixed) == "the noise"
    assert tokenizer.decode(mixed, skip_special=False) == "<|mask|>the noise<|mask|><|mask|><|endoftext|>"
    assert tokenizer.decode([SIZE + 7, *ids]) == "the noise"  # an id of the network without a token
    import numpy as np

    assert tokenizer.text_bytes(np.array([mask, *ids])) == len("the noise")


def test_a_vocabulary_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    beside(tmp_path, SIZE - 1)
    with pytest.raises(ValueError, match=r"must have at most the 299 tokens of its model, got 300$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("said", ["many", 0, -1, 2**40, True, None, 3.5])
def test_an_invalid_size_is_refused(said: object, tmp_path: Path) -> None:
    beside(tmp_path, SIZE, config={"vocab_size": said})
    with pytest.raises(ValueError, match=r"vocab_size in config\.json of .* must be a whole number"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize("text", ["{", "[]", "[" * 10**5])
def test_a_torn_file_is_one_line(name: str, text: str, tmp_path: Path) -> None:
    beside(tmp_path, SIZE)
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{name}\.json of .* must (be valid JSON|hold a JSON object)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, 299),
        ({"tokenizer_config": {"eos_token": "a"}, "generation_config": {"eos_token_id": 5}}, None),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": 5}}, 5),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": [7, 5]}}, 7),
        ({"tokenizer_config": {}, "generation_config": {}, "config": {"eos_token_id": 9}}, 9),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": [999]}}, 299),
    ],
    ids=["tokenizer", "tokenizer first", "generation", "several", "config", "unknown"],
)
def test_the_tokens_that_end_a_text(files: dict[str, Any], eos: int | None, tmp_path: Path) -> None:
    backend = beside(tmp_path, SIZE, **files)
    assert load_tokenizer(tmp_path).eos_id == (backend.token_to_id("a") if eos is None else eos)


@pytest.mark.parametrize("said", ["x", -1, [1, "x"], True])
def test_an_invalid_end_token_is_refused(said: object, tmp_path: Path) -> None:
    beside(tmp_path, SIZE, generation_config={"eos_token_id": said})
    with pytest.raises(ValueError, match=r"eos_token_id for the tokenizer of .* must be token ids, got"):
        load_tokenizer(tmp_path)


def test_at_most_one_token_begins_a_text(tmp_path: Path) -> None:
    backend = beside(tmp_path, SIZE)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> <|endoftext|> $A", special_tokens=[("<|endoftext|>", 299)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="must put at most one token before a text, got 2"):
        load_tokenizer(tmp_path)


class TestTemplates:
    def test_each_place_of_a_template(self, tmp_path: Path) -> None:
        beside(tmp_path, SIZE, tokenizer_config={"chat_template": "A"})
        assert load_tokenizer(tmp_path).chat_template == "A"
        several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
        assert load_tokenizer(tmp_path).chat_template == "D"
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}\n")
        assert load_tokenizer(tmp_path).chat_template == "{{ messages }}\n"

    def test_it_is_saved_and_not_part_of_the_fingerprint(self, tmp_path: Path) -> None:
        beside(tmp_path, SIZE + 9, tokenizer_config={"chat_template": "A"})
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.save(tmp_path / "again")
        assert load_tokenizer(tmp_path / "again") == tokenizer
        bare = Tokenizer(tokenizer.spec, tokenizer.mask_id, tokenizer.eos_id, tokenizer.bos_id)
        assert bare.fingerprint == tokenizer.fingerprint
        assert by_transformers(tmp_path / "again").chat_template == "A"

    def test_an_invalid_template_is_refused(self, tmp_path: Path) -> None:
        beside(tmp_path, SIZE, tokenizer_config={"chat_template": 3})
        with pytest.raises(ValueError, match=r"chat_template of .* must be a text, got 3"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "said",
    [
        *([], {}, {"mask_id": None}, {"mask_id": "5"}, {"mask_id": -1}, {"mask_id": 2**40}),
        *({"mask_id": 300, "eos_id": 300}, {"mask_id": 300, "bos_id": True}),
    ],
)
def test_ids_of_our_own_are_checked(said: object, tmp_path: Path) -> None:
    gpt_like(tmp_path, {"bd3lm": said})
    with pytest.raises(
        ValueError, match=r"bd3lm in tokenizer_config\.json of .* must hold mask_id, eos_id an"
    ):
        load_tokenizer(tmp_path)


class TestForOthers:
    @pytest.mark.parametrize("vocabulary", [SIZE, SIZE + 100])
    @pytest.mark.parametrize("begin", [False, True])
    def test_transformers_encodes_as_we_do(self, vocabulary: int, begin: bool, tmp_path: Path) -> None:
        beside(tmp_path, vocabulary, begin=begin, tokenizer_config={"chat_template": "A"})
        tokenizer = load_tokenizer(tmp_path)
        tokenizer.save_for_others(tmp_path / "out")
        theirs = by_transformers(tmp_path / "out")
        assert len(theirs) == SIZE
        assert theirs.mask_token is None
        assert theirs.chat_template == "A"
        for text in TEXTS[:-1]:
            ids = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)
            assert theirs(text)["input_ids"] == ids
            assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
        (tmp_path / "out" / "config.json").write_text((tmp_path / "config.json").read_text())
        assert load_tokenizer(tmp_path / "out").fingerprint == tokenizer.fingerprint

    def test_one_of_ours_begins_texts_there_too(self, tmp_path: Path) -> None:
        BPE.save_for_others(tmp_path)
        theirs = by_transformers(tmp_path)
        assert len(theirs) == BPE.vocab_size - 1
        assert theirs("the noise")["input_ids"] == [BPE.bos_id, *BPE.encode("the noise")]
