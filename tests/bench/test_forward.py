"""What a forward benchmark times: network and loss of a training step, and nothing for a backward pass."""

import math

import pytest
import torch

from bd3lm.bench import Shape, TrainingCase, forward, measure_forward
from bd3lm.models import BlockCausal, BlockDiffusion, Transformer
from bd3lm.training.step import training_sums

CPU = torch.device("cpu")
SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "context": 8, "vocabulary": 11}


def case(**changes) -> TrainingCase:
    return TrainingCase(shape=Shape(**SHAPE), batch_size=3, **{"compile": False, **changes})


@pytest.fixture
def passes(timed, monkeypatch):
    """The losses of a case's call and the layouts that the network was asked for."""

    def of(case: TrainingCase) -> tuple[list, list]:
        sums, layouts = [], []
        watched = Transformer.forward

        def pass_of(network, *words, layout, **options):
            assert not network.training
            assert not torch.is_grad_enabled()
            layouts.append(type(layout))
            return watched(network, *words, layout=layout, **options)

        def keep(*words):
            sums.append(training_sums(*words))
            return sums[-1]

        with monkeypatch.context() as patch:
            patch.setattr(forward, "training_sums", keep)
            patch.setattr(Transformer, "forward", pass_of)
            measure_forward(case, device=CPU)
            for _ in range(2):
                timed[-1]()
        return sums, layouts

    return of


def test_a_call_is_one_pass_or_two_with_the_same_loss(passes):
    single, layouts = passes(case())
    assert layouts == [BlockDiffusion] * 2
    double, layouts = passes(case(algorithm="two_pass"))
    assert layouts == [BlockCausal, BlockDiffusion] * 2
    losses = [each.loss.item() for each in (*single, *double)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert all(each.loss.grad_fn is None for each in (*single, *double))


def test_a_pass_is_compiled_where_the_case_is(timed, monkeypatch):
    compiled = []
    monkeypatch.setattr(Transformer, "compile_trunk", lambda network: compiled.append(network))
    measure_forward(case(), device=CPU)
    assert not compiled
    measure_forward(case(compile=True, attention="dense"), device=CPU)
    assert [network.attention_backend for network in compiled] == ["dense"]


def test_a_pass_whose_loss_is_not_finite_has_no_speed(monkeypatch):
    build = Transformer.reset_parameters

    def break_weights(network: Transformer) -> None:
        build(network)
        torch.nn.init.constant_(network.output.bias, math.nan)

    monkeypatch.setattr(Transformer, "reset_parameters", break_weights)
    with pytest.raises(FloatingPointError, match=r"the loss of BD3-LM, blocks of 4, 1 x 16, .* not finite"):
        measure_forward(case(), device=CPU, warmup=0, repeats=1)
