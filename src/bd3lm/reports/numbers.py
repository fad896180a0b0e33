"""Formats numbers for readers."""

import math
from collections.abc import Mapping
from typing import Any

SIGNS = {"exact": "", "bound": "≤ ", "neither": "≈ "}  # by what a figure means


def with_error(value: float | None, error: float | None, *, sign: str = "") -> str:
    """A figure ± one standard error, with as many digits as the error justifies."""
    if value is None:
        return f"{sign}∞"
    if not error:
        return sign + plain(value)
    decimals = min(max(1 - math.floor(math.log10(error)), 0), max(3, _decimals(value)))
    return f"{sign}{value:,.{decimals}f} ± {error:,.{decimals}f}"


def perplexity_text(figure: Mapping[str, Any]) -> str:
    """The perplexity of a record's figure: ≤ before a bound, ≈ before a figure that is neither exact nor a
    bound, ± standard error."""
    return with_error(figure["perplexity"], figure["perplexity_error"], sign=SIGNS[figure["meaning"]])


def bits_text(figure: Mapping[str, Any]) -> str:
    """The bits per byte of a record's figure, with its sign; a dash if they are unknown."""
    bits = figure["bits_per_byte"]
    return "–" if bits is None else SIGNS[figure["meaning"]] + plain(bits)


def leaning(lean: float, *, beside: float = 0.0) -> str:
    """The lean of an order, as the end of a label.

    A uniform order needs none, unless the label stands `beside` one with a lean and could be mistaken for it.
    """
    return f", lean {lean:g}" if lean or beside else ""


def plain(value: float) -> str:
    """Three or more significant digits."""
    return f"{value:,.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    size = abs(value)
    if size < 1:
        return max(3, 2 - math.floor(math.log10(size))) if size else 3
    return 0 if size >= 1000 else 1 if size >= 100 else 2


def capital(text: str) -> str:
    """With a capital first letter."""
    return text[:1].upper() + text[1:]


def chain(counts: tuple[int, ...], start: str | None = None) -> str:
    """The counts of successive runs as a sum, after "?" for a start whose count is unknown."""
    return " + ".join([*(["?"] if start is not None else []), *(f"{count:,}" for count in counts)])


def shortened(count: int) -> str:
    """A number of parameters, such as 7.9M."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return str(count)
