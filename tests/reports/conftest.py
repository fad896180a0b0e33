"""What the tests of reports share: plots that are drawn once, or not at all, since that takes most time."""

from collections.abc import Callable
from typing import Any

import pytest

from bd3lm.reports import plots

PLOTS: dict[str, Callable[..., str]] = {
    each.__name__: each
    for each in (
        plots.training_curves,
        plots.clip_ranges,
        plots.perplexities,
        plots.variances,
        plots.length_histograms,
        plots.quality_against_cost,
    )
}
DRAWN: dict[str, str] = {}


def drawing_once(draw: Callable[..., str]) -> Callable[..., str]:
    """The same, but equal plots are drawn once."""

    def plot(*arguments: Any, **options: Any) -> str:
        key = repr((draw.__name__, arguments, options))
        if key not in DRAWN:
            DRAWN[key] = draw(*arguments, **options)
        return DRAWN[key]

    return plot


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal plots are drawn once, for tests of what stands around them."""
    for name, draw in PLOTS.items():
        monkeypatch.setattr(plots, name, drawing_once(draw))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a plot stands what it was told to draw, for tests of what that is."""
    for name in PLOTS:
        monkeypatch.setattr(plots, name, lambda *arguments, **options: repr((arguments, options)))
