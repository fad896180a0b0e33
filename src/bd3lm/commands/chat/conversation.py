"""The conversation so far: the part that the model is given, and the whole as a line of JSON in a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bd3lm.commands.shared.records import check_new_file
from bd3lm.data import Tokenizer
from bd3lm.data.chat import Message, conversation
from bd3lm.io.files import local_path, read_text, write_atomically
from bd3lm.io.reading import MAX_DOCUMENT
from bd3lm.io.terminal import as_utf8

_CHARACTERS = 64  # per token, on average, at most; longer text is not even tokenized
_SHARE = 4  # an answer gets at least one in this many tokens of the context


@dataclass(frozen=True)
class Window:
    """The part of a conversation that the model is given."""

    tokens: list[int]
    dropped: int
    """The oldest exchanges, this many, are left out."""


@dataclass
class Conversation:
    """Exchanges of a user's message and its answer; between turns every exchange is complete."""

    template: str
    tokenizer: Tokenizer
    context: int
    """Tokens that the model reads at once."""
    system: str | None = None
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    @property
    def most_characters(self) -> int:
        """Of a message; a longer one is not even tokenized."""
        return _CHARACTERS * self.context

    def window(self, message: str, most_new: int | None) -> Window:
        """The tokens to answer a message with, leaving room for the answer.

        The room is `most_new` tokens or a quarter of the context, whichever is less. It depends only on the
        conversation, so the same conversation always gives the same tokens.
        """
        check_text(message, "a message", self.most_characters)
        share = max(self.context // _SHARE, 1)
        limit = self.context - (share if most_new is None else min(most_new, share))
        dropped, last = self._first_of_interest(), len(self.exchanges)
        tokens = self.tokens(message, dropped)
        if len(tokens) > limit and dropped < last:  # the fewest exchanges to leave out
            too_few, dropped, tokens = dropped, last, self.tokens(message, last)
            while dropped - too_few > 1:
                middle = (too_few + dropped) // 2
                found = self.tokens(message, middle)
                if len(found) > limit:
                    too_few = middle
                else:
                    dropped, tokens = middle, found
        if len(tokens) >= self.context:
            raise ValueError(
                f"a message must leave room for an answer in the context of {self.context:,} tokens, got a "
                f"message that makes {len(tokens):,}"
            )
        return Window(tokens, dropped)

    def tokens(self, message: str, dropped: int = 0) -> list[int]:
        """The conversation with one more message, without this many of the oldest exchanges."""
        turns = [*self._before(dropped), Message("user", message)]
        return conversation(self.template, turns, self.tokenizer)

    def messages(self) -> list[dict[str, str]]:
        """All messages, in the format of files and servers."""
        return [{"role": each.role, "content": each.content} for each in self._before(0)]

    def _before(self, dropped: int) -> list[Message]:
        turns = [] if self.system is None else [Message("system", self.system)]
        for user, assistant in self.exchanges[dropped:]:
            turns += [Message("user", user), Message("assistant", assistant)]
        return turns

    def _first_of_interest(self) -> int:
        """The first exchange from which on the rest might fit, counting only characters."""
        left = self.most_characters
        for place in range(len(self.exchanges) - 1, -1, -1):
            left -= sum(map(len, self.exchanges[place]))
            if left < 0:
                return place + 1
        return 0

    def save(self, file: str) -> Path:
        """Write the conversation to a new file, as one line of JSON that `bd3lm tune` reads too."""
        path = local_path(file)
        check_new_file(path, "/save")
        line = json.dumps({"messages": self.messages()}, ensure_ascii=False)
        write_atomically(path, as_utf8(line + "\n"))
        return path

    def load(self, file: str) -> None:
        """Replace this conversation with the one in a file."""
        self.system, self.exchanges = read_conversation(local_path(file))


def read_conversation(path: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """The system message, if there is one, and the exchanges of the single conversation in a file."""
    lines = [line for line in read_text(path, most=MAX_DOCUMENT).split("\n") if line.strip()]
    if len(lines) != 1:
        raise ValueError(
            f"/load must be a file with one conversation on one line, and {path} has {len(lines):,}"
        )
    try:
        said = json.loads(lines[0])
    except (ValueError, RecursionError):
        raise ValueError(f"/load must be a JSON file, and {path} is not") from None
    messages = said.get("messages") if isinstance(said, dict) else None
    if not isinstance(messages, list):
        raise ValueError(f"/load must be an object with a list of messages, and {path} is not")
    turns = [_turn(each, place, path) for place, each in enumerate(messages)]
    system = turns.pop(0)[1] if turns and turns[0][0] == "system" else None
    roles = [role for role, _ in turns]
    if roles != ["user", "assistant"] * (len(turns) // 2):
        raise ValueError(
            "/load must be a conversation that alternates between user and assistant and ends with the "
            f"assistant, and {path} is not"
        )
    texts = [text for _, text in turns]
    return system, list(zip(texts[::2], texts[1::2], strict=True))


def _turn(message: Any, place: int, path: Path) -> tuple[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"/load: message {place} of {path} must have a role and a content, both texts")
    Message(role, content)  # its error lists the allowed roles
    check_text(content, f"message {place} of {path}", MAX_DOCUMENT)
    return role, content


def check_text(text: str, name: str, most: int) -> None:
    """Refuse invalid Unicode, which a terminal with another encoding sends, and text that is far too long."""
    if len(text) > most:
        raise ValueError(f"{name} must have at most {most:,} characters here, got {len(text):,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be valid Unicode, got {text!r:.80}") from None


def check_template(template: str, system: str | None, tokenizer: Tokenizer) -> Sequence[int]:
    """Refuse a template that cannot write a conversation, or that does not take the given system message."""
    return Conversation(template, tokenizer, 1 << 30, system, [("Hello", "Hello")]).tokens("Hello")
