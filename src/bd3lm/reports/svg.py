"""Plots as SVG, parsed and written again, so no label can become part of the drawing."""

import re
from xml.etree import ElementTree

from bd3lm.reports.readable import readable

_FONTS = "system-ui, 'Helvetica Neue', Arial, sans-serif"
_SPACES = {"xmlns": "http://www.w3.org/2000/svg", "xmlns:xlink": "http://www.w3.org/1999/xlink"}
_XLINK = f"{{{_SPACES['xmlns:xlink']}}}"


def portable_svg(svg: str, name: str) -> str:
    """matplotlib's SVG without preamble and date, with the reader's fonts, and with ids unique in a page."""
    root = _elements(svg)
    for parent in list(root.iter()):
        for metadata in parent.findall("metadata"):
            parent.remove(metadata)
    for element in root.iter():
        for key, value in element.items():
            element.set(key, _portable(key, value, name))
    return _written(root, _SPACES)


def inline_svg(svg: str, alt: str) -> str:
    """An SVG for an HTML page, which needs no namespaces; `alt` describes it in words."""
    return _written(_elements(svg), {"role": "img", "aria-label": readable(alt)})


def _elements(svg: str) -> ElementTree.Element:
    """Rename all elements and attributes to their HTML names."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key in [key for key in element.attrib if key.startswith(_XLINK)]:
            element.set(f"xlink:{key.removeprefix(_XLINK)}", element.attrib.pop(key))
    return root


def _written(root: ElementTree.Element, attributes: dict[str, str]) -> str:
    root.attrib = {**attributes, **root.attrib}
    return ElementTree.tostring(root, encoding="unicode")


def _portable(key: str, value: str, name: str) -> str:
    match key:
        case "id":
            return f"{name}-{value}"
        case "xlink:href":
            return value.replace("#", f"#{name}-", 1)
        case "style":
            return re.sub("font-family: [^;]*", f"font-family: {_FONTS}", value)
        case "d":  # on one line, rounded to a hundredth of a point
            return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(value.split()))
    return value.replace("url(#", f"url(#{name}-")
