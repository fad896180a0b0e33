"""Recomputed layers: the same gradients to the bit, with less memory kept."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bd3lm.diffusion import ClippedTimes
from bd3lm.models import BlockReading, Transformer, TransformerConfig
from bd3lm.objectives import Autoregressive, BlockDiffusionLoss, Drafting, Objective, TokenBatch
from bd3lm.training import Engine
from tests.oracles.networks import FAMILIES
from tests.oracles.strangers import PlainConfig
from tests.training.scenarios import ROWS, SETTINGS, Run
from tests.training.tiny import COUNTS, rows, tiny_trainer

VOCABULARY, LENGTH = 23, 16
READING = BlockReading(block_size=4, mask_id=VOCABULARY)
JOINT = BlockReading(block_size=4, mask_id=VOCABULARY, causal_clean=True)
OBJECTIVES: dict[str, Objective] = {
    "autoregressive": Autoregressive(mask_id=VOCABULARY),
    "one pass": BlockDiffusionLoss(reading=READING),
    "two passes": BlockDiffusionLoss(reading=READING, algorithm="two_pass"),
    "two passes, joint": BlockDiffusionLoss(reading=JOINT, algorithm="two_pass", next_token=0.5),
    "joint": BlockDiffusionLoss(reading=JOINT, next_token=0.5, masking=ClippedTimes()),
    "drafter": Drafting(mask_id=VOCABULARY, masks=4),
}


def gradients(
    objective: Objective, *, recompute: bool, compiled: bool = False, dropout: float = 0.1, **shape: Any
) -> tuple[float, dict[str, torch.Tensor | None]]:
    torch.manual_seed(3)
    values = {"layers": 3, "hidden": 16, "heads": 4, "context": LENGTH} | shape
    values["mask_vector"] = True
    values["additions"] = 2 if isinstance(objective, Drafting) else 0
    network = Transformer(TransformerConfig(vocab_size=VOCABULARY, dropout=dropout, **values))
    network.attention_backend = "dense"
    if isinstance(objective, Drafting):
        network.learn_beside()
    if recompute:
        network.recompute_layers()
    if compiled:
        network.compile_trunk()
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    draws = objective.draw(3, LENGTH, generator=generator, device="cpu")
    loss = objective.loss(network, TokenBatch.of(tokens), draws).minimised
    loss.backward()
    return loss.item(), {name: each.grad for name, each in network.named_parameters()}


def same(objective: Objective, **options: Any) -> None:
    nats, expected = gradients(objective, recompute=False, **options)
    again, found = gradients(objective, recompute=True, **options)
    assert again == nats
    assert any(each is not None and bool(each.any()) for each in expected.values())
    for name, gradient in expected.items():
        other = found[name]
        if gradient is None:
            assert other is None, name
        else:
            assert other is not None, name
            assert torch.equal(other, gradient), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_the_same_to_the_bit(name: str, family: str) -> None:
    """With dropout, which gets its seeds from outside the layers."""
    same(OBJECTIVES[name], **FAMILIES[family])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one pass", "two passes"])
def test_gradients_are_the_same_when_compiled(name: str) -> None:
    same(OBJECTIVES[name], compiled=True)


def test_a_run_is_the_same(tmp_path: Path) -> None:
    for recompute in (False, True):
        run = tiny_trainer(tmp_path / f"{recompute}", COUNTS, recompute_activations=recompute)
        run.run()
    assert rows(tmp_path / "True") == rows(tmp_path / "False")


def test_a_network_that_cannot_recompute_is_refused(tmp_path: Path) -> None:
    network: Any = PlainConfig(vocab_size=13, context=8, width=8).build()
    with pytest.raises(
        ValueError, match="recompute_activations must be false for a network of kind plain_st"
    ):
        tiny_trainer(tmp_path, COUNTS, model=network, recompute_activations=True)


def sharded(parallel: str, compiled: bool) -> list[list[float]]:
    """Norms of three steps of two processes, without and with recomputation."""
    found = []
    with Engine.from_environment(parallel=parallel, device="cpu") as engine:  # type: ignore[arg-type]
        for recompute in (False, True):
            run = Run(engine)
            if recompute:
                run.network.recompute_layers()
            if compiled:
                run.network.compile_layers()
            found.append([run.train(step, micro_batches=2).item() for step in range(3)])
    assert ROWS % 4 == 0
    assert SETTINGS.clip_norm is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "compiled"), [("ddp", False), ("fsdp", False), ("fsdp", True)])
def test_two_processes_give_the_same_run_with_recomputation(parallel: str, compiled: bool) -> None:
    from tests.training.processes import run_processes

    for once, twice in run_processes(
        "tests.models.test_recompute.sharded", parallel, compiled, world=2, timeout=200.0
    ):
        assert once == (pytest.approx(twice, rel=1e-6) if compiled else twice)


@pytest.mark.slow
def test_the_peak_of_memory_is_lower() -> None:
    """Twelve layers over 8,192 positions: about 700 MB are kept without recomputation, 50 with it."""
    code = """
import resource, sys, torch
from bd3lm.models import Bidirectional, TransformerConfig
network = TransformerConfig(vocab_size=16, layers=12, hidden=128, heads=2, context=512, dropout=0.0).build()
if sys.argv[1] == "again":
    network.recompute_layers()
tokens = torch.randint(16, (16, 512))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
network(tokens, layout=Bidirectional(512)).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = {}
    for how in ("once", "again"):
        done = subprocess.run(
            [sys.executable, "-c", code, how],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "100000", "OMP_NUM_THREADS": "1"},
        )
        found[how] = int(done.stdout)
    assert found["again"] < 0.4 * found["once"], found
