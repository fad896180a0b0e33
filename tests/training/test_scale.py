"""Two processes and the real trainer: the same run as on one, whatever shares the parameters.

Without dropout, since its noise is drawn for each micro-batch. Sums run in another order, hence a tolerance:
1e-5 on weights, averages and moments after ten steps, 1e-5 relative on losses.
"""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from bd3lm.diffusion import Absorbing, Uniform
from bd3lm.objectives import D3PM, ScoreEntropy, SimplexDiffusionLoss
from bd3lm.training import Engine, Trainer
from bd3lm.training.distributed import whole
from tests.once import made_once
from tests.oracles.networks import FAMILIES
from tests.training.processes import run_processes
from tests.training.tiny import (
    AR,
    CLIPPED,
    LEARNED,
    MASK,
    NEXT_TOKEN,
    VOCABULARY,
    checkpoint,
    rows,
    signal_at,
    state,
    tiny_trainer,
)

pytestmark = pytest.mark.slow  # processes that each import torch; `test_distributed.py` is the quick part
CASES = {
    "next token": NEXT_TOKEN,
    "clip search": CLIPPED,
    "learned proposal": LEARNED,
    "random batch": replace(AR, random_batch=True),
    "SEDD": ScoreEntropy(process=Absorbing(VOCABULARY, MASK), mask_id=MASK),
    "uniform D3PM": D3PM(process=Uniform(VOCABULARY), mask_id=MASK, steps=9, auxiliary=0.1),
    "SSD-LM": SimplexDiffusionLoss(block_size=5, mask_id=MASK),  # the last block is cut
    "Llama": NEXT_TOKEN,
    "Qwen3": AR,  # it never reads the mask, whose vector learns nothing
}
# What cuts the parameters knows no method: under it those alone that share statistics too, and a loss of
# each kind; and of networks a family each.
PARALLEL = {
    "ddp": tuple(CASES),
    "fsdp": ("next token", "clip search", "learned proposal", "SSD-LM", "Llama", "Qwen3"),
}
FIGURES = ("train_nats", "gradient_norm", "valid_nats", "clip_low", "clip_high", "clip_variance")


def trainer_of(folder: Path, case: str, **options: Any) -> Trainer:
    """One of the cases. Cases named after a family train a network of that family."""
    family = case if case in FAMILIES else "GPT"
    return tiny_trainer(folder, CASES[case], dropout=0.0, family=family, **options)


def train(folder: Path, engine: Engine, case: str, **options: Any) -> Trainer:
    trainer = trainer_of(folder / case, case, engine=engine, **options)
    trainer.resume()
    trainer.run()
    return trainer


def on_rank(parallel: str, folder: str) -> dict[str, Any]:
    """The work of each process: every case, one run cut short for one process, and one stopped."""
    results: dict[str, Any] = {}
    with Engine.from_environment(parallel=parallel, device="cpu") as engine:
        for case in PARALLEL[parallel]:
            trainer = train(Path(folder), engine, case, micro_batch=1)
            results[case] = trainer.objective.state()
        short = train(Path(folder) / "short", engine, "clip search", steps=7)
        watchers = [signal_at(5, signal.SIGTERM)] if engine.rank == 1 else []
        stopped = tiny_trainer(Path(folder) / "stopped", LEARNED, *watchers, dropout=0.0, engine=engine)
        stopped.run()
        results["stopped"] = [stopped.step, stopped.stopped_by, stopped.store.steps()]
        results["sharded"] = any(
            tuple(local.to_local().shape) != tuple(local.shape)
            for local in short.network.parameters()
            if hasattr(local, "to_local")
        )
        results["averages"] = sum(whole(t).double().sum().item() for t in short.ema.tensors().values())
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for case in CASES:
        train(folder, Engine(), case)
    return folder


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(request, tmp_path_factory) -> tuple[str, Path, list[dict[str, Any]]]:
    parallel = request.param

    def train_together() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(parallel)
        found = run_processes("tests.training.test_scale.on_rank", parallel, str(folder), world=2)
        return {"folder": str(folder), "found": found}

    made = made_once(tmp_path_factory, parallel, train_together)
    return parallel, Path(made["folder"]), made["found"]


def tensors(folder: Path, tmp_path: Path, case: str) -> dict[str, torch.Tensor]:
    """A run's last checkpoint as a single process reads it and writes it again."""
    trainer = trainer_of(folder, case)
    assert trainer.resume()
    trainer.store.folder = tmp_path / "rewritten" / folder.name / "checkpoints"
    trainer.save()
    return load(checkpoint(tmp_path / "rewritten" / folder.name, trainer.step)["tensors.safetensors"])


def worst_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize(
    ("together", "case"),
    [(parallel, case) for parallel, cases in PARALLEL.items() for case in cases],
    indirect=["together"],
)
def test_two_processes_train_as_one(case, alone, together, tmp_path):
    """Losses of every step, validation figures, and the contents of the last checkpoint."""
    _, folder, _ = together
    ours, theirs = rows(folder / case), rows(alone / case)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == [str(i + 1) for i in range(10)]
    for one, other in zip(ours, theirs, strict=True):
        for figure in FIGURES:
            if other.get(figure):
                assert float(one[figure]) == pytest.approx(float(other[figure]), rel=1e-5), (
                    one["step"],
                    figure,
                )
    assert any(row["valid_nats"] for row in theirs)
    two, one = tensors(folder / case, tmp_path / "two", case), tensors(alone / case, tmp_path / "one", case)
    assert worst_difference(two, one) < 1e-5


def test_all_ranks_learn_the_same(alone, together):
    parallel, folder, (first, second) = together
    for case in PARALLEL[parallel]:
        assert first[case] == second[case], case
    assert first["clip search"] == state(alone / "clip search")["objective"]  # a choice among a few: exact
    assert first["clip search"] != {"low": 0.0, "high": 1.0}
    assert first["learned proposal"]["second_moments"] == pytest.approx(
        state(alone / "learned proposal")["objective"]["second_moments"], rel=1e-5
    )
    counted = [
        state(where / "learned proposal")["statistics"]["count_moments"][1] for where in (alone, folder)
    ]
    assert counted[0] == counted[1]  # blocks seen since the last update, over both ranks


def test_parameters_are_sharded_under_fsdp_only(together):
    parallel, folder, results = together
    assert {result["sharded"] for result in results} == {parallel == "fsdp"}
    files = sorted(p.name for p in (folder / "next token/checkpoints/step-00000010").iterdir())
    assert ("tensors-00001-of-00002.safetensors" in files) == (parallel == "fsdp")
    assert results[0]["averages"] == results[1]["averages"]


def test_a_signal_to_one_process_stops_both_after_the_same_step(together):
    _, _, results = together
    assert [result["stopped"] for result in results] == [[5, "signal", [4, 5]]] * 2


def test_a_run_of_two_processes_goes_on_alone(alone, together, tmp_path):
    """Stopped after 7 steps by two processes, finished by one: the checkpoint has the same form."""
    _, folder, _ = together
    copy = tmp_path / "short"
    copy.mkdir()
    for path in sorted((folder / "short" / "clip search").rglob("*")):
        target = copy / path.relative_to(folder / "short" / "clip search")
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    trainer = tiny_trainer(copy, CLIPPED, dropout=0.0)
    assert trainer.resume()
    assert trainer.step == 7
    trainer.run()
    one = tensors(alone / "clip search", tmp_path / "one", "clip search")
    assert worst_difference(tensors(copy, tmp_path / "two", "clip search"), one) < 1e-5
    assert state(copy)["objective"] == state(alone / "clip search")["objective"]
    assert json.loads(checkpoint(copy)["state.json"])["step"] == 10


def back_on_two(parallel: str, folder: str) -> int:
    with Engine.from_environment(parallel=parallel, device="cpu") as engine:
        trainer = tiny_trainer(Path(folder), LEARNED, dropout=0.0, engine=engine)
        assert trainer.resume()
        before = trainer.step
        trainer.run()
        return before


def test_a_run_of_one_process_goes_on_with_two(alone, tmp_path):
    """Stopped after 5 steps, with statistics of the proposal still pending."""
    tiny_trainer(tmp_path / "run", LEARNED, dropout=0.0, steps=5).run()
    found = run_processes("tests.training.test_scale.back_on_two", "fsdp", str(tmp_path / "run"), world=2)
    assert found == [5, 5]
    two = tensors(tmp_path / "run", tmp_path / "two", "learned proposal")
    one = tensors(alone / "learned proposal", tmp_path / "one", "learned proposal")
    assert worst_difference(two, one) < 1e-5
    assert state(tmp_path / "run")["objective"]["second_moments"] == pytest.approx(
        state(alone / "learned proposal")["objective"]["second_moments"], rel=1e-5
    )


def demo_on_rank(parallel: str, folder: str) -> int:
    from bd3lm.cli import main

    small = (
        *("--data.context", "16", "--data.builtin_vocabulary", "300", "--data.validation_sequences", "8"),
        *("--network.layers", "1", "--network.hidden", "16", "--network.heads", "2"),
        *("--train.steps", "3", "--train.global_batch", "4"),
    )
    return main(["train", "demo", "--out", folder, "--device", "cpu", "--parallel", parallel, *small])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_command_trains_the_demo_on_two_processes(parallel, tmp_path):
    """Two stages, and the report at the end."""
    found = run_processes("tests.training.test_scale.demo_on_rank", parallel, str(tmp_path / "run"), world=2)
    assert found == [0, 0]
    assert (tmp_path / "run" / "block" / "model" / "config.json").is_file()
