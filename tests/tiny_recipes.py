"""Recipes and shards small enough to be trained in a second, and a preset of two stages of them."""

from pathlib import Path
from typing import Any

from bd3lm.data import Tokenizer, TokenShards, byte_tokenizer, prepare
from bd3lm.runs.merging import merge
from bd3lm.runs.presets import Preset, Stage
from bd3lm.runs.recipe import Recipe, recipe_from_dict
from tests.data_room.documents import small_corpus


def prepared(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Shards of a few made-up documents, by bytes."""
    shards: TokenShards = prepare(
        small_corpus(train=40, valid=6), tokenizer or byte_tokenizer(), folder, progress=False
    )
    return shards.folder


def plain(data: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """A recipe as YAML would say it: an autoregressive run of 6 steps, with changes."""
    base = {
        "data": {"path": str(data), "context": 16, "validation_sequences": 8, "validation_batch": 4},
        "network": {"size": "tiny", "layers": 1, "hidden": 16, "heads": 2, "dropout": 0.1},
        "optimizer": {"lr": 0.01, "warmup_steps": 2},
        "train": {
            "steps": 6,
            "global_batch": 4,
            "ema_decay": 0.8,
            "log_every": 1,
            "validate_every": 3,
            "checkpoint_every": 2,
        },
        "method": {"kind": "autoregressive"},
    }
    return merge(base, *changes)


BLOCK: dict[str, Any] = {"method": {"kind": "block_diffusion", "block_size": 4}}


def tiny_recipe(data: Path, *changes: dict[str, Any]) -> Recipe:
    return recipe_from_dict(plain(data, *changes), where="the test's recipe")


def two_stages(data: Path, *changes: dict[str, Any]) -> Preset:
    """As `demo`: autoregressive, then blocks of 4 from it."""
    next_token = {
        "method": {"kind": "block_diffusion", "causal_clean": True},
        "objective": {"next_token": 1.0},
    }
    return Preset(
        "two tiny stages",
        (
            Stage("ar", plain(data, *changes)),
            Stage("block", plain(data, BLOCK, next_token, *changes)),
        ),
    )
