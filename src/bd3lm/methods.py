"""What the method of a recipe is: trained by an objective, judged by another, and released as a config."""

from dataclasses import replace
from typing import Any

from bd3lm import diffusion
from bd3lm.config import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    D3PMMethod,
    Method,
    ScoreEntropyMethod,
    SimplexMethod,
)
from bd3lm.diffusion import LevelSampler, MaskingRule, NoiseSchedule
from bd3lm.lm import corruption_bound
from bd3lm.models import BlockReading
from bd3lm.objectives import (
    D3PM,
    Autoregressive,
    BlockDiffusionLoss,
    Objective,
    ScoreEntropy,
    SimplexDiffusionLoss,
)
from bd3lm.runs.recipe import (
    AutoregressiveRecipe,
    BlockDiffusionRecipe,
    ClippedMasking,
    CountsMasking,
    D3PMRecipe,
    DiscreteMasking,
    MaskingRecipe,
    MethodRecipe,
    ScoreEntropyRecipe,
    SimplexRecipe,
    TimesMasking,
)


def build_objective(method: MethodRecipe, *, context: int, mask_id: int, vocab_size: int) -> Objective:
    """What a method recipe trains with."""
    match method:
        case AutoregressiveRecipe():
            return Autoregressive(
                mask_id=mask_id, score_first=method.score_first, random_batch=method.random_batch
            )
        case ScoreEntropyRecipe():
            released = ScoreEntropyMethod(mask_id=mask_id, process=method.process)
            return corruption_bound(released, vocab_size)
        case D3PMRecipe():
            steps = D3PMMethod(
                mask_id=mask_id, process=method.process, steps=method.steps, schedule=method.schedule
            )
            return replace(corruption_bound(steps, vocab_size), auxiliary=method.auxiliary)
        case SimplexRecipe():
            return SimplexDiffusionLoss(
                block_size=method.block_size,
                mask_id=mask_id,
                steps=method.steps,
                simplex_scale=method.simplex_scale,
            )
        case BlockDiffusionRecipe():
            levels = (
                LevelSampler(stratified=False)
                if method.strata == "none"
                else LevelSampler(assignment=method.strata)
            )
            return BlockDiffusionLoss(
                reading=BlockReading(
                    block_size=method.block_size or context,
                    mask_id=mask_id,
                    causal_clean=method.causal_clean,
                    previous_token=method.previous_token,
                ),
                masking=build_masking(method.masking),
                levels=levels,
                algorithm=method.algorithm,
                next_token=method.next_token,
            )


def build_masking(masking: MaskingRecipe) -> MaskingRule:
    """How masks are drawn."""
    match masking:
        case TimesMasking():
            return diffusion.Times(NoiseSchedule.members()[masking.schedule]())
        case DiscreteMasking():
            return diffusion.DiscreteTimes(
                steps=masking.steps, schedule=NoiseSchedule.members()[masking.schedule]()
            )
        case ClippedMasking():
            return diffusion.ClippedTimes(
                low=masking.low,
                high=masking.high,
                weight=masking.weight,
                redraw=masking.redraw,
                search=masking.search,
            )
        case CountsMasking():
            if masking.learn_proposal:
                return diffusion.LearnedCounts()
            return diffusion.Counts(
                complementary=masking.complementary, lean=masking.lean, weight=masking.weight
            )


def validation_objective(objective: Objective, *, lean: float = 0.0, uses_noise: bool = False) -> Objective:
    """What a method is judged by: its likelihood, or the paper's bound, whatever masks it is trained with.

    The bound is of the order in which the model will write, with its `lean`, and is drawn by counts: mask
    rates that are drawn uniformly have the same mean and an infinite variance, and which checkpoint is kept
    as the best would be a matter of luck. A network that `uses_noise` must be told a rate. SSD-LM has
    neither; it is judged by its cross-entropy on pure noise, where nothing can be copied.
    """
    if isinstance(objective, Autoregressive):
        return Autoregressive(mask_id=objective.mask_id, score_first=objective.score_first)
    if isinstance(objective, BlockDiffusionLoss):
        masking = objective.masking
        if not isinstance(masking, diffusion.DiscreteTimes):  # a network trained in T steps is judged in them
            masking = diffusion.Times() if uses_noise else diffusion.Counts(lean=lean)
        return BlockDiffusionLoss(reading=objective.reading, masking=masking)
    if isinstance(objective, ScoreEntropy | D3PM):
        return objective  # what D3PM adds to its bound never enters the figure
    if isinstance(objective, SimplexDiffusionLoss):
        return replace(objective, pure_noise=True)
    return objective  # of somebody else's, which says itself whether it is a bound


def build_method(method: MethodRecipe, *, context: int, mask_id: int) -> Method:
    """What a model of this method is, whatever it was trained with: it is saved beside the weights."""
    common: dict[str, Any] = {"mask_id": mask_id, "score_first": method.score_first}
    match method:
        case AutoregressiveRecipe():
            return AutoregressiveMethod(**common)
        case BlockDiffusionRecipe():
            return BlockDiffusionMethod(
                **common,
                block_size=method.block_size or context,
                causal_clean=method.causal_clean,
                previous_token=method.previous_token,
                lean=method.lean,
            )
        case ScoreEntropyRecipe():
            return ScoreEntropyMethod(**common, process=method.process)
        case D3PMRecipe():
            return D3PMMethod(**common, process=method.process, steps=method.steps, schedule=method.schedule)
        case SimplexRecipe():
            return SimplexMethod(**common, block_size=method.block_size, simplex_scale=method.simplex_scale)
