"""A rich console for texts from anywhere: none of them can control the terminal or act as markup."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from bd3lm.io.terminal import printable


class Console(rich.console.Console):
    """Only a `Text` carries style: brackets in a string stay brackets, and :cat: is no emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as rich does; all output passes through here, and only rich's own control codes stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
