"""What a corpus is: documents as text, by split, in an order that never changes.

A corpus also gives a fingerprint of all that decides its documents, so that shards made from it can say what
they hold, and it keeps no more than a few documents in memory, however large it is.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator


class Corpus(ABC):
    """Documents by split. Two corpora with the same fingerprint give the same documents."""

    name: str
    holds_conversations: bool = False
    """Whether its documents are conversations, which a template makes tokens of (`conversations`)."""
    holds_ids: bool = False
    """Whether its documents are token ids, as lists in JSON, in place of text: what a model wrote comes back
    as it was written, where tokenizing its text again might cut it otherwise."""

    @property
    @abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Which splits there are: "train" and, where they exist, "valid" and "test"."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 of the text, or of what pins it, and of every option that decides the documents."""

    @property
    def description(self) -> str:
        """Its name, and the options that its documents were read with, for people."""
        return self.name

    @property
    def skipped(self) -> str | None:
        """What lies where it is read from and is passed over, and why, in a line; None where nothing is."""
        return None

    @abstractmethod
    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split, none of them blank, in an order that never changes."""

    def count(self, split: str) -> int | None:
        """About how many documents a split has, where that is cheap to know: for progress bars."""
        return None

    def check_split(self, split: str) -> None:
        if split not in self.splits:
            raise ValueError(
                f"split must be one of {', '.join(self.splits)} for corpus {self.name!r}, got {split!r}"
            )


def digest(value: object) -> str:
    """sha256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
