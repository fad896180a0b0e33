"""What lies in the folder of a run, as far as that is known without torch."""

from pathlib import Path

RECIPE_FILE = "recipe.yaml"
"""The resolved recipe of one stage, in its folder."""
STAGES_FILE = "stages.yaml"
"""The recipes of all stages of a run with several, by name and in order, including those not begun."""
METRICS_FILE = "metrics.csv"
"""The log of a stage."""
SAMPLES_FILE = "samples.jsonl"
"""The texts that a stage wrote while it trained, where it was asked to."""
CHECKPOINTS = "checkpoints"
"""The folder of a stage's checkpoints."""


def is_run(out: Path) -> bool:
    """Whether a folder holds a run, of one stage or of several."""
    return (out / RECIPE_FILE).is_file() or (out / STAGES_FILE).is_file()


def begun_stages(out: Path) -> list[str]:
    """The names of the stages in a folder, in no particular order, also where nothing says of which run."""
    return sorted(file.parent.name for file in out.glob(f"*/{RECIPE_FILE}"))


def check_not_begun(out: Path) -> None:
    """Refuse a folder in which a run has got as far as a checkpoint, for whoever begins a new one."""
    for folder in (out, *(out / name for name in begun_stages(out))):
        if (folder / RECIPE_FILE).exists() and any((folder / CHECKPOINTS).glob("step-*")):
            raise ValueError(f"{folder} holds a run; give --resume to go on with it, or another --out")
