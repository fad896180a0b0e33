"""A model is tuned by additions at every position, which are released alone and loaded in its weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bd3lm.interop import load
from bd3lm.models import Causal
from bd3lm.runs.memory import training_memory
from bd3lm.runs.plan import Run, plan_run
from bd3lm.runs.recipe import Recipe
from tests.oracles.networks import logits_of
from tests.tiny_recipes import BLOCK, prepared, tiny_recipe

METHODS: dict[str, dict[str, Any]] = {"autoregressive": {}, "blocks": BLOCK}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def bases(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    for name, method in METHODS.items():
        run = plan_run(tiny_recipe(data, method), folder / name).build()
        run.trainer.run()
        run.export()
    return {name: folder / name for name in METHODS}


def tuned(data: Path, start: Path | None, *changes: dict[str, Any]) -> Recipe:
    said = {"network": {"additions": 4, "additions_at": "all"}, "optimizer": {"lr": 0.02}}
    begun = {"start_from": str(start)} if start is not None else {}
    return tiny_recipe(data, *changes, said, begun)


def learned(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.clone() for name, p in run.trainer.network.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", METHODS)
def test_additions_alone_learn_and_the_model_has_them_in_its_weights(name, data, bases, tmp_path):
    run = plan_run(tuned(data, bases[name], METHODS[name]), tmp_path).build()
    base, _ = load(bases[name] / "model")
    given, before = base.state_dict(), learned(run)
    assert all(".additions." in each for each in before)
    memory = training_memory(run.config)
    assert memory.learned == sum(each.numel() for each in before.values())
    run.trainer.run()
    for each, weight in run.trainer.network.named_parameters():
        assert torch.equal(weight, before[each] if each in before else given[each]) == (each in given), each
    checkpoints = list((tmp_path / "checkpoints").rglob("*.safetensors"))
    assert max(file.stat().st_size for file in checkpoints) < 60_000  # nothing that is frozen is in there

    network, config = load(run.export())
    assert config.network == network.config == base.config
    assert config.base is None
    average = run.trainer.network.eval()
    average.load_state_dict({**average.state_dict(), **run.trainer.ema.tensors()})
    tokens, layout = torch.arange(16).unsqueeze(0), Causal(16)
    found, plain = (logits_of(each.eval(), tokens, layout) for each in (network, base))
    torch.testing.assert_close(found, logits_of(average, tokens, layout), rtol=0, atol=1e-5)
    assert (found - plain).abs().max() > 1e-3


def test_it_goes_on_bit_for_bit_from_the_same_model(data, bases, tmp_path):
    recipe = tuned(data, bases["blocks"], BLOCK)
    whole = plan_run(recipe, tmp_path / "whole").build()
    whole.trainer.run()
    parted = plan_run(recipe, tmp_path / "parted").build()
    for _ in range(2):
        parted.trainer.train_step()
    parted.trainer.save()
    again = plan_run(recipe, tmp_path / "parted").build()
    assert again.trainer.resume()
    again.trainer.run()
    for name, parameter in whole.trainer.network.named_parameters():
        assert torch.equal(dict(again.trainer.network.named_parameters())[name], parameter), name


def test_there_must_be_something_to_add_to(data, tmp_path):
    with pytest.raises(ValueError, match=r"network\.additions_at all adds to a model: give --from MODEL"):
        plan_run(tuned(data, None), tmp_path)
