"""Methods: how a model is trained and writes, one file for each; and the config of a saved model."""

from bd3lm.methods.autoregressive import AutoregressiveMethod, AutoregressiveTraining
from bd3lm.methods.base import Frame, Law, Method, NoisedTraining, Training, only_estimator
from bd3lm.methods.block_diffusion import BlockDiffusionMethod, BlockDiffusionTraining
from bd3lm.methods.config import Base, LanguageModelConfig, config_from_dict, config_to_dict
from bd3lm.methods.d3pm import D3PMMethod, D3PMTraining
from bd3lm.methods.drafter import DrafterMethod, DrafterTraining
from bd3lm.methods.score_entropy import ScoreEntropyMethod
from bd3lm.methods.settings import Settings, SettingsKeywords
from bd3lm.methods.simplex import SimplexMethod, SimplexTraining

__all__ = [
    "AutoregressiveMethod",
    "AutoregressiveTraining",
    "Base",
    "BlockDiffusionMethod",
    "BlockDiffusionTraining",
    "D3PMMethod",
    "D3PMTraining",
    "DrafterMethod",
    "DrafterTraining",
    "Frame",
    "LanguageModelConfig",
    "Law",
    "Method",
    "NoisedTraining",
    "ScoreEntropyMethod",
    "Settings",
    "SettingsKeywords",
    "SimplexMethod",
    "SimplexTraining",
    "Training",
    "config_from_dict",
    "config_to_dict",
    "only_estimator",
]
