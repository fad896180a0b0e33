"""A conversation as tokens, made by the model's chat template, with a mark on the tokens of answers.

Only the template makes special tokens: the content of a message is text, whatever it looks like. An answer
begins where the template stops when it asks for an answer, and ends with the special token that the template
writes after it. The tokens before an answer are the same in training and in sampling.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from bd3lm.data.sandbox import rendered
from bd3lm.data.tokenizers import Tokenizer

Answers = Literal["all", "last"]
"""Which answers of a conversation are learned."""

_ROLES = ("system", "user", "assistant")
_FIRST_SIGN = 0xD800  # surrogates, which no text contains: each stands for a special token
_SIGNS = 0xE000 - _FIRST_SIGN
_SPECIAL = re.compile("[\ud800-\udfff]")
_PRIVATE = range(0xE100, 0xF900)
_PLACE = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True)
class Message:
    """A turn of a conversation."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role must be one of {', '.join(_ROLES)}, got {self.role!r}")


class Answered(NamedTuple):
    """The tokens of a conversation up to the end of its last answer, and which of them are learned."""

    tokens: list[int]
    learned: list[bool]


def user_message(template: str, message: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation that begins with this message, up to the start of the answer."""
    return conversation(template, [Message("user", message)], tokenizer)


def conversation(template: str, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation, up to the start of the next answer."""
    script = _Script(template, messages, tokenizer)
    return script.tokens(script.parts(ask=True))[0]


def answered(
    template: str, messages: Sequence[Message], tokenizer: Tokenizer, *, answers: Answers = "all"
) -> Answered:
    """The tokens of a conversation that ends with an answer, and which of them belong to answers.

    The tokens before answer k are those of `conversation(template, messages[:k], tokenizer)`. Some templates
    write earlier turns differently once they are past; these are refused if all answers are to be learned. If
    the template ends the last answer without a special token, or with one that is not the tokenizer's end
    token, the end token is added: there sampling stops.
    """
    if not messages or messages[-1].role != "assistant":
        raise ValueError("messages must end with an assistant message, the answer to learn")
    script = _Script(template, messages, tokenizer)
    *_, (ending, _) = parts = script.parts(ask=False, answers=answers)
    tokens, learned = script.tokens(parts)
    if (end := tokenizer.eos_id) is None and not _SPECIAL.search(ending[-1:]):
        raise ValueError(
            "the chat template writes no special token after an answer, and the tokenizer has no end token"
        )
    if end is not None and tokens[-1] != end:
        tokens, learned = [*tokens, end], [*learned, True]
    return Answered(tokens, learned)


def continuation(before: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text that continues another text, whose own tokens do not change."""
    if not before or not text:
        return tokenizer.encode(text) if text else []
    together, first = tokenizer.encode(before + text), tokenizer.encode(before)
    # If a token would span the boundary, tokenize the continuation on its own, as sampling does.
    return together[len(first) :] if together[: len(first)] == first else tokenizer.encode(text)


class _Part(NamedTuple):
    """A piece of a conversation, with one placeholder character for each special token."""

    text: str
    learned: bool


class _Script:
    """The output of a template for some messages, with a placeholder for each special token that it
    writes."""

    def __init__(self, template: str, messages: Sequence[Message], tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._messages = [Message(each.role, _SPECIAL.sub("\ufffd", each.content)) for each in messages]
        self._signs: dict[str, str] = {}
        self._made: dict[tuple[int, bool], tuple[str, list[str]]] = {}

    def parts(self, *, ask: bool, answers: Answers = "all") -> list[_Part]:
        """The whole conversation, cut where answers begin and end. It stops at the end of the last answer, or
        where the next one begins."""
        whole, between = self._written(len(self._messages), ask=ask)
        places = [place for place, each in enumerate(self._messages) if place and each.role == "assistant"]
        ending = "" if not places else self._ending(places[-1])
        found: list[_Part] = []
        done = 0
        for place in places:
            asked, _ = self._written(place, ask=True)
            is_wanted = not ask and (answers == "all" or place == places[-1])
            if not whole.startswith(asked) or len(asked) < done:
                if is_wanted:
                    raise ValueError(
                        f"the chat template writes the text before message {place}, an answer, differently "
                        "when it asks for the answer than afterwards; train on last answers only "
                        "(--answers last)"
                        if answers == "all"
                        else f"the chat template asks for message {place}, the last answer, with other words "
                        "than it writes before it"
                    )
                continue
            end = self._end(whole, len(asked), asked, between, place, ending)
            is_whole = self._messages[place].content.strip() in whole[len(asked) : end]
            if is_wanted and not is_whole and place != places[-1]:
                raise ValueError(
                    f"the chat template changes message {place}, an answer, in later turns (some templates "
                    "drop thoughts); train on last answers only (--answers last)"
                )
            found += [_Part(whole[done : len(asked)], False), _Part(whole[len(asked) : end], is_wanted)]
            done = end
        return found if not ask else [*found, _Part(whole[done:], False)]

    def tokens(self, parts: Sequence[_Part]) -> tuple[list[int], list[bool]]:
        """The tokens of the parts, and which of them are learned. No token spans two parts."""
        specials = {sign: self._specials[name] for name, sign in self._signs.items()}
        found: list[int] = []
        learned: list[bool] = []
        before = ""  # the text since the last special token
        for part in parts:
            for text in re.split("([\ud800-\udfff])", part.text):
                if text in specials:
                    ids, before = [specials[text]], ""
                else:
                    ids, before = continuation(before, text, self._tokenizer), before + text
                found += ids
                learned += [part.learned] * len(ids)
        return found, learned

    def _ending(self, place: int) -> str:
        """What the template writes after an answer, up to its first special token; empty if it writes
        none."""
        _, between = self._written(place + 1, ask=False)
        special = _SPECIAL.search(between[-1])
        return between[-1][: special.end()] if special else ""

    def _end(
        self, whole: str, begin: int, asked: str, between: Sequence[str], place: int, ending: str
    ) -> int:
        """Where the answer that begins at `begin` ends: after its end token, or after its text."""
        # Special tokens between the request for the answer and its text belong to the answer.
        skipped = sum(_count(each) for each in between[: place + 1]) - _count(asked)
        for _ in range(skipped):
            begin = _SPECIAL.search(whole, begin).end()  # type: ignore[union-attr]
        if ending and between[place + 1].startswith(ending):
            found = _SPECIAL.search(whole, begin)
            if found is not None:
                return found.end()
        text = self._messages[place].content.strip()
        if (start := whole.find(text, begin)) < 0:
            raise ValueError(f"the chat template changes the text of message {place}, an answer")
        return start + len(text)

    def _written(self, number: int, *, ask: bool) -> tuple[str, list[str]]:
        if (number, ask) not in self._made:
            self._made[number, ask] = self._write(number, ask=ask)
        return self._made[number, ask]

    def _write(self, number: int, *, ask: bool) -> tuple[str, list[str]]:
        """The template's output for the first messages, and the parts between the messages.

        We run the template with placeholders instead of the contents, so no content can be mistaken for the
        template's own words. Each placeholder stands between spaces; if they are missing, the template has
        trimmed the content. A template may also look at a message, for example to drop its thoughts. So we
        run it once more with the messages themselves, and use that output if it has the same special tokens.
        """
        messages = self._messages[:number]
        between, contents = self._around(messages, ask=ask)
        framed = "".join(f"{before}{content}" for before, content in zip(between, contents, strict=True))
        held, restore = self._hidden([each.content for each in messages])
        looked_at = restore(self._as_signs(self._run(messages, held, ask=ask)))
        same = _SPECIAL.findall(looked_at) == _SPECIAL.findall(framed)
        return (looked_at if same else framed), between

    def _around(self, messages: Sequence[Message], *, ask: bool) -> tuple[list[str], list[str]]:
        """The text before each message and after the last one, and the part of each message that is
        written."""
        text = self._run(messages, [_place(place) for place in range(len(messages))], ask=ask)
        between: list[str] = []
        contents: list[str] = []
        found = [(each.start(), each.end(), each[1]) for each in _PLACE.finditer(text)]
        ahead = Counter(number for _, _, number in found)
        done = 0
        for place, message in enumerate(messages):
            if ahead[str(place)] != 1:
                raise ValueError(
                    f"the chat template of the model must write each message once, got message {place} "
                    f"written {ahead[str(place)]} times"
                )
            start, end, number = found[place]
            if number != str(place):
                raise ValueError("the chat template of the model must write messages in their order")
            is_kept = text[start - 1 : start] == " " == text[end : end + 1] and start > done
            between.append(self._as_signs(text[done : start - is_kept]))
            contents.append(message.content if is_kept else message.content.strip())
            done = end + is_kept
        return [*between, self._as_signs(text[done:])], [*contents, ""]

    def _run(self, messages: Sequence[Message], contents: Sequence[str], *, ask: bool) -> str:
        names: dict[int | None, str] = {place: name for name, place in self._specials.items()}
        return rendered(
            self._template,
            [
                {"role": message.role, "content": content}
                for message, content in zip(messages, contents, strict=True)
            ],
            add_generation_prompt=ask,
            bos_token=names.get(self._tokenizer.bos_id, ""),
            eos_token=names.get(self._tokenizer.eos_id, ""),
        )

    def _hidden(self, contents: Sequence[str]) -> "tuple[list[str], _Restore]":
        """The contents with everything that reads like a special token hidden, and a function that restores
        it."""
        if self._any_special is None:
            return list(contents), _Restore("", ())
        used = set("".join(contents)) | set(self._template)
        mark = next((chr(place) for place in _PRIVATE if chr(place) not in used), None)
        if mark is None:
            raise ValueError("messages must leave some of Unicode's private characters unused")
        hidden: dict[str, int] = {}

        def hide(found: re.Match[str]) -> str:
            return f"{mark}{hidden.setdefault(found[0], len(hidden))}{mark}"

        return [self._any_special.sub(hide, each) for each in contents], _Restore(mark, tuple(hidden))

    def _as_signs(self, text: str) -> str:
        if self._any_special is None:
            return text
        return self._any_special.sub(lambda found: self._sign_of(found[0]), text)

    def _sign_of(self, special: str) -> str:
        if len(self._signs) == _SIGNS:
            raise ValueError(f"a chat template must write at most {_SIGNS:,} different special tokens")
        return self._signs.setdefault(special, chr(_FIRST_SIGN + len(self._signs)))

    @cached_property
    def _specials(self) -> Mapping[str, int]:
        return _specials(self._tokenizer)

    @cached_property
    def _any_special(self) -> re.Pattern[str] | None:
        longest_first = sorted(self._specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


class _Restore(NamedTuple):
    """Restores the texts that marks stand for, by their numbers."""

    mark: str
    texts: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if not self.texts:
            return text
        return re.sub(f"{self.mark}(\\d+){self.mark}", lambda found: self.texts[int(found[1])], text)


def _place(place: int) -> str:
    return f" \ue000{place}\ue001 "


def _count(text: str) -> int:
    return sum(1 for _ in _SPECIAL.finditer(text))


def _specials(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens of a tokenizer by name."""
    return dict(_named_specials(tokenizer.spec))


@lru_cache(maxsize=4)
def _named_specials(spec: str) -> tuple[tuple[str, int], ...]:
    added = json.loads(spec).get("added_tokens") or ()
    return tuple((each["content"], each["id"]) for each in added if each.get("special") and each["content"])
