"""A drafter is trained beside a model that stays as it is, from the recipe to the released folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bd3lm import LanguageModel
from bd3lm.interop import load
from bd3lm.runs.plan import plan_run
from bd3lm.runs.recipe import recipe_from_dict
from tests.tiny_recipes import plain, prepared, tiny_recipe
from tests.training.tiny import rows
from tests.training.tracker_files import events, left, offline

__all__ = ["offline"]  # a fixture


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


def drafter(data: Path, start: Path, *changes: dict[str, Any], **train: Any):
    said = plain(data, *changes)
    said["train"] |= train
    said |= {
        "method": {"kind": "drafter", "masks": 2},
        "network": {"size": "checkpoint", "additions": 4},
        "objective": {"aim": "soft", **said.get("objective", {})},
        "start_from": str(start),
    }
    return recipe_from_dict(said, where="the test's recipe")


def test_only_what_is_beside_the_weights_learns_and_is_kept(data, base, tmp_path):
    run = plan_run(
        drafter(data, base, {"optimizer": {"lr": 0.02}}, steps=60, validate_every=20), tmp_path
    ).build()
    frozen = {name: p.clone() for name, p in run.trainer.network.named_parameters() if not p.requires_grad}
    run.trainer.run()
    folder = run.export()
    losses = rows(tmp_path)
    assert float(losses[-1]["valid_nats"]) < float(losses[19]["valid_nats"])
    accepted = [float(row["valid_accepted_2"]) for row in losses if row["valid_accepted_2"]]
    assert 0.0 < accepted[0] < accepted[-1] < 1.0  # one sees it rise
    assert not any(row.get("valid_perplexity") for row in losses)  # drafts have no likelihood
    for name, parameter in run.trainer.network.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    checkpoints = list((tmp_path / "checkpoints").rglob("*.safetensors"))
    assert max(file.stat().st_size for file in checkpoints) < 60_000
    network, config = load(folder)
    assert config.base is not None
    assert (config.base.source, config.method.kind) == (str(base), "drafter")
    for name, parameter in network.named_parameters():
        expected = frozen[name] if name in frozen else run.trainer.ema.tensors()[name]
        assert torch.equal(parameter, expected), name


def test_its_law_is_that_of_its_base_to_the_last_bit(data, base, tmp_path):
    run = plan_run(drafter(data, base), tmp_path).build()
    run.trainer.run()
    ours, theirs = (
        LanguageModel.from_pretrained(each, device="cpu") for each in (run.export(), base / "model")
    )
    texts = ["alpha beta", "gamma"]
    assert [each.log_p for each in ours.log_likelihood(texts)] == [
        each.log_p for each in theirs.log_likelihood(texts)
    ]
    written = [
        [each.tokens for each in lm.generate("al", count=4, length=30, stop_at_eos=False)]
        for lm in (ours, theirs)
    ]
    assert written[0] == written[1]
    assert ours.law == "causal"


def test_it_goes_on_bit_for_bit(data, base, tmp_path):
    whole = plan_run(drafter(data, base), tmp_path / "whole").build()
    whole.trainer.run()
    parted = plan_run(drafter(data, base), tmp_path / "parted").build()
    for _ in range(2):
        parted.trainer.train_step()
    parted.trainer.save()
    again = plan_run(drafter(data, base), tmp_path / "parted").build()
    assert again.trainer.resume()
    again.trainer.run()
    for name, parameter in whole.trainer.network.named_parameters():
        assert torch.equal(dict(again.trainer.network.named_parameters())[name], parameter), name


def test_acceptance_is_logged_by_place_and_texts_are_the_bases(data, base, tmp_path, offline):
    """In metrics.csv, TensorBoard and W&B alike. A drafter writes as the model that it was made of."""
    trackers = {"tensorboard": True, "wandb_project": "tests", "sample_texts": 2, "sample_tokens": 12}
    recipe = drafter(data, base, {"trackers": trackers})
    recipe = replace(recipe, method=replace(recipe.method, masks=4))
    run = plan_run(recipe, tmp_path).build()
    run.trainer.run()
    places = [f"valid_accepted_{place}" for place in (2, 3, 4, 5)]
    assert [name for name in rows(tmp_path)[0] if "accepted" in name] == places
    shown, [kept] = events(tmp_path / "tensorboard"), left(tmp_path)
    for name in places:
        expected = [
            (3, pytest.approx(value(tmp_path, 3, name))),
            (6, pytest.approx(value(tmp_path, 6, name))),
        ]
        assert [(each.step, each.value) for each in shown.Scalars(name)] == expected
        assert [(each["_step"], each[name]) for each in kept.history if name in each] == expected
    texts = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    seeds = [each["seed"] for each in texts]
    written = LanguageModel.from_pretrained(base, device="cpu").generate([""] * 4, seeds=seeds, length=12)
    assert [each["text"] for each in texts] == [str(each) for each in written]
    markdown = shown.Tensors("samples/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert markdown == "\n".join(f"    {line}" for line in texts[0]["text"].splitlines())
    tables = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    assert sorted(row for table in tables for row in json.loads(table.read_text())["data"]) == [
        [each["step"], each["index"], each["prompt"], each["text"]] for each in texts
    ]
    assert offline == []


def value(folder: Path, step: int, name: str) -> float:
    [found] = [float(row[name]) for row in rows(folder) if row["step"] == str(step)]
    return found


def test_a_stage_after_another_adds_to_the_same_base(data, base, tmp_path):
    """Soft targets first, and then the overlap."""
    first = plan_run(drafter(data, base), tmp_path / "soft").build()
    first.trainer.run()
    first.export()
    recipe = drafter(data, tmp_path / "soft", {"objective": {"aim": "overlap"}})
    second = plan_run(recipe, tmp_path / "overlap").build()
    before = {name: tensor.clone() for name, tensor in first.trainer.ema.tensors().items()}
    for name, parameter in second.trainer.network.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name])
    second.trainer.run()
    _, config = load(second.export())
    assert config.base == first.config.base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_from": None}, "give --from MODEL, or start_from"),
        ({"network": {"size": "checkpoint"}}, r"network\.additions must be at least 1 for a drafter"),
        ({"method": {"kind": "drafter", "masks": 3}}, r"method\.masks must divide the context 16, got 3"),
        ({"network": {"size": "checkpoint", "additions": 17}}, "additions must be a rank up to hidden 16"),
    ],
)
def test_what_cannot_be_is_one_line(data, base, tmp_path, changes, message):
    said = plain(data) | {
        "method": {"kind": "drafter", "masks": 2},
        "network": {"size": "checkpoint", "additions": 4},
        "start_from": str(base),
    }
    with pytest.raises(ValueError, match=message):
        plan_run(recipe_from_dict(said | changes, where="the test's recipe"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
