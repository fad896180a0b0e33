"""Notebooks as pages: cells and saved outputs become Markdown, which MyST reads. Nothing is run here."""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_FENCE = "~" * 8  # longer than any in a cell


def as_markdown(notebook: dict[str, Any], file: str) -> str:
    """The page of a notebook; `file` is its name, for the link to it."""
    parts = [part for cell in notebook["cells"] for part in _cell(cell)]
    link = f"{{download}}`Download this notebook <{file}>`"
    return "\n\n".join([parts[0], link, *parts[1:]]) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = _text(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    alt = cell["metadata"].get("alt", "")
    return [_code(source, "python"), *(_output(each, alt) for each in cell["outputs"])]


def _output(output: dict[str, Any], alt: str) -> str:
    if output["output_type"] == "stream":
        return _code(_text(output["text"]), "text", "output")
    data = output.get("data", {})
    if "image/png" in data:
        image = _text(data["image/png"]).replace("\n", "")
        return f"![{alt}](data:image/png;base64,{image})"
    if "text/plain" in data:
        return _code(_text(data["text/plain"]), "text", "output")
    raise ValueError(f"a notebook's output must be text or a PNG, got {output['output_type']}: {list(data)}")


def _code(text: str, language: str, style: str = "") -> str:
    option = f":class: {style}\n" if style else ""
    return f"{_FENCE}{{code-block}} {language}\n{option}\n{text.rstrip()}\n{_FENCE}"


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def _read(app: "Sphinx", docname: str, source: list[str]) -> None:
    file = app.env.doc2path(docname)
    if file.suffix == ".ipynb":
        source[0] = as_markdown(json.loads(source[0]), file.name)


def setup(app: "Sphinx") -> dict[str, bool]:
    app.connect("source-read", _read, priority=400)  # before the pages are changed
    return {"parallel_read_safe": True, "parallel_write_safe": True}
