"""Recipes that fine-tune a model on conversations, with the loss of its own method.

They are plain values. docs/tuning.md says what has not been tuned.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bd3lm.kinds import plain
from bd3lm.runs.merging import CHECKPOINT, merge

if TYPE_CHECKING:
    from bd3lm.methods import LanguageModelConfig

EPOCHS = 3
_LEAST_CONTEXT = 512
_TILES = (32, 8)  # kernels use whole tiles
_RATE, _RATE_OF_ADDITIONS = 2e-5, 2e-4
_COMMON: dict[str, Any] = {
    "data": {"validation_sequences": 256, "validation_batch": 16},
    "network": {"size": CHECKPOINT, "dropout": 0.0},
    "optimizer": {
        "betas": [0.9, 0.95],
        "decay": "linear",
        "min_lr_ratio": 0.0,
        "clip_norm": 1.0,
    },
    # The learning rate falls to zero, which is as good as averaging the weights and needs no memory.
    "train": {"global_batch": 16, "ema_decay": 0.0, "log_every": 10},
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The context of a model, and how conversations fit into it."""

    most: int
    """Its context."""
    unit: int
    """Conversations begin at multiples of this many tokens."""

    @classmethod
    def of(cls, model: "LanguageModelConfig") -> "Reading":
        context = model.network.context
        return cls(most=context, unit=model.method.packing(context).unit)

    @property
    def longest(self) -> int:
        """The most tokens that a conversation may have."""
        return self.most - self.most % self.unit

    def context(self, longest: int) -> int:
        """The length of sequences: enough for the longest conversation and for an efficient pass, in whole
        tiles if possible."""
        if self.unit == self.most:  # a single block, whose size belongs to the model
            return self.most
        wanted = min(max(longest, _LEAST_CONTEXT), self.longest)
        for tile in _TILES:
            step = math.lcm(self.unit, tile)
            if (found := -(-wanted // step) * step) <= self.longest:
                return found
        return -(-wanted // self.unit) * self.unit


def outline() -> dict[str, Any]:
    """The part of the recipe that is known before the model is read, to check flags."""
    return merge(_COMMON, {"method": "autoregressive", "train": {"steps": 1}})


def tuning_recipe(
    model: "LanguageModelConfig",
    source: str,
    *,
    data: str,
    context: int,
    steps: int,
    rank: int | None = None,
    skip_long: bool = False,
) -> dict[str, Any]:
    """The recipe for data whose conversations fit into the context: for all weights, or for low-rank
    additions."""
    if rank is not None and model.method.trains_beside:
        raise ValueError(f"--rank is for models whose weights are trained, and {source} is {model.title}")
    rate = _RATE if rank is None and not model.method.trains_beside else _RATE_OF_ADDITIONS
    beside = {} if rank is None else {"network": {"additions": rank, "additions_at": "all"}}
    looked = max(10, min(250, steps // 4))
    most = {"most_context": model.network.context} if context < model.network.context else {}
    return merge(
        _COMMON,
        beside,
        {
            "data": {"path": data, "context": context, "skip_long": skip_long, **most},
            "method": plain(model.method),
            "objective": plain(model.method.tuned_by(model.frame)),
            "optimizer": {"lr": rate, "warmup_steps": min(50, steps // 10)},
            "train": {"steps": steps, "validate_every": looked, "checkpoint_every": looked},
            "start_from": source,
        },
    )


def steps_of(epochs: float, sequences: int, batch: int) -> int:
    """The number of steps that read the sequences this many times."""
    return max(1, math.ceil(epochs * sequences / batch))
