"""Training objectives, one file for each method."""

from bd3lm.objectives.autoregressive import Autoregressive
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss
from bd3lm.objectives.block import BlockDiffusionLoss
from bd3lm.objectives.d3pm import D3PM
from bd3lm.objectives.denoising import BlockDenoiser
from bd3lm.objectives.drafting import Drafting
from bd3lm.objectives.score_entropy import ScoreEntropy
from bd3lm.objectives.simplex import SimplexDiffusionLoss

__all__ = [
    "D3PM",
    "Autoregressive",
    "BlockDenoiser",
    "BlockDiffusionLoss",
    "Drafting",
    "Objective",
    "ScoreEntropy",
    "SimplexDiffusionLoss",
    "TokenBatch",
    "TokenLoss",
]
