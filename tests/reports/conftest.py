"""What the tests of reports share: plots that are drawn once."""

from collections.abc import Callable
from typing import Any

import pytest

from bd3lm.reports import plots

PLOTS = (
    "training_curves",
    "clip_ranges",
    "perplexities",
    "variances",
    "length_histograms",
    "quality_against_cost",
)
DRAWN: dict[str, str] = {}


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal plots are drawn once, for tests of what stands around them: to draw takes most of the time."""

    def once(name: str, draw: Callable[..., str]) -> Callable[..., str]:
        def plot(*arguments: Any, **options: Any) -> str:
            key = repr((name, arguments, options))
            if key not in DRAWN:
                DRAWN[key] = draw(*arguments, **options)
            return DRAWN[key]

        return plot

    for name in PLOTS:
        monkeypatch.setattr(plots, name, once(name, getattr(plots, name)))
