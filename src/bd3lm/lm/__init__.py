"""The language model that users hold: load it, generate with it, score texts with it."""

from bd3lm.lm.generation import Generation
from bd3lm.lm.model import LanguageModel, load
from bd3lm.lm.prompts import Gap
from bd3lm.lm.scoring import PAPER, TextLikelihood, build_estimator
from bd3lm.methods import Settings

__all__ = [
    "PAPER",
    "Gap",
    "Generation",
    "LanguageModel",
    "Settings",
    "TextLikelihood",
    "build_estimator",
    "load",
]
