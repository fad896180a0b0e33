"""A conversation as the tokens that a model's chat template makes of it.

A template is a program that came with a model. It runs in a process of its own (`template.py`), which ends
where it takes more than a conversation needs. Special tokens are made by the template alone: what stands in
a message is text, whatever it looks like.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bd3lm.data.tokenizers import Tokenizer

_MOST_TEMPLATE = 1_000_000  # characters; long ones have thirty thousand
_MOST_TEXT = 1_000_000  # characters of what it writes
_MOST_SECONDS = 2  # of computing; they take milliseconds
_MOST_BYTES = 2**29
_MOST_WAITING = 60.0  # seconds, on a machine that is busy with others
_PROGRAM = Path(__file__).with_name("template.py")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role must be one of {', '.join(_ROLES)}, got {self.role!r}")


def user_message(template: str, message: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation that begins with this message, up to where the answer begins."""
    return conversation(template, [Message("user", message)], tokenizer)


def conversation(template: str, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation, up to where the next answer begins."""
    specials = _specials(tokenizer)
    found: list[int] = []
    pending = ""
    for piece in [*_written(template, messages, tokenizer, specials), 0]:
        if isinstance(piece, str):  # text that nothing special stands between is tokenized together
            pending += piece
            continue
        found += tokenizer.encode(pending) if pending else []
        found.append(piece)
        pending = ""
    return found[:-1]


def _written(
    template: str, messages: Sequence[Message], tokenizer: Tokenizer, specials: dict[str, int]
) -> Iterator[str | int]:
    """What a template makes of messages: what is plain, and the ids of what is special.

    It is run with signs in place of the messages, so that nothing in these can be taken for its own words. A
    sign stands between spaces: where they are gone, the template has trimmed what was there.
    """
    text = _rendered(template, [_sign(place) for place in range(len(messages))], messages, tokenizer)
    for place, message in enumerate(messages):
        sign = _sign(place)
        kept, trimmed = text.count(sign), text.count(sign.strip())
        if trimmed != 1:
            raise ValueError(
                f"the chat template of the model must write each message once, got message {place} written "
                f"{trimmed} times"
            )
        before, text = text.split(sign if kept else sign.strip())
        if any(_sign(later).strip() in before for later in range(place + 1, len(messages))):
            raise ValueError("the chat template of the model must write messages in their order")
        yield from _pieces(before, specials)
        yield message.content if kept else message.content.strip()
    yield from _pieces(text, specials)


def _sign(place: int) -> str:
    return f" \ue000{place}\ue001 "


def _rendered(template: str, signs: Sequence[str], messages: Sequence[Message], tokenizer: Tokenizer) -> str:
    """What a template writes of messages that are signs."""
    if len(template) > _MOST_TEMPLATE:
        raise ValueError(
            f"a chat template must have at most {_MOST_TEMPLATE:,} characters, got {len(template):,}"
        )
    names: dict[int | None, str] = {place: name for name, place in _specials(tokenizer).items()}
    said = {
        "messages": [
            {"role": message.role, "content": sign} for message, sign in zip(messages, signs, strict=True)
        ],
        "add_generation_prompt": True,
        "bos_token": names.get(tokenizer.bos_id, ""),
        "eos_token": names.get(tokenizer.eos_id, ""),
    }
    answer = _run(template, json.dumps(said))
    if "error" in answer:
        raise ValueError(f"the chat template of the model cannot be used: {answer['error']}")
    return answer["text"]


@lru_cache(maxsize=32)
def _run(template: str, said: str) -> dict[str, str]:
    """What a template writes, or why it writes nothing. It sees signs, so that few of these runs differ."""
    limits = {"seconds": _MOST_SECONDS, "bytes": _MOST_BYTES, "characters": _MOST_TEXT}
    asked: dict[str, Any] = {"template": template, "said": json.loads(said), **limits}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_PROGRAM)],
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_MOST_WAITING,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it takes longer than {_MOST_WAITING:.0f} s"}
    if done.returncode == -signal.SIGXCPU:
        return {"error": f"it computes for more than {_MOST_SECONDS} s"}
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"error": f"its process ended with {done.returncode}{''.join(f': {line}' for line in last)}"}
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def _specials(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens of a tokenizer by their names."""
    added = json.loads(tokenizer.spec).get("added_tokens") or ()
    return {each["content"]: each["id"] for each in added if each.get("special") and each["content"]}


def _pieces(text: str, specials: dict[str, int]) -> Iterator[str | int]:
    """A text of a template: what is plain, and the ids of what is special."""
    if not specials:
        yield text
        return
    longest_first = sorted(specials, key=len, reverse=True)
    for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
        if part:
            yield specials.get(part, part)
