"""Commands as objects: what `as_typed` says is read as the same command."""

import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from bd3lm.cli import main
from bd3lm.commands import every_command
from bd3lm.commands.bench import Bench, BenchAttention
from bd3lm.commands.eval import Eval
from bd3lm.commands.sample import Sample
from bd3lm.commands.shared.command import Command, as_typed, flags_of, subcommands_of, unwrapped
from bd3lm.commands.train import Train


def read(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command that its command line is read as."""
    seen: list[Command] = []
    monkeypatch.setattr(type(command), "run", lambda self: seen.append(self) or 0)
    bd3lm, *words = shlex.split(as_typed(command))
    assert bd3lm == "bd3lm"
    assert main(words) == 0, words
    (found,) = seen
    return found


def other(hint: Any, default: Any) -> Any:
    """A value of a type that is not the default."""
    hint, _ = unwrapped(hint)
    if get_origin(hint) in (Union, UnionType):
        hint, _ = unwrapped(next(each for each in get_args(hint) if each is not type(None)))
    if get_origin(hint) is tuple:
        one = other(get_args(hint)[0], None)
        return (one, one if one != 0 else 1)
    if get_origin(hint) is Literal:
        return next(each for each in get_args(hint) if each != default)
    if hint is bool:
        return not default
    if hint in (int, float):
        return hint((0 if default in (None, MISSING) else default) - 3 + 0.125 * (hint is float))
    return {str: 'it\'s a "word"', Path: Path("a folder/a file")}[hint]


def with_all(command: type[Any]) -> Any:
    """A command with no flag at its default."""
    hints = get_type_hints(command, include_extras=True)
    values = {
        each.name: ("--train.steps", "3") if flag.is_hidden else other(hints[each.name], each.default)
        for each, flag in zip(fields(command), flags_of(command), strict=True)
    }
    return command(**values)


def each_command() -> Iterator[Any]:
    for name, command in every_command().items():
        inside = subcommands_of(command)
        for word, member in inside.items():
            yield pytest.param(command(with_all(member)), id=f"{name} {word}")
        if not inside:
            yield pytest.param(with_all(command), id=name)


@pytest.mark.parametrize("command", list(each_command()))
def test_a_command_is_read_as_it_was_typed(command, monkeypatch):
    assert read(command, monkeypatch) == command
    for flag in flags_of(type(command)):
        if flag.default is not MISSING and not flag.is_positional:
            plain = replace(command, **{flag.field: flag.default})
            words = shlex.split(as_typed(plain))
            assert not any(word.partition("=")[0] == flag.name for word in words)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (Eval(models=("a",)), "bd3lm eval a"),
        (Eval(models=("a", "b c"), data=("ptb",), eos=False), "bd3lm eval a 'b c' --data ptb --no-eos"),
        (Eval(models=("a",), lean=1e-4, seed=-1), "bd3lm eval a --lean 0.0001 --seed -1"),
        (Eval(models=("a",), lean=0.1234567890123), "bd3lm eval a --lean 0.1234567890123"),
        (Sample("box", ("", "b"), stop=("--x", "a b")), "bd3lm sample box '' b --stop=--x --stop 'a b'"),
        (Train("demo", start_from="a", overrides=("--x.y", "3")), "bd3lm train demo --from a --x.y 3"),
        (Bench(BenchAttention(variants=())), "bd3lm bench attention --variants"),
    ],
)
def test_a_command_line(command, line, monkeypatch):
    assert as_typed(command) == line
    assert read(command, monkeypatch) == command


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            Sample("box", ("-x",)),
            "prompts must have values that do not begin with -, because they are typed without a flag, got "
            "'-x'",
        ),
        (Sample(prompts=("x",)), "model must be given if prompts is, got None"),
    ],
)
def test_what_cannot_be_typed_is_refused(command, said):
    with pytest.raises(ValueError, match=said):
        as_typed(command)
