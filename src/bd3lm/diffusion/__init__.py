"""The mathematics of block diffusion: functions of tensors, without networks, configuration or I/O."""

from bd3lm.counter import Purpose, counter_uniform, derive_seed
from bd3lm.diffusion.categorical import gumbel, gumbel_max, nucleus, temper, top_k
from bd3lm.diffusion.checks import is_number, is_whole
from bd3lm.diffusion.counts import Counts, LearnedCounts, learned_proposal
from bd3lm.diffusion.draws import Draws, LevelSampler, Strata, blocks_in
from bd3lm.diffusion.masking import ClippedTimes, ClipSearch, DiscreteTimes, MaskingRule, Masks, Times
from bd3lm.diffusion.orders import log_reveal_rates, log_reveal_times
from bd3lm.diffusion.parameterizations import d3pm, sedd, sedd_at_masks, subs, subs_at_masks
from bd3lm.diffusion.processes import Absorbing, ForwardProcess, Uniform, named_process
from bd3lm.diffusion.schedules import (
    Cosine,
    Floored,
    Linear,
    Logarithmic,
    NoiseSchedule,
    Square,
    SquareRoot,
    conditioning_noise,
)
from bd3lm.diffusion.scores import (
    score_entropy_at_masks,
    tweedie_at_masks,
    uniform_score_entropy,
    uniform_tweedie,
)
from bd3lm.diffusion.simplex import (
    GreedyProjection,
    MultiHotProjection,
    Projection,
    SamplingProjection,
    SquaredCosine,
    add_noise,
    almost_one_hot,
)
from bd3lm.limits import check_lean

__all__ = [
    "Absorbing",
    "ClipSearch",
    "ClippedTimes",
    "Cosine",
    "Counts",
    "DiscreteTimes",
    "Draws",
    "Floored",
    "ForwardProcess",
    "GreedyProjection",
    "LearnedCounts",
    "LevelSampler",
    "Linear",
    "Logarithmic",
    "MaskingRule",
    "Masks",
    "MultiHotProjection",
    "NoiseSchedule",
    "Projection",
    "Purpose",
    "SamplingProjection",
    "Square",
    "SquareRoot",
    "SquaredCosine",
    "Strata",
    "Times",
    "Uniform",
    "add_noise",
    "almost_one_hot",
    "blocks_in",
    "check_lean",
    "conditioning_noise",
    "counter_uniform",
    "d3pm",
    "derive_seed",
    "gumbel",
    "gumbel_max",
    "is_number",
    "is_whole",
    "learned_proposal",
    "log_reveal_rates",
    "log_reveal_times",
    "named_process",
    "nucleus",
    "score_entropy_at_masks",
    "sedd",
    "sedd_at_masks",
    "subs",
    "subs_at_masks",
    "temper",
    "top_k",
    "tweedie_at_masks",
    "uniform_score_entropy",
    "uniform_tweedie",
]
