"""A whole training step on CUDA: the host never waits, and the losses are those of a CPU.

With heads of 64, for which FlexAttention's tiles are tuned. Run with `pytest --gpu -m gpu tests/gpu`.
"""

import math
from pathlib import Path

import pytest
import torch
import torch._dynamo

from bd3lm.diffusion import Times
from bd3lm.models import BlockDiffusion, BlockReading, Transformer, render
from bd3lm.models.rotary import rotated_parts, rotation
from bd3lm.objectives import BlockDiffusionLoss, Objective, TokenBatch
from bd3lm.training import Engine, OptimizerSettings, Trainer
from tests.gpu.test_attention_gpu import attention_and_gradients, relative
from tests.gpu.test_baselines_gpu import objectives
from tests.training.tiny import (
    AR,
    COUNTS,
    MASK,
    VOCABULARY,
    Sentences,
    network,
    rows,
    sentences,
    tiny_trainer,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32_and_nothing_but_compiled_kernels"),
]
CUDA = torch.device("cuda")
CONTEXT = 256
OBJECTIVES: dict[str, Objective] = {
    "AR": AR,
    "blocks of 4": COUNTS,
    "one block": BlockDiffusionLoss(reading=BlockReading(block_size=CONTEXT, mask_id=MASK), masking=Times()),
}
BASELINES = objectives(VOCABULARY, MASK)
BLOCKS = [(256, 1), (256, 4), (256, 16), (256, 64), (255, 3), (255, 5), (1024, 4), (1024, 16)]


def wide_network(context: int = CONTEXT, dropout: float = 0.0, told_time: bool = False) -> Transformer:
    """Two heads of 64, with weights small enough for bfloat16 to be compared."""
    shape = {"hidden": 128, "heads": 2, "context": context, "adaln": told_time}
    model = network(dropout=dropout, time_conditioning=told_time, **shape)
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            matrix.div_(3.0)
    return model


def trainer_on(
    device: torch.device, folder: Path, objective: Objective, dropout=0.0, told_time=False, **settings
) -> Trainer:
    return tiny_trainer(
        folder,
        objective,
        model=wide_network(dropout=dropout, told_time=told_time).to(device),
        engine=Engine(device=device),
        validate=False,
        data=Sentences(CONTEXT),
        optimizer=OptimizerSettings(lr=1e-3, warmup_steps=2),
        **settings,
    )


# --- waiting ---


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [*OBJECTIVES, *BASELINES])
def test_the_host_never_waits_for_a_step(name, compiled, tmp_path):
    """Whatever the masks: each step hides another number of tokens.

    Baselines have networks that are told the time, as in the presets.
    """
    objective, told_time = (OBJECTIVES | BASELINES)[name], name in BASELINES
    trainer = trainer_on(CUDA, tmp_path, objective, dropout=0.1, told_time=told_time, compile=compiled)
    for _ in range(2):
        trainer.train_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.step == 5
    assert all(weight.isfinite().all() for weight in trainer.network.parameters())


def test_micro_batches_are_not_waited_for_either(tmp_path):
    trainer = trainer_on(CUDA, tmp_path, COUNTS, micro_batch=2)
    for _ in range(2):
        trainer.train_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- losses ---


@pytest.mark.parametrize(
    ("precision", "compiled", "tolerance"),
    [("fp32", False, 1e-3), ("fp32", True, 1e-3), ("bf16", False, 0.01), ("bf16", True, 0.01)],
)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_those_of_the_cpu(name, precision, compiled, tolerance, tmp_path):
    """Masks and seeds of dropout are drawn on the host on either device, so both train on the same ones."""
    trainer_on(torch.device("cpu"), tmp_path / "cpu", OBJECTIVES[name], dropout=0.1, steps=4).run()
    there = trainer_on(
        CUDA, tmp_path / "gpu", OBJECTIVES[name], dropout=0.1, steps=4, precision=precision, compile=compiled
    )
    there.run()
    expected, found = (
        [float(row["train_nats"]) for row in rows(tmp_path / where)] for where in ("cpu", "gpu")
    )
    assert len(expected) == 4
    assert all(math.isfinite(loss) for loss in found)
    assert found == pytest.approx(expected, rel=tolerance)
    assert found[0] == pytest.approx(expected[0], rel=tolerance / 10 if precision == "fp32" else tolerance)


# --- the tuned tiles ---


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("length", "block_size"), BLOCKS)
def test_attention_is_finite_and_that_of_the_dense_mask(length, block_size, head_dim, dtype, tolerance):
    """Forward and backward, for all queries and for those that are read."""
    layout = BlockDiffusion(length, block_size)
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 2, 2, layout.size, head_dim, generator=generator).to(CUDA, dtype)
    for queries in ((0, layout.size), layout.read):
        flex = attention_and_gradients(tensors, layout, queries, "flex")
        dense = attention_and_gradients(tensors.double(), layout, queries, "dense")
        for name, found, expected in zip(("output", "query", "key", "value"), flex, dense, strict=True):
            assert found.isfinite().all(), f"{name} of queries {queries}"
            assert relative(found, expected) < tolerance, f"{name} of queries {queries}"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("length", "block_size"), BLOCKS[:6])
def test_a_network_learns_the_same_by_either_kernel(length, block_size, compiled):
    """In bfloat16, as it is trained: the loss and every gradient, flex against dense."""
    objective = BlockDiffusionLoss(reading=BlockReading(block_size=block_size, mask_id=MASK))
    batch = TokenBatch.of(sentences(4, 0, length))
    draws = objective.seeded_draws(batch, 0)
    found = {}
    for backend in ("dense", "flex"):
        model = wide_network(length).to(CUDA)
        model.attention_backend = backend
        if compiled:
            model.compile_trunk()
        with torch.autocast("cuda", torch.bfloat16):
            loss = objective.loss(model, batch, draws).mean()
        loss.backward()
        found[backend] = {"loss": loss.detach(), **{k: p.grad for k, p in model.named_parameters()}}
    for name, expected in found["dense"].items():
        assert found["flex"][name].isfinite().all(), name
        assert relative(found["flex"][name], expected) < (0.02 if name == "loss" else 0.1), name


def test_masks_are_fine_where_that_was_measured():
    mask = render(BlockDiffusion(256, 4), (0, 512), CUDA)
    assert mask.blocks is not None
    assert mask.fine == (torch.cuda.get_device_capability() == (9, 0))
    assert mask.blocks.BLOCK_SIZE == ((64, 64) if mask.fine else (128, 128))


# --- rotary positions ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (3, 32), (2, 20)])
def test_the_gradient_of_rotated_parts_is_joined_by_one_kernel(heads: int, head_dim: int, dtype):
    """The compiled gradient, which the kernel writes, is that of plain operations."""
    rows, positions = 3, 50
    projected = torch.randn(rows, positions, 3 * heads * head_dim, device=CUDA).to(dtype)
    turn = rotation(torch.arange(positions, device=CUDA), head_dim, base=1e4, dtype=torch.float32)
    turn = turn[0].unsqueeze(-2), turn[1].unsqueeze(-2)
    gradients = [torch.randn(rows, heads, positions, head_dim, device=CUDA).to(dtype) for _ in range(3)]

    def run(parts_of):
        leaf = projected.clone().requires_grad_()
        parts = [part.transpose(1, 2) for part in parts_of(leaf, turn, heads)]
        return *parts, *torch.autograd.grad(parts, leaf, gradients)

    found = run(torch.compile(rotated_parts, dynamic=False, fullgraph=True))
    for mine, theirs in zip(found, run(rotated_parts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
