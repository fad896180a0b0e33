"""Recognize a row of a data set as a conversation, by the names of its fields. Errors are one line."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bd3lm.data.chat import Message
from bd3lm.io.reading import whole_characters

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "ai": "assistant",
}
"""The names that data sets use for speakers, and our role for each."""

_NAMES, _TEXTS = ("role", "from"), ("content", "value")


class Conversation(NamedTuple):
    """Turns that end with an answer."""

    messages: tuple[Message, ...]
    is_text: bool = False
    """Whether they are a text and its continuation, which need no template."""
    cut: int = 0
    """How many messages after the last answer were left out; nothing is learned from them."""


def conversation_of(row: Any) -> Conversation:
    """The conversation in a row of plain values. A ValueError says what is wrong with it."""
    if not isinstance(row, Mapping):
        raise ValueError(f"must be an object with fields, got {type(row).__name__}")
    present = {name for name, value in row.items() if value is not None}
    for fields, read in _SHAPES:
        if present.issuperset(fields):
            return _checked(*read(row))
    known = "; ".join(" and ".join(fields) for fields, _ in _SHAPES)
    found = ", ".join(map(str, row)) or "none"
    raise ValueError(f"must have the fields of a conversation ({known}), got {found:.200}")


def is_conversation(row: Any) -> bool:
    """Whether a row has the fields of a conversation."""
    return isinstance(row, Mapping) and any(row.keys() >= set(fields) for fields, _ in _SHAPES)


def _checked(messages: Sequence[Message], is_text: bool) -> Conversation:
    kept = list(messages)
    while kept and kept[-1].role != "assistant":
        kept.pop()
    if not kept:
        raise ValueError("has no message of the assistant, so there is nothing to learn")
    if kept[0].role == "assistant":
        raise ValueError("begins with an answer: something must come before it")
    return Conversation(tuple(kept), is_text, len(messages) - len(kept))


def _from_list(name: str) -> Callable[[Mapping[str, Any]], tuple[list[Message], bool]]:
    def read(row: Mapping[str, Any]) -> tuple[list[Message], bool]:
        first = _system(row) if not _begins_with_system(row[name]) else []
        return [*first, *_messages(row[name], name)], False

    return read


def _from_pair(question: str, answer: str) -> Callable[[Mapping[str, Any]], tuple[list[Message], bool]]:
    """Two texts, or two lists of messages. The texts may go without a template if the row has nothing
    else."""

    def read(row: Mapping[str, Any]) -> tuple[list[Message], bool]:
        system = _system(row)
        if isinstance(row[question], str) and isinstance(row[answer], str):
            pair = [_message("user", row[question], question), _message("assistant", row[answer], answer)]
            return [*system, *pair], question == "prompt" and not system
        return [*system, *_messages(row[question], question), *_messages(row[answer], answer)], False

    return read


def _instruction(row: Mapping[str, Any]) -> tuple[list[Message], bool]:
    """The fields of Alpaca: an instruction, often with an input."""
    asked = _message("user", row["instruction"], "instruction").content
    about = row.get("input")
    if about is not None and not isinstance(about, str):
        raise ValueError(f"must have text in its field 'input', got {type(about).__name__}")
    if about and about.strip():
        asked = f"{asked}\n\n{about}"
    return [*_system(row), Message("user", asked), _message("assistant", row["output"], "output")], False


_MOST_MESSAGES = 2_000
"""A template writes all that stands before each answer anew, which takes a minute at that size."""

_Read = Callable[[Mapping[str, Any]], tuple[list[Message], bool]]
_SHAPES: tuple[tuple[tuple[str, ...], _Read], ...] = (
    (("messages",), _from_list("messages")),
    (("conversations",), _from_list("conversations")),
    (("conversation",), _from_list("conversation")),
    (("prompt", "completion"), _from_pair("prompt", "completion")),
    (("prompt", "response"), _from_pair("prompt", "response")),
    (("instruction", "output"), _instruction),
    (("question", "answer"), _from_pair("question", "answer")),
)

FIELDS = frozenset(name for fields, _ in _SHAPES for name in fields) | {"input", "system"}
"""All fields that are read."""


def _system(row: Mapping[str, Any]) -> list[Message]:
    """The system message, from a field of its own."""
    said = row.get("system")
    if said is None or said == "":
        return []
    return [_message("system", said, "system")]


def _begins_with_system(messages: Any) -> bool:
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(first, Mapping) and any(ROLES.get(str(first.get(name))) == "system" for name in _NAMES)


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"must have a list of messages in its field {name!r}, got {kind}")
    if len(value) > _MOST_MESSAGES:
        raise ValueError(
            f"must have at most {_MOST_MESSAGES:,} messages in its field {name!r}, got {len(value):,}"
        )
    return [_turn(turn, f"{name}[{place}]") for place, turn in enumerate(value)]


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError(f"must have an object as {where}, got {type(turn).__name__}")
    for name, text in zip(_NAMES, _TEXTS, strict=True):
        if name in turn and text in turn:
            role = turn[name]
            if not isinstance(role, str) or role.lower() not in ROLES:
                raise ValueError(
                    f"must have one of the roles {', '.join(ROLES)} as {where}.{name}, got {role!r:.80}"
                )
            return _message(ROLES[role.lower()], turn[text], f"{where}.{text}")
    found = ", ".join(map(str, turn)) or "none"
    raise ValueError(
        f"must have a role and content, or from and value, in {where}: it has the fields {found:.200}"
    )


def _message(role: str, content: Any, where: str) -> Message:
    if not isinstance(content, str):
        raise ValueError(f"must have text as {where}, got {type(content).__name__}")
    if not content.strip():
        raise ValueError(f"must have text as {where}, got none")
    return Message(role, whole_characters(content))
