"""What each method trains with and is judged by."""

from dataclasses import replace

import pytest
import torch

from bd3lm import diffusion
from bd3lm.diffusion import (
    Absorbing,
    ClippedTimes,
    Counts,
    DiscreteTimes,
    Floored,
    LearnedCounts,
    LevelSampler,
    Times,
    Uniform,
)
from bd3lm.methods import (
    AutoregressiveMethod,
    AutoregressiveTraining,
    BlockDiffusionMethod,
    BlockDiffusionTraining,
    D3PMMethod,
    D3PMTraining,
    Frame,
    Method,
    NoisedTraining,
    ScoreEntropyMethod,
    SimplexMethod,
    SimplexTraining,
    Training,
)
from bd3lm.models import BlockReading
from bd3lm.objectives import (
    D3PM,
    Autoregressive,
    BlockDiffusionLoss,
    Objective,
    ScoreEntropy,
    SimplexDiffusionLoss,
    TokenBatch,
)
from tests.oracles.networks import MASK, tiny_transformer

FRAME = Frame(vocab_size=12, context=16, mask_id=9)
TOLD = Frame(vocab_size=12, context=16, mask_id=9, told_noise=True)
BLOCKS = BlockDiffusionMethod(block_size=4)
READING = BlockReading(block_size=4, mask_id=9)
JOINT = BlockDiffusionMethod(block_size=4, causal_clean=True, previous_token=True)
JOINT_READING = BlockReading(block_size=4, mask_id=9, causal_clean=True, previous_token=True)


@pytest.mark.parametrize(
    ("method", "training", "expected"),
    [
        (AutoregressiveMethod(), AutoregressiveTraining(), Autoregressive(mask_id=9)),
        (
            AutoregressiveMethod(score_first=True),
            AutoregressiveTraining(random_batch=True),
            Autoregressive(mask_id=9, score_first=True, random_batch=True),
        ),
        (
            BlockDiffusionMethod(),
            BlockDiffusionTraining(),
            BlockDiffusionLoss(reading=BlockReading(block_size=16, mask_id=9)),
        ),
        (
            BlockDiffusionMethod(block_size=4, lean=2.0),
            BlockDiffusionTraining(),
            BlockDiffusionLoss(reading=READING),
        ),
        (
            BLOCKS,
            BlockDiffusionTraining(strata="none", algorithm="two_pass"),
            BlockDiffusionLoss(reading=READING, levels=LevelSampler(stratified=False), algorithm="two_pass"),
        ),
        (
            JOINT,
            BlockDiffusionTraining(strata="ordered", next_token=0.5),
            BlockDiffusionLoss(
                reading=JOINT_READING, levels=LevelSampler(assignment="ordered"), next_token=0.5
            ),
        ),
        (
            BLOCKS,
            BlockDiffusionTraining(masking=LearnedCounts()),
            BlockDiffusionLoss(reading=READING, masking=LearnedCounts()),
        ),
        (ScoreEntropyMethod(), NoisedTraining(), ScoreEntropy(process=Absorbing(12, 9), mask_id=9)),
        (
            ScoreEntropyMethod(process="uniform"),
            NoisedTraining(),
            ScoreEntropy(process=Uniform(12), mask_id=9, schedule=Floored(diffusion.Linear())),
        ),
        (D3PMMethod(), D3PMTraining(), D3PM(process=Absorbing(12, 9), mask_id=9, steps=1000)),
        (
            D3PMMethod(process="uniform", steps=7, schedule=diffusion.Cosine()),
            D3PMTraining(auxiliary=0.01),
            D3PM(process=Uniform(12), mask_id=9, steps=7, schedule=diffusion.Cosine(), auxiliary=0.01),
        ),
        (
            D3PMMethod(process="uniform", block_size=4),
            D3PMTraining(),
            D3PM(process=Uniform(12), mask_id=9, steps=1000, block_size=4),
        ),
        (
            ScoreEntropyMethod(block_size=4),
            NoisedTraining(),
            ScoreEntropy(process=Absorbing(12, 9), mask_id=9, block_size=4),
        ),
        (SimplexMethod(), SimplexTraining(), SimplexDiffusionLoss(block_size=25, mask_id=9)),
        (
            SimplexMethod(block_size=5, simplex_scale=3.0),
            SimplexTraining(steps=50),
            SimplexDiffusionLoss(block_size=5, mask_id=9, steps=50, simplex_scale=3.0),
        ),
    ],
)
def test_each_method_has_its_objective(method: Method, training: Training, expected: Objective) -> None:
    assert method.objective(training, FRAME) == expected


@pytest.mark.parametrize(
    ("method", "training"),
    [
        (BLOCKS, BlockDiffusionTraining),
        (ScoreEntropyMethod(), NoisedTraining),
        (ScoreEntropyMethod(process="uniform"), NoisedTraining),
        (D3PMMethod(), D3PMTraining),
        (D3PMMethod(process="uniform"), D3PMTraining),
    ],
)
def test_strata_are_spread_in_training_and_in_evaluation_as_asked(method: Method, training: type) -> None:
    """In the order of the batch, as the paper says; the levels of a place are then not uniform: no bound."""
    ordered = LevelSampler(assignment="ordered")
    assert method.objective(training(strata="none"), FRAME).levels == LevelSampler(stratified=False)
    trained = method.objective(training(strata="ordered"), FRAME)
    assert trained.levels == ordered
    validated = method.validation(training(strata="ordered"), FRAME)
    assert validated.levels == LevelSampler()
    assert validated.is_bound
    asked, plain = (method.estimator(name, FRAME) for name in ("nelbo:ordered", "nelbo"))
    assert (asked.name, plain.name) == ("nelbo:ordered", "nelbo")
    assert asked.objective == replace(plain.objective, levels=ordered)
    assert not asked.objective.is_bound
    (draws,) = asked.draw(4, 16, generator=torch.Generator().manual_seed(0), device=torch.device("cpu"))
    levels = draws.levels.flatten()
    assert torch.equal((levels * len(levels)).ceil().long(), torch.arange(1, len(levels) + 1))


@pytest.mark.parametrize("method", [BLOCKS, ScoreEntropyMethod(), ScoreEntropyMethod(process="uniform")])
def test_the_references_estimator_has_its_strata_and_its_least_mask_rate(method: Method) -> None:
    asked, ordered = (method.estimator(name, FRAME) for name in ("nelbo:reference", "nelbo:ordered"))
    assert asked.name == "nelbo:reference"
    levels = LevelSampler(assignment="ordered", least=1e-3)
    assert asked.objective == replace(ordered.objective, levels=levels)
    assert not asked.objective.is_bound
    one, other = (
        each.draw(4, 16, generator=torch.Generator().manual_seed(0), device=torch.device("cpu"))[0].levels
        for each in (asked, ordered)
    )
    torch.testing.assert_close(one, 1e-3 + (1 - 1e-3) * other)


def test_the_references_estimator_is_block_diffusion_in_a_range_from_its_least_rate() -> None:
    """Which has a flag in training: the weight is 1/rate, and nothing makes up for what is left out."""
    network, batch = tiny_transformer(1), TokenBatch.of(torch.tensor([[0, 3, 1, 1]] * 40))
    frame = Frame(vocab_size=4, context=4, mask_id=MASK)
    method = BlockDiffusionMethod(block_size=2)
    estimator = method.estimator("nelbo:reference", frame)
    (draws,) = estimator.draw(40, 4, generator=torch.Generator().manual_seed(0), device=torch.device("cpu"))
    options = BlockDiffusionTraining(masking=ClippedTimes(low=1e-3), strata="ordered")
    trained = method.objective(options, frame)
    own = trained.draw(40, 4, generator=torch.Generator().manual_seed(0), device="cpu")
    loss = trained.loss(network, batch, own).nats.double()
    assert loss.sum() > 1.0
    torch.testing.assert_close(estimator.parts(network, batch, (draws,))[0], loss)
    assert [figure.meaning for figure in estimator.figures(network)] == ["neither"]


@pytest.mark.parametrize("process", ["absorbing", "uniform"])
def test_d3pm_has_steps_and_no_least_level(process: str) -> None:
    with pytest.raises(ValueError, match="estimator must be 'nelbo' or 'nelbo:ordered' for method kind d3pm"):
        D3PMMethod(process=process).estimator("nelbo:reference", FRAME)


def test_models_are_judged_by_the_papers_bound_whatever_trained_them() -> None:
    clipped = BlockDiffusionTraining(masking=ClippedTimes(low=0.3, high=0.8), next_token=1.0)
    assert JOINT.validation(clipped, FRAME) == BlockDiffusionLoss(reading=JOINT_READING, masking=Counts())
    assert JOINT.validation(clipped, TOLD).masking == Times()
    assert JOINT.validation(replace(clipped, validation="times"), FRAME).masking == Times()
    (said,) = JOINT.with_lean(2.0).training_conflicts(replace(clipped, validation="times"), FRAME)
    assert "objective.validation must be counts for an order that leans" in said
    assert JOINT.with_lean(2.0).validation(clipped, FRAME).masking == Counts(lean=2.0)
    discrete = BlockDiffusionTraining(masking=DiscreteTimes(steps=5))
    judged = BLOCKS.validation(discrete, FRAME)
    assert judged == BlockDiffusionLoss(reading=READING, masking=DiscreteTimes(steps=5))
    simplex = SimplexMethod(block_size=5)
    assert simplex.validation(SimplexTraining(), FRAME) == SimplexDiffusionLoss(
        block_size=5, mask_id=9, pure_noise=True
    )
    ar = AutoregressiveMethod(score_first=True)
    exact = ar.validation(AutoregressiveTraining(random_batch=True), FRAME)
    assert exact == Autoregressive(mask_id=9, score_first=True)
    assert all(each.is_bound for each in (judged, exact, JOINT.validation(clipped, FRAME)))
