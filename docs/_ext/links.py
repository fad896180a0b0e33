"""Links of the pages: to files that are elsewhere on the site, from code to the API; where code breaks."""

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


def _moved(app: Sphinx, docname: str, source: list[str]) -> None:
    """The pages of `site_pages`, by which the repository's own links would miss the site's."""
    up = "../" * docname.count("/")
    for path, page in app.config.site_pages.items():
        source[0] = source[0].replace(f"]({path}", f"]({up}{page}")


class LinkedCode(SphinxTransform):
    """`bd3lm.sampling.BlockWriter` in the text of a page links to its entry, where there is one."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        for code in list(self.document.findall(nodes.literal)):
            if re.fullmatch(r"bd3lm(\.\w+)+", code.astext()) and not isinstance(
                code.parent, nodes.reference | pending_xref
            ):
                link = pending_xref(
                    "",
                    refdomain="py",
                    reftype="obj",
                    reftarget=code.astext(),
                    refdoc=self.env.docname,
                    refwarn=False,
                )
                code.replace_self(link)
                link += code


def _breakable(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """Let long names in code break where a reader would: after a slash, dot, colon, underscore or hyphen
    that ends a word, and so not after the hyphens of a flag."""
    context["body"] = re.sub(
        r'(?<=<span class="pre">)[^<]{20,}(?=</span>)',
        lambda found: re.sub(r"(?<=\w)([/.:_-])(?=[^/.:_-])", r"\1<wbr>", found.group()),
        context.get("body", ""),
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("site_pages", {}, "env")
    app.connect("source-read", _moved)
    app.add_transform(LinkedCode)
    app.connect("html-page-context", _breakable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
