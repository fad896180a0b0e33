"""Builds what watches a run besides metrics.csv: trackers, and the writer of sample texts."""

from collections.abc import Sequence
from pathlib import Path

from bd3lm.data import Tokenizer
from bd3lm.io.extras import require
from bd3lm.methods import LanguageModelConfig
from bd3lm.runs.folders import SAMPLES_FILE
from bd3lm.runs.recipe import Recipe
from bd3lm.runs.samples import SampleTexts
from bd3lm.training import Engine, TensorBoardLog, Tracker, Validator, WandbLog


def check_trackers(recipe: Recipe, engine: Engine) -> None:
    """Refuse trackers that a run cannot have."""
    if recipe.trackers.gradient_variance_batches and engine.world > 1:
        raise ValueError("trackers.gradient_variance_batches needs a run of one process")
    if recipe.trackers.tensorboard:
        require("tensorboard", "tensorboard", "trackers.tensorboard")
    if recipe.trackers.wandb_project:
        require("wandb", "wandb", "trackers.wandb_project")


def make_trackers(recipe: Recipe, out: Path) -> list[Tracker]:
    """The trackers that a recipe names, for the folder of a run."""
    trackers: list[Tracker] = []
    if recipe.trackers.tensorboard:
        trackers.append(TensorBoardLog(out / "tensorboard"))
    if recipe.trackers.wandb_project:
        trackers.append(WandbLog(project=recipe.trackers.wandb_project, name=out.name, folder=out))
    return trackers


def sample_texts(
    recipe: Recipe,
    config: LanguageModelConfig,
    tokenizer: Tokenizer,
    out: Path,
    trackers: Sequence[Tracker] = (),
) -> list[Validator]:
    """The writer of sample texts, if a recipe asks for them. Refuses prompts that are too long."""
    if not recipe.trackers.sample_texts:
        return []
    file = out / SAMPLES_FILE
    return [
        SampleTexts(recipe.trackers, config, tokenizer, seed=recipe.train.seed, file=file, trackers=trackers)
    ]
