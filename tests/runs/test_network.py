"""The network of a recipe: its fields are the config's own, and a checkpoint's shape can be taken."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bd3lm import interop
from bd3lm.data import byte_tokenizer
from bd3lm.lm import LanguageModel
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import TransformerConfig
from bd3lm.models.rotary import LinearScaling
from bd3lm.runs.merging import merge
from bd3lm.runs.network import NetworkRecipe
from bd3lm.runs.plan import plan_run
from bd3lm.runs.recipe import parse_overrides, recipe_from_dict, recipe_to_dict
from bd3lm.runs.stages import read_recipe, resolve_stages
from bd3lm.runs.train import train_stages
from tests.oracles.networks import tiny_transformer
from tests.oracles.strangers import KeepingConfig, PlainConfig, stranger
from tests.tiny_recipes import BLOCK, plain, prepared, tiny_recipe

SMALLEST: dict[str, Any] = {"train": {"steps": 1}, "method": "autoregressive"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


def network(*layers: Mapping[str, Any]) -> NetworkRecipe:
    return recipe_from_dict(merge(SMALLEST, *layers), where="r").network


def said(*layers: Mapping[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        recipe_from_dict(merge(SMALLEST, *layers), where="r")
    return str(caught.value)


# --- fields ---


def test_every_field_is_a_flag() -> None:
    words = (
        "--network.mlp swiglu --network.kv_heads 2 --network.heads 4 --network.hidden 32 --network.layers 1 "
        "--network.qk_norm true --network.norm rms --network.rotary_scaling.kind linear "
        "--network.rotary_scaling.factor 4"
    )
    found = network(parse_overrides(words.split())).config(vocab_size=9, context=8)
    assert found == TransformerConfig(
        vocab_size=9,
        context=8,
        mlp="swiglu",
        kv_heads=2,
        heads=4,
        hidden=32,
        layers=1,
        qk_norm=True,
        norm="rms",
        rotary_scaling=LinearScaling(factor=4.0),
    )


def test_what_is_not_given_is_not_shown_and_comes_back() -> None:
    recipe = recipe_from_dict(merge(SMALLEST, {"network": {"tied": True, "layers": 3}}), where="r")
    plain = recipe_to_dict(recipe)
    assert plain["network"] == {
        "kind": "transformer",
        "size": "small",
        "layers": 3,
        "tied": True,
        "initialisation": "gpt2",
    }
    assert recipe_from_dict(plain, where="r") == recipe


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mlp": "relu"}, "network.mlp: input should be 'gelu' or 'swiglu', got 'relu'"),
        ({"layer": 3}, "network.layer: unknown key, did you mean 'layers'? allowed are kind, size, layers, "),
        (
            {"size": "smal"},
            "qwen3-8b, checkpoint, got 'smal', did you mean 's",
        ),
        ({"kind": "transformr"}, "network.kind: must be one of 'transformer'"),
        ({"heads": 5}, "network: hidden must be a multiple of heads where head_dim is not given"),
        ({"initialisation": "xavier"}, "network.initialisation: input should be 'gpt2' or 'identity'"),
        ({"kind": "plain_stranger"}, "network.width must be given, but is missing"),
        (
            {"kind": "plain_stranger", "heads": 2},
            "network.heads: unknown key, allowed are kind, size, width, ",
        ),
        (
            {"size": "checkpoint", "layers": 2},
            "only additions, additions_at, dropout may be given with it, got layers",
        ),
        ({"vocab_size": 5}, "network.vocab_size: unknown key"),
    ],
    ids=str,
)
def test_what_no_network_is_is_said_in_a_line(given: dict[str, Any], expected: str) -> None:
    assert expected in said({"network": given})


def test_another_kind_drops_the_fields_of_the_usual_one() -> None:
    usual = {"network": {"size": "tiny", "layers": 4, "dropout": 0.0}}
    other = {"network": {"kind": "keeping_stranger", "layers": 3}}
    assert merge(usual, other) == other
    assert merge(other, {"network": {"kind": "transformer"}}) == {"network": {"kind": "transformer"}}
    assert merge(other, {"network": {"width": 4}}) == {
        "network": {"kind": "keeping_stranger", "layers": 3, "width": 4}
    }
    again = merge(usual, {"network": {"kind": "transformer", "layers": 2}})
    assert again["network"] == {"kind": "transformer", "size": "tiny", "layers": 2, "dropout": 0.0}
    taken = merge(usual, {"network": {"size": "checkpoint"}})
    assert taken == {"network": {"size": "checkpoint", "dropout": 0.0}}


@pytest.mark.parametrize(
    "config",
    [
        TransformerConfig(vocab_size=9, context=8),
        TransformerConfig(vocab_size=9, context=8, hidden=32, heads=4, kv_heads=2, mlp="swiglu", tied=True),
        KeepingConfig(vocab_size=9, context=8, layers=1),
        PlainConfig(vocab_size=9, context=8, width=4),
    ],
    ids=str,
)
def test_the_recipe_of_a_network_makes_it_again(config: Any) -> None:
    recipe = NetworkRecipe.of(config)
    assert recipe.config(vocab_size=9, context=8) == config
    in_yaml = yaml.safe_load(yaml.safe_dump(recipe_to_dict(recipe_from_dict(SMALLEST, where="r"))))
    in_yaml["network"] = {k: v for k, v in vars(recipe).items() if v is not None}
    assert recipe_from_dict(in_yaml, where="r").network == recipe


# --- the network of a checkpoint ---


def saved(folder: Path, config: Any, mask_id: int) -> LanguageModel:
    model = LanguageModel(
        stranger(config).float(),
        LanguageModelConfig(network=config, method=AutoregressiveMethod(), mask_id=mask_id),
    )
    model.save_pretrained(folder)
    return model


TOKENS = byte_tokenizer().vocab_size
SHAPE = {"layers": 2, "hidden": 24, "heads": 3, "mlp": "swiglu", "norm": "rms", "dropout": 0.0}


def without_network(data: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plain(data, *changes).items() if key != "network"}


def test_a_start_gives_the_network_where_nothing_is_said_of_it(data: Path, tmp_path: Path) -> None:
    config = TransformerConfig(vocab_size=TOKENS, context=32, **SHAPE)
    model = saved(tmp_path / "model", config, TOKENS - 1)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(without_network(data, BLOCK)))
    stages = resolve_stages(None, config=file, start_from=str(tmp_path / "model"))
    assert stages[0][1].network.is_checkpoints
    (run,) = train_stages(stages, tmp_path / "run", device="cpu")
    assert run.config.network == TransformerConfig(vocab_size=TOKENS, context=16, **SHAPE)
    kept = read_recipe(tmp_path / "run")
    assert not kept.network.is_checkpoints
    assert kept.network.shape["mlp"] == "swiglu"
    assert not torch.equal(
        model.network.state_dict()["output.weight"], run.trainer.network.state_dict()["output.weight"]
    )
    # Going on needs the checkpoint no more, whichever way it is asked for.
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    (again,) = train_stages(stages, tmp_path / "run", resume=True, device="cpu")
    assert again.trainer.resumed_at == 6


def test_the_weights_are_the_checkpoints(data: Path, tmp_path: Path) -> None:
    config = TransformerConfig(vocab_size=TOKENS, context=16, **SHAPE)
    model = saved(tmp_path / "model", config, TOKENS - 1)
    changes = {"network": {"size": "checkpoint", "dropout": 0.3}, "start_from": str(tmp_path / "model")}
    recipe = recipe_from_dict({**without_network(data), **changes}, where="r")
    run = plan_run(recipe, tmp_path / "run").build()
    assert run.config.network == TransformerConfig(vocab_size=TOKENS, context=16, **{**SHAPE, "dropout": 0.3})
    for (name, one), other in zip(
        run.trainer.network.named_parameters(), model.network.parameters(), strict=True
    ):
        assert torch.equal(one, other), name


def test_a_network_of_another_kind_gives_its_own_shape(data: Path, tmp_path: Path) -> None:
    config = PlainConfig(vocab_size=TOKENS, context=16, width=4, layers=2)
    saved(tmp_path / "model", config, TOKENS - 1)
    changes = {"network": {"size": "checkpoint", "dropout": 0.3}, "start_from": str(tmp_path / "model")}
    recipe = recipe_from_dict({**without_network(data), **changes}, where="r")
    assert plan_run(recipe, tmp_path / "run").build().config.network == config


def test_a_mask_that_the_checkpoint_lacks_is_the_mean_of_its_tokens(data: Path, tmp_path: Path) -> None:
    """Its vocabulary is all of the data's tokens but the mask, which comes last."""
    config = TransformerConfig(vocab_size=TOKENS - 1, context=16, **SHAPE)
    model = saved(tmp_path / "model", config, mask_id=0)
    changes = {"network": {"size": "checkpoint"}, "start_from": str(tmp_path / "model")}
    recipe = recipe_from_dict({**without_network(data, BLOCK), **changes}, where="r")
    run = plan_run(recipe, tmp_path / "run").build()
    network = run.config.network
    assert (network.vocab_size, network.input_vocab_size) == (TOKENS - 1, TOKENS)
    weights = dict(run.trainer.network.named_parameters())
    mean = model.network.state_dict()["embedding.weight"].mean(0)
    torch.testing.assert_close(weights.pop("mask_vector").detach(), mean)
    assert weights.keys() == dict(model.network.named_parameters()).keys()
    run.trainer.run()
    lm = LanguageModel.from_pretrained(run.export(), device="cpu")
    assert lm.config.mask_id == lm.config.network.vocab_size
    assert lm.log_likelihood(["abc def."], estimator="exact")[0].log_p < 0.0
    assert len(lm.generate("a", length=12, stop_at_eos=False)[0].tokens) == 12


def test_a_mask_apart_needs_data_whose_mask_is_last(data: Path, tmp_path: Path) -> None:
    run = plan_run(tiny_recipe(data, {"network": {"mask_vector": True}}), tmp_path / "run").build()
    assert run.config.network.vocab_size == TOKENS - 1
    assert run.config.mask_id == TOKENS - 1


def test_additions_to_a_checkpoint_start_as_none(data: Path, tmp_path: Path) -> None:
    """They are zero at first, so the network computes what the checkpoint does."""
    model = saved(tmp_path / "model", TransformerConfig(vocab_size=TOKENS, context=16, **SHAPE), TOKENS - 1)
    changes = {
        "network": {"size": "checkpoint", "additions": 2},
        "method": {"kind": "drafter", "masks": 2},
        "start_from": str(tmp_path / "model"),
    }
    network = plan_run(
        recipe_from_dict({**without_network(data), **changes}, where="r"), tmp_path / "run"
    ).build()
    weights = dict(network.trainer.network.named_parameters())
    ups = [weight for name, weight in weights.items() if name.endswith(".up")]
    assert len(ups) == 8
    assert not any(each.any() for each in ups)
    for name, weight in model.network.named_parameters():
        assert torch.equal(weights[name], weight)


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (
            TransformerConfig(vocab_size=TOKENS, context=8, **SHAPE),
            {},
            "data.context must be at most the context of {model}, 8, whose network is used, got 16",
        ),
        (
            TransformerConfig(vocab_size=TOKENS - 2, context=16, **SHAPE),
            {},
            f"start_from must be a model that reads the {TOKENS} tokens of the data, or all but its mask if "
            f"that is the last, got {{model}}, which reads {TOKENS - 2}",
        ),
        (
            TransformerConfig(vocab_size=TOKENS - 1, context=16, **SHAPE),
            {"method": "d3pm"},
            "method.kind d3pm needs a network whose mask is one of the tokens that it can predict",
        ),
        (
            PlainConfig(vocab_size=TOKENS - 1, context=16, width=4),
            {},
            f"a network of kind plain_stranger has no vector for a mask besides its {TOKENS - 1} tokens",
        ),
        (
            TransformerConfig(vocab_size=TOKENS, context=16, adaln=True, time_conditioning=True, **SHAPE),
            {},
            "network.time_conditioning must be false for an autoregressive method",
        ),
    ],
    ids=["context", "tokens", "method", "no mask vector", "told the noise"],
)
def test_what_does_not_fit_is_said_in_a_line(
    config: Any, changes: dict[str, Any], expected: str, data: Path, tmp_path: Path
) -> None:
    network, model = stranger(config).float(), tmp_path / "model"
    method = BlockDiffusionMethod() if config.told_noise else AutoregressiveMethod()
    interop.save(network, LanguageModelConfig(network=config, method=method, mask_id=0), model)
    settings = {
        **without_network(data),
        "network": {"size": "checkpoint"},
        "start_from": str(model),
        **changes,
    }
    with pytest.raises(ValueError, match=re.escape(expected.format(model=model))) as caught:
        plan_run(recipe_from_dict(settings, where="r"), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoints_network_needs_a_checkpoint(data: Path, tmp_path: Path) -> None:
    recipe = recipe_from_dict({**without_network(data), "network": {"size": "checkpoint"}}, where="r")
    with pytest.raises(
        ValueError, match=r"network\.size checkpoint needs a model to start from: give --from"
    ):
        train_stages([("run", recipe)], tmp_path / "run")


def test_a_later_stage_may_have_the_network_of_the_one_before(data: Path, tmp_path: Path) -> None:
    first = plain(data, {"network": {"layers": 2}})
    second = {**without_network(data, BLOCK), "network": {"size": "checkpoint", "dropout": 0.0}}
    stages = [(name, recipe_from_dict(each, where=name)) for name, each in (("ar", first), ("block", second))]
    runs = train_stages(stages, tmp_path / "run", device="cpu")
    one, two = (run.config.network for run in runs)
    assert (one.layers, one.dropout, two.layers, two.dropout) == (2, 0.1, 2, 0.0)


def test_a_network_in_other_words_goes_on(data: Path, tmp_path: Path) -> None:
    """What was written out by an earlier version, or said by a size, is the same network."""
    recipe = tiny_recipe(data)
    train_stages([("run", recipe)], tmp_path, device="cpu")
    file = tmp_path / "recipe.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["network"] |= {"tied": False, "adaln": False, "mlp": "gelu"}
    del settings["network"]["kind"]
    file.write_text(yaml.safe_dump(settings))
    (run,) = train_stages([("run", recipe)], tmp_path, resume=True, device="cpu")
    assert run.trainer.resumed_at == 6
    other = tiny_recipe(data, {"network": {"mlp": "swiglu"}})
    with pytest.raises(ValueError, match=r"Different: network\.mlp \('gelu' then, 'swiglu' now\)"):
        train_stages([("run", other)], tmp_path, resume=True, device="cpu")


def test_a_strange_network_goes_on_bit_for_bit(data: Path, tmp_path: Path) -> None:
    strange = {"network": {"kind": "plain_stranger", "width": 8}}
    settings = {**without_network(data, BLOCK, {"train": {"checkpoint_every": 3}}), **strange}
    recipe = recipe_from_dict(settings, where="r")
    (whole,) = train_stages([("run", recipe)], tmp_path / "whole", device="cpu")
    run = plan_run(recipe, tmp_path / "cut").build()
    for _ in range(3):
        run.trainer.train_step()
    run.trainer.save()
    again = plan_run(recipe, tmp_path / "cut").build()
    assert again.trainer.resume()
    again.trainer.run()
    for one, other in zip(
        again.trainer.network.parameters(), whole.trainer.network.parameters(), strict=True
    ):
        assert torch.equal(one, other)
    lm = LanguageModel.from_pretrained(whole.export(), device="cpu")
    assert lm.config.network == PlainConfig(vocab_size=TOKENS, context=16, width=8)


def test_two_passes_need_a_network_that_keeps_keys() -> None:
    strange = {"network": {"kind": "plain_stranger", "width": 8}}
    two_pass = {
        "method": {"kind": "block_diffusion", "block_size": 4},
        "objective": {"algorithm": "two_pass"},
    }
    assert "objective.algorithm must be single_pass for a network that keeps no keys" in said(
        two_pass, strange
    )
    assert network(two_pass, {"network": {"kind": "keeping_stranger"}}).kind == "keeping_stranger"


def test_compiling_what_cannot_be_is_refused(data: Path, tmp_path: Path) -> None:
    strange = {"network": {"kind": "plain_stranger", "width": 8}}
    recipe = recipe_from_dict({**without_network(data, {"train": {"compile": True}}), **strange}, where="r")
    with pytest.raises(
        ValueError, match=r"train\.compile must be false or auto for a network of kind plain_str"
    ):
        plan_run(recipe, tmp_path / "run").build()


def test_a_mismatch_names_the_way_out(data: Path, tmp_path: Path) -> None:
    network = tiny_transformer(0, vocab_size=TOKENS, context=16)
    config = LanguageModelConfig(network=network.config, method=AutoregressiveMethod(), mask_id=TOKENS - 1)
    interop.save(network.float(), config, tmp_path / "model")
    recipe = tiny_recipe(data, {"start_from": str(tmp_path / "model")})
    with pytest.raises(ValueError, match=r"--network\.size checkpoint takes the network from there"):
        plan_run(recipe, tmp_path / "run").build()
