"""What a run begins with: cut into rows by FSDP2 it is what one process has, and nobody builds it whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bd3lm import interop
from bd3lm.data import TokenShards
from bd3lm.models import Transformer
from bd3lm.runs.plan import plan_run
from bd3lm.runs.recipe import Recipe, recipe_from_dict
from bd3lm.runs.weights import sharded_network, whole_network
from bd3lm.training import Engine
from bd3lm.training.distributed import local, whole
from tests.oracles.networks import FAMILIES
from tests.runs.test_drafter_runs import drafter
from tests.tiny_recipes import BLOCK, plain, prepared, tiny_recipe
from tests.training.processes import run_processes

SHAPES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "tied, from the identity": {"tied": True, "initialisation": "identity"},
    "adaptive norms": {"adaln": True},
    "Qwen3": {name: value for name, value in FAMILIES["Qwen3"].items() if name != "mask_vector"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ar") / "run"
    run = plan_run(tiny_recipe(data), out).build()
    run.trainer.run()
    run.export()
    return out


def started(recipe: Recipe, data: Path, start: str | None) -> None:
    """Both ways to begin have every parameter the same, and what learns."""
    shards = TokenShards(data)
    config = _config(recipe, shards)
    expected = whole_network(recipe, config, shards, start)
    network, weights = sharded_network(recipe, config, shards, start)
    assert weights is not None
    assert all(parameter.is_meta for parameter in network.parameters())
    learns = {name: p.requires_grad for name, p in expected.named_parameters()}
    assert {name: p.requires_grad for name, p in network.named_parameters()} == learns
    for name, parameter in expected.named_parameters():
        rows = parameter.shape[0]
        for cut in ((0, rows), (rows // 2, rows)):
            assert torch.equal(weights.rows(name, *cut).float(), parameter.detach()[slice(*cut)]), name


def _config(recipe: Recipe, shards: TokenShards) -> Any:
    from bd3lm.runs.plan import _config as config_of
    from bd3lm.runs.plan import _Tokens

    return config_of(recipe, _Tokens.of(shards))


@pytest.mark.parametrize("shape", SHAPES)
def test_fresh_weights(shape, data):
    network = SHAPES[shape]
    started(tiny_recipe(data, {"network": network | ({"heads": 4} if shape == "Qwen3" else {})}), data, None)


def test_weights_of_a_model(data, base):
    started(replace(tiny_recipe(data, BLOCK), start_from=str(base)), data, str(base))


def test_a_mask_that_a_model_lacks_is_the_mean_of_its_tokens_and_additions_are_drawn(data, base):
    recipe = drafter(data, base)
    recipe = plan_run(recipe, base.parent / "none").recipe
    started(recipe, data, str(base))


def test_another_network_is_refused_in_the_same_words(data, base):
    recipe = replace(tiny_recipe(data, {"network": {"hidden": 8}}), start_from=str(base))
    said = []
    for begin in (whole_network, sharded_network):
        with pytest.raises(ValueError, match="start_from must have the network of this recipe") as caught:
            begin(recipe, _config(recipe, TokenShards(data)), TokenShards(data), str(base))
        said.append(str(caught.value))
    assert said[0] == said[1]


def on_rank(said: dict[str, Any], out: str) -> dict[str, Any]:
    """Train under FSDP2, with a `Transformer` that can be built nowhere but on the device "meta"."""
    build = Transformer.__init__

    def watched(self: Transformer, *args: Any) -> None:
        build(self, *args)
        if any(not each.is_meta for each in self.parameters()):
            raise AssertionError("a network was built whole")

    Transformer.__init__ = watched  # type: ignore[method-assign]
    with Engine.from_environment(parallel="fsdp", device="cpu") as engine:
        recipe = recipe_from_dict(said, where="the test's recipe")
        run = plan_run(recipe, Path(out), engine=engine).build()
        network = run.trainer.network
        held = sum(local(p).numel() for p in network.parameters())
        sums = {name: whole(p).double().sum().item() for name, p in network.named_parameters()}
        run.trainer.run()
        run.export()
        return {"held": held, "sums": sums, "learns": [p.requires_grad for p in network.parameters()]}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fresh", "model", "drafter"])
def test_two_processes_begin_and_train_as_one(start, data, base, tmp_path):
    said = plain(data, {"network": {"dropout": 0.0}})
    if start == "model":
        said["start_from"] = str(base)
    if start == "drafter":
        said |= {
            "method": {"kind": "drafter", "masks": 2},
            "network": {"size": "checkpoint", "additions": 4, "dropout": 0.0},
            "objective": {"aim": "soft"},
            "start_from": str(base),
        }
    one = plan_run(recipe_from_dict(said, where="the test's recipe"), tmp_path / "one").build()
    parameters = dict(one.trainer.network.named_parameters())
    sums = {name: p.detach().double().sum().item() for name, p in parameters.items()}
    said["parallel"] = "fsdp"
    found = run_processes("tests.runs.test_weights.on_rank", said, str(tmp_path / "two"), world=2)
    assert [each["sums"] for each in found] == [sums, sums]
    assert found[0]["learns"] == [p.requires_grad for p in parameters.values()]
    total = sum(p.numel() for p in parameters.values())
    assert sum(each["held"] for each in found) == total
    assert max(each["held"] for each in found) < 0.6 * total
    one.trainer.run()
    one.export()
    ours, _ = interop.load(tmp_path / "two")
    theirs, _ = interop.load(tmp_path / "one")
    for name, parameter in theirs.named_parameters():
        assert (dict(ours.named_parameters())[name] - parameter).abs().max() < 1e-5, name
