"""How much memory training a network needs at least: what its parameters and the optimizer are."""

import math
from dataclasses import dataclass

from bd3lm.interop.weights import beside_names, parameter_shapes
from bd3lm.methods import LanguageModelConfig

_BYTES = 4  # of a number, in float32; a GPU computes in bfloat16 from these


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Numbers that stay as they are, and numbers that learn. What a batch takes comes on top."""

    frozen: int
    learned: int

    @property
    def weights(self) -> int:
        return _BYTES * (self.frozen + self.learned)

    @property
    def gradients(self) -> int:
        return _BYTES * self.learned

    @property
    def moments(self) -> int:
        """AdamW's two, of each number that learns."""
        return 2 * _BYTES * self.learned

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {_gib(getattr(self, name))}" for name in ("weights", "gradients", "moments")
        )
        return (
            f"{_gib(self.total)} GiB before activations ({parts}), of {self.frozen + self.learned:,} numbers "
            f"{self.learned:,} learn"
        )


def training_memory(config: LanguageModelConfig) -> TrainingMemory:
    """That of a model whose weights all learn, or only what it has beside them, as its method has it."""
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config.network).items()}
    total = sum(sizes.values())
    learning = beside_names(config.network) if config.trains_beside else sizes.keys()
    learned = sum(sizes[name] for name in learning)
    return TrainingMemory(frozen=total - learned, learned=learned)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
