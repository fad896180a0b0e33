"""Where a model lies that is called by a name and not by a path: the one in the box, and that of a run."""

from pathlib import Path

RUN_MODEL = "model"
"""The folder of a training run in which its model is."""
BOX = "box"
"""The name of the model that comes with this package."""
BOX_FOLDER = Path(__file__).parents[1] / BOX


def box_folder(argument: str) -> Path:
    """Where the model lies that comes with this package; not for whoever may mean a folder of its name."""
    if Path(BOX).exists():
        raise ValueError(
            f"{argument} {BOX!r} is the model that comes with bd3lm, and something here has that name too: "
            f"write ./{BOX} for what is here, or {BOX_FOLDER} for the model"
        )
    return BOX_FOLDER
