"""Training objectives: one file a method."""

from bd3lm.objectives.autoregressive import Autoregressive
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss
from bd3lm.objectives.block import BlockDiffusionLoss
from bd3lm.objectives.denoising import BlockDenoiser
from bd3lm.objectives.simplex import SimplexDiffusionLoss

__all__ = [
    "Autoregressive",
    "BlockDenoiser",
    "BlockDiffusionLoss",
    "Objective",
    "SimplexDiffusionLoss",
    "TokenBatch",
    "TokenLoss",
]
