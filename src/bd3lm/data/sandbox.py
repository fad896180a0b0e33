"""What a chat template writes: a program that came with a model, run where it can do no harm.

It runs in Jinja's sandbox, cannot change what it is given, and is stopped where it makes more than a
conversation needs: too long a text, or too many rounds of its loops.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, wraps
from types import CodeType
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MOST_TEMPLATE = 1_000_000  # characters; long ones have thirty thousand
_MOST_TEXT = 1_000_000  # characters of any text that is put together, beside what the messages hold
_MOST_STEPS = 100_000  # numbers that all ranges together have
_MOST_ROUNDS = 1_000_000  # of all loops together
_MOST_NUMBER = 1_000_000  # of what is multiplied, or says how long something is to be
_MOST_POWER = 64
_COUNTED = "counted"


def rendered(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """What a template writes of messages; a ValueError of one line where it fails or does too much."""
    if len(template) > _MOST_TEMPLATE:
        raise ValueError(
            f"a chat template must have at most {_MOST_TEMPLATE:,} characters, got {len(template):,}"
        )
    said = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    sandbox = _Sandbox(room=4 * sum(len(message["content"]) for message in messages))
    try:
        program: Template = Template.from_code(sandbox, _compiled(template), sandbox.make_globals(None), None)
        text, length = [], 0
        for piece in program.generate(said):
            text.append(piece)
            length += len(piece)
            sandbox.check_length(length)
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template of the model cannot be used: {why:.300}") from None
    return "".join(text)


@lru_cache(maxsize=8)
def _compiled(template: str) -> CodeType:
    """Its program, which thousands of conversations share."""
    return _Sandbox().compile(template)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's, with what chat templates call, and with limits on what they multiply, add and count."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, room: int = 0) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=self._counted,
        )
        self._most = _MOST_TEXT + room
        self.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        for name in ("center", "indent", "wordwrap", "format", "batch", "slice"):  # much of little
            del self.filters[name]
        for name, work in self.filters.items():
            self.filters[name] = self._checked(name, work)
        self.filters[_COUNTED] = self._rounds
        self.globals = {
            "range": self._range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _refuse,
        }
        self._steps = self._gone_round = 0

    def check_length(self, length: int) -> None:
        if length > self._most:
            raise ValueError(f"it makes a text of more than {_MOST_TEXT:,} characters")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and all(hasattr(each, "__len__") for each in (left, right)):
            self.check_length(len(left) + len(right))
        elif operator in ("*", "**", "%") and not all(_is_small(each) for each in (left, right)):
            raise ValueError(f"it has {operator} of what are no small numbers")
        elif operator == "**" and right > _MOST_POWER:
            raise ValueError(f"it has a power above {_MOST_POWER}, {right}")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *given: Any, **named: Any) -> Any:
        name, of = getattr(called, "__name__", ""), getattr(called, "__self__", None)
        if name in ("format", "format_map", "translate"):  # which take sizes from a text or a table
            raise ValueError(f"it calls {name}, which is not allowed")
        self._check_sizes(given, named)
        if isinstance(of, str) and name == "replace":
            self._check_replacing(of, *given[:2])
        elif isinstance(of, str) and name == "join" and given:
            given = (list(given[0]), *given[1:])
            self._check_joining(of, given[0])
        self._count_round()
        if isinstance(called, LoopContext) and given:
            given = (self._rounds(given[0]), *given[1:])
        return self._within(super().call(context, called, *given, **named))

    def _within(self, found: Any) -> Any:
        if isinstance(found, str | bytes):
            self.check_length(len(found))
        return found

    def _count_round(self) -> None:
        self._gone_round += 1
        if self._gone_round > _MOST_ROUNDS:
            raise ValueError(f"it goes round its loops more than {_MOST_ROUNDS:,} times")

    def _range(self, *bounds: int) -> Iterator[int]:
        for each in range(*bounds):
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise ValueError(f"it counts further than {_MOST_STEPS:,}")
            yield each

    def _rounds(self, values: Iterable[Any]) -> Iterator[Any]:
        for each in values:
            self._count_round()
            yield each

    def _checked(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is asked for nothing large, and gives no text that is too long."""

        @wraps(work)
        def checked(*given: Any, **named: Any) -> Any:
            first = 1 if given and isinstance(given[0], Context | EvalContext | Environment) else 0
            self._check_sizes(given[first:], named)
            of, *others = given[first:] or ("",)
            if name == "replace":
                self._check_replacing(str(of), *others[:2])
            elif name == "join":
                of = list(of)
                self._check_joining(str((others or [named.get("d", "")])[0]), of)
                given = (*given[:first], of, *others)
            return self._within(work(*given, **named))

        return checked

    def _check_sizes(self, given: Iterable[Any], named: Mapping[str, Any]) -> None:
        """Refuse numbers that may be the length of what is made of them, as of 'a'.ljust(10000000000), and
        lists that hold one another."""
        for value in (*given, *named.values()):
            if isinstance(value, int) and not _is_small(value):
                raise ValueError(f"it calls something with a number above {_MOST_NUMBER:,}")
            self._counted(value)

    def _counted(self, value: Any) -> Any:
        """A value that is written; a list that holds another many times over would be long."""
        waiting, length = [value], 0
        while waiting:
            each = waiting.pop()
            if isinstance(each, Mapping):
                waiting += [*each.keys(), *each.values()]
            elif isinstance(each, list | tuple):
                waiting += each
            length += len(each) if isinstance(each, str) else 1
            self.check_length(length)
        return value

    def _check_replacing(self, text: str, old: Any = "", new: Any = "") -> None:
        self.check_length(len(text) + text.count(str(old)) * len(str(new)))

    def _check_joining(self, separator: str, parts: Sequence[Any]) -> None:
        self.check_length(len(separator) * len(parts) + sum(len(str(part)) for part in parts))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """With a + for every ~, so that one limit holds for both, and loops that are counted."""
        found: nodes.Template = _Limits().visit(super()._parse(source, name, filename))
        return found


class _Limits(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        found: nodes.Expr | None = None
        for each in node.nodes:
            text = nodes.Filter(each, "string", [], [], None, None, lineno=node.lineno)
            found = text if found is None else nodes.Add(found, text, lineno=node.lineno)
        assert found is not None
        return found

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        if not node.recursive:  # which is bounded by the depth of the stack
            node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node


class _Generation(Extension):
    """The tag that says which part of a text an assistant wrote: that is found out without it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        found: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return found


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _MOST_NUMBER


def _refuse(message: str) -> None:
    raise ValueError(str(message))
