"""rich's console for texts from anywhere: nothing in them steers the terminal, none is markup."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from bd3lm.io.terminal import printable


class Console(rich.console.Console):
    """What is styled is a `Text`: brackets in a string are brackets, and :cat: is no cat."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich does, which takes all that is shown through here; its own control codes are set apart."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)
