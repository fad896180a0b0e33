"""Sampling: the order of reveal, drawing of tokens, the end of texts, and the engine that runs it all."""

from bd3lm.sampling.analytic import AnalyticWriter
from bd3lm.sampling.autoregressive import AutoregressiveWriter
from bd3lm.sampling.blocks import BlockWriter
from bd3lm.sampling.drawing import RowSharpening, Sharpening
from bd3lm.sampling.engine import Engine, Handle
from bd3lm.sampling.events import (
    BlockFinished,
    BlockStarted,
    Drafted,
    Event,
    Extended,
    Failed,
    Redrawn,
    Sample,
    Started,
    Stopped,
    Tell,
    TokenHidden,
    TokenRevealed,
)
from bd3lm.sampling.fills import Fills, FillWeights, Weights, followed_to
from bd3lm.sampling.guided import Guide, GuidedWriter, GuideState
from bd3lm.sampling.loop import sample, write
from bd3lm.sampling.posterior import PosteriorWriter
from bd3lm.sampling.replay import without_replays
from bd3lm.sampling.request import Request
from bd3lm.sampling.simplex import SimplexWriter
from bd3lm.sampling.sliding import SlidingWriter
from bd3lm.sampling.speculation import SCHEMES, Scheme, Speculation
from bd3lm.sampling.speculative import SpeculativeWriter
from bd3lm.sampling.speculative_blocks import SpeculativeBlockWriter
from bd3lm.sampling.stopping import StoppedBy, Stopping, token_entropy
from bd3lm.sampling.unmasking import (
    Adaptive,
    Ancestral,
    EntropyBound,
    FirstHitting,
    MostConfident,
    Pass,
    Planned,
    Remasking,
    UnmaskingRule,
)
from bd3lm.sampling.writer import Writer

__all__ = [
    "SCHEMES",
    "Adaptive",
    "AnalyticWriter",
    "Ancestral",
    "AutoregressiveWriter",
    "BlockFinished",
    "BlockStarted",
    "BlockWriter",
    "Drafted",
    "Engine",
    "EntropyBound",
    "Event",
    "Extended",
    "Failed",
    "FillWeights",
    "Fills",
    "FirstHitting",
    "Guide",
    "GuideState",
    "GuidedWriter",
    "Handle",
    "MostConfident",
    "Pass",
    "Planned",
    "PosteriorWriter",
    "Redrawn",
    "Remasking",
    "Request",
    "RowSharpening",
    "Sample",
    "Scheme",
    "Sharpening",
    "SimplexWriter",
    "SlidingWriter",
    "Speculation",
    "SpeculativeBlockWriter",
    "SpeculativeWriter",
    "Started",
    "Stopped",
    "StoppedBy",
    "Stopping",
    "Tell",
    "TokenHidden",
    "TokenRevealed",
    "UnmaskingRule",
    "Weights",
    "Writer",
    "followed_to",
    "sample",
    "token_entropy",
    "without_replays",
    "write",
]
