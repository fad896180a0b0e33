"""Tyro's box of many lines about a command line that it cannot read, told in one line."""

import re

_TYPES = {"FLOAT": "a number", "float": "a number", "INT": "a whole number", "int()": "a whole number"}
_VALUE = re.compile(r"Error parsing (?P<flag>\S+): (?P<why>.*?)\[?(?P<value>'[^']*')\]?\.?$")
_FLAG = re.compile(r"^--[\w.-]+")


def in_one_line(box: str) -> str:
    """The mistake, and where to read on. A box of an unknown shape is given as it is, without its frame."""
    _, *parts = _parts(box) or [[]]
    if not parts:
        return " ".join(box.split())
    said = " ".join(parts[0])
    where = re.search(r"bd3lm[\w -]*--help", " ".join(parts[-1]))
    see = f" (see {where[0]})" if where else ""
    said = said.partition(" Got errors:")[0]
    if (wrong := _VALUE.match(said)) is not None:
        kind = next((words for name, words in _TYPES.items() if name in wrong["why"]), None)
        if kind is not None:
            return f"{wrong['flag']} must be {kind}, got {wrong['value']}{see}"
    if re.match("Unrecognized (or misplaced )?options", said):
        near = next((at[0] for part in parts[1:] for line in part if (at := _FLAG.match(line))), None)
        hint = f", did you mean {near}?" if near else ""
        options = re.sub(r" \(applied to [^)]*\)| Arguments are applied to .*", "", said.partition(": ")[2])
        return f"unrecognized options {options}{hint}{see}"
    return said[:1].lower() + said[1:].rstrip(".") + see


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
