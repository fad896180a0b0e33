"""What is in the folder of a run, as far as that can be told without torch."""

from pathlib import Path

from bd3lm.io.places import STAGES_FILE

RECIPE_FILE = "recipe.yaml"
"""The resolved recipe of one stage, in its folder."""
METRICS_FILE = "metrics.csv"
"""The log of a stage."""
SAMPLES_FILE = "samples.jsonl"
"""Texts that a stage wrote during training, if requested."""
CHECKPOINTS = "checkpoints"
"""The checkpoints of a stage."""


def is_run(out: Path) -> bool:
    """Whether a folder holds a run, with one stage or several."""
    return (out / RECIPE_FILE).is_file() or (out / STAGES_FILE).is_file()


def begun_stages(out: Path) -> list[str]:
    """The names of the stages in a folder, in no particular order, even if no file lists them."""
    return sorted(file.parent.name for file in out.glob(f"*/{RECIPE_FILE}"))


def check_not_begun(out: Path) -> None:
    """Refuse a folder whose run already has a checkpoint, for a command that starts a new run."""
    for folder in (out, *(out / name for name in begun_stages(out))):
        if (folder / RECIPE_FILE).exists() and any((folder / CHECKPOINTS).glob("step-*")):
            raise ValueError(f"{folder} holds a run already; use --resume to continue it, or another --out")
