"""A conversation as the tokens that a model's chat template makes of it.

A template is a program that came with a model. It runs in Jinja's sandbox, cannot change what it is given,
and is stopped where it makes more than a conversation needs. Special tokens are made by the template alone:
what stands in a message is text, whatever it looks like.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from bd3lm.data.tokenizers import Tokenizer

_MOST_TEMPLATE = 1_000_000  # characters; long ones have thirty thousand
_MOST_TEXT = 1_000_000  # characters of any text that is put together
_MOST_STEPS = 100_000  # numbers that all ranges together have
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
    try:
        text, length = [], 0
        for piece in _Sandbox().from_string(template).generate(said):
            text.append(piece)
            length += len(piece)
            _check_length(length)
    except (
        TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ValueError(
            f"the chat template of the model cannot be used: {error or type(error).__name__}"
        ) from None
    return "".join(text)


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


def _check_length(length: int) -> None:
    if length > _MOST_TEXT:
        raise ValueError(f"it makes a text of more than {_MOST_TEXT:,} characters")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, with what chat templates call, and with limits on what they multiply, add and count."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        for name in ("join", "replace"):
            self.filters[name] = _checked(self.filters[name])
        for name in ("center", "indent", "wordwrap", "format"):  # which make long texts of short ones
            del self.filters[name]
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _refuse,
        }
        self._steps = 0

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and all(hasattr(each, "__len__") for each in (left, right)):
            _check_length(len(left) + len(right))
        elif operator in ("*", "**", "%") and not all(_is_small(each) for each in (left, right)):
            raise ValueError(f"it has {operator} of what are no small numbers")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *given: Any, **named: Any) -> Any:
        found = super().call(context, called, *given, **named)
        if isinstance(found, str):
            _check_length(len(found))
        return found

    def _range(self, *bounds: int) -> Iterator[int]:
        for each in range(*bounds):
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise ValueError(f"it counts further than {_MOST_STEPS:,}")
            yield each

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """With a + for every ~, so that one limit holds for both."""
        found: nodes.Template = _Additions().visit(super()._parse(source, name, filename))
        return found


class _Additions(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        found: nodes.Expr | None = None
        for each in node.nodes:
            text = nodes.Filter(each, "string", [], [], None, None, lineno=node.lineno)
            found = text if found is None else nodes.Add(found, text, lineno=node.lineno)
        assert found is not None
        return found


class _Generation(Extension):
    """The tag that says which part of a text an assistant wrote: of no concern here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        found: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return found


def _checked(work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that gives texts, none of them too long."""

    @wraps(work)
    def checked(*given: Any, **named: Any) -> Any:
        found = work(*given, **named)
        _check_length(len(found))
        return found

    return checked


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= 1_000_000


def _refuse(message: str) -> None:
    raise ValueError(str(message))
