"""The least memory that training a network needs: parameters and optimizer state."""

import math
from dataclasses import dataclass

from bd3lm.interop.weights import beside_names, parameter_shapes
from bd3lm.methods import LanguageModelConfig

_BYTES = 4  # per number, in float32; a GPU computes in bfloat16 from these


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Parameters that stay the same and parameters that are trained. The memory of a batch comes on top."""

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
        """The two moments of AdamW for each trained parameter."""
        return 2 * _BYTES * self.learned

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {_gib(getattr(self, name))}" for name in ("weights", "gradients", "moments")
        )
        return (
            f"{_gib(self.total)} GiB before activations ({parts}); {self.learned:,} of "
            f"{self.frozen + self.learned:,} parameters are trained"
        )


def training_memory(config: LanguageModelConfig) -> TrainingMemory:
    """The memory for a model that trains all weights, or only its additions, depending on the method."""
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(config.network).items()}
    total = sum(sizes.values())
    learning = beside_names(config.network) if config.trains_beside else sizes.keys()
    learned = sum(sizes[name] for name in learning)
    return TrainingMemory(frozen=total - learned, learned=learned)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
