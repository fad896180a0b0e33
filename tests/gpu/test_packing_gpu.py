"""Rows of several texts on CUDA: compiled kernels under a mask for each row, and one graph for all batches.

Run with `pytest --gpu -m gpu tests/gpu`.
"""

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from bd3lm.diffusion import Counts
from bd3lm.models import BlockDiffusion, Causal, Layout, Packed, Transformer
from bd3lm.objectives import Autoregressive, BlockDiffusionLoss, Drafting, Objective, TokenBatch
from tests.gpu.test_attention_gpu import (
    CUDA,
    assert_same_loss,
    attention_and_gradients,
    loss_and_gradients,
    network,
    random_texts,
    relative,
)
from tests.oracles.networks import MASK, blocks_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32_and_nothing_but_compiled_kernels"),
]
OBJECTIVES: dict[str, Objective] = {
    "autoregressive": Autoregressive(mask_id=MASK),
    "blocks": BlockDiffusionLoss(reading=blocks_of(16)),
    "complementary": BlockDiffusionLoss(reading=blocks_of(4), masking=Counts(complementary=True)),
    "joint": BlockDiffusionLoss(
        reading=blocks_of(16, causal_clean=True, previous_token=True), next_token=0.5
    ),
    "two passes": BlockDiffusionLoss(reading=blocks_of(16), algorithm="two_pass"),
    "one block": BlockDiffusionLoss(reading=blocks_of(256)),
}


def documents(length: int, seed: int = 0, rows: int = 2, unit: int = 16) -> Tensor:
    """Rows of texts of random lengths, each of which begins where a block of `unit` does."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(rows, length // unit, generator=generator) < 0.3
    return begins.cumsum(1).repeat_interleave(unit, 1)


def batch_of(seed: int, length: int = 256) -> TokenBatch:
    """The first tokens of texts are given, and of every fourth block all but three tokens are absent."""
    numbers = documents(length, seed)
    whole = TokenBatch(random_texts(2, length, seed), torch.ones(2, length, dtype=torch.bool), None, numbers)
    absent = (torch.arange(length) % 64 >= 51).expand(2, -1)
    return TokenBatch(whole.tokens, ~whole.begins & ~absent, absent, numbers)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize(
    "inner",
    [
        Causal(256),
        BlockDiffusion(256, 16),
        BlockDiffusion(1024, 4),
        BlockDiffusion(528, 16, copies=2, causal_clean=True),
    ],
    ids=str,
)
def test_attention_and_its_gradients_are_those_of_the_dense_mask(inner, head_dim, dtype, tolerance):
    layout = Packed(inner, documents(inner.length).to(CUDA))
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 2, 2, layout.size, head_dim, generator=generator).to(CUDA, dtype)
    for queries in {(0, layout.size), layout.read}:
        flex = attention_and_gradients(tensors, layout, queries, "flex")
        dense = attention_and_gradients(tensors.double(), layout, queries, "dense")
        for name, found, expected in zip(("output", "query", "key", "value"), flex, dense, strict=True):
            assert found.isfinite().all(), f"{name} of queries {queries}"
            assert relative(found, expected) < tolerance, f"{name} of queries {queries}"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_cpu(name):
    objective, batch = OBJECTIVES[name], batch_of(0)
    exact = loss_and_gradients(network().double(), objective, batch)
    model = network().to(CUDA)
    for backend in ("dense", "flex", "auto"):
        model.attention_backend = backend
        assert_same_loss(loss_and_gradients(model, objective, batch), exact, 1e-4)


def test_drafts_are_those_of_the_cpu():
    objective, batch = Drafting(mask_id=MASK, masks=4), batch_of(0)
    exact = objective.loss(network(additions=4).double(), batch)
    found = objective.loss(network(additions=4).to(CUDA), batch)
    assert relative(found.nats.detach(), exact.nats.detach()) < 1e-4


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "two passes"])
def test_one_compiled_trunk_serves_every_batch_and_is_the_uncompiled_one(name):
    """Forward and backward: masks of a batch are inputs of the graph."""
    objective = OBJECTIVES[name]
    model, plain = network().to(CUDA), network().to(CUDA)
    plain.attention_backend = "dense"
    model.compile_trunk()
    graphs = []
    for seed in range(4):
        batch = batch_of(seed)
        found, expected = (loss_and_gradients(each, objective, batch) for each in (model, plain))
        assert_same_loss(found, expected, 1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * 4


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "two passes"])
def test_the_host_never_waits_for_a_loss(name, compiled):
    """Batches lie on the host, where they are checked; what is made of them is made on the device."""
    objective, model = OBJECTIVES[name], network().to(CUDA)
    if compiled:
        model.compile_trunk()

    def step(seed: int) -> None:
        batch = batch_of(seed)
        objective.loss(model, batch, objective.seeded_draws(batch, seed)).mean().backward()

    step(0)
    step(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_mask_for_each_row_is_made_of_what_the_layout_alone_is_made_of():
    """As the CPU makes it, whose squares are checked pair by pair."""
    inner: Layout = BlockDiffusion(1024, 4)
    numbers = documents(1024)
    here, there = Packed(inner, numbers), Packed(inner, numbers.to(CUDA))
    for queries in ((0, inner.size), inner.read):
        expected = here.block_mask(queries, granularity=64)
        found = there.block_mask(queries, CUDA, granularity=64)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def test_additions_at_every_position_train_compiled_and_decode_merged():
    """What the fused kernels write with merged weights is what the plain path writes with the additions."""

    def tuned() -> Transformer:
        return network(additions=4, additions_at="all").to(CUDA)

    objective, batch = OBJECTIVES["blocks"], batch_of(0)
    model, plain = tuned(), tuned()
    model.learn_beside()
    plain.learn_beside()
    plain.attention_backend = "dense"
    model.compile_trunk()
    losses = [objective.loss(each, batch, objective.seeded_draws(batch, 0)).mean() for each in (model, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == (".additions." not in name)
        if one.grad is not None:
            assert relative(one.grad, other.grad) < 1e-3, name
    merged, texts = model.merged().eval(), random_texts(2, 8).to(CUDA)
    with torch.no_grad():
        written = [
            each.head(each(texts, layout=Causal(8), cache=each.new_cache(2, segment=8)))
            for each in (merged, plain.eval())
        ]
    torch.testing.assert_close(*written, rtol=0, atol=1e-3)
