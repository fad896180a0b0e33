"""Texts that a model writes to be trained on: the same however often they are interrupted."""

import json
from pathlib import Path

import pytest

from bd3lm.data import byte_tokenizer, prepare
from bd3lm.lm import LanguageModel
from bd3lm.runs.own_texts import Author, OwnTexts, Writing, builtin_prompts
from tests.data_room.test_joined import tokens
from tests.lm import of_bytes

PROMPTS = ["ab", "hello", "the ", "x"]
CHAT = "{{ '<|endoftext|>' }}Q: {{ messages[0].content }} A: "


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return of_bytes(None, end_logit=1.0)


def author(model: LanguageModel, path: Path, **changes: object) -> Author:
    writing = {"texts": 11, "length": 12, "batch_size": 3, "seed": 5}
    prompts = changes.pop("prompts", PROMPTS)
    weights = changes.pop("weights", "f" * 64)
    return Author(model, weights, Writing(**{**writing, **changes}), path, prompts=prompts)


def write(model: LanguageModel, path: Path, **changes: object) -> list[dict]:
    assert len(list(author(model, path, **changes).write())) > 0
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.jsonl"
    write(model, path)
    return path


def test_each_text_goes_on_from_its_prompt_by_a_seed_of_its_own(model, whole):
    head, *texts = [json.loads(line) for line in whole.read_text("utf-8").splitlines()]
    assert head["weights"] == "f" * 64
    assert {
        "texts": 11,
        "length": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 5,
        "law": "causal",
    }.items() <= head.items()
    assert [each["index"] for each in texts] == list(range(11))
    assert len({each["seed"] for each in texts}) == 11
    for each in texts:
        assert each["prompt"] == PROMPTS[each["index"] % 4]
        assert model.tokenizer.decode(each["tokens"]).startswith(each["prompt"])
        (again,) = model.generate(each["prompt"], seeds=[each["seed"]], length=12, top_p=1.0)
        assert again.tokens == each["tokens"]


def test_a_batch_changes_no_text(model, whole, tmp_path):
    write(model, tmp_path / "own.jsonl", batch_size=7)
    assert (tmp_path / "own.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("torn", [b"", b'{"index": 9, "tok'])
def test_an_interrupted_writing_goes_on_byte_for_byte(torn, model, whole, tmp_path):
    path = tmp_path / "own.jsonl"
    steps = author(model, path).write()
    for _ in range(4):
        next(steps)
    steps.close()
    assert not path.exists()
    partial = path.with_name("own.jsonl.partial")
    partial.write_bytes(partial.read_bytes() + torn)
    again = author(model, path)
    assert len(again.left) == 7
    assert len(list(again.write())) == 7
    assert path.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    assert author(model, path).left == []
    assert list(author(model, path).write()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": "0" * 64}, "weights"),
        ({"prompts": ["another"]}, "prompts"),
        ({"temperature": 0.5}, "temperature"),
        ({"texts": 12}, "texts"),
        ({"seed": 6}, "seed"),
    ],
)
def test_texts_of_another_writing_are_not_mixed(changes, said, model, whole, tmp_path):
    with pytest.raises(ValueError, match=f"holds texts with other settings .*{said}.* use another --out"):
        _ = author(model, whole, **changes).left
    steps = author(model, tmp_path / "own.jsonl").write()
    next(steps)
    steps.close()
    with pytest.raises(ValueError, match="partial holds texts with other settings"):
        _ = author(model, tmp_path / "own.jsonl", **changes).left


def test_prompts_that_are_too_long_are_refused_before_anything_is_written(model, tmp_path):
    with pytest.raises(ValueError, match="prompt 0: length must be at least the prompt's"):
        write(model, tmp_path / "sub" / "own.jsonl", prompts=["a long prompt indeed"])
    assert list(tmp_path.iterdir()) == []


def test_they_are_a_corpus_of_ids_of_which_the_last_are_held_out(model, whole, tmp_path):
    corpus = OwnTexts(whole)
    texts = [json.loads(line)["tokens"] for line in whole.read_text("utf-8").splitlines()[1:]]
    shards = prepare(corpus, model.tokenizer, tmp_path, eos_between_documents=False, progress=False)
    assert tokens(shards, "train") == [each for text in texts[:10] for each in text]
    assert tokens(shards, "valid") == texts[10]
    assert (corpus.count("train"), corpus.count("valid")) == (10, 1)
    assert shards.meta.inputs.source_fingerprint == corpus.fingerprint
    assert "11 texts by the model ffffffffffff (temperature 1, top_p 1)" in corpus.description


def test_the_fingerprint_is_of_all_that_decides_the_texts(model, whole, tmp_path):
    found = {OwnTexts(whole).fingerprint}
    for number, changes in enumerate(
        (
            {"weights": "0" * 64},
            {"prompts": ["y"]},
            {"top_p": 0.9},
            {"texts": 10},
            {"length": 11},
            {"seed": 6},
        )
    ):
        path = tmp_path / f"{number}.jsonl"
        write(model, path, **changes)
        found.add(OwnTexts(path).fingerprint)
    assert len(found) == 7


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"", "must begin with a line of format"), (b"[1]\n", "must begin"), (b"{}\n", "must begin")],
)
def test_a_file_that_is_none_of_these(line, said, tmp_path):
    (tmp_path / "own.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=said):
        OwnTexts(tmp_path / "own.jsonl")


def test_a_model_with_a_template_is_asked_in_it(model, tmp_path):
    from dataclasses import replace

    tokenizer = replace(model.tokenizer, chat_template=CHAT)
    chatting = LanguageModel(model.network, model.record, tokenizer)
    _, *texts = write(chatting, tmp_path / "own.jsonl", length=32, texts=4)
    assert [
        tokenizer.decode(each["tokens"])[: len(f"Q: {each['prompt'].strip()} A: ")] for each in texts
    ] == [f"Q: {each.strip()} A: " for each in PROMPTS]
    assert all(each["tokens"][0] == tokenizer.eos_id for each in texts)


@pytest.mark.parametrize("chat", [True, False])
def test_the_prompts_that_come_with_it_are_many_and_each_once(chat):
    found = builtin_prompts(chat=chat)
    assert len(found) >= 60
    assert len(set(found)) == len(found)
    assert all(each == each.strip() for each in found)
    assert max(len(byte_tokenizer().encode(each)) for each in found) < 160


def test_one_text_is_too_few():
    with pytest.raises(ValueError, match="texts must be at least 2"):
        Writing(texts=1, length=8)
