"""Several corpora as one, and a text corpus as token ids."""

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from bd3lm.data.corpus import Corpus, digest
from bd3lm.data.tokenizers import Tokenizer

_TOGETHER = 64  # documents


class JoinedCorpus(Corpus):
    """The documents of several corpora, split by split, one corpus after another."""

    def __init__(self, parts: Sequence[Corpus]) -> None:
        if not parts:
            raise ValueError("parts must name at least one corpus, got none")
        kinds = {part.holds_ids for part in parts}
        if len(kinds) > 1:
            raise ValueError("parts must all hold text or all token ids, got both: see IdsOf")
        self.parts = tuple(parts)
        self.holds_ids = kinds.pop()
        self.holds_conversations = all(part.holds_conversations for part in parts)
        if not self.holds_conversations and any(part.holds_conversations for part in parts):
            raise ValueError("parts must all hold conversations, or none of them may")
        self.name = " and ".join(part.name for part in parts)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(part.splits for part in self.parts)))

    @property
    def fingerprint(self) -> str:
        return digest([part.fingerprint for part in self.parts])

    @property
    def description(self) -> str:
        return " and ".join(part.description for part in self.parts)

    @property
    def skipped(self) -> str | None:
        return "; ".join(part.skipped for part in self.parts if part.skipped is not None) or None

    def documents(self, split: str) -> Iterator[str]:
        self.check_split(split)
        return chain.from_iterable(part.documents(split) for part in self.parts if split in part.splits)

    def count(self, split: str) -> int | None:
        counts = [part.count(split) for part in self.parts if split in part.splits]
        return None if None in counts else sum(each for each in counts if each is not None)


class IdsOf(Corpus):
    """The documents of a text corpus as token ids, each followed by the end token."""

    holds_ids = True

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer) -> None:
        if corpus.holds_ids:
            raise ValueError(f"corpus must hold text, but {corpus.name} holds token ids")
        self.name = corpus.name
        self._corpus, self._tokenizer = corpus, tokenizer
        self._end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    @property
    def splits(self) -> tuple[str, ...]:
        return self._corpus.splits

    @property
    def fingerprint(self) -> str:
        return digest(["ids", self._corpus.fingerprint, self._tokenizer.fingerprint])

    @property
    def description(self) -> str:
        return self._corpus.description

    @property
    def skipped(self) -> str | None:
        return self._corpus.skipped

    def documents(self, split: str) -> Iterator[str]:
        texts = self._corpus.documents(split)
        while group := list(islice(texts, _TOGETHER)):
            for ids in self._tokenizer.encode_batch(group):
                yield json.dumps([*ids, *self._end])

    def count(self, split: str) -> int | None:
        return self._corpus.count(split)
