"""A language model as users hold it: load it, let it write, ask it how likely a text is."""

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
