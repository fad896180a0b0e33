"""The built-in corpus: the language reference in every CPython, without its repetitions."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cached_property

from bd3lm.data.corpus import Corpus, digest

PYDOC = "pydoc"

Documents = dict[str, list[str]]  # by split


class PydocCorpus(Corpus):
    """The language reference in every CPython (`pydoc_data.topics`): about 0.4 MB, no network needed.

    Its topics quote one another: a fifth of the text is a second copy of a paragraph, so two fifths lie in
    paragraphs that occur more than once. If whole topics were held out unchanged, training would read parts
    of them. So repeated paragraphs are removed before the split. The size, and therefore the fingerprint,
    varies with the version of Python.
    """

    name = PYDOC

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._documents)

    @cached_property
    def fingerprint(self) -> str:
        return digest(self._documents)

    def documents(self, split: str) -> Iterator[str]:
        self.check_split(split)
        return iter(self._documents[split])

    def count(self, split: str) -> int:
        return len(self._documents[split])

    @cached_property
    def _documents(self) -> Documents:
        from pydoc_data.topics import topics

        return split_topics(topics)


def split_topics(
    topics: Mapping[str, str], *, held_out: float = 0.1, group_length: int = 2000, leak_length: int = 60
) -> Documents:
    """Remove repeated paragraphs, then hold out about `held_out` of the text, in groups of paragraphs.

    A paragraph ends at a blank line; two paragraphs are the same if they differ only in white space. The
    longest topic keeps the paragraph, since short topics are mostly extracts of long ones. The rest of each
    topic is cut into groups of about `group_length` characters, and the groups with the first hashes are held
    out. A document of the valid split is one of these groups; a document of the train split is the rest of a
    topic. Last, a held-out paragraph of at least `leak_length` characters that is part of a longer paragraph
    in training is dropped too.
    """
    groups = [group for topic in _without_repeats(topics) for group in _grouped(topic, group_length)]
    allowance = held_out * sum(_length(paragraphs) for _, paragraphs in groups)
    held: set[int] = set()
    for i in sorted(range(len(groups)), key=lambda i: _hash("\n\n".join(groups[i][1]))):
        length = _length(groups[i][1])
        if length <= allowance:
            held.add(i)
            allowance -= length

    train: dict[str, list[str]] = {}
    for i, (topic, paragraphs) in enumerate(groups):
        if i not in held:
            train.setdefault(topic, []).extend(paragraphs)
    seen = "\n".join(_squeezed(p) for paragraphs in train.values() for p in paragraphs)
    valid = [
        [p for p in groups[i][1] if len(_squeezed(p)) < leak_length or _squeezed(p) not in seen]
        for i in sorted(held)
    ]
    return {
        "train": ["\n\n".join(paragraphs) for paragraphs in train.values()],
        "valid": ["\n\n".join(paragraphs) for paragraphs in valid if paragraphs],
    }


def paragraphs_of(text: str) -> list[str]:
    """The stretches of text between blank lines, with their indentation."""
    return [p.rstrip() for p in re.split(r"\n(?:[ \t]*\n)+", text.strip("\n")) if p.strip()]


def _without_repeats(topics: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    stub = 100  # anything shorter is a heading whose paragraphs are all elsewhere
    seen: set[str] = set()
    for topic in sorted(topics, key=lambda topic: (-len(topics[topic]), topic)):
        kept = []
        for paragraph in paragraphs_of(topics[topic]):
            if _squeezed(paragraph) not in seen:
                seen.add(_squeezed(paragraph))
                kept.append(paragraph)
        if _length(kept) >= stub:
            yield topic, kept


def _grouped(topic: tuple[str, list[str]], group_length: int) -> Iterator[tuple[str, list[str]]]:
    name, paragraphs = topic
    group: list[str] = []
    for paragraph in paragraphs:
        group.append(paragraph)
        if _length(group) >= group_length:
            yield name, group
            group = []
    if group:
        yield name, group


def _squeezed(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _length(paragraphs: list[str]) -> int:
    return sum(map(len, paragraphs))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
