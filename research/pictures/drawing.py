"""An SVG picture, element by element: tokens in cells, grids, arrows and words."""

from collections.abc import Iterable, Sequence
from html import escape

from torch import Tensor

WIDTH = 560  # narrow, so that words of 14 px can still be read on a phone
STEP = 66  # from one cell to the next
CELL, HIGH = 62, 28

_STYLE = """
text{font:14px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#1f2430}
.page{fill:#fff;stroke:#d6d6d0}
.head{font-weight:600}
.note{font-size:13px;fill:#5b6270}
.small{font-size:12px;fill:#5b6270}
.ok{font-size:13px;fill:#1b7a3d}
.no{font-size:13px;fill:#b3261e}
.text{fill:#e9edf5;stroke:#9aa5bd}
.kept{fill:#f4f4f1;stroke:#d6d6d0} .in-kept{fill:#8d93a0}
.sure{fill:#1f5fd0;stroke:#1f5fd0} .in-sure{fill:#fff}
.draft{fill:#fff;stroke:#7f9fe0;stroke-dasharray:4 3} .in-draft{fill:#5878b8;font-style:italic}
.mask{fill:#c9d6f2;stroke:#c9d6f2}
.gone{fill:#fff;stroke:#d6d6d0} .in-gone{fill:#8d93a0;text-decoration:line-through}
.own{fill:#1f5fd0} .before{fill:#e0902c} .clean{fill:#5f9e6e} .hidden{fill:#f0f0ec}
.bar{fill:#1f5fd0} .pale{fill:#c9d6f2} .over{fill:#e0902c}
.line{stroke:#9aa5bd;fill:none} .rule{stroke:#e4e4de}
.arrow{stroke:#1f5fd0;stroke-width:1.5;fill:none} .faint{stroke:#a9bde8;stroke-width:1.5;fill:none}
"""
_HEADS = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#1f5fd0"/></marker><marker id="faint" viewBox="0 0 8 8" '
    'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
    'fill="#a9bde8"/></marker></defs>'
)


class Drawing:
    """A page of a fixed width. `title` says in words what it shows."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._made: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> None:
        kind = f' class="{kind}"' if kind else ""
        anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._made.append(f'<text x="{x:g}" y="{y:g}"{kind}{anchor}>{escape(words, quote=False)}</text>')

    def upward(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Words that are read from below."""
        place = f"translate({x:g} {y:g}) rotate(-90)"
        self._made.append(f'<text transform="{place}" class="{kind}">{escape(words, quote=False)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, *, round_by: float = 0) -> None:
        rounded = f' rx="{round_by:g}"' if round_by else ""
        self._made.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{rounded} class="{kind}"/>'
        )

    def shade(self, x: float, y: float, size: float, share: float) -> None:
        """A square, the darker the larger a share is."""
        self._made.append(
            f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" fill="#1f5fd0" '
            f'fill-opacity="{share:.3f}" stroke="#e4e4de"/>'
        )

    def cell(self, x: float, y: float, word: str, kind: str = "text", *, width: float = CELL) -> None:
        """A token; a mask has no word."""
        self.box(x, y, width, HIGH, kind, round_by=5)
        if word:
            inside = f"in-{kind}" if kind in ("kept", "sure", "draft", "gone") else ""
            self.text(x + width / 2, y + 19, word, inside, anchor="middle")

    def row(self, x: float, y: float, words: Iterable[str], kind: str = "text") -> None:
        for place, word in enumerate(words):
            self.cell(x + place * STEP, y, word, kind if word else "mask")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "rule") -> None:
        head = f' marker-end="url(#{kind})"' if kind in ("arrow", "faint") else ""
        self._made.append(f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{kind}"{head}/>')

    def grid(
        self, x: float, y: float, size: float, seen: Tensor, kinds: Sequence[Sequence[str]], gap: float = 1.5
    ) -> None:
        """A square for each pair of a reader (row) and what it may see (column): coloured where it may."""
        for row, line in enumerate(seen.tolist()):
            for column, sees in enumerate(line):
                kind = kinds[row][column] if sees else "hidden"
                self.box(x + column * size, y + row * size, size - gap, size - gap, kind)

    def __str__(self) -> str:
        page = f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{self._height - 1}" rx="8"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
                f'width="{WIDTH}" height="{self._height}" role="img">',
                f"<title>{escape(self._title, quote=False)}</title>",
                f"<style>{_STYLE}</style>",
                _HEADS,
                page,
                *self._made,
                "</svg>\n",
            ]
        )
