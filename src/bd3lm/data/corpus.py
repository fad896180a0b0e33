"""The interface of a corpus: documents as text, by split, in an order that never changes.

A corpus also has a fingerprint of everything that decides its documents, so shards can record what they were
made from. It holds only a few documents in memory at a time, whatever its size.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator


class Corpus(ABC):
    """Documents by split. Two corpora with the same fingerprint have the same documents."""

    name: str
    holds_conversations: bool = False
    """Whether its documents are conversations, which a chat template turns into tokens (`conversations`)."""
    holds_ids: bool = False
    """Whether its documents are token ids, as JSON lists, instead of text. A model's own output then keeps
    its tokens, which tokenizing its text again might not reproduce."""

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits that exist: "train", and possibly "valid" and "test"."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of the text, or of something that determines it, and of every option that decides the
        documents."""

    @property
    def description(self) -> str:
        """Its name and the options used to read its documents, for people."""
        return self.name

    @property
    def skipped(self) -> str | None:
        """One line about the files at its source that were not read, and why; None if all were."""
        return None

    @abstractmethod
    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split, none of them blank, in an order that never changes."""

    def count(self, split: str) -> int | None:
        """About how many documents a split has, for progress bars; None if that is expensive to find out."""
        return None

    def check_split(self, split: str) -> None:
        """Refuse a split that the corpus does not have."""
        if split not in self.splits:
            raise ValueError(
                f"split must be one of {', '.join(self.splits)} for corpus {self.name!r}, got {split!r}"
            )


def digest(value: object) -> str:
    """sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
