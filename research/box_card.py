"""The figures of the model card, from what `bd3lm eval` wrote: python research/box_card.py

Rewrites what stands between the marks in the card of the model in the box.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EVAL = ROOT / "research" / "results" / "box.json"
CARD = ROOT / "src" / "bd3lm" / "box" / "README.md"
BEGIN, END = "<!-- figures -->\n", "<!-- end -->\n"


def shipped_lean() -> float:
    """The lean of the model beside the card."""
    lean: float = json.loads((CARD.parent / "config.json").read_text("utf-8"))["method"]["lean"]
    return lean


def figures(records: Sequence[dict[str, Any]], *, shipped: float) -> str:
    """The table of records of `bd3lm eval --estimator exact`, one for each lean, all of one text."""
    result, settings = records[0]["result"], records[0]["settings"]
    scored = f"{result['sequences']:,} sequences of {settings['context']}, {result['tokens']:,} tokens scored"
    return "\n".join(
        [
            "| order | perplexity, exact | its bound (NELBO) | bits a token | bits a byte |",
            "|---|---|---|---|---|",
            *(_row(record, shipped=shipped) for record in records),
            "",
            f"{scored}; ± is one standard error over sequences.",
            "Bits are those of the exact figure.",
            "",
        ]
    )


def _row(record: dict[str, Any], *, shipped: float) -> str:
    exact, bound = (_named(record, name) for name in ("exact", "nelbo"))
    cells = [
        _order(record["settings"]["lean"], shipped=shipped),
        *(f"{each['perplexity']:.2f} ± {each['perplexity_error']:.2f}" for each in (exact, bound)),
        *(f"{exact[bits]:.3f}" for bits in ("bits_per_token", "bits_per_byte")),
    ]
    return f"| {' | '.join(cells)} |"


def _named(record: dict[str, Any], name: str) -> dict[str, Any]:
    (figure,) = (each for each in record["result"]["figures"] if each["name"] == name)
    return figure


def _order(lean: float, *, shipped: float) -> str:
    if lean == shipped:
        return f"**lean {lean:g}, as it ships**"
    return f"lean {lean:g}" if lean else "lean 0, the paper's"


def with_figures(card: str, records: Sequence[dict[str, Any]], *, shipped: float) -> str:
    """The card with the figures of these records."""
    before, _, rest = card.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"the card must have a line {BEGIN.strip()} and after it a line {END.strip()}")
    return before + BEGIN + figures(records, shipped=shipped) + END + after


if __name__ == "__main__":
    measured = json.loads(EVAL.read_text("utf-8"))
    card = with_figures(CARD.read_text("utf-8"), measured, shipped=shipped_lean())
    CARD.write_text(card, encoding="utf-8")
