"""Where models are that have a name instead of a path: the box, and the model of a run."""

from pathlib import Path

RUN_MODEL = "model"
"""The folder of a run's model, inside the run."""
STAGES_FILE = "stages.yaml"
"""The recipes of all stages of a run with several, by name and in order, including stages not yet begun."""
BOX = "box"
"""The name of the model that comes with this package."""
BOX_FOLDER = Path(__file__).parents[1] / BOX


def box_folder(argument: str) -> Path:
    """The folder of the box model; refused if a folder here has the same name."""
    if Path(BOX).exists():
        raise ValueError(
            f"{argument} {BOX!r} is the model that comes with bd3lm, but a file or folder here has that name "
            f"too: use ./{BOX} for the local one, or {BOX_FOLDER} for the model"
        )
    return BOX_FOLDER
