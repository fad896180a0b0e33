"""The engine: two processes over gloo against one process, on the same global batch."""

from pathlib import Path

import pytest
import torch
from torch import nn

from bd3lm.training.distributed import Engine
from tests.training.processes import run_processes

TOLERANCE = 2e-6  # relative to the largest value of a tensor: sums are taken in another order


@pytest.mark.slow
def test_two_processes_do_what_one_does() -> None:
    """Gradients are sums over ranks, with or without accumulation; norms, steps and evaluations agree."""
    results = run_processes("tests.training.scenarios.equal_to_one_process", world=2)
    for by_case in results:
        low = by_case.pop("bf16")
        assert low["dtypes"] == ["torch.float32"]
        assert 1e-4 < low["gradients"] < 0.1
        for case, result in by_case.items():
            for what in ("nats", "gradients", "norm"):
                for micro_batches in (1, 2, 4):
                    assert result[f"{what}{micro_batches}"] < TOLERANCE, (case, what, micro_batches)
            # AdamW divides by the size of a gradient, so rounding errors of small gradients show.
            for what in ("norms", "parameters", "ema", "raw", "averaged", "raw again"):
                assert result[what] < 1e-5, (case, what)
            assert result["swap"] > 1e-4, case
            assert result["restored"], case
    for case in ("ddp", "ddp, tied"):
        assert all(by_case[case]["held"] == by_case[case]["numel"] for by_case in results)
    for case in ("fsdp", "fsdp, tied", "fsdp, Llama", "fsdp, Qwen3"):
        held, numel = [by_case[case]["held"] for by_case in results], results[0][case]["numel"]
        assert sum(held) == numel
        assert all(0.45 < part / numel < 0.55 for part in held)


@pytest.mark.slow
def test_processes_exchange_texts_and_flags() -> None:
    for rank, result in enumerate(run_processes("tests.training.scenarios.talk", world=2)):
        assert result == {
            "rank": rank,
            "is_main": rank == 0,
            "scale": 2.0,
            "sum": [2.0, 1.0],
            "one": True,
            "none": False,
            "gathered": ["", "é"],
            "empty": ["", ""],
            "broadcast": "from 0",
        }


@pytest.mark.slow
def test_a_lost_process_ends_the_others_and_no_checkpoint(tmp_path: Path) -> None:
    survivor, _ = run_processes("tests.training.scenarios.lose_a_rank", str(tmp_path), world=2, may_die=[1])
    assert survivor == {
        "error": "RuntimeError",
        "state": {"n": 1},
        "after": ["step-00000001", "step-00000003"],
    }


@pytest.mark.slow
def test_the_main_process_works_with_whole_tensors_and_its_failure_is_told_to_all() -> None:
    main, other = run_processes("tests.training.scenarios.whole_on_main", world=2)
    assert main["same"]
    assert main["sums"]
    assert other["sums"] == {}
    assert main["said"] == "[Errno 28] No space left on device"
    assert other["said"] == "[Errno 5] the main process could not continue: No space left on device"
    assert main["after"] == other["after"] == ["there", "there"]


def test_one_process_needs_no_exchange() -> None:
    engine = Engine()
    assert (engine.rank, engine.world, engine.is_main, engine.gradient_scale) == (0, 1, True, 1.0)
    assert engine.device == torch.device("cpu")
    assert engine.all_reduce_sum(torch.tensor([2.0])).tolist() == [2.0]
    assert engine.any_true(True)
    assert not engine.any_true(False)
    assert engine.gather_text("a") == ["a"]
    assert engine.broadcast_text("a") == "a"
    engine.barrier()
    engine.close()


def test_one_process_wraps_nothing_and_moves_the_module() -> None:
    module = nn.Linear(2, 2)
    engine = Engine(device=torch.device("meta"))
    assert engine.wrap(module, layers=[], precision="bf16") is module
    assert module.weight.device == torch.device("meta")


def test_the_norm_is_over_all_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    assert Engine().grad_norm(parameters).item() == 0.0
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert Engine().grad_norm(iter(parameters)).item() == 5.0


@pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp"])
@pytest.mark.parametrize("launched", [False, True])
def test_one_process_is_not_parallel(parallel: str, launched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        if launched:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    engine = Engine.from_environment(parallel=parallel, device="cpu")  # type: ignore[arg-type]
    assert engine == Engine()


def test_errors_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="parallel must be 'none', 'ddp' or 'fsdp', got 'tensor'"):
        Engine.from_environment(parallel="tensor")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision must be 'fp32' or 'bf16', got 'fp16'"):
        Engine().wrap(nn.Linear(1, 1), layers=[], precision="fp16")  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="parallel must be 'ddp' or 'fsdp' with 2 processes, got 'none'"):
        Engine.from_environment(device="cpu")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number from 1, got 'two'"):
        Engine.from_environment(device="cpu")


def test_every_process_of_a_machine_needs_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="there are 2, and LOCAL_RANK is 2"):
        Engine.from_environment(device="cuda")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked in ("cuda", "cuda:1"):
        with pytest.raises(
            ValueError, match=f"device must be cpu, because torch finds no GPU .*, got '{asked}'"
        ):
            Engine.from_environment(device=asked)
