"""Texts that a run writes while it trains: those of its model, wherever it trains, and at no cost to it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bd3lm
from bd3lm.data import byte_tokenizer, prepare
from bd3lm.lm import LanguageModel
from bd3lm.lm.prompts import text_seeds
from bd3lm.runs.folders import SAMPLES_FILE
from bd3lm.runs.plan import plan_run
from bd3lm.runs.recipe import recipe_from_dict
from bd3lm.runs.train import train_stages
from bd3lm.training import Tracker
from tests.data_room.documents import ListCorpus, random_texts
from tests.tiny_recipes import BLOCK, merge, plain, prepared, tiny_recipe
from tests.training.processes import run_processes
from tests.training.tiny import Crash, checkpoint, crash_at, rows

PROMPTS = ("ab", "")
TEXTS: dict[str, Any] = {
    "trackers": {"sample_texts": 3, "sample_prompts": list(PROMPTS), "sample_tokens": 10}
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SAMPLES_FILE).read_text().splitlines()]


class Hears(Tracker):
    """A tracker that keeps what it is told."""

    title = "Hears"

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[Any] = []

    def open(self, trainer):
        pass

    def add_metrics(self, step, metrics):
        pass

    def add_texts(self, step, texts):
        self.texts += [(step, each.index, each.text) for each in texts]

    def close(self, *, failed):
        pass


METHODS: dict[str, dict[str, Any]] = {
    "autoregressive": {},
    "block diffusion": BLOCK,
    "joint": {
        "method": {"kind": "block_diffusion", "block_size": 4, "causal_clean": True},
        "objective": {"next_token": 1.0},
    },
    "one block": {"method": {"kind": "block_diffusion", "block_size": None}},
    "SEDD": {"method": {"kind": "score_entropy"}, "network": {"conditioning_dim": 8}},
    "D3PM": {"method": {"kind": "d3pm", "steps": 20}, "network": {"conditioning_dim": 8}},
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_that_the_model_writes(method, data, tmp_path):
    run = plan_run(tiny_recipe(data, METHODS[method], TEXTS), tmp_path).build()
    run.trainer.run()
    run.export()
    found = samples(tmp_path)
    assert [(each["step"], each["index"]) for each in found] == [(s, i) for s in (3, 6) for i in range(3)]
    assert [each["prompt"] for each in found[:3]] == ["ab", "", "ab"]
    seeds = [each["seed"] for each in found[:3]]
    assert seeds == [each["seed"] for each in found[3:]] == text_seeds(run.trainer.settings.seed, 3)
    model = bd3lm.load(tmp_path, device="cpu")
    written = model.generate(["ab", "", "ab"], seeds=seeds, length=10)
    assert [(each["text"], each["tokens"], each["stopped_by"]) for each in found[3:]] == [
        (str(each), len(each.tokens), each.stopped_by) for each in written
    ]
    assert all(each["text"].startswith(each["prompt"]) for each in found)


@pytest.mark.parametrize("method", ["autoregressive", "block diffusion"])
def test_training_is_the_same_to_the_bit(method, data, tmp_path, monkeypatch):
    """Also where what writes takes random numbers that are everybody's."""
    write = LanguageModel.generate

    def write_at_random(self, *arguments, **options):
        torch.rand(3)
        return write(self, *arguments, **options)

    monkeypatch.setattr(LanguageModel, "generate", write_at_random)
    states = {}
    for name, changes in (("without", {}), ("with", TEXTS)):
        torch.manual_seed(5)
        run = plan_run(tiny_recipe(data, METHODS[method], changes), tmp_path / name).build()
        run.trainer.run()
        states[name] = torch.get_rng_state()
    assert len(samples(tmp_path / "with")) == 6
    assert not (tmp_path / "without" / SAMPLES_FILE).exists()
    assert rows(tmp_path / "without") == rows(tmp_path / "with")
    first, second = (checkpoint(tmp_path / name, 6) for name in states)
    tensors = [name for name in first if name.endswith(".safetensors")]
    assert tensors
    assert all(first[name] == second[name] for name in tensors)
    assert torch.equal(states["without"], states["with"])


def test_trackers_are_told_and_a_resumed_run_has_each_text_once(data, tmp_path):
    def build(folder: str) -> Any:
        run = plan_run(tiny_recipe(data, BLOCK, TEXTS, {"train": {"steps": 9}}), tmp_path / folder).build()
        hears = Hears()
        run.trainer.callbacks.append(hears)
        run.trainer.validators[-1]._trackers.append(hears)
        return run.trainer, hears

    whole, heard = build("whole")
    whole.run()
    assert heard.texts == [
        (each["step"], each["index"], each["text"]) for each in samples(tmp_path / "whole")
    ]
    torn, _ = build("torn")
    torn.callbacks.append(crash_at(7))
    with pytest.raises(Crash):
        torn.run()
    file = tmp_path / "torn" / SAMPLES_FILE
    later = {**samples(tmp_path / "torn")[-1], "step": 9, "text": "of a time that is gone"}
    with file.open("a") as written:
        written.write(f"{json.dumps(later)}\n" + '{"step": 3, "index"')
    again, _ = build("torn")
    assert again.resume()
    again.run()
    assert file.read_bytes() == (tmp_path / "whole" / SAMPLES_FILE).read_bytes()


def test_texts_that_cannot_be_written_stop_nothing(data, tmp_path, capsys, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("out of\nmemory \x1b[2J")

    run = plan_run(tiny_recipe(data, TEXTS), tmp_path).build()
    monkeypatch.setattr(LanguageModel, "generate", fail)
    run.trainer.run()
    assert run.trainer.step == 6
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines if "sample" in line] == [
        f"no sample texts of step {step}, training continues" for step in (3, 6)
    ]
    assert not any("\x1b" in line for line in lines)
    assert rows(tmp_path)[-1]["valid_nats"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_texts": -1}, r"sample_texts must not be negative \(0 writes none\), got -1"),
        ({"sample_texts": 1, "sample_tokens": 0}, "sample_tokens must be at least 1, got 0"),
        ({"sample_tokens": 9}, "sample_tokens needs sample_texts, got 9 and 0 texts"),
        (
            {"sample_texts": 1, "sample_prompts": ["a", "b"]},
            "sample_texts must be at least the number of sample_prompts 2, got 1",
        ),
        (
            {"sample_texts": 1, "sample_tokens": 17},
            "trackers.sample_tokens must be at most the context 16, got 17",
        ),
        (
            {"sample_texts": 1, "sample_tokens": 4, "sample_prompts": ["abcdef"]},
            "trackers.sample_prompts, with sample_tokens 4: prompt 0: length must be at least the prompt's",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_trained(data, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        plan_run(tiny_recipe(data, {"trackers": changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_texts_need_something_to_validate_on(tmp_path):
    corpus = ListCorpus({"train": random_texts(8)})
    shards = prepare(corpus, byte_tokenizer(), tmp_path / "shards", progress=False)
    with pytest.raises(
        ValueError, match=r"the variance trackers and sample texts need at least one sequence"
    ):
        plan_run(tiny_recipe(shards.folder, TEXTS), tmp_path / "run")


def in_processes(parallel: str, data: str, out: str) -> list[str]:
    """A rank of a run that writes texts."""
    recipe = merge(plain(Path(data), BLOCK, TEXTS), {"parallel": parallel, "train": {"precision": "fp32"}})
    stages = [("run", recipe_from_dict(recipe, where="the test's recipe"))]
    [run] = train_stages(stages, Path(out), device="cpu")
    return [str(run.trainer.step)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_of_many_processes_one_writes_the_texts_of_the_whole_model(parallel, data, tmp_path):
    function = "tests.runs.test_samples.in_processes"
    assert run_processes(function, parallel, str(data), str(tmp_path / "run"), world=2) == [["6"], ["6"]]
    found = samples(tmp_path / "run")
    assert [(each["step"], each["index"]) for each in found] == [(s, i) for s in (3, 6) for i in range(3)]
    model = bd3lm.load(tmp_path / "run", device="cpu")
    written = model.generate(["ab", "", "ab"], seeds=[each["seed"] for each in found[3:]], length=10)
    assert [each["text"] for each in found[3:]] == [str(each) for each in written]
