"""Reports a mistake in a command line as one line, even if tyro accepts it silently or prints a box."""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bd3lm.commands.shared.command import Command, flags_of, subcommands_of
from bd3lm.words import command_for

_TYPES = {"FLOAT": "a number", "float": "a number", "INT": "a whole number", "int()": "a whole number"}
_VALUE = re.compile(r"Error parsing (?P<flag>\S+): (?P<why>.*?)\[?(?P<value>'[^']*')\]?\.?$")
_FLAG = re.compile(r"^--[\w.-]+")
_CHOICE = re.compile(
    r"[Ii]nvalid choice (?P<value>'.*') for argument '(?P<flag>.*)'\. Expected one of \((?P<all>.*)\)"
)
_NO_VALUE = re.compile(r"Missing value for argument '(?P<flag>[^']*)'")


def command_named(words: Sequence[str], commands: Mapping[str, type[Command]]) -> str:
    """The command that these words begin with."""
    *_, (said, _) = _commands_in(words, commands)
    return said


def mistyped(words: Sequence[str], commands: Mapping[str, type[Command]]) -> str | None:
    """The error for an unknown command, or for a flag that people often try; None if neither occurs."""
    *_, (said, names) = _commands_in(words, commands)
    rest = words[said.count(" ") :]
    if names and rest and not rest[0].startswith("-"):
        near = difflib.get_close_matches(rest[0], names, n=1)
        meant = (command_for(rest[0]) if said == "bd3lm" else None) or next(iter(near), None)
        hint = "." if meant is None else f", did you mean {meant!r}?"
        return f"{said} has no command {rest[0]!r}{hint} Its commands are {', '.join(names)}"
    if names and words and not rest:
        return f"{said} needs a command, {' or '.join(names)}; see {said} --help"
    if not words or words[0] not in commands:
        return None
    command = commands[words[0]]
    flags = flags_of(command)
    own = {flag.name: flag.field for flag in flags if not flag.is_positional}
    bare = {name: flag.field.upper() for flag in flags if flag.is_positional for name in _as_flags(flag.name)}
    for flag in (_flag(word) for word in rest if word.startswith("--")):
        name = flag.replace("_", "-")
        if name in own:
            continue
        if name in command.mistakes:
            return command.mistakes[name]
        if name in bare:
            return f"{said} takes {bare[name]} without a flag, got {flag} (see {said} --help)"
        if (advice := command.advice(name)) is not None:
            return f"{said} has no option {flag}: {advice} (see {said} --help)"
    return None


def _as_flags(positional: str) -> tuple[str, str]:
    """A positional argument typed as a flag, in the plural or singular."""
    return positional, positional.removesuffix("s")


def given_twice(command: Any, words: Sequence[str]) -> str | None:
    """The error for a flag of several values that was given twice: tyro would keep only the last."""
    given = Counter(_flag(word).replace("_", "-") for word in words)
    for flag in flags_of(type(command)):
        value = getattr(command, flag.field)
        if isinstance(value, tuple) and given[flag.name] > 1 and not flag.is_repeated:
            times = given[flag.name]
            return (
                f"{flag.name} takes several values after one flag, got the flag {times} times: write "
                f"{flag.name} A B"
            )
        if flag.subcommands and (wrong := given_twice(value, words)) is not None:
            return wrong
    return None


def _commands_in(
    words: Sequence[str], commands: Mapping[str, type[Any]]
) -> Iterator[tuple[str, Mapping[str, type[Any]]]]:
    """Yield `bd3lm` and then each (sub)command in the words, with the commands inside it by name."""
    said = "bd3lm"
    yield said, commands
    for word in words:
        name = word.replace("_", "-")
        if name not in commands:
            return
        said, commands = f"{said} {name}", subcommands_of(commands[name])
        yield said, commands


def _flag(word: str) -> str:
    return word.partition("=")[0]


def in_one_line(box: str, command: str = "bd3lm") -> str:
    """One line from tyro's error box: the mistake, and the --help to read.

    A box of unknown shape is printed as it is, without its frame.
    """
    _, *parts = _parts(box) or [[]]
    if not parts:
        return " ".join(box.split())
    said = " ".join(parts[0])
    where = re.search(r"bd3lm[\w -]*--help", " ".join(parts[-1]))
    see = f" (see {command} --help)" if where else ""
    said = said.partition(" Got errors:")[0]
    if (wrong := _VALUE.match(said)) is not None:
        kind = next((words for name, words in _TYPES.items() if name in wrong["why"]), None)
        if kind is not None:
            return f"{wrong['flag']} must be {kind}, got {wrong['value']}{see}"
    if (wrong := _CHOICE.match(said)) is not None:
        allowed = ", ".join(re.findall(r"'([^']*)'", wrong["all"]))
        return f"{wrong['flag']} must be one of {allowed}, got {wrong['value']}{see}"
    if (wrong := _NO_VALUE.match(said)) is not None:
        return f"{wrong['flag']} needs a value, got none{see}"
    if said.startswith("Missing from") and (missing := _missing(box)):
        return f"{command} needs {' and '.join(missing)}{see}"
    if re.match("Unrecognized (or misplaced )?options", said):
        options = re.sub(r" \(applied to [^)]*\)| Arguments are applied to .*", "", said.partition(": ")[2])
        return _unknown(options.replace(",", "").split(), _suggested(parts[1:]), command) + see
    return said[:1].lower() + said[1:].rstrip(".") + see


def _missing(box: str) -> list[str]:
    """The arguments that are missing, without their help, which is indented further."""
    lines = [line.strip("│").rstrip() for line in box.splitlines()]
    start = next(n for n, line in enumerate(lines) if line.strip().startswith("Missing from")) + 1
    listed = list(itertools.takewhile(lambda line: line.strip("─- "), lines[start:]))
    depth = min((len(line) - len(line.lstrip()) for line in listed), default=0)
    names = (line.strip().partition("  ")[0] for line in listed if not line[depth:].startswith(" "))
    return list(names)


def _unknown(words: list[str], suggested: list[tuple[str, list[str]]], command: str) -> str:
    """The error for unknown words; tyro suggests flags of all commands, here the command's own come first."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    if flag is None:
        return f"{command} does not expect {' '.join(words)}"
    said = f"{command} has no option {flag}"
    own = next((near for near, commands in suggested if command in commands), None)
    if own is not None:
        return f"{said}, did you mean {own}?"
    others = [each for near, commands in suggested if near == flag for each in commands]
    return f"{said}; it belongs to {' and '.join(dict.fromkeys(others))}" if others else said


def _suggested(parts: list[list[str]]) -> list[tuple[str, list[str]]]:
    """The flags that tyro suggests, nearest first, each with the commands that have it."""
    found: list[tuple[str, list[str]]] = []
    for line in (line for part in parts for line in part):
        if (flag := _FLAG.match(line)) is not None:
            found.append((flag[0], []))
        elif (where := re.fullmatch(r"in (bd3lm[\w -]*) --help", line)) is not None and found:
            found[-1][1].append(where[1])
    return found


def _parts(box: str) -> list[list[str]]:
    """The lines between the rules of a box, the title first, without edges and indentation.

    A box is drawn with lines or, if these cannot be printed, with dashes and without a frame.
    """
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("╭╰│╮╯ ")
        if line.startswith("╭"):
            parts = [[text.strip("─ ")], []]
        elif text and not text.strip("─-"):
            parts.append([])
        elif text:
            parts[-1].append(text)
    return [part for part in parts if part]
