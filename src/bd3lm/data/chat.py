"""A conversation as the tokens that a model's chat template makes of it, and which of them are of answers.

Special tokens are made by the template alone: what stands in a message is text, whatever it looks like. An
answer begins where the template stops when it is asked for one, and ends with the special token that the
template writes behind it. Tokens before an answer are the same while it is written and while it is learned.
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
_FIRST_SIGN = 0xD800  # surrogates, which no text holds: each stands for a special token
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
    """The tokens of a conversation up to the end of its last answer, and which are to be learned."""

    tokens: list[int]
    learned: list[bool]


def user_message(template: str, message: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation that begins with this message, up to where the answer begins."""
    return conversation(template, [Message("user", message)], tokenizer)


def conversation(template: str, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation, up to where the next answer begins."""
    script = _Script(template, messages, tokenizer)
    return script.tokens(script.parts(ask=True))[0]


def answered(
    template: str, messages: Sequence[Message], tokenizer: Tokenizer, *, answers: Answers = "all"
) -> Answered:
    """A conversation that ends with an answer, and its answers.

    The tokens before answer k are those of `conversation(template, messages[:k], tokenizer)`; a template that
    writes earlier turns otherwise once they are past is refused where all answers are to be learned. The end
    token of the tokenizer follows the last answer where the template ends it with none, or with another:
    that is where writing stops.
    """
    if not messages or messages[-1].role != "assistant":
        raise ValueError("messages must end with one of the assistant, the answer that is to be learned")
    script = _Script(template, messages, tokenizer)
    *_, (ending, _) = parts = script.parts(ask=False, answers=answers)
    tokens, learned = script.tokens(parts)
    if (end := tokenizer.eos_id) is None and not _SPECIAL.search(ending[-1:]):
        raise ValueError(
            "the chat template writes no special token behind an answer, and the tokenizer has no end token"
        )
    if end is not None and tokens[-1] != end:
        tokens, learned = [*tokens, end], [*learned, True]
    return Answered(tokens, learned)


def continuation(before: str, text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text that goes on from another, whose own tokens stay as they are."""
    if not before or not text:
        return tokenizer.encode(text) if text else []
    together, first = tokenizer.encode(before + text), tokenizer.encode(before)
    # Where a token would cross the seam the text is cut apart from what it follows, as writing cuts it.
    return together[len(first) :] if together[: len(first)] == first else tokenizer.encode(text)


class _Part(NamedTuple):
    """A piece of a conversation, each special token in it one sign."""

    text: str
    learned: bool


class _Script:
    """What a template makes of messages, with a sign for each special token that it writes."""

    def __init__(self, template: str, messages: Sequence[Message], tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._messages = [Message(each.role, _SPECIAL.sub("\ufffd", each.content)) for each in messages]
        self._signs: dict[str, str] = {}
        self._made: dict[tuple[int, bool], tuple[str, list[str]]] = {}

    def parts(self, *, ask: bool, answers: Answers = "all") -> list[_Part]:
        """All of it, cut where answers begin and end; up to the end of the last, or to where the next
        begins."""
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
                        f"the chat template writes what stands before message {place}, an answer, otherwise "
                        "while the answer is asked for than afterwards; train on last answers only "
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
                    f"the chat template writes message {place}, an answer, in other words once it is past, "
                    "as those do that drop thoughts; train on last answers only (--answers last)"
                )
            found += [_Part(whole[done : len(asked)], False), _Part(whole[len(asked) : end], is_wanted)]
            done = end
        return found if not ask else [*found, _Part(whole[done:], False)]

    def tokens(self, parts: Sequence[_Part]) -> tuple[list[int], list[bool]]:
        """The tokens of parts, and which of them are learned; a token never crosses from one to the next."""
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
        """What the template writes behind an answer, up to its first special token; nothing where it writes
        none."""
        _, between = self._written(place + 1, ask=False)
        special = _SPECIAL.search(between[-1])
        return between[-1][: special.end()] if special else ""

    def _end(
        self, whole: str, begin: int, asked: str, between: Sequence[str], place: int, ending: str
    ) -> int:
        """Where an answer ends that begins at `begin`: with its end token, or with its text."""
        # Special tokens that stand before the text of the answer, and are its own to write.
        skipped = sum(_count(each) for each in between[: place + 1]) - _count(asked)
        for _ in range(skipped):
            begin = _SPECIAL.search(whole, begin).end()  # type: ignore[union-attr]
        if ending and between[place + 1].startswith(ending):
            found = _SPECIAL.search(whole, begin)
            if found is not None:
                return found.end()
        text = self._messages[place].content.strip()
        if (start := whole.find(text, begin)) < 0:
            raise ValueError(f"the chat template writes message {place}, an answer, in other words")
        return start + len(text)

    def _written(self, number: int, *, ask: bool) -> tuple[str, list[str]]:
        if (number, ask) not in self._made:
            self._made[number, ask] = self._write(number, ask=ask)
        return self._made[number, ask]

    def _write(self, number: int, *, ask: bool) -> tuple[str, list[str]]:
        """What the template makes of the first messages, and what of it stands between them.

        It is run with signs in place of what the messages hold, so that nothing in these can be taken for its
        own words. A sign stands between spaces: where they are gone, the template has trimmed what was there.
        A template may look at a message too, to leave out its thoughts say. So it is run once more with the
        messages themselves, and that is what counts while it has the same special tokens.
        """
        messages = self._messages[:number]
        between, contents = self._around(messages, ask=ask)
        framed = "".join(f"{before}{content}" for before, content in zip(between, contents, strict=True))
        held, restore = self._hidden([each.content for each in messages])
        looked_at = restore(self._as_signs(self._run(messages, held, ask=ask)))
        same = _SPECIAL.findall(looked_at) == _SPECIAL.findall(framed)
        return (looked_at if same else framed), between

    def _around(self, messages: Sequence[Message], *, ask: bool) -> tuple[list[str], list[str]]:
        """What stands before each message and behind the last, and what of each message is written."""
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
        """Messages in which nothing reads as a special token, and how they read again as they were."""
        if self._any_special is None:
            return list(contents), _Restore("", ())
        used = set("".join(contents)) | set(self._template)
        mark = next((chr(place) for place in _PRIVATE if chr(place) not in used), None)
        if mark is None:
            raise ValueError("a message must leave some of Unicode's private characters unused")
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
    """The texts that a mark stands for, by their numbers."""

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
    """The special tokens of a tokenizer by their names."""
    return dict(_named_specials(tokenizer.spec))


@lru_cache(maxsize=4)
def _named_specials(spec: str) -> tuple[tuple[str, int], ...]:
    added = json.loads(spec).get("added_tokens") or ()
    return tuple((each["content"], each["id"]) for each in added if each.get("special") and each["content"])
