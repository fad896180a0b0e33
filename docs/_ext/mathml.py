"""Mathematics as MathML, made when the site is built: browsers draw it themselves, and nothing is fetched."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

_log = logging.getLogger(__name__)


def _visit(self: HTML5Translator, node: nodes.math | nodes.math_block, display: str) -> None:
    latex = node.astext().replace("{aligned}", "{align*}")  # of the two it knows only the other
    made = convert(latex, display=display)
    if "\\" in made or "<mi>&</mi>" in made:  # what it does not know it passes on
        _log.warning("latex2mathml does not understand all of this: %s", node.astext(), location=node)
    made = re.sub("(<mi>(?:log|max|min)</mi>)(?=<m[isu])", r'\1<mspace width="0.167em"/>', made)
    made = made.replace(
        "<mrow><mo>&#x0003C;</mo>", '<mrow><mo lspace="0" rspace="0">&#x0003C;</mo>'
    )  # x^{<b}
    made = made.replace("&#x029F5;", "&#x02216;")  # the sign for set differences that fonts have
    self.body.append(made if display == "inline" else f'<div class="math">{made}</div>')
    raise nodes.SkipNode


def _visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    _visit(self, node, "inline")


def _visit_block(self: HTML5Translator, node: nodes.math_block) -> None:
    _visit(self, node, "block")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
