"""A run: what is written beside it, what it goes on with, and what it refuses."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from bd3lm import interop
from bd3lm.data import TokenShards
from bd3lm.diffusion import Counts
from bd3lm.models import Transformer
from bd3lm.runs import presets
from bd3lm.runs.folders import is_run
from bd3lm.runs.recipe import recipe_from_dict, recipe_to_dict
from bd3lm.runs.stages import read_recipe, resolve_stages, run_stages, saved_stages
from bd3lm.runs.train import train_stages
from tests.tiny_recipes import BLOCK, prepared, tiny_recipe, two_stages
from tests.training.tiny import checkpoint, rows, state


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepared(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    """An autoregressive run that others start from."""
    out = tmp_path_factory.mktemp("finished") / "ar"
    train(out, tiny_recipe(data))
    return out


def train(out: Path, recipe, *, resume: bool = False, console: Console | None = None):
    return train_stages([("train", recipe)], out, resume=resume, console=console or quiet(), device="cpu")[-1]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def write(path: Path, data: Any) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture
def staged(monkeypatch, data):
    monkeypatch.setattr(presets, "PRESETS", {**presets.PRESETS, "two": two_stages(data)})


# --- what is written, and that it is enough ---


@pytest.mark.parametrize("method", [{}, BLOCK], ids=["ar", "block"])
def test_a_run_is_reproducible_from_its_saved_recipe(method, data, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    train(first, tiny_recipe(data, method, {"train": {"seed": 3}}))
    [(_, recipe)] = resolve_stages(None, config=first / "recipe.yaml")
    train(again, recipe)
    assert rows(first) == rows(again)
    assert checkpoint(first, 6) == checkpoint(again, 6)
    assert weights(first) == weights(again)
    other = tmp_path / "other"
    train(other, tiny_recipe(data, method, {"train": {"seed": 4}}))
    assert weights(first) != weights(other)


def test_every_checkpoint_carries_the_resolved_recipe_and_the_fingerprints(data, finished):
    shards = TokenShards(data)
    for step in (4, 6):
        run = state(finished, step)["run"]
        assert recipe_from_dict(run["recipe"], where="checkpoint") == tiny_recipe(data)
        assert run["data_fingerprint"] == shards.fingerprint
        assert run["tokenizer_fingerprint"] == shards.tokenizer.fingerprint
    assert yaml.safe_load((finished / "recipe.yaml").read_text()) == recipe_to_dict(tiny_recipe(data))


def test_a_run_is_known_from_its_folder(data, finished, tmp_path):
    [(_, recipe)] = saved_stages(finished)
    assert recipe == tiny_recipe(data)
    [(_, longer)] = saved_stages(finished, {"train": {"steps": 8}})
    assert longer == tiny_recipe(data, {"train": {"steps": 8}})
    assert run_stages(finished) == [finished]
    for asked in (saved_stages, run_stages):
        with pytest.raises(ValueError, match=r"must be the folder of a run, with its recipe.yaml or stages"):
            asked(tmp_path)


def test_what_a_run_leaves_behind(finished):
    assert sorted(p.name for p in finished.iterdir()) == [
        "checkpoints",
        "metrics.csv",
        "model",
        "recipe.yaml",
    ]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in (finished / "model").iterdir()
    }


# --- resuming ---


def test_a_folder_that_holds_a_run_is_refused(data, finished):
    before = weights(finished)
    with pytest.raises(
        ValueError, match="holds a run already; use --resume to continue it, or another --out"
    ):
        train(finished, tiny_recipe(data))
    assert weights(finished) == before


def test_another_recipe_is_refused_by_the_names_of_its_fields(data, finished):
    changed = tiny_recipe(data, {"optimizer": {"lr": 0.5}, "train": {"seed": 1}, "network": {"dropout": 0.2}})
    with pytest.raises(ValueError, match="was started with another recipe") as caught:
        train(finished, changed, resume=True)
    message = str(caught.value)
    for difference in (
        "optimizer.lr (0.01 then, 0.5 now)",
        "train.seed (0 then, 1 now)",
        "network.dropout (0.1 then, 0.2 now)",
    ):
        assert difference in message
    assert "\n" not in message
    assert yaml.safe_load((finished / "recipe.yaml").read_text())["optimizer"]["lr"] == 0.01


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("auto", "training on cpu in fp32, not compiled"),
        (False, "training on cpu in fp32, not compiled"),
        (True, "training on cpu in fp32, compiled; the first step takes about a minute"),
    ],
)
def test_a_run_says_once_how_it_trains_and_keeps_what_was_asked(asked, said, data, tmp_path, monkeypatch):
    monkeypatch.setattr(Transformer, "compile_trunk", lambda network: None)
    console = quiet()
    recipe = tiny_recipe(data, {"train": {"compile": asked}})
    train(tmp_path, recipe, console=console)
    train(tmp_path, recipe, resume=True, console=console)  # which has nothing left to do
    assert [line for line in console.file.getvalue().splitlines() if "training on" in line] == [said]
    assert yaml.safe_load((tmp_path / "recipe.yaml").read_text())["train"]["compile"] == asked


def test_held_out_text_shorter_than_a_context_is_said_before_training(data, tmp_path):
    tokens = TokenShards(data).split("valid").tokens
    console = quiet()
    changes = {"data": {"context": tokens + 1}, "train": {"global_batch": 1, "steps": 1}}
    run = train(tmp_path / "short", tiny_recipe(data, changes), console=console)
    said = f"the valid split has {tokens:,} tokens, less than one context of {tokens + 1:,}"
    assert f"{said}: nothing will be validated\n" in console.file.getvalue()
    assert not run.trainer.validators
    assert run.nothing_held_out == said

    console = quiet()
    train(tmp_path / "enough", tiny_recipe(data), console=console)
    assert "nothing will be validated" not in console.file.getvalue()


def test_why_another_number_of_steps_is_refused_is_said(data, tmp_path):
    decaying = {"optimizer": {"decay": "cosine"}}
    train(tmp_path, tiny_recipe(data, decaying))
    with pytest.raises(ValueError, match=r"train\.steps \(6 then, 10 now\)") as caught:
        train(tmp_path, tiny_recipe(data, decaying, {"train": {"steps": 10}}), resume=True)
    assert (
        ". The learning rate's cosine decay depends on train.steps; to train longer from its weights use "
        f"--from {tmp_path} with"
    ) in str(caught.value)
    with pytest.raises(ValueError, match=r"Different: train\.seed") as caught:
        train(tmp_path, tiny_recipe(data, decaying, {"train": {"seed": 10}}), resume=True)
    assert "decay" not in str(caught.value)


def test_a_longer_run_goes_on_from_a_finished_one(data, finished, tmp_path):
    """With a constant learning rate it is the run that was long from the start."""
    longer = tiny_recipe(data, {"train": {"steps": 10}})
    train(tmp_path / "whole", longer)
    shutil.copytree(finished, tmp_path / "parts")
    console = quiet()
    train(tmp_path / "parts", longer, resume=True, console=console)
    assert "resumed at step 6" in console.file.getvalue()
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_other_data_is_refused_on_resuming(data, finished, tmp_path):
    """The same path, other tokens: the fingerprint in the checkpoint tells."""
    moved, out = tmp_path / "shards", tmp_path / "run"
    shutil.copytree(data, moved)
    train(out, tiny_recipe(moved))
    shutil.rmtree(moved)
    from bd3lm.data import byte_tokenizer, prepare
    from tests.data_room.documents import small_corpus

    prepare(small_corpus(train=40, valid=6, seed=9), byte_tokenizer(), moved, progress=False)
    with pytest.raises(ValueError, match=r"fingerprint|other data|another"):
        train(out, tiny_recipe(moved, {"train": {"steps": 8}}), resume=True)


def test_data_that_were_moved_are_known_by_their_fingerprint_and_others_leave_the_recipe(
    data, finished, tmp_path
):
    from bd3lm.data import byte_tokenizer, prepare
    from tests.data_room.documents import small_corpus

    out, moved, other = tmp_path / "run", tmp_path / "moved", tmp_path / "other"
    shutil.copytree(finished, out)
    shutil.copytree(data, moved)
    prepare(small_corpus(train=40, valid=6, seed=9), byte_tokenizer(), other, progress=False)
    train(out, tiny_recipe(moved), resume=True)
    with pytest.raises(ValueError, match="data_fingerprint was"):
        train(out, tiny_recipe(other), resume=True)
    assert read_recipe(out).data.path == str(moved)


def test_what_is_not_trained_may_change_and_is_kept_as_it_is_now(data, finished, tmp_path):
    started = tmp_path / "started"
    first = tiny_recipe(data, BLOCK, {"start_from": str(finished), "method": {"causal_clean": True}})
    train(started, first)
    changes = {"method": {"lean": 2.0}, "data": {"validation_sequences": 5, "validation_batch": 2}}
    gone = {"start_from": "nowhere"}
    run = train(
        started, tiny_recipe(data, BLOCK, {"method": {"causal_clean": True}}, changes, gone), resume=True
    )
    assert run.config.method.lean == 2.0
    assert read_recipe(started) == tiny_recipe(
        data, BLOCK, {"start_from": str(finished), "method": {"causal_clean": True}}, changes
    )


def test_what_a_search_looks_at_may_not_change(data, tmp_path):
    search = {"every": 3, "batches": 1, "widths": [0.5], "step": 0.5}
    clipped = {"objective": {"masking": {"kind": "clipped", "search": search}}}
    few = {"train": {"steps": 3}}
    train(tmp_path, tiny_recipe(data, BLOCK, clipped, few))
    other = tiny_recipe(data, BLOCK, clipped, few, {"data": {"validation_sequences": 5}})
    with pytest.raises(ValueError, match=r"Different: data.validation_sequences \(8 then, 5 now\)"):
        train(tmp_path, other, resume=True)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("checkpoints", "holds a model, which would be replaced, and no checkpoint to continue from"),
        ("recipe.yaml", "holds checkpoints without the recipe.yaml they were trained with"),
    ],
)
def test_a_run_that_has_lost_a_part_is_not_overwritten(lost, message, resume, data, finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    part = out / lost
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    before = everything(out)
    with pytest.raises(ValueError, match=f"{out} {message}; .*another --out"):
        train(out, tiny_recipe(data), resume=resume)
    assert everything(out) == before


def test_a_model_of_somebody_else_is_not_overwritten(data, finished, tmp_path):
    shutil.copytree(finished / "model", tmp_path / "model")
    with pytest.raises(ValueError, match="holds a model, which would be replaced"):
        train(tmp_path, tiny_recipe(data, {"train": {"seed": 5}}))
    assert weights(tmp_path) == weights(finished)


def test_a_checkpoint_that_was_set_aside_counts(data, finished, tmp_path):
    """It was to be replaced when the run was killed."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "model")
    for path in sorted((out / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(path)
    (path,) = (out / "checkpoints").iterdir()
    path.rename(path.with_name(f"old-{path.name}"))
    with pytest.raises(ValueError, match="holds a run already; use --resume"):
        train(out, tiny_recipe(data))


def test_a_second_process_is_refused_and_the_folder_is_free_after(data, tmp_path):
    from bd3lm.io.files import only_writer

    out = tmp_path / "run"
    out.mkdir()
    few = tiny_recipe(data, {"train": {"steps": 1}})
    with only_writer(out), pytest.raises(ValueError, match=f"another process is training in {out}"):
        train(out, few)
    assert list(out.iterdir()) == []
    train(out, few)


def test_a_run_holds_its_folder_while_it_trains(data, tmp_path, monkeypatch):
    from bd3lm.training import Trainer

    recipe = tiny_recipe(data, {"train": {"steps": 1}})
    plain_run = Trainer.run

    def watched(trainer: Trainer) -> None:
        with pytest.raises(ValueError, match="another process is training in"):
            train(tmp_path / "run", recipe, resume=True)
        plain_run(trainer)

    monkeypatch.setattr(Trainer, "run", watched)
    train(tmp_path / "run", recipe)


def test_a_start_that_is_refused_was_not_stopped(data, finished, tmp_path):
    """A job script that finds the mark starts it again, for ever."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / "STOPPED").touch()
    with pytest.raises(ValueError, match="was started with another recipe"):
        train(out, tiny_recipe(data, {"optimizer": {"lr": 0.5}}), resume=True)
    assert not (out / "STOPPED").exists()


@pytest.mark.parametrize(("stopped", "status"), [(False, 1), (True, 0)])
def test_the_job_script_starts_again_only_what_was_stopped_in_it(stopped, status, tmp_path):
    """`srun` and `scontrol` say what they were called with; the run of the job before this was stopped."""
    out, tools = tmp_path / "run", tmp_path / "bin"
    (out / "ar").mkdir(parents=True)
    (out / "ar" / "STOPPED").touch()
    tools.mkdir()
    leave = f"touch {out}/ar/STOPPED; " if stopped else ""
    for name, does in (("srun", f"{leave}exit {status}"), ("scontrol", 'echo "$1"')):
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "1", "SLURM_GPUS_PER_NODE": "8"}
    done = subprocess.run(
        ["bash", str(Path(__file__).parents[2] / "scripts" / "train.slurm"), "demo"],
        env={"PATH": f"{tools}:{os.environ['PATH']}", "OUT": str(out), "SLURM_JOB_ID": "7", **variables},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (status, "requeue\n" if stopped else "")


def test_a_loss_that_is_not_finite_leaves_a_model_and_says_what_works(data, tmp_path, monkeypatch):
    from bd3lm.training import Trainer

    plain_step = Trainer.train_step

    def spoiled(trainer: Trainer) -> None:
        if trainer.step == 3:
            trainer.network.output.bias.data.fill_(float("nan"))
        plain_step(trainer)

    out, again = tmp_path / "run", tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", spoiled)
        with pytest.raises(FloatingPointError, match="from the model of step 2: bd3lm train ") as caught:
            train(out, tiny_recipe(data))
    said = f"--config {out}/recipe.yaml --optimizer.lr LOWER --out ANOTHER [--from {out}]"
    assert said in str(caught.value)
    stages = resolve_stages(
        None, config=out / "recipe.yaml", overrides={"optimizer": {"lr": 1e-3}}, start_from=str(out)
    )
    assert train_stages(stages, again, console=quiet(), device="cpu")[-1].trainer.step == 6


def stop_at(monkeypatch, step: int, stage: str | None = None) -> None:
    """SIGTERM comes while `step` is trained, in the folder of `stage` where one is named."""
    from bd3lm.training import Trainer

    plain_step = Trainer.train_step

    def watched(trainer: Trainer) -> None:
        plain_step(trainer)
        if trainer.step == step and (stage is None or trainer.store.folder.parent.name == stage):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "train_step", watched)


def test_a_stopped_run_says_so_and_goes_on(data, tmp_path, monkeypatch):
    train(tmp_path / "whole", tiny_recipe(data))
    console = quiet()
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        run = train(tmp_path / "parts", tiny_recipe(data), console=console)
    assert run.trainer.step == 5
    assert "stopped at step 5 of 6; everything is saved in" in console.file.getvalue()
    train(tmp_path / "parts", tiny_recipe(data), resume=True)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.parametrize(("stage", "finished_stages"), [("ar", 1), ("block", 2)])
def test_two_stages_stop_and_go_on(stage, finished_stages, staged, tmp_path, monkeypatch):
    stages = resolve_stages("two")
    train_stages(stages, tmp_path / "whole", console=quiet(), device="cpu")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, stage)
        runs = train_stages(stages, tmp_path / "parts", console=quiet(), device="cpu")
    assert len(runs) == finished_stages
    # Also the stage that was not begun is known from the folder alone.
    assert saved_stages(tmp_path / "parts") == stages
    saved = saved_stages(tmp_path / "parts", {"train": {"log_every": 1}})
    runs = train_stages(saved, tmp_path / "parts", resume=True, console=quiet(), device="cpu")
    assert len(runs) == 2
    for name in ("ar", "block"):
        assert weights(tmp_path / "parts" / name) == weights(tmp_path / "whole" / name)
        assert rows(tmp_path / "parts" / name) == rows(tmp_path / "whole" / name)


def test_a_signal_in_the_last_step_of_a_stage_is_not_forgotten(staged, tmp_path, monkeypatch):
    stages = resolve_stages("two")
    with monkeypatch.context() as patch:
        stop_at(patch, 6, "ar")
        runs = train_stages(stages, tmp_path / "parts", console=quiet(), device="cpu")
    assert [stage.name for stage in run_stages(tmp_path / "parts")] == ["ar"]
    assert len(runs) == 1, "the next stage was trained all the same"
    assert len(train_stages(stages, tmp_path / "parts", resume=True, console=quiet(), device="cpu")) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_saved_lets_it_be_saved(number, staged, tmp_path, monkeypatch, capfd):
    """It used to end the process there: SIGTERM without a word, Ctrl-C with the model unwritten."""
    stages = resolve_stages("two")
    train_stages(stages, tmp_path / "whole", console=quiet(), device="cpu")
    plain_save = interop.native.save_tensors

    def interrupted(*what: Any) -> None:
        os.kill(os.getpid(), number)
        plain_save(*what)

    monkeypatch.setattr(interop.native, "save_tensors", interrupted)
    before = signal.signal(number, signal.default_int_handler)  # which a background shell may have ignored
    try:
        runs = train_stages(stages, tmp_path / "parts", console=quiet(), device="cpu")
    finally:
        signal.signal(number, before)
    assert capfd.readouterr().err == "saving the model, then stopping; again to quit at once\n"
    assert [run.trainer.stopped_by for run in runs] == ["signal"], "the next stage was trained all the same"
    assert (tmp_path / "parts/ar/STOPPED").exists()
    assert weights(tmp_path / "parts/ar") == weights(tmp_path / "whole/ar")


def test_the_second_stage_starts_from_the_averages_of_the_first(staged, data, tmp_path):
    stages = resolve_stages(
        "two", overrides={"block": {"train": {"steps": 1}, "optimizer": {"warmup_steps": 1}}}
    )
    ar, block = train_stages(stages, tmp_path, console=quiet(), device="cpu")
    # The first step of a warm-up has a rate of zero: the weights are still those it started from.
    for name, parameter in block.trainer.network.named_parameters():
        assert torch.equal(parameter, ar.trainer.ema.tensors()[name]), name
    saved = recipe_from_dict(yaml.safe_load((tmp_path / "block/recipe.yaml").read_text()), where="recipe")
    assert saved.start_from == str(tmp_path / "ar" / "model")
    assert saved.data.skip == block.trainer.data.skip == ar.trainer.settings.steps * ar.trainer.data.rows > 0
    assert saved.objective.masking == Counts()


def test_two_stages_may_start_from_one(data, tmp_path):
    """A stage that names its start begins with those weights, and with the text that they have not read."""
    one_step = {"train": {"steps": 1}, "optimizer": {"warmup_steps": 1}}
    recipes: dict[str, dict[str, Any]] = {
        "ar": {},
        "longer": one_step,
        "block": {**BLOCK, **one_step, "start_from": "ar"},
    }
    stages = [(name, tiny_recipe(data, changes)) for name, changes in recipes.items()]
    ar, longer, block = train_stages(stages, tmp_path, console=quiet(), device="cpu")
    for name, average in ar.trainer.ema.tensors().items():
        assert torch.equal(dict(block.trainer.network.named_parameters())[name], average), name
    assert block.trainer.data.skip == longer.trainer.data.skip == 6 * ar.trainer.data.rows
    assert saved_stages(tmp_path) == stages
    starts = [read_recipe(tmp_path / name).start_from for name in ("longer", "block")]
    assert starts == [str(tmp_path / "ar" / "model")] * 2


@pytest.mark.parametrize(
    ("changes", "skip"),
    [({"data": {"skip": 3}}, 3), ({"train": {"seed": 9}}, 0), ({"data": {"context": 8}}, 0)],
    ids=["as said", "another order", "other sequences"],
)
def test_a_stage_that_reads_in_another_way_reads_from_the_start_or_as_it_is_told(
    staged, tmp_path, changes, skip
):
    few = {"train": {"steps": 1, "validate_every": 1}}
    stages = resolve_stages("two", overrides={**few, "block": changes})
    _, block = train_stages(stages, tmp_path, console=quiet(), device="cpu")
    assert block.trainer.data.skip == skip


def test_a_start_that_is_not_there_leaves_nothing_behind(data, tmp_path):
    recipe = tiny_recipe(data, {"start_from": str(tmp_path / "nowhere")})
    with pytest.raises(ValueError, match="nowhere"):
        train(tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [{"data": {"context": 10**6}}, {"data": {"path": "nowhere"}}, {"train": {"micro_batch": 3}}],
    ids=["too little text", "no data", "an odd batch"],
)
def test_a_run_that_cannot_be_leaves_nothing_behind(changes, data, tmp_path):
    with pytest.raises(ValueError, match=r"less than one context|nowhere|micro_batch"):
        train(tmp_path / "out", tiny_recipe(data, changes))
    assert not (tmp_path / "out").exists()


def test_the_data_of_a_later_stage_is_looked_for_before_the_first_is_trained(staged, tmp_path):
    stages = resolve_stages("two", overrides={"block": {"data": {"path": "nowhere"}}})
    with pytest.raises(ValueError, match=r"got nowhere, which does not exist; .* if it has moved, name it"):
        train_stages(stages, tmp_path / "out", console=quiet(), device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"micro_batch": 3}}, "micro_batch must divide"),
        ({"data": {"context": 10**6}}, "less than one context"),
        ({"network": {"hidden": 32}}, "must have the network of this recipe, got .*ar/model"),
    ],
    ids=["an odd batch", "too little text", "another width"],
)
def test_a_mistake_in_a_later_stage_is_found_before_the_first_is_trained(changes, message, staged, tmp_path):
    stages = resolve_stages("two", overrides={"block": changes})
    with pytest.raises(ValueError, match=message):
        train_stages(stages, tmp_path / "out", console=quiet(), device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_search_without_held_out_text_is_found_before_the_first_is_trained(staged, tmp_path):
    from bd3lm.data import byte_tokenizer, prepare
    from tests.data_room.documents import ListCorpus, random_texts

    shards = tmp_path / "shards"
    prepare(ListCorpus({"train": random_texts(40, seed=0)}), byte_tokenizer(), shards, progress=False)
    search = {"every": 3, "batches": 1, "widths": [0.5], "step": 0.5}
    block = {"data": {"path": str(shards)}, "objective": {"masking": {"kind": "clipped", "search": search}}}
    with pytest.raises(ValueError, match=f"{shards} has no valid or test split; the clip search"):
        train_stages(
            resolve_stages("two", overrides={"block": block}), tmp_path / "out", console=quiet(), device="cpu"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"hidden": 32}}, "must have the network of this recipe"),
        (
            {"objective": {"masking": {"kind": "clipped", "low": 0.9, "high": 0.1}}},
            "low and high must satisfy 0 <= low <= high <= 1, got low 0.9 and high 0.1",
        ),
        ({"objective": {"masking": {"kind": "discrete", "steps": 0}}}, "steps must be at least 1, got 0"),
    ],
    ids=["another width", "an empty range", "no steps"],
)
def test_a_mistake_in_a_later_stage_is_found_before_the_built_in_text_is_prepared(
    changes, message, staged, tmp_path
):
    builtin = {"data": {"path": "builtin"}, "block": changes}
    with pytest.raises(ValueError, match=message):
        train_stages(resolve_stages("two", overrides=builtin), tmp_path / "out", console=quiet())
    assert not (tmp_path / "out").exists()


def test_a_later_stage_that_would_be_overwritten_is_found_before_the_first_is_trained(
    finished, staged, tmp_path
):
    shutil.copytree(finished / "model", tmp_path / "block" / "model")
    with pytest.raises(ValueError, match=f"{tmp_path / 'block'} holds a model"):
        train_stages(resolve_stages("two"), tmp_path, console=quiet(), device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["block"]


def test_a_stage_whose_checkpoints_were_cleared_away_is_not_trained_again(staged, tmp_path, monkeypatch):
    stages = resolve_stages("two")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, "block")
        train_stages(stages, tmp_path, console=quiet(), device="cpu")
    shutil.rmtree(tmp_path / "ar" / "checkpoints")
    before, console = everything(tmp_path / "ar"), quiet()
    (run,) = train_stages(stages, tmp_path, resume=True, console=console, device="cpu")
    assert run.trainer.step == 6
    assert everything(tmp_path / "ar") == before
    assert f"{tmp_path / 'ar'}: no checkpoint, but a later stage has one" in console.file.getvalue()
    other = resolve_stages("two", overrides={"ar": {"optimizer": {"lr": 0.5}}})
    with pytest.raises(ValueError, match=r"ar was started with another recipe.* optimizer.lr"):
        train_stages(other, tmp_path, resume=True, console=quiet(), device="cpu")


def test_a_run_of_two_stages_can_be_moved(staged, tmp_path, monkeypatch):
    """Stopped, carried to another disk, resumed there."""
    stages = resolve_stages("two")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, "block")
        train_stages(stages, tmp_path / "here", console=quiet(), device="cpu")
    (tmp_path / "here").rename(tmp_path / "there")
    runs = train_stages(stages, tmp_path / "there", resume=True, console=quiet(), device="cpu")
    assert runs[-1].trainer.step == 6


def test_a_run_from_before_its_stages_were_kept_goes_on_with_its_preset(staged, tmp_path, monkeypatch):
    stages = resolve_stages("two")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, "block")
        train_stages(stages, tmp_path, console=quiet(), device="cpu")
    (tmp_path / "stages.yaml").unlink()
    with pytest.raises(ValueError, match=r"has the stages ar, block, but no stages.yaml .* with its preset"):
        saved_stages(tmp_path)
    runs = train_stages(stages, tmp_path, resume=True, console=quiet(), device="cpu")
    assert runs[-1].trainer.step == 6
    assert saved_stages(tmp_path) == stages


# --- kill -9 ---


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_it_is_the_same_run(data, tmp_path):
    """`python -m bd3lm train` in two stages, killed three times and then left alone."""
    command = [
        *(sys.executable, "-m", "bd3lm", "train", "demo", "--device", "cpu"),
        *("--data.path", str(data), "--data.context", "16", "--data.validation_sequences", "8"),
        *("--network.layers", "1", "--network.hidden", "16", "--network.heads", "2"),
        *("--train.steps", "90", "--train.global_batch", "4", "--train.log_every", "1"),
        *("--train.checkpoint_every", "2", "--train.validate_every", "25"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def start(out: Path) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*command, "--out", str(out), *(["--resume"] if is_run(out) else [])],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def finish(out: Path) -> None:
        process = start(out)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output.decode()

    def last_step(folder: Path) -> int:
        steps = [int(p.name[5:]) for p in folder.glob("checkpoints/step-*")]
        return max(steps, default=0)

    parts, chance, killed = tmp_path / "parts", random.Random(0), []
    for stage, least in (("ar", 10), ("ar", 35), ("block", 15)):
        process = start(parts)
        until = time.monotonic() + 60
        while last_step(parts / stage) < least and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.2)
        process.kill()
        process.communicate()
        killed.append(process.returncode == -signal.SIGKILL)
        if stage == "ar":
            assert 0 < last_step(parts / "ar") < 90, "a test that killed nothing"
    assert all(killed)
    finish(parts)
    finish(tmp_path / "whole")
    for stage in ("ar", "block"):
        ours, theirs = (checkpoint(where / stage, 90) for where in (parts, tmp_path / "whole"))
        assert ours["tensors.safetensors"] == theirs["tensors.safetensors"]
        assert rows(parts / stage) == rows(tmp_path / "whole" / stage)
        assert weights(parts / stage) == weights(tmp_path / "whole" / stage)
    assert json.loads(checkpoint(parts / "block", 90)["state.json"])["step"] == 90


def test_a_start_that_failed_does_not_claim_the_folder(data, tmp_path):
    """Nothing was trained, so nothing would be lost: the corrected command may use the same folder."""
    wrong = resolve_stages("wikipedia-ar", overrides={"data": {"path": str(tmp_path / "nowhere")}})
    with pytest.raises(ValueError, match="which does not exist"):
        train_stages(wrong, tmp_path / "out", console=Console(quiet=True))
    right = [("run", tiny_recipe(data))]
    runs = train_stages(right, tmp_path / "out", console=Console(quiet=True))
    assert runs[0].trainer.step == runs[0].trainer.settings.steps
