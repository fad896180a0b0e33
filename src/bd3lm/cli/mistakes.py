"""Tyro's box of many lines about a command line that it cannot read, told in one line."""

import re

_TYPES = {"FLOAT": "a number", "float": "a number", "INT": "a whole number", "int()": "a whole number"}
_VALUE = re.compile(r"Error parsing (?P<flag>\S+): (?P<why>.*?)\[?(?P<value>'[^']*')\]?\.?$")
_FLAG = re.compile(r"^--[\w.-]+")


def in_one_line(box: str, command: str = "bd3lm") -> str:
    """The mistake in what was said to a command, and where to read on.

    A box of an unknown shape is given as it is, without its frame.
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
    if re.match("Unrecognized (or misplaced )?options", said):
        options = re.sub(r" \(applied to [^)]*\)| Arguments are applied to .*", "", said.partition(": ")[2])
        return _unknown(options.replace(",", "").split(), _suggested(parts[1:]), command) + see
    return said[:1].lower() + said[1:].rstrip(".") + see


def _unknown(words: list[str], suggested: list[tuple[str, list[str]]], command: str) -> str:
    """What to say of words that a command does not know: tyro suggests flags of all commands."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("--")), None)
    if flag is None:
        return f"{command} does not know what to do with {' '.join(words)}"
    said = f"{command} has no option {flag}"
    own = next((near for near, commands in suggested if command in commands), None)
    if own is not None:
        return f"{said}, did you mean {own}?"
    others = [each for near, commands in suggested if near == flag for each in commands]
    return f"{said}, which is one of {' and '.join(dict.fromkeys(others))}" if others else said


def _suggested(parts: list[list[str]]) -> list[tuple[str, list[str]]]:
    """The flags that tyro suggests, the nearest first, each with the commands that have it."""
    found: list[tuple[str, list[str]]] = []
    for line in (line for part in parts for line in part):
        if (flag := _FLAG.match(line)) is not None:
            found.append((flag[0], []))
        elif (where := re.fullmatch(r"in (bd3lm[\w -]*) --help", line)) is not None and found:
            found[-1][1].append(where[1])
    return found


def _parts(box: str) -> list[list[str]]:
    """The lines between the rules of a box, the title first, without edges and indents.

    A box is drawn with lines, or where these cannot be printed with dashes, and then without a frame.
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
