"""Docstrings, which are plain text with Markdown's marks, as the reStructuredText that autodoc reads.

`code` in backquotes becomes a link where it names something that the API pages have. Lists, indented blocks,
`>>>` examples, *emphasis* and **weight** stay what they are. All else is text: nothing in it is markup.
"""

import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

_INLINE = re.compile(r"``(?P<double>[^`]+)``|`(?P<code>[^`]+)`|(?P<strong>\*\*\w[^*]*\*\*)|(?P<weak>\*\w[^*\s]*\*)")
_NAME = re.compile(r"[A-Za-z_][\w.]*(\(\))?")
_ITEM = re.compile(r"(- |\d+\. )")


def as_restructured_text(lines: list[str]) -> list[str]:
    """The lines of a docstring, freed of its indentation, as reStructuredText."""
    made: list[str] = []
    for block in _blocks(lines):
        if block[0].startswith(">>>"):
            made += block
        elif block[0].startswith((" ", "\t")):
            made += ["::", "", *(f"    {line}" for line in block)]
        elif _ITEM.match(block[0]):
            made += _list(block)
        else:
            made += _text(block)
        made.append("")
    return made


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines of one kind: paragraphs, items of a list with what hangs under them, indented blocks."""
    block: list[str] = []
    for line in lines:
        starts_item = bool(_ITEM.match(line))
        in_text = bool(block) and not block[0].startswith((" ", "\t", ">>>"))
        if block and (not line.strip() or (starts_item and in_text)):
            yield block
            block = []
        elif block and block[0].startswith((" ", "\t")) != line.startswith((" ", "\t")) and not _ITEM.match(block[0]):
            yield block
            block = []
        if line.strip():
            block.append(line)
    if block:
        yield block


def _list(block: list[str]) -> list[str]:
    mark = _ITEM.match(block[0])
    assert mark is not None
    hang = " " * mark.end()
    first, *rest = _text([block[0][mark.end() :], *(line.strip() for line in block[1:])])
    return [mark.group() + first, *(hang + line for line in rest)]


def _text(block: list[str]) -> list[str]:
    """One paragraph. Code may go on over the end of a line, so its lines are joined first."""
    text, made, at = " ".join(line.strip() for line in block), "", 0
    for found in _INLINE.finditer(text):
        made += _escaped(text[at : found.start()])
        at = found.end()
        code = found["double"] or found["code"]
        # What follows markup without a blank (`counts`' law) would undo it, but for an escaped blank.
        before = "" if not made or made[-1].isspace() else "\\ "
        after = "" if at == len(text) or text[at].isspace() else "\\ "
        made += before + (_code(code) if code else found.group()) + after
    made += _escaped(text[at:])
    return [made]


def _code(code: str) -> str:
    if _NAME.fullmatch(code):
        return f":py:obj:`{code}`"
    return f":code:`{code}`" if "\\" not in code else f"``{code}``"


def _escaped(text: str) -> str:
    return re.sub(r"([\\*`|]|_(?=\W|$))", r"\\\1", text)


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
