"""Conversations in local files: .jsonl, also as .gz, .xz or .zst, and .parquet.

Each row is a conversation, in one of the forms that `shapes` knows. Rows are held out in the same way as for
text (`files`). A document is the JSON of the messages, together with their place in the files, so that later
errors, such as in tokenization, can name it.
"""

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from bd3lm.data.chat import Message
from bd3lm.data.corpus import digest
from bd3lm.data.files import FileCorpus, fingerprint_files, json_values
from bd3lm.data.folders import required_format
from bd3lm.data.parquet import parquet_values
from bd3lm.data.shapes import FIELDS, Conversation, conversation_of
from bd3lm.io.reading import MAX_DOCUMENT, numbered_lines, open_text, readable

_READABLE = (".jsonl", ".parquet")


class Said(NamedTuple):
    """A document of a conversation corpus."""

    where: str
    conversation: Conversation

    def dumps(self) -> str:
        messages = [[each.role, each.content] for each in self.conversation.messages]
        return json.dumps([self.where, messages, self.conversation.is_text])

    @classmethod
    def loads(cls, document: str) -> "Said":
        where, messages, is_text = json.loads(document)
        return cls(where, Conversation(tuple(Message(*each) for each in messages), is_text))


class ConversationCorpus(FileCorpus):
    """The conversations of a file or of a folder of files."""

    holds_conversations = True

    def __init__(
        self, path: str | Path, *, held_out: float | None = None, max_document: int | None = None
    ) -> None:
        super().__init__(path, held_out=held_out, max_document=max_document)
        for file in self._files:
            if required_format(file)[0] not in _READABLE:
                raise ValueError(f"{file} must be {' or '.join(_READABLE)}, to hold conversations")

    @property
    def description(self) -> str:
        return f"{self.name} (conversations, held out {self._held_out:g})"

    @cached_property
    def fingerprint(self) -> str:
        options = ["conversations", self._held_out, list(self.splits)]
        return digest([options, fingerprint_files(self._root, self._files)])

    @cached_property
    def cut(self) -> int:
        """How many conversations have messages after their last answer. These messages are left out. Counting
        reads and checks all conversations."""
        return sum(1 for _, found in self._read(self._files) if found.cut)

    def _rows(self, files: Iterable[Path]) -> Iterator[str]:
        return (Said(where, found).dumps() for where, found in self._read(files))

    def _read(self, files: Iterable[Path]) -> Iterator[tuple[str, Conversation]]:
        for file in files:
            yield from read_conversations(file, self._most)


def read_conversations(path: Path, max_document: int = MAX_DOCUMENT) -> Iterator[tuple[str, Conversation]]:
    """The conversations of one file, each with its place in the file."""
    for where, row in _values(path, max_document):
        try:
            yield where, conversation_of(row)
        except ValueError as error:
            raise ValueError(f"{where}, {error}") from None


def _values(path: Path, max_document: int) -> Iterator[tuple[str, Any]]:
    kind, _ = required_format(path)
    with readable(path):
        if kind == ".parquet":
            for number, row in enumerate(parquet_values(path, FIELDS, max_document), start=1):
                yield f"{path}, row {number}", row
            return
        with open_text(path) as text:
            for number, row in json_values(path, numbered_lines(text, path, max_document)):
                yield f"{path}, line {number}", row
