"""How a checkpoint is adapted: recipes that start from it, one for each of three outcomes.

They are plain values, so that asking for them needs no torch. What they are chosen from is in
docs/adapting.md, and what of it has not been tuned.
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
"""What can become of a checkpoint: it stays as it is and learns to draft beside that; it learns a block law
too; or it becomes a model of blocks alone."""
AIMS = ("hard", "soft", "overlap")
"""What drafts are to come near, as `bd3lm.models` has it."""
DATA = "data/adapt"
"""Where the presets read tokens, which must be those of the checkpoint."""

_MOST_CONTEXT = 512
_TILES = (32, 8)  # kernels take whole ones; the larger, if nearly all of a context can be read so
_NEARLY = 7 / 8
_SOFT_SHARE = 0.4
_STEPS = 1000
_OF_DRAFTERS = ("masks", "rank", "aim")
_OF_BLOCKS = ("block_size",)

_COMMON: Mapping[str, Any] = {
    "data": {"path": DATA, "validation_sequences": 256, "validation_batch": 32},
    "network": {"size": CHECKPOINT, "dropout": 0.0},
    "optimizer": {"betas": [0.9, 0.95], "min_lr_ratio": 0.0, "clip_norm": 1.0},
    # The rate falls to zero, which averages the weights as well as a mean of them does, and takes no memory.
    "train": {
        "global_batch": 32,
        "ema_decay": 0.0,
        "log_every": 20,
        "validate_every": 250,
        "checkpoint_every": 250,
    },
}
_DRAFTER_RATE, _RATE = 5e-4, 5e-5
# As the recommended presets have it: both copies of complementary masks, each masked token with weight 1.
_MASKS = {"masking": {"kind": "counts", "complementary": True, "weight": "flat"}}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What an adaptation is chosen by; None is what is usual for the outcome."""

    to: str
    steps: int | None = None
    """Of all stages together."""
    block_size: int | None = None
    masks: int | None = None
    rank: int | None = None
    aim: str | None = None
    """Train a drafter in one stage with this aim, in place of soft targets and then the overlap."""
    most_context: int = _MOST_CONTEXT
    """What the checkpoint can read at once, where that is less."""

    def __post_init__(self) -> None:
        if self.to not in OUTCOMES:
            raise ValueError(f"--to must be one of {', '.join(OUTCOMES)}, got {self.to!r}")
        others, whose = (_OF_BLOCKS, "joint or block") if self.to == "drafter" else (_OF_DRAFTERS, "drafter")
        for name in others:
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{_flag(name)} is for --to {whose}, got {value} with --to {self.to}")
        for name in ("steps", "block_size", "masks", "rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} must be at least 1, got {value}")
        if self.aim is not None and self.aim not in AIMS:
            raise ValueError(f"--aim must be one of {', '.join(AIMS)}, got {self.aim!r}")
        if self._unit > self.most_context:
            what = "--masks" if self.to == "drafter" else "--block-size"
            raise ValueError(
                f"{what} must be at most the {self.most_context} tokens that the model reads at once, got "
                f"{self._unit}"
            )

    def stages(self) -> dict[str, dict[str, Any]]:
        """The recipes by the names of their stages, each of which starts from the one before."""
        found = {"drafter": self._drafter, "joint": self._joint, "block": self._blocks}[self.to]()
        steps = self.steps or _STEPS
        if steps < len(found):
            raise ValueError(f"--steps must be at least {len(found)}, one for each stage, got {steps}")
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
        """How many tokens are read at once: whole groups of masks or blocks, if possible whole tiles."""
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
        """Small blocks first: 2, 4, 8 and so on, up to what is asked for."""
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
    """Refuse a checkpoint of which the outcome of a recipe cannot be made."""
    method = model.method
    if recipe.method.trains_beside:
        if "causal" not in method.laws:
            raise ValueError(
                "a drafter needs a model that writes token after token, which verifies its drafts, and "
                f"{source} is {model.title}: --to joint makes one of it"
            )
        rank, theirs = (getattr(each, "additions", 0) for each in (recipe.network, model.network))
        if theirs and rank != theirs:
            raise ValueError(
                f"--rank must be {theirs}, that of the additions that {source} has already, got {rank}"
            )
    elif model.base is not None:
        raise ValueError(
            f"{source} has no weights of its own to be trained, only additions to those of "
            f"{model.base.source}: adapt that, or train the additions further with --to drafter"
        )
    elif "causal" not in method.laws and not method.masks_by_rule:
        raise ValueError(
            f"--to joint and block need an autoregressive model, or one of masked diffusion, and {source} is "
            f"{model.title}"
        )
