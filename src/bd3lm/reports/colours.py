"""The colours of the house, for plots and films alike, and those that take their place on a dark page."""

# Okabe and Ito's colours, told apart by all kinds of eyes; styles and markers tell them apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B0568A", "#8A6A00", "#333333", "#3B9BD1")
INK, SOFT = "#1b1b1b", "#595959"
DRAFT = "#54789a"  # of what is no part of a text yet
AXIS, GRID, PAPER = "#8a8a8a", "#e4e4e0", "#ffffff"
BARS, MIDDLE = "#c9cdd2", "#8a8f96"  # what the lengths of texts are compared with, and its median

_DARK = {
    **dict(
        zip(
            COLOURS,
            ("#5CB3EA", "#F58A3C", "#35C29A", "#DE8FBE", "#D2AE3A", "#C8C8C8", "#A6DBFA"),
            strict=True,
        )
    ),
    INK: "#e8e8e4",
    SOFT: "#abaca8",
    AXIS: "#7d8087",
    GRID: "#32353a",
    PAPER: "#17191c",
    BARS: "#40454d",
    MIDDLE: "#8f959d",
}


def dark_rules() -> str:
    """CSS that gives the plots of a page its dark colours, for those in their style attributes. Marks are
    copies of one that is drawn apart, which no selector finds by what it stands in."""
    return "\n".join(
        f'  [style*="{what}: {light.lower()}"] {{ {what}: {dark} !important; }}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
