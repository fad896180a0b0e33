"""From a recipe to a run: each choice becomes its object, and weights are taken from where they fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bd3lm.data import TokenShards, train_bpe
from bd3lm.diffusion import Counts
from bd3lm.interop import load
from bd3lm.methods import AutoregressiveMethod
from bd3lm.objectives import BlockDiffusionLoss
from bd3lm.runs.plan import plan_run, prepare_builtin, run_data
from bd3lm.runs.sections import DataRecipe
from bd3lm.runs.texts import held_out_batches
from bd3lm.training import ClipSearchValidator, Engine, GradientVarianceValidator, LikelihoodValidator
from tests.data_room.documents import random_texts
from tests.tiny_recipes import BLOCK, prepared, tiny_recipe
from tests.training.tiny import rows


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def ar(data, tmp_path_factory) -> Path:
    """A trained autoregressive run, exported."""
    out = tmp_path_factory.mktemp("ar") / "run"
    run = plan_run(tiny_recipe(data), out).build()
    run.trainer.run()
    run.export()
    return out


def build(data: Path, out: Path, *changes):
    return plan_run(tiny_recipe(data, *changes), out).build()


def test_validators_follow_the_recipe(data, tmp_path):
    searched = {"objective": {"masking": {"kind": "clipped", "search": {"every": 3, "batches": 2}}}}
    gradient = {"trackers": {"gradient_variance_batches": 2}}
    run = build(data, tmp_path, BLOCK, searched, gradient)
    assert [type(v) for v in run.trainer.validators] == [
        LikelihoodValidator,
        ClipSearchValidator,
        GradientVarianceValidator,
    ]
    run.trainer.run()
    last = rows(tmp_path)[-1]
    assert all(last[name] for name in ("valid_nats", "clip_low", "clip_high", "gradient_variance"))
    assert [type(v) for v in build(data, tmp_path / "b").trainer.validators] == [LikelihoodValidator]


def test_the_first_weights_are_the_seeds(data, tmp_path):
    first, same, other = (
        build(data, tmp_path / str(i), {"train": {"seed": seed}}) for i, seed in enumerate((1, 1, 2))
    )
    weight = [run.trainer.network.output.weight for run in (first, same, other)]
    assert torch.equal(weight[0], weight[1])
    assert not torch.equal(weight[0], weight[2])


def test_the_callers_random_numbers_are_left_alone(data, tmp_path):
    """Neither the first weights nor dropout take them, or set the seed that the next draw is from."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    run = build(data, tmp_path)
    run.trainer.train_step()
    run.trainer.validate()
    assert torch.equal(torch.rand(3), expected)


def test_a_recipe_may_ask_for_another_initialisation(data, tmp_path):
    run = build(data, tmp_path, {"network": {"initialisation": "identity"}})
    assert not run.trainer.network.layers[0].mlp_out.weight.any()
    assert run.trainer.network.layers[0].mlp_in.weight.any()
    with pytest.raises(ValueError, match=r"initialisation.*'gpt2'"):
        build(data, tmp_path, {"network": {"initialisation": "xavier"}})


# --- export ---


def test_what_is_exported_is_the_averaged_model(data, tmp_path):
    run = build(data, tmp_path, BLOCK)
    run.trainer.run()
    network, config = load(run.export())
    assert config == run.config
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, run.trainer.ema.tensors()[name])


def test_a_run_may_be_trained_for_an_order_that_leans(data, tmp_path):
    """And is still judged in the order that it will write in, which is said apart."""
    counts = {"objective": {"masking": {"kind": "counts", "lean": 0.7}}}
    run = build(data, tmp_path, BLOCK, counts)
    assert run.trainer.objective.masking == Counts(lean=0.7)
    assert run.config.method.lean == 0.0
    assert run.trainer.validators[0].objective.masking == Counts()
    run.trainer.run()
    assert float(rows(tmp_path)[-1]["valid_nats"]) > 0
    run = build(
        data,
        tmp_path / "leaning",
        BLOCK,
        {"method": {"lean": 2.0}, "objective": {"masking": {"kind": "counts"}}},
    )
    assert run.trainer.validators[0].objective.masking == Counts(lean=2.0)


def test_what_is_exported_leans_as_the_recipe_says_and_is_trained_as_without(data, tmp_path):
    plain, leans = (
        build(data, tmp_path / name, BLOCK, {"method": change})
        for name, change in (("plain", {}), ("leans", {"lean": 2.0}))
    )
    for run in (plain, leans):
        run.trainer.run()
    assert [run.config.method.lean for run in (plain, leans)] == [0.0, 2.0]
    network, config = load(leans.export())
    assert config == leans.config
    assert all(
        torch.equal(a, b)
        for a, b in zip(network.parameters(), load(plain.export())[0].parameters(), strict=True)
    )
    trained, valid = (
        [[row[column] for row in rows(tmp_path / name)] for name in ("plain", "leans")]
        for column in ("train_nats", "valid_nats")
    )
    assert trained[0] == trained[1]
    assert valid[0] != valid[1]  # which is of the order in which it writes


def test_without_an_average_the_weights_themselves_are_exported(data, tmp_path):
    run = build(data, tmp_path, {"train": {"ema_decay": 0}})
    run.trainer.run()
    trained = dict(run.trainer.network.named_parameters())
    network, _ = load(run.export())
    assert all(torch.equal(weight, trained[name]) for name, weight in network.named_parameters())


def test_a_tied_network_is_exported_too(data, tmp_path):
    run = build(data, tmp_path, {"network": {"tied": True}})
    run.trainer.run()
    network, config = load(run.export())
    assert config.network.tied
    assert torch.equal(network.output.weight, run.trainer.ema.tensors()["embedding.weight"])


# --- starting from another model ---


@pytest.mark.parametrize("folder", ["", "model"])
def test_a_block_model_starts_from_the_averages_of_an_autoregressive_run(folder, data, ar, tmp_path):
    run = build(data, tmp_path, BLOCK, {"start_from": str(ar / folder), "train": {"seed": 5}})
    stored = load_file(ar / "model" / "model.safetensors")
    named = dict(run.trainer.network.named_parameters())
    assert stored.keys() == named.keys()
    assert all(torch.equal(named[name], stored[name]) for name in stored)
    assert isinstance(run.trainer.objective, BlockDiffusionLoss)
    assert all(torch.equal(average, named[name]) for name, average in run.trainer.ema.tensors().items())
    run.trainer.run()


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "score_entropy"},
        {"kind": "score_entropy", "process": "uniform"},
        {"kind": "d3pm", "steps": 9},
        {"kind": "d3pm", "steps": 9, "process": "uniform"},
        {"kind": "simplex", "block_size": 5},
    ],
    ids=str,
)
def test_every_baseline_starts_from_another_methods_network_trains_and_is_released(
    method, data, ar, tmp_path
):
    run = build(data, tmp_path, {"method": method, "start_from": str(ar)})
    named = dict(run.trainer.network.named_parameters())
    stored = load_file(ar / "model" / "model.safetensors")
    assert all(torch.equal(named[name], stored[name]) for name in stored)
    run.trainer.run()
    last = rows(tmp_path)[-1]
    assert float(last["valid_nats"]) > 0
    assert bool(last.get("valid_perplexity")) == (method["kind"] != "simplex")
    network, config = load(run.export())
    assert {name: getattr(config.method, name) for name in method} == method
    assert config.mask_id == run.tokenizer.mask_id
    released = dict(network.named_parameters())
    assert all(torch.equal(released[name], average) for name, average in run.trainer.ema.tensors().items())


def test_a_network_that_is_told_the_time_is_handed_on_between_baselines(data, tmp_path):
    timed = {"network": {"adaln": True, "time_conditioning": True}}
    sedd = build(data, tmp_path / "sedd", timed, {"method": {"kind": "score_entropy"}})
    sedd.trainer.run()
    sedd.export()
    ssd = {"method": {"kind": "simplex", "block_size": 5}, "start_from": str(tmp_path / "sedd")}
    run = build(data, tmp_path / "ssd", timed, ssd)
    named = dict(run.trainer.network.named_parameters())
    assert all(torch.equal(named[name], average) for name, average in sedd.trainer.ema.tensors().items())
    run.trainer.run()
    with pytest.raises(ValueError, match=r"start_from must have the network"):  # this one is told no time
        build(data, tmp_path / "mdlm", BLOCK, {"start_from": str(tmp_path / "sedd")})


def test_another_shape_is_refused_with_the_parameters_that_differ(data, ar, tmp_path):
    with pytest.raises(
        ValueError, match=r"start_from must have the network .* parameters differ \(.* there, .* here"
    ):
        build(data, tmp_path, BLOCK, {"start_from": str(ar), "network": {"hidden": 32}})
    with pytest.raises(ValueError, match=r"layers\.1.*missing there"):
        build(data, tmp_path, BLOCK, {"start_from": str(ar), "network": {"layers": 2}})
    tied = r"1 parameter differs .*; its embeddings are untied and those of this recipe tied: network\.tied"
    with pytest.raises(ValueError, match=tied):
        build(data, tmp_path, BLOCK, {"start_from": str(ar), "network": {"tied": True}})


def test_another_shape_is_refused_with_the_flag_that_gives_it(data, ar, tmp_path):
    heads = json.loads((ar / "model" / "config.json").read_text())["network"]["heads"]
    flag = "--network.size checkpoint takes the network from there$"
    with pytest.raises(ValueError, match=rf"parameters differ .*; {flag}"):
        build(data, tmp_path, BLOCK, {"start_from": str(ar), "network": {"hidden": 32}})
    with pytest.raises(ValueError, match=rf"whose heads are {heads} and not {2 * heads};.* {flag}"):
        build(data, tmp_path, BLOCK, {"start_from": str(ar), "network": {"heads": 2 * heads}})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rotary_base": 500.0}, r"whose rotary_base is 10000\.0 and not 500\.0"),
        ({"norm_eps": 1e-3}, r"whose norm_eps is 1e-05 and not 0\.001"),
        (
            {"rotary_scaling": {"kind": "linear", "factor": 2.0}},
            r"whose rotary_scaling is None and not Linear",
        ),
    ],
)
def test_another_network_of_the_same_parameters_is_refused(changes, said, data, ar, tmp_path):
    with pytest.raises(ValueError, match=said):
        build(data, tmp_path, {"start_from": str(ar), "network": changes})


def test_another_dropout_is_no_other_network(data, ar, tmp_path):
    run = build(data, tmp_path, {"start_from": str(ar), "network": {"dropout": 0.3}})
    assert run.config.network.dropout == 0.3


def test_another_tokenizer_is_refused(data, ar, tmp_path):
    other = prepared(tmp_path / "other", train_bpe(random_texts(50), 270))
    assert TokenShards(other).tokenizer.vocab_size != TokenShards(data).tokenizer.vocab_size
    said = (
        r"^start_from .* were made with another tokenizer: .*; prepare text with `bd3lm data prepare SOURCE "
    )
    with pytest.raises(ValueError, match=said):
        build(other, tmp_path / "out", BLOCK, {"start_from": str(ar)})


def test_a_place_without_a_model_is_refused(data, tmp_path):
    with pytest.raises((ValueError, OSError), match="nowhere") as caught:
        build(data, tmp_path, BLOCK, {"start_from": str(tmp_path / "nowhere")})
    assert "\n" not in str(caught.value)


def test_a_context_of_another_length_may_be_started_from(data, ar, tmp_path):
    """No parameter knows the context: rotary positions are computed."""
    run = build(data, tmp_path, BLOCK, {"start_from": str(ar), "data": {"context": 32}})
    assert run.config.network.context == 32


# --- data ---


def test_the_built_in_corpus_is_prepared_once(tmp_path):
    recipe = DataRecipe(context=16, builtin_vocabulary=300)
    first = prepare_builtin(recipe, tmp_path / "data", Engine())
    stamp = (tmp_path / "data" / "meta.json").stat().st_mtime_ns
    again = prepare_builtin(recipe, tmp_path / "data", Engine())
    assert again.fingerprint == first.fingerprint
    assert first.tokenizer.vocab_size == 300
    assert (tmp_path / "data" / "meta.json").stat().st_mtime_ns == stamp


def test_the_data_of_a_run_is_opened_and_not_made_again(tmp_path, monkeypatch):
    """Under another Python the built-in text, and so its tokenizer, would be another."""
    recipe = DataRecipe(context=16, builtin_vocabulary=300)
    made = prepare_builtin(recipe, tmp_path / "run" / "data", Engine())
    monkeypatch.setattr("bd3lm.runs.plan.train_bpe", lambda *_: pytest.fail("a tokenizer was trained"))
    assert run_data(recipe, tmp_path / "run").fingerprint == made.fingerprint
    assert run_data(recipe, tmp_path / "run" / "stage").fingerprint == made.fingerprint
    assert prepare_builtin(recipe, tmp_path / "run" / "data", Engine()).fingerprint == made.fingerprint
    with pytest.raises(ValueError, match="trained on the built-in corpus, whose tokens must be in"):
        run_data(recipe, tmp_path / "other")


def test_data_that_is_not_there_is_one_clear_line(tmp_path):
    with pytest.raises(OSError, match="holds no token shards") as caught:
        plan_run(tiny_recipe(tmp_path), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_without_held_out_text_there_is_nothing_to_validate(data, tmp_path):
    from bd3lm.data import byte_tokenizer, prepare
    from tests.data_room.documents import ListCorpus

    prepare(ListCorpus({"train": random_texts(40)}), byte_tokenizer(), tmp_path / "d", progress=False)
    run = build(tmp_path / "d", tmp_path / "out")
    run.trainer.run()
    assert run.trainer.validators == []
    assert not run.held_out.batches
    assert "valid_nats" not in rows(tmp_path / "out")[-1]


def test_held_out_batches_are_a_sequence(data):
    """Read from either end and in slices, up to the limit; the last batch is what is left."""
    recipe = DataRecipe(path=str(data), context=16, validation_sequences=7, validation_batch=3)
    batches = held_out_batches(recipe, TokenShards(data), AutoregressiveMethod())
    assert [len(batch.tokens) for batch in batches] == [3, 3, 1]
    assert torch.equal(batches[-1].tokens, batches[2].tokens)
    assert [torch.equal(a.tokens, batches[i].tokens) for i, a in enumerate(batches[:2])] == [True, True]
    whole = held_out_batches(
        replace(recipe, validation_sequences=None, validation_batch=7),
        TokenShards(data),
        AutoregressiveMethod(),
    )
    assert torch.equal(torch.cat([each.tokens for each in batches]), whole[0].tokens)
    for outside in (3, -4):
        with pytest.raises(IndexError):
            batches[outside]


def test_weights_that_are_missing_are_not_replaced_by_random_ones(data, tmp_path, monkeypatch):
    run = build(data, tmp_path, {"network": {"tied": True}})
    named = run.trainer.ema.tensors()
    monkeypatch.setattr(run.trainer.ema, "tensors", lambda: dict(list(named.items())[:-1]))
    with pytest.raises(ValueError, match=r"the model to save in .*; missing: "):
        run.export()


def test_what_only_one_process_can_measure_is_refused_before_training(data, tmp_path):
    """Not at the first validation, hours later and before the first checkpoint."""
    recipe = tiny_recipe(data, {"trackers": {"gradient_variance_batches": 2}})
    with pytest.raises(ValueError, match="gradient_variance_batches needs a run of one process"):
        plan_run(recipe, tmp_path, engine=Engine(world=2))
    builtin = replace(recipe, data=replace(recipe.data, path="builtin"))
    with pytest.raises(ValueError, match="gradient_variance_batches needs a run of one process"):
        plan_run(builtin, tmp_path, engine=Engine(world=2))


@pytest.mark.parametrize("path", ["builtin", None])
def test_options_of_training_that_cannot_work_are_refused_before_training(path, data, tmp_path):
    """As those of a second stage they would end a run after hours."""
    change = {} if path is None else {"data": {"path": path}}
    recipe = tiny_recipe(
        data, BLOCK, {"objective": {"masking": {"kind": "counts", "proposal": [1, 2]}}}, change
    )
    with pytest.raises(ValueError, match=r"proposal must have one entry for each count 1\.\.4"):
        plan_run(recipe, tmp_path)


def test_a_network_that_no_memory_holds_is_refused_before_it_is_made(data, tmp_path):
    network = {"network": {"hidden": 500_000, "heads": 1, "layers": 1}}
    with pytest.raises(
        ValueError, match="training a network of 3,000,002,000,000 parameters must fit in mem"
    ):
        plan_run(tiny_recipe(data, network), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_parameters_of_a_network_are_counted_without_making_it(data, tmp_path):
    for changes in ({}, {"tied": True}, {"adaln": True}):
        network = build(data, tmp_path / str(changes), {"network": changes}).trainer.network
        matrices = [
            p.numel() for name, p in network.named_parameters() if p.ndim == 2 and "noise" not in name
        ]
        assert sum(matrices) == network.config.parameters
