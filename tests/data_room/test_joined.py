"""Corpora of token ids, and several corpora as one, down to the shards."""

import json

import numpy as np
import pytest

from bd3lm.data import IdsOf, JoinedCorpus, byte_tokenizer, prepare
from tests.data_room.documents import ListCorpus, small_corpus


class Ids(ListCorpus):
    name = "ids"
    holds_ids = True


def tokens(shards, split) -> list[int]:
    return [
        int(each)
        for file in sorted(shards.folder.glob(f"{split}-*.bin"))
        for each in np.fromfile(file, "<u2")
    ]


def test_ids_reach_the_shards_as_they_are(tmp_path):
    """[104, 105] twice would have the same text as one document; the tokenizer counts bytes."""
    tokenizer = byte_tokenizer()
    documents = [[256, 104, 105], [195, 169, 256], []]
    corpus = Ids({"train": [json.dumps(each) for each in documents]})
    shards = prepare(corpus, tokenizer, tmp_path, eos_between_documents=False, progress=False)
    assert tokens(shards, "train") == [256, 104, 105, 195, 169, 256]
    split = shards.split("train")
    assert (split.documents, split.tokens, split.text_bytes) == (3, 6, 4)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("[1, 258]", "token ids below 258, got"),
        ("[-1]", "token ids below 258, got"),
        ("[true]", "token ids below 258, got"),
        ('"text"', "token ids below 258, got"),
        ("[257]", "must not hold the mask token 257"),
    ],
)
def test_invalid_ids_are_refused(document, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        prepare(
            Ids({"train": [document]}),
            byte_tokenizer(),
            tmp_path,
            eos_between_documents=False,
            progress=False,
        )


def test_the_ids_of_a_text_are_those_that_it_is_prepared_as(tmp_path):
    tokenizer, corpus = byte_tokenizer(), small_corpus(train=70)
    one = prepare(corpus, tokenizer, tmp_path / "text", progress=False)
    ids = IdsOf(corpus, tokenizer)
    two = prepare(ids, tokenizer, tmp_path / "ids", eos_between_documents=False, progress=False)
    for split in ("train", "valid"):
        assert tokens(one, split) == tokens(two, split)
        assert one.split(split).text_bytes == two.split(split).text_bytes
    assert ids.fingerprint != corpus.fingerprint


def test_corpora_are_joined_split_by_split(tmp_path):
    first, second = ListCorpus({"train": ["a", "b"], "valid": ["c"]}), ListCorpus({"train": ["d"]})
    joined = JoinedCorpus([first, second])
    assert joined.splits == ("train", "valid")
    assert list(joined.documents("train")) == ["a", "b", "d"]
    assert list(joined.documents("valid")) == ["c"]
    assert joined.fingerprint != JoinedCorpus([second, first]).fingerprint
    shards = prepare(joined, byte_tokenizer(), tmp_path, progress=False)
    assert tokens(shards, "train") == [97, 256, 98, 256, 100, 256]


def test_corpora_that_cannot_be_joined_are_refused():
    text = ListCorpus({"train": ["a"]})
    with pytest.raises(ValueError, match="at least one corpus"):
        JoinedCorpus([])
    with pytest.raises(ValueError, match="all hold text or all token ids"):
        JoinedCorpus([text, Ids({"train": ["[1]"]})])
    with pytest.raises(ValueError, match="must hold text"):
        IdsOf(Ids({"train": ["[1]"]}), byte_tokenizer())
