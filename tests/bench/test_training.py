"""What a training benchmark times: the trainer's own step, in the variant that was asked for."""

import math

import pytest
import torch

from bd3lm.bench import Shape, TrainingCase, measure_training
from bd3lm.bench.training import _RandomTokens
from bd3lm.diffusion import Counts, Times
from bd3lm.models import BlockReading, Transformer
from bd3lm.objectives import Autoregressive

CPU = torch.device("cpu")
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "context": 8, "vocabulary": 11}


def trainer_of(timed: list, **changes):
    measure_training(TrainingCase(shape=Shape(**SHAPE), batch_size=3, **changes), device=CPU)
    return timed[-1].__self__


def test_a_training_step_is_the_trainers_own_on_the_whole_batch(timed):
    trainer = trainer_of(timed, compile=False)
    before = {name: weight.clone() for name, weight in trainer.network.named_parameters()}
    for _ in range(2):  # the first step of the warm-up has a rate of zero
        trainer.train_step()
    assert trainer.tokens_seen == 2 * 3 * 8
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.network.named_parameters())
    assert trainer.ema.updates == 2


def test_variants_of_training_change_what_their_names_say(timed, monkeypatch):
    compiled = []
    monkeypatch.setattr(Transformer, "compile_trunk", lambda network: compiled.append(network))
    assert trainer_of(timed).network in compiled
    assert trainer_of(timed, compile=False).network not in compiled
    assert trainer_of(timed, compile=False, attention="dense").network.attention_backend == "dense"
    assert trainer_of(timed, compile=False, algorithm="two_pass").objective.algorithm == "two_pass"
    trainer, without = (trainer_of(timed, compile=False, ema=ema) for ema in (True, False))
    assert not averages_that_are_weights(trainer)
    assert averages_that_are_weights(without) == set(dict(without.network.named_parameters()))


def averages_that_are_weights(trainer) -> set[str]:
    """Which of them are kept in no memory of their own."""
    weights = {weight.data_ptr() for weight in trainer.network.parameters()}
    return {name for name, average in trainer.ema.tensors().items() if average.data_ptr() in weights}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_step_whose_loss_is_not_finite_has_no_speed(broken, monkeypatch):
    """We once believed a kernel that was fast because it gave NaN."""
    build = Transformer.reset_parameters

    def break_weights(network: Transformer) -> None:
        build(network)
        torch.nn.init.constant_(network.output.bias, broken)

    monkeypatch.setattr(Transformer, "reset_parameters", break_weights)
    case = TrainingCase(shape=Shape(**SHAPE), batch_size=1, compile=False)
    with pytest.raises(FloatingPointError, match=r"the loss of BD3-LM, blocks of 4, 1 x 16, .* not finite"):
        measure_training(case, device=CPU, warmup=0, steps=1)


def test_random_tokens_are_text_of_every_kind_but_the_mask(timed):
    data = trainer_of(timed, compile=False).data
    wide = _RandomTokens(200, Shape(**SHAPE))
    assert sorted(wide.batch(0).tokens.unique().tolist()) == list(range(10))
    assert data.batch(0).tokens.shape == (3, 8)
    assert torch.equal(data.batch(5, slice(1, 2)).tokens, data.batch(0).tokens[1:2])


def test_objectives_are_those_of_the_methods():
    ar, mdlm, block = (
        TrainingCase(shape=Shape(method=method, **SHAPE)).objective() for method in ("ar", "mdlm", "bd3lm")
    )
    assert ar == Autoregressive(mask_id=10)
    assert (mdlm.reading, mdlm.masking) == (BlockReading(block_size=8, mask_id=10), Times())
    assert (block.reading, block.masking) == (BlockReading(block_size=4, mask_id=10), Counts())


@pytest.mark.parametrize(
    ("shape", "title"),
    [({"method": "ar"}, "AR"), ({"method": "mdlm"}, "MDLM"), ({"block_size": 8}, "BD3-LM, blocks of 8")],
)
def test_two_passes_where_there_is_one_are_refused(shape, title):
    """They would be the same step, timed twice."""
    with pytest.raises(ValueError, match=f"two passes need a clean text .* and {title} has none"):
        TrainingCase(shape=Shape(**SHAPE | shape), algorithm="two_pass")


def test_as_many_steps_as_asked_for_are_timed():
    timing = measure_training(
        TrainingCase(shape=Shape(**SHAPE), batch_size=1, compile=False), device=CPU, warmup=1, steps=2
    )
    assert len(timing.seconds) == 2
    assert min(timing.seconds) > 0
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        measure_training(TrainingCase(shape=Shape(**SHAPE), batch_size=1), device=CPU, steps=0)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        TrainingCase(shape=Shape(**SHAPE), batch_size=0)
