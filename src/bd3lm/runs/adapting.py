"""Recipes that adapt a checkpoint, one for each of three outcomes.

They are plain values, so they need no torch. docs/adapting.md says how they were chosen, and what has not
been tuned.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bd3lm.runs.merging import CHECKPOINT, ONLY, merge

if TYPE_CHECKING:
    from bd3lm.methods import LanguageModelConfig
    from bd3lm.runs.recipe import Recipe

OUTCOMES = ("drafter", "joint", "block")
"""What a checkpoint can become: itself with a drafting part, a model with a block law too, or a block model.
"""
AIMS = ("hard", "soft", "overlap")
"""The losses of drafts, as in `bd3lm.models`."""
DATA = "data/adapt"
"""Where the presets look for tokens, which must be those of the checkpoint."""

_MOST_CONTEXT = 512
_TILES = (32, 8)  # kernels use whole tiles; the larger one, if it covers nearly all of a context
_NEARLY = 7 / 8
_SOFT_SHARE = 0.4
_STEPS = 1000
_OF_DRAFTERS = ("masks", "rank", "aim")
_OF_BLOCKS = ("block_size",)

_COMMON: Mapping[str, Any] = {
    "data": {"path": DATA, "validation_sequences": 256, "validation_batch": 32},
    "network": {"size": CHECKPOINT, "dropout": 0.0},
    "optimizer": {"betas": [0.9, 0.95], "min_lr_ratio": 0.0, "clip_norm": 1.0},
    # The learning rate falls to zero, which is as good as averaging the weights and needs no memory.
    "train": {
        "global_batch": 32,
        "ema_decay": 0.0,
        "log_every": 20,
        "validate_every": 250,
        "checkpoint_every": 250,
    },
}
_DRAFTER_RATE, _RATE = 5e-4, 5e-5
# As in the recommended presets: both copies of complementary masks, each masked token with weight 1.
_MASKS = {"masking": {"kind": "counts", "complementary": True, "weight": "flat"}}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of an adaptation; None means the default for the outcome."""

    to: str
    steps: int | None = None
    """All stages together."""
    block_size: int | None = None
    masks: int | None = None
    rank: int | None = None
    aim: str | None = None
    """Train a drafter in one stage with this loss, instead of soft targets and then the overlap."""
    most_context: int = _MOST_CONTEXT
    """The context of the checkpoint, if that is less."""

    def __post_init__(self) -> None:
        if self.to not in OUTCOMES:
            raise ValueError(f"--to must be one of {', '.join(OUTCOMES)}, got {self.to!r}")
        others, whose = (_OF_BLOCKS, "joint or block") if self.to == "drafter" else (_OF_DRAFTERS, "drafter")
        for name in others:
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{_flag(name)} needs --to {whose}, got {value} with --to {self.to}")
        for name in ("steps", "block_size", "masks", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {value}")
        if self.aim is not None and self.aim not in AIMS:
            raise ValueError(f"--aim must be one of {', '.join(AIMS)}, got {self.aim!r}")
        if self._unit > self.most_context:
            what = "--masks" if self.to == "drafter" else "--block-size"
            raise ValueError(
                f"{what} must be at most the {self.most_context} tokens of the model's context, got "
                f"{self._unit}"
            )

    def stages(self) -> dict[str, dict[str, Any]]:
        """The recipes by stage; each stage starts from the one before it."""
        found = {"drafter": self._drafter, "joint": self._joint, "block": self._blocks}[self.to]()
        steps = self.steps or _STEPS
        if steps < len(found):
            raise ValueError(f"--steps must be at least {len(found)}, one per stage, got {steps}")
        shares = self._steps(steps, len(found))
        last = list(found)[-1]
        for (name, recipe), its in zip(found.items(), shares, strict=True):
            falls = {"decay": "linear"} if name == last else {"decay": "constant"}
            rate = _DRAFTER_RATE if self.to == "drafter" else _RATE
            found[name] = merge(
                _COMMON,
                {"data": {"context": self.context}},
                recipe,
                {"optimizer": {"lr": rate, "warmup_steps": min(50, its // 10), **falls}},
                {"train": {"steps": its}},
            )
        return found

    @property
    def context(self) -> int:
        """The context of training: whole groups of masks or blocks, and whole tiles if possible."""
        most = self._most
        found = (most - most % math.lcm(self._unit, tile) for tile in _TILES)
        return next((each for each in found if each >= _NEARLY * most), most - most % self._unit)

    @property
    def _most(self) -> int:
        return min(max(_MOST_CONTEXT, self._unit), self.most_context)

    @property
    def _unit(self) -> int:
        if self.to == "drafter":
            return 3 if self.masks is None else self.masks
        return 4 if self.block_size is None else self.block_size

    def _steps(self, steps: int, stages: int) -> list[int]:
        if stages == 1:
            return [steps]
        if self.to == "drafter":
            soft = min(max(1, round(_SOFT_SHARE * steps)), steps - 1)
            return [soft, steps - soft]
        early = max(1, steps // (2 * (stages - 1)))
        return [*[early] * (stages - 1), steps - early * (stages - 1)]

    def _drafter(self) -> dict[str, dict[str, Any]]:
        beside = {
            "network": {"additions": 64 if self.rank is None else self.rank},
            "method": {"kind": "drafter", "masks": self._unit},
        }
        aims = {ONLY: self.aim} if self.aim is not None else {"soft": "soft", "overlap": "overlap"}
        return {stage: merge(beside, {"objective": {"aim": aim}}) for stage, aim in aims.items()}

    def _joint(self) -> dict[str, dict[str, Any]]:
        method = {"joint": True, "law": "causal"}
        return {ONLY: merge(_in_blocks(self._unit), {"method": method, "objective": {"next_token": 4.0}})}

    def _blocks(self) -> dict[str, dict[str, Any]]:
        """Small blocks first: 2, 4, 8 and so on, up to the final size."""
        sizes = [2**power for power in range(1, self._unit.bit_length()) if 2**power < self._unit]
        sizes = [size for size in sizes if self.context % size == 0] + [self._unit]
        return {ONLY if len(sizes) == 1 else f"blocks{size}": _in_blocks(size) for size in sizes}


def _in_blocks(size: int) -> dict[str, Any]:
    return {
        "method": {"kind": "block_diffusion", "block_size": size, "causal_clean": True},
        "objective": _MASKS,
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_can_become(model: "LanguageModelConfig", source: str, recipe: "Recipe") -> None:
    """Refuse a checkpoint that cannot become what a recipe makes of it."""
    method = model.method
    if recipe.method.trains_beside:
        if "causal" not in method.laws:
            raise ValueError(
                "a drafter needs a model that writes token by token, which verifies its drafts, and "
                f"{source} is {model.title}; first make a joint model with --to joint"
            )
        rank, theirs = (getattr(each, "additions", 0) for each in (recipe.network, model.network))
        if theirs and rank != theirs:
            raise ValueError(
                f"--rank must be {theirs}, the rank of the additions that {source} already has, got {rank}"
            )
    elif model.base is not None:
        raise ValueError(
            f"{source} has no weights of its own to train, only additions to the weights of "
            f"{model.base.source}: adapt that model, or train the additions further with --to drafter"
        )
    elif "causal" not in method.laws and not method.masks_by_rule:
        raise ValueError(
            f"--to joint and --to block need an autoregressive or masked diffusion model, and {source} is "
            f"{model.title}"
        )
