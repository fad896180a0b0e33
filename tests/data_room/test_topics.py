"""The built-in corpus: training has nothing that is held out, on this Python and on made-up topics."""

import re

from hypothesis import given
from hypothesis import strategies as st

from bd3lm.data import PydocCorpus
from bd3lm.data.topics import paragraphs_of, split_topics

CORPUS = PydocCorpus()


def squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def test_no_held_out_paragraph_of_60_characters_is_in_training() -> None:
    training = " ".join(squeezed(text) for text in CORPUS.documents("train"))
    held_out = [squeezed(p) for text in CORPUS.documents("valid") for p in re.split(r"\n\s*\n", text)]
    long = [p for p in held_out if len(p) >= 60]
    assert len(long) > 100
    assert [p for p in long if p in training] == []


def test_a_naive_split_would_leak() -> None:
    """Why repeated paragraphs are removed first: what happens if topics are held out unchanged."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    training = " ".join(squeezed(topics[n]) for n in names if names.index(n) % 10)
    held_out = [squeezed(p) for n in names[::10] for p in paragraphs_of(topics[n])]
    long = [p for p in held_out if len(p) >= 60]
    assert sum(p in training for p in long) > 0.1 * len(long)


def test_about_a_tenth_is_held_out_and_little_is_lost() -> None:
    from pydoc_data.topics import topics

    train, valid = (sum(map(len, CORPUS.documents(split))) for split in ("train", "valid"))
    assert 0.08 < valid / (train + valid) < 0.105
    unique = {squeezed(p) for text in topics.values() for p in paragraphs_of(text)}
    assert train + valid > 0.98 * sum(map(len, unique))
    assert 300_000 < train + valid < 600_000


def test_documents_are_whole_paragraphs_of_the_topics() -> None:
    from pydoc_data.topics import topics

    paragraphs = {p for text in topics.values() for p in paragraphs_of(text)}
    kept = [p for split in CORPUS.splits for text in CORPUS.documents(split) for p in text.split("\n\n")]
    assert set(kept) <= paragraphs
    assert len({squeezed(p) for p in kept}) == len(kept)


def test_the_corpus_is_deterministic_and_fingerprinted() -> None:
    again = PydocCorpus()
    assert again.splits == ("train", "valid")
    assert [list(again.documents(s)) for s in again.splits] == [
        list(CORPUS.documents(s)) for s in again.splits
    ]
    assert again.fingerprint == CORPUS.fingerprint
    assert len(list(again.documents("train"))) == again.count("train")


def test_the_order_of_the_topics_does_not_matter() -> None:
    from pydoc_data.topics import topics

    assert split_topics(dict(reversed(topics.items()))) == split_topics(topics)


# Paragraphs over few words repeat and contain one another, as in the real thing.
paragraph = st.lists(st.sampled_from(["alpha", "beta", "gamma delta"]), min_size=1, max_size=4).map(" ".join)
topic = st.lists(paragraph, min_size=1, max_size=12).map("\n\n".join)


@given(st.dictionaries(st.text("abc", min_size=1), topic, min_size=2, max_size=6))
def test_nothing_leaks_from_any_topics(topics: dict[str, str]) -> None:
    documents = split_topics(topics, held_out=0.3, group_length=20, leak_length=5)
    training = "\n".join(squeezed(p) for text in documents["train"] for p in paragraphs_of(text))
    for text in documents["valid"]:
        assert not [p for p in paragraphs_of(text) if len(squeezed(p)) >= 5 and squeezed(p) in training]


def test_paragraphs_end_at_blank_lines_and_keep_their_indentation() -> None:
    assert paragraphs_of("\n\nA\n  b \n \t\n\n   c\nd\n\n") == ["A\n  b", "   c\nd"]
