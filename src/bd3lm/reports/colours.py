"""The colors of plots and films, and their replacements on a dark page."""

# Okabe and Ito's colors, which color-blind readers can tell apart; styles and markers differ in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B0568A", "#8A6A00", "#333333", "#3B9BD1")
INK, SOFT = "#1b1b1b", "#595959"
DRAFT = "#54789a"  # for what is not part of a text yet
AXIS, GRID, PAPER = "#8a8a8a", "#e4e4e0", "#ffffff"
BARS, MIDDLE = "#c9cdd2", "#8a8f96"  # the lengths that texts are compared with, and their median

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
    """CSS with the dark colors for plots that set colors in style attributes.

    Marks are copies of a mark that is defined elsewhere, which no selector can find by its context.
    """
    return "\n".join(
        f'  [style*="{what}: {light.lower()}"] {{ {what}: {dark} !important; }}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
