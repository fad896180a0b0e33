"""On CUDA the engine, the optimizer, the EMA and checkpoints do what they do on the CPU, without waiting.

Run with `pytest --gpu -m gpu tests/gpu`. One GPU is one process: the wrappers run over a group of one.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bd3lm.training.checkpoint import CheckpointStore
from bd3lm.training.distributed import Engine, Parallel
from tests.training.scenarios import Run, difference, fingerprint, gradients_of, whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PARALLEL = ["none", "ddp", "fsdp"]


@pytest.fixture(scope="module", autouse=True)
def _group_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.cuda.set_device(0)
    meeting = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def engine(parallel: Parallel) -> Engine:
    return Engine(parallel=parallel, device=torch.device("cuda", 0))


def on_cpu(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else whole(tensor).cpu() for name, tensor in tensors.items()}


def test_the_environment_gives_this_process_its_gpu() -> None:
    assert Engine.from_environment() == engine("none")


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_gpu_trains_as_the_cpu(parallel: Parallel) -> None:
    cpu, gpu = Run(Engine()), Run(engine(parallel))
    cpu.backward(0)
    gpu.backward(0, micro_batches=2)
    assert difference(on_cpu(gradients_of(gpu)), gradients_of(cpu)) < 1e-5
    for run in (cpu, gpu):
        run.update()
    for step in range(1, 4):
        torch.testing.assert_close(gpu.train(step).cpu(), cpu.train(step), rtol=1e-4, atol=0.0)
    assert difference(on_cpu(gpu.named), dict(cpu.named)) < 1e-4
    assert difference(on_cpu(gpu.ema.tensors()), dict(cpu.ema.tensors())) < 1e-4


def test_bfloat16_shards_keep_float32_parameters_and_gradients() -> None:
    cpu, gpu = Run(Engine()), Run(engine("fsdp"), precision="bf16")
    cpu.backward(0)
    gpu.backward(0, micro_batches=2)
    assert 1e-4 < difference(on_cpu(gradients_of(gpu)), gradients_of(cpu)) < 0.1


@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_host_does_not_wait_for_a_step(parallel: Parallel) -> None:
    run = Run(engine(parallel))
    run.train(0)
    run.backward(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_checkpoint_travels_from_gpu_to_cpu_and_back(parallel: Parallel, tmp_path: Path) -> None:
    gpu, cpu, again = Run(engine(parallel)), Run(Engine()), Run(engine(parallel))
    for step in range(2):
        gpu.train(step)
    store = CheckpointStore(tmp_path)
    store.save(1, gpu.groups(), {}, engine=gpu.engine)
    store.load_into(cpu.groups(), engine=cpu.engine)
    assert fingerprint(cpu.groups()) == fingerprint(gpu.groups())
    store.save(2, cpu.groups(), {}, engine=cpu.engine)
    store.load_into(again.groups(), engine=again.engine)
    assert fingerprint(again.groups()) == fingerprint(gpu.groups())
    gpu.train(2)
    again.train(2)  # the restored optimizer goes on; sums on a GPU have no fixed order
    assert difference(on_cpu(again.named), on_cpu(gpu.named)) < 1e-5


def test_raw_weights_return_exactly_after_the_averages() -> None:
    run = Run(engine("fsdp"))
    for step in range(3):
        run.train(step)
    before, raw = fingerprint({"model": run.named}), run.evaluate(9)
    with run.ema.swapped_in():
        assert (run.evaluate(9) / raw - 1).abs().item() > 1e-3
    assert torch.equal(run.evaluate(9), raw)
    assert fingerprint({"model": run.named}) == before
