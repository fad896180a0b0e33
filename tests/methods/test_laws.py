"""The two laws of a joint model: in blocks, and token after token, each as a model of that kind has it."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bd3lm import LanguageModel
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    BlockDiffusionTraining,
    LanguageModelConfig,
    config_from_dict,
    config_to_dict,
)
from tests.oracles.networks import CLEAN, MASK, tiny_transformer

JOINT = BlockDiffusionMethod(block_size=2, causal_clean=True, joint=True)


def joint_model(**changes: object) -> LanguageModel:
    network = tiny_transformer(3, context=8)
    method = replace(JOINT, **changes)
    return LanguageModel(network, LanguageModelConfig(network=network.config, method=method, mask_id=MASK))


def alone(method: object) -> LanguageModel:
    network = tiny_transformer(3, context=8)
    return LanguageModel(network, LanguageModelConfig(network=network.config, method=method, mask_id=MASK))


TEXTS = [torch.tensor([0, *rest]) for rest in itertools.product(CLEAN, repeat=3)]


def test_each_law_is_that_of_a_model_of_its_kind():
    lm = joint_model()
    for law, method in (
        ("block", BlockDiffusionMethod(block_size=2, causal_clean=True)),
        ("causal", AutoregressiveMethod()),
    ):
        view, other = lm.with_law(law), alone(method)
        assert view.law == law
        found = [each.log_p for each in view.log_likelihood(TEXTS, estimator="exact")]
        expected = [each.log_p for each in other.log_likelihood(TEXTS, estimator="exact")]
        assert found == expected
        assert torch.tensor(found, dtype=torch.float64).exp().sum().item() == pytest.approx(1.0, abs=1e-9)
        for one, two in zip(
            view.generate([0], count=20, length=6, stop_at_eos=False),
            other.generate([0], count=20, length=6, stop_at_eos=False),
            strict=True,
        ):
            assert one.tokens == two.tokens
    block, causal = (lm.with_law(law).log_likelihood(TEXTS)[5].log_p for law in ("block", "causal"))
    assert block != pytest.approx(causal, abs=1e-3)


def test_a_joint_model_keeps_what_it_is_under_either_law(tmp_path: Path):
    lm = joint_model(law="causal", lean=1.5)
    assert lm.law == "causal"
    assert "causal law" in repr(lm)
    assert lm.with_law("block").with_law("causal").config == lm.config
    assert lm.with_law("block").config.method.order_lean == 1.5
    lm.with_law("block").save_pretrained(tmp_path)
    again = LanguageModel.from_pretrained(tmp_path, device="cpu")
    assert again.record == lm.record
    assert (again.law, again.config) == ("causal", lm.config)
    assert config_from_dict(config_to_dict(lm.record)) == lm.record


def test_what_is_trained_is_the_joint_model():
    lm = joint_model(law="causal")
    training = BlockDiffusionTraining(next_token=1.0)
    losses = [
        model.loss(TEXTS[7].unsqueeze(0), training, generator=torch.Generator().manual_seed(0)).item()
        for model in (lm, lm.with_law("block"))
    ]
    assert losses[0] == losses[1]
    trained = BlockDiffusionMethod(block_size=2, causal_clean=True).after(training)
    assert trained == JOINT
    assert JOINT.after(BlockDiffusionTraining()) == JOINT
    assert AutoregressiveMethod().after(AutoregressiveMethod.Training()) == AutoregressiveMethod()


def test_laws_that_a_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match="law must be block for block diffusion, got 'causal'"):
        alone(BlockDiffusionMethod(block_size=2)).with_law("causal")
    with pytest.raises(ValueError, match="law must be causal for autoregressive, got 'block'"):
        alone(AutoregressiveMethod()).with_law("block")
    with pytest.raises(ValueError, match="law must be block or causal for block diffusion, got 'both'"):
        joint_model().with_law("both")
    with pytest.raises(ValueError, match="law must be block, got 'causal'; a joint model has both"):
        BlockDiffusionMethod(block_size=2, causal_clean=True, law="causal")
    with pytest.raises(ValueError, match="joint needs causal_clean"):
        BlockDiffusionMethod(block_size=2, joint=True)
    with pytest.raises(ValueError, match=r"lean is for the block law, got .* under the causal law"):
        joint_model(law="causal").with_lean(2.0)
