"""Docstrings, which are plain text with Markdown's marks, as the reStructuredText that autodoc reads.

`code` in backquotes becomes a link where it names something that the API pages have. Lists, indented blocks,
`>>>` examples, *emphasis* and **weight** stay what they are. All else is text: nothing in it is markup.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_INLINE = re.compile(
    r"``(?P<double>[^`]+)``|`(?P<code>[^`]+)`|(?P<strong>\*\*\w[^*]*\*\*)|(?P<weak>\*\w[^*\s]*\*)"
)
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
        if block and _ends(block[0], line):
            yield block
            block = []
        if line.strip():
            block.append(line)
    if block:
        yield block


def _ends(first: str, line: str) -> bool:
    """Whether a line is no part of the block that another begins."""
    if not line.strip():
        return True
    if first.startswith(">>>"):
        return False
    if first.startswith(" "):
        return not line.startswith(" ")
    if _ITEM.match(line):
        return True
    return line.startswith(" ") and not _ITEM.match(first)


def _list(block: list[str]) -> list[str]:
    mark, text = _ITEM.match(block[0])[0], [_ITEM.sub("", block[0], count=1), *block[1:]]  # type: ignore[index]
    return [mark + line for line in _text(text)]


def _text(block: list[str]) -> list[str]:
    """One paragraph in one line: code may go on over the end of a line."""
    text, made, at = " ".join(line.strip() for line in block), "", 0
    for found in _INLINE.finditer(text):
        made += _escaped(text[at : found.start()])
        at = found.end()
        code = found["double"] or found["code"]
        # A letter that touches markup would undo it, but for an escaped blank between them.
        before = "" if not made or not made[-1].isalnum() else "\\ "
        after = "" if at == len(text) or not text[at].isalnum() else "\\ "
        made += before + (_code(code) if code else found.group()) + after
    made += _escaped(text[at:])
    return [made]


def _code(code: str) -> str:
    if _NAME.fullmatch(code):
        return f":py:obj:`{code}`"
    return f":code:`{code}`" if "\\" not in code else f"``{code}``"


def _escaped(text: str) -> str:
    return re.sub(r"([\\*`|]|_(?=\W|$))", r"\\\1", text)


def _process(app: "Sphinx", what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)


def setup(app: "Sphinx") -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
