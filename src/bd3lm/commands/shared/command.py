"""What a command is: a frozen dataclass whose fields are its flags; also turns it back into a command
line."""

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from tyro.conf import FlagCreatePairsOff, Positional, Suppress, UseAppendAction, subcommand

from bd3lm.kinds import Kinded
from bd3lm.words import advice_in_flags


class Command(Kinded, ABC, family="command", group="bd3lm.commands"):
    """A command: `kind` is the word to type, the docstring is its help, the fields are its flags."""

    mistakes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Flags that people try but the command does not have, each with the error to print."""

    @classmethod
    def advice(cls, flag: str) -> str | None:
        """What to use instead of a flag from another program; None if it is unknown."""
        return advice_in_flags(flag, {each.field for each in flags_of(cls)})

    @abstractmethod
    def run(self) -> int:
        """Do the work and return the exit status."""

    @classmethod
    def set_aside(cls, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Split the words: those for tyro, and values of fields that the command parses itself."""
        return list(words), {}


@dataclass(frozen=True)
class Flag:
    """A field of a command, as the user types it."""

    field: str
    name: str
    """For example --top-p-rule."""
    default: Any
    is_switch: bool
    """A switch is --name or, if it `has_opposite`, --no-name."""
    has_opposite: bool
    is_positional: bool
    is_repeated: bool
    """The flag is repeated, once for each value."""
    is_hidden: bool
    """Hidden from tyro: its words are typed unchanged."""
    subcommands: Mapping[str, type[Any]]
    """By name, if the field is a subcommand."""

    def words(self, value: Any) -> list[str]:
        """The words to type for a value."""
        if self.is_switch:
            return [self.name if value else f"--no-{self.name.removeprefix('--')}"]
        if self.is_repeated:
            return [word for each in value for word in self._one(_text(each))]
        if isinstance(value, tuple):
            return [self.name, *map(self._bare, map(_text, value))]
        return self._one(_text(value))

    def bare_words(self, value: Any) -> list[str]:
        """The words to type for the value of a positional argument."""
        return [self._bare(_text(each)) for each in (value if isinstance(value, tuple) else (value,))]

    def _one(self, text: str) -> list[str]:
        return [f"{self.name}={text}"] if _looks_like_a_flag(text) else [self.name, text]

    def _bare(self, text: str) -> str:
        if _looks_like_a_flag(text):
            raise ValueError(
                f"{self.field} must have values that do not begin with -, because they are typed without a "
                f"flag, got {text!r}"
            )
        return text


_POSITIONAL, _REPEATED, _HIDDEN, _ALONE = (
    get_args(mark[Any])[1] for mark in (Positional, UseAppendAction, Suppress, FlagCreatePairsOff)
)

_SUBCOMMAND: Any = type(subcommand())


def flags_of(command: type[Any]) -> list[Flag]:
    """The flags of a command, with the names that tyro gives them."""
    hints = get_type_hints(command, include_extras=True)
    found = []
    for each in fields(command):
        hint, marks = unwrapped(hints[each.name])
        given = next((mark.name for mark in marks if getattr(mark, "name", None)), each.name)
        found.append(
            Flag(
                field=each.name,
                name=f"--{given.replace('_', '-')}",
                default=each.default,
                is_switch=hint is bool,
                has_opposite=hint is bool and _ALONE not in marks,
                is_positional=_POSITIONAL in marks,
                is_repeated=_REPEATED in marks,
                is_hidden=_HIDDEN in marks,
                subcommands=_subcommands(hint),
            )
        )
    return found


def subcommands_of(command: type[Any]) -> Mapping[str, type[Any]]:
    """The subcommands of a command such as `bd3lm data`; most commands have none."""
    return next((flag.subcommands for flag in flags_of(command) if flag.subcommands), {})


def as_typed(command: Command) -> str:
    """The command line of a command, without flags at their defaults."""
    name, positional, flags = typed_parts(command)
    return shlex.join([*name, *positional, *flags])


def typed_parts(command: Any) -> tuple[list[str], list[str], list[str]]:
    """The parts of a command line: name, positional arguments, flags."""
    name = ["bd3lm", command.kind] if isinstance(command, Command) else []
    positional: list[str] = []
    words: list[str] = []
    left_out: list[Flag] = []  # defaults of positional arguments; needed if a later one is given
    for flag in sorted(flags_of(type(command)), key=lambda flag: flag.is_hidden):  # hidden words come last
        value = getattr(command, flag.field)
        if flag.subcommands:
            chosen = next(each for each, kind in flag.subcommands.items() if type(value) is kind)
            inside, positional, words = typed_parts(value)
            name += [chosen, *inside]
        elif flag.is_hidden:
            words += value
        elif flag.is_positional:
            if value == flag.default:
                left_out.append(flag)
                continue
            for each in left_out:
                if each.default is None:
                    raise ValueError(f"{each.field} must be given if {flag.field} is, got None")
                positional += each.bare_words(each.default)
            left_out = []
            positional += flag.bare_words(value)
        elif value != flag.default:
            words += flag.words(value)
    return name, positional, words


def unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations, and the annotations."""
    marks: list[Any] = []
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        marks += more
    return hint, marks


def _subcommands(hint: Any) -> Mapping[str, type[Any]]:
    return dict(_named_members(hint))


def _named_members(hint: Any) -> Iterator[tuple[str, type[Any]]]:
    for member in get_args(hint):
        kind, marks = unwrapped(member)
        for mark in marks:
            if isinstance(mark, _SUBCOMMAND):
                yield mark.name, kind


def _text(value: Any) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def _looks_like_a_flag(text: str) -> bool:
    """Negative numbers do not."""
    if not text.startswith("-"):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False
