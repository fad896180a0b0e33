"""On CUDA the compiled kernels, their gradients and what is built on them equal the dense mask and the CPU.

Run with `pytest --gpu -m gpu tests/gpu`. Every test fails, rather than falls back to eager attention, when
torch refuses to compile one more layout.
"""

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import Counts, Purpose, Times, counter_uniform
from bd3lm.evaluation import exact_likelihood
from bd3lm.models import Bidirectional, BlockCausal, BlockDiffusion, Causal, Layout, Transformer
from bd3lm.models.attention import attend, render
from bd3lm.objectives import BlockDiffusionLoss, Objective, TokenBatch, TokenLoss
from tests.oracles.networks import CLEAN, MASK, blocks_of, logits_of, tiny_transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_float32_and_nothing_but_compiled_kernels"),
]
CUDA = torch.device("cuda")


def network(**config) -> Transformer:
    """Heads wide enough for the kernels, weights small enough for float32 to be compared."""
    return tiny_transformer(1, dtype=torch.float32, gain=1.0, hidden=64, heads=2, context=2048, **config)


def random_texts(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(CLEAN)[torch.randint(0, len(CLEAN), (rows, length), generator=generator)]


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return ((found - expected).norm() / expected.norm()).item()


# --- attention itself ---

LAYOUTS = [
    BlockDiffusion(12, 4),
    BlockDiffusion(16, 4),
    BlockDiffusion(40, 4),
    BlockDiffusion(128, 4),
    BlockDiffusion(128, 16),
    BlockDiffusion(132, 4),
    BlockDiffusion(132, 4, copies=2, causal_clean=True),
    BlockDiffusion(1024, 4),
    BlockDiffusion(1024, 16),
    BlockCausal(16, 16),
    BlockCausal(64, 4),
    BlockCausal(80, 16),
    BlockCausal(132, 4),
    Causal(132),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_flex_attention_and_its_gradients_are_those_of_the_dense_mask(layout, dtype, tolerance):
    """Against dense attention in float64, for all queries and for those that are read."""
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 2, 2, layout.size, 32, generator=generator).to(CUDA, dtype)
    for start, stop in {(0, layout.size), layout.read}:
        flex = attention_and_gradients(tensors, layout, (start, stop), "flex")
        dense = attention_and_gradients(tensors.double(), layout, (start, stop), "dense")
        for name, found, expected in zip(("output", "query", "key", "value"), flex, dense, strict=True):
            assert found.dtype == dtype
            assert relative(found, expected) < tolerance, f"{name} of queries {start}..{stop}"


def attention_and_gradients(
    tensors: Tensor, layout: Layout, queries: tuple[int, int], backend: str
) -> list[Tensor]:
    q, k, v, gradient = tensors.clone().unbind(0)
    q, gradient = q[:, :, slice(*queries)].contiguous(), gradient[:, :, slice(*queries)].contiguous()
    for leaf in (q, k, v):
        leaf.requires_grad_()
    output = attend(q, k, v, render(layout, queries, CUDA, backend))
    output.backward(gradient)
    return [output.detach(), q.grad, k.grad, v.grad]


def test_block_masks_are_what_cuda_uses_by_itself():
    assert render(BlockDiffusion(128, 4), (0, 128), CUDA).blocks is not None
    assert render(Causal(128), (0, 128), CUDA).causal
    assert render(Bidirectional(128), (0, 128), CUDA).blocks is None


def test_many_layouts_in_one_process_stay_compiled():
    """More than the 8 graphs that torch compiles of one function by default before it goes eager."""
    with torch.no_grad():
        for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            q, k, v = torch.randn(3, 1, 1, 1024, 32, device=CUDA)
            layout = BlockDiffusion(512, n)
            flex = attend(q, k, v, render(layout, (0, 1024), CUDA, "flex"))
            dense = F.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), attn_mask=layout.dense(device=CUDA)
            )
            assert relative(flex, dense) < 1e-5


# --- losses ---


def loss_and_gradients(
    model: Transformer, objective: Objective, batch: TokenBatch, *, autocast: bool = False
) -> tuple[TokenLoss, dict[str, Tensor]]:
    """On the model's device, with draws made on the CPU."""
    device = model.embedding.weight.device
    draws = objective.draw(*batch.tokens.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    batch = batch.to(device)
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = objective.loss(model, batch, None if draws is None else draws.to(device))
    loss.mean().backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_loss(found, expected, tolerance: float) -> None:
    assert expected[0].nats.sum() > 0
    assert relative(found[0].nats.detach(), expected[0].nats.detach()) < tolerance
    for name, gradient in found[1].items():
        assert relative(gradient, expected[1][name]) < 10 * tolerance, name


OBJECTIVES = {
    "counts": (132, blocks_of(4), Counts(), {}),
    "complementary": (128, blocks_of(16), Counts(complementary=True), {}),
    "causal clean": (132, blocks_of(4, causal_clean=True), Times(), {}),
    "time": (128, blocks_of(16), Times(), {"adaln": True, "time_conditioning": True}),
    "the token before": (132, blocks_of(4, previous_token=True), Counts(), {}),
    "one block": (132, blocks_of(132), Counts(), {}),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_and_gradients_are_the_same_for_flex_dense_two_pass_and_the_cpu(name):
    length, reading, masking, config = OBJECTIVES[name]
    batch = TokenBatch.of(random_texts(3, length), lengths=torch.tensor([length, length - 3, length // 2]))
    single, double = (
        BlockDiffusionLoss(reading=reading, masking=masking, algorithm=algorithm)
        for algorithm in ("single_pass", "two_pass")
    )
    exact = loss_and_gradients(network(**config).double(), single, batch)
    model = network(**config).to(CUDA)
    for backend in ("dense", "flex"):
        model.attention_backend = backend
        assert_same_loss(loss_and_gradients(model, single, batch), exact, 1e-4)
        assert_same_loss(loss_and_gradients(model, double, batch), exact, 1e-4)


def test_bfloat16_training_is_close_with_either_kernel():
    batch = TokenBatch.of(random_texts(8, 128))
    objective = BlockDiffusionLoss(reading=blocks_of(16))
    exact = loss_and_gradients(network().double(), objective, batch)
    model = network().to(CUDA)
    for backend in ("dense", "flex"):
        model.attention_backend = backend
        assert_same_loss(loss_and_gradients(model, objective, batch, autocast=True), exact, 3e-2)


def test_exact_likelihood_is_the_cpus():
    batch = TokenBatch.of(random_texts(3, 132), lengths=torch.tensor([132, 130, 67]))
    here = exact_likelihood(network().double(), batch, blocks_of(4))
    on_device = TokenBatch(tokens=batch.tokens.cuda(), scored=batch.scored.cuda(), absent=batch.absent.cuda())
    there = exact_likelihood(network().to(CUDA), on_device, blocks_of(4))
    torch.testing.assert_close(there.nll.cpu(), here.nll, rtol=0, atol=1e-4)
    torch.testing.assert_close(there.nelbo.cpu(), here.nelbo, rtol=0, atol=1e-4)
    assert torch.equal(there.tokens.cpu(), here.tokens)


# --- decoding ---


@torch.no_grad()
def test_cached_decoding_is_the_uncached_text():
    """Rows of different lengths, block by block, against compiled attention over the whole text."""
    model, lengths = network().to(CUDA), torch.tensor([0, 64, 128])
    prompts = random_texts(3, 128).masked_fill(torch.arange(128) >= lengths.unsqueeze(1), MASK).to(CUDA)
    cache = model.new_cache(3, segment=128)
    model(prompts, layout=BlockCausal(128, 16, keys_only=True), cache=cache)
    cache.advance(lengths.to(CUDA))
    texts = [prompts[row, : int(length)] for row, length in enumerate(lengths)]
    for seed in (1, 2):
        noisy, block = (random_texts(3, 16, seed + s).to(CUDA) for s in (0, 10))
        cached = logits_of(model, noisy, Bidirectional(16), cache=cache)
        for row, text in enumerate(texts):
            whole = torch.cat((text, noisy[row])).unsqueeze(0)
            uncached = logits_of(model, whole, BlockCausal(whole.shape[1], 16))[0, -16:]
            torch.testing.assert_close(cached[row], uncached, rtol=0, atol=1e-3)
            texts[row] = torch.cat((text, block[row]))
        model(block, layout=Bidirectional(16, keys_only=True), cache=cache)
        cache.advance(16)


@torch.no_grad()
def test_a_hundred_thousand_positions_later_the_same_text_has_the_same_logits():
    model, text = network().to(CUDA), random_texts(2, 64).to(CUDA)
    near, far = (model.new_cache(2, segment=4, window=16) for _ in range(2))
    far.ends = torch.tensor([100_000, 99_999], device=CUDA)
    far.starts = far.ends.clone()
    for start in range(0, 64, 4):
        block = text[:, start : start + 4]
        here, there = (logits_of(model, block, Bidirectional(4), cache=cache) for cache in (near, far))
        torch.testing.assert_close(here, there, rtol=0, atol=1e-4)
        near.advance(4)
        far.advance(4)


def test_counter_based_noise_is_the_same_number_on_every_device():
    seeds = torch.tensor([0, 1, -1, 2**62, -(2**63)]).unsqueeze(1)
    positions = torch.tensor([0, 1, 1023, 100_000, 2**40])
    for purpose in Purpose:
        here = counter_uniform(seeds, positions, purpose, 1000)
        there = counter_uniform(seeds.to(CUDA), positions.to(CUDA), purpose, 1000)
        assert there.is_cuda
        assert torch.equal(here, there.cpu())
