"""The single pass, the two passes of Algorithm 1 and one pass a block: the same numbers and gradients."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import ClippedTimes, Counts, Times, conditioning_noise
from bd3lm.models import Transformer
from bd3lm.objectives import Autoregressive, BlockDenoiser, BlockDiffusionLoss, TokenBatch
from tests.oracles.likelihood import block_nats
from tests.oracles.networks import (
    CLEAN,
    MASK,
    AfterPrevious,
    blocks_of,
    mask_of,
    network_of,
    tiny_transformer,
)

pytestmark = pytest.mark.sweep(3)

CONDITIONINGS = {"plain": {}, "adaln": {"adaln": True}, "time": {"adaln": True, "time_conditioning": True}}
SHAPES = [(6, 1), (6, 2), (6, 3), (4, 4)]  # the last is one block, which has no clean half


def random_texts(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(CLEAN)[torch.randint(0, len(CLEAN), (rows, length), generator=generator)]


def block_by_block(
    model: Transformer,
    texts: Tensor,
    masked: Tensor,
    block_size: int,
    causal_clean: bool,
    noise: Tensor | None,
) -> Tensor:
    """One network call for every row, copy and block: (rows, copies, length)."""
    nats = [
        torch.cat(
            [
                block_nats(
                    model,
                    texts[row : row + 1],
                    start,
                    block_size,
                    masked[row, copy, start : start + block_size].nonzero().flatten().tolist(),
                    causal_clean=causal_clean,
                    noise=None if noise is None else noise[row, start : start + 1],
                )
                for start in range(0, texts.shape[1], block_size)
            ],
            dim=1,
        )
        for row in range(masked.shape[0])
        for copy in range(masked.shape[1])
    ]
    return torch.cat(nats).view(masked.shape)


def gradients(model: Transformer, nats: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every token has its own weight."""
    weight = torch.linspace(0.5, 2.0, nats.numel(), dtype=torch.float64).view_as(nats)
    model.zero_grad()
    (nats * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("length", "block_size", "causal_clean", "previous_token", "conditioning", "copies"),
    [  # every other one of all: of any three of the four, each value meets each
        (*SHAPES[shape], bool(causal), bool(previous), *(("plain", 2), ("adaln", 1), ("time", 2))[told])
        for shape, causal, previous, told in product(range(len(SHAPES)), range(2), range(2), range(3))
        if (shape + causal + previous + told) % 2 == 0
    ],
)
def test_both_algorithms_are_one_pass_a_block(
    length, block_size, causal_clean, previous_token, conditioning, copies
):
    model = tiny_transformer(4, **CONDITIONINGS[conditioning])
    assert_both_algorithms_agree(
        model, random_texts(3, length), block_size, causal_clean, previous_token, copies
    )


@pytest.mark.parametrize(
    ("family", "block_size", "causal_clean", "previous_token", "copies"),
    [("Llama", 3, True, True, 1), ("Llama", 2, False, False, 2), ("Qwen3", 3, True, False, 2)],
)
def test_both_algorithms_are_one_pass_a_block_of_networks_of_today(
    family, block_size, causal_clean, previous_token, copies
):
    """Their mask, which lies beside the vocabulary, learns too."""
    model, texts = network_of(family, 4), random_texts(3, 6) % 3
    assert_both_algorithms_agree(model, texts, block_size, causal_clean, previous_token, copies)
    assert model.mask_vector.grad.any()


def assert_both_algorithms_agree(model, texts, block_size, causal_clean, previous_token, copies):
    """With one pass a block, and with each other, gradients too."""
    length = texts.shape[1]
    generator = torch.Generator().manual_seed(1)
    masked = torch.rand(3, copies, length, generator=generator) < 0.6
    noise = None
    if model.uses_noise:
        noise = torch.rand(3, length // block_size, generator=generator).repeat_interleave(block_size, 1)
    asked = AfterPrevious(model) if previous_token else model
    expected = block_by_block(asked, texts, masked, block_size, causal_clean, noise)
    expected_gradients = gradients(model, expected)
    assert (expected > 0).equal(masked)
    for algorithm in ("single_pass", "two_pass"):
        denoiser = BlockDenoiser(
            model,
            TokenBatch.of(texts, score_first=True),
            blocks_of(
                block_size,
                mask_id=mask_of(model),
                causal_clean=causal_clean,
                previous_token=previous_token,
            ),
            algorithm=algorithm,
        )
        nats = denoiser.nats(masked, noise=noise)
        torch.testing.assert_close(nats, expected, rtol=0, atol=1e-10)
        for name, gradient in gradients(model, nats).items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize(
    ("masking", "model"),
    [
        (Times(), tiny_transformer(5)),
        (Times(), tiny_transformer(5, **CONDITIONINGS["time"])),
        (ClippedTimes(low=0.3, high=0.8), tiny_transformer(5, **CONDITIONINGS["time"])),
        (Counts(), tiny_transformer(5)),
        (Counts(complementary=True), tiny_transformer(5, **CONDITIONINGS["adaln"])),
        (Counts(), network_of("Llama", 5)),
        (Counts(complementary=True), network_of("Qwen3", 5)),
    ],
    ids=["Times", "Times, told", "Clipped, told", "Counts", "Complementary, told", "Llama", "Qwen3"],
)
def test_both_algorithms_give_the_same_training_loss_and_gradient(masking, model):
    texts = random_texts(4, 8) % (4 if model.mask_vector is None else 3)
    batch = TokenBatch.of(texts, prompts=torch.tensor([1, 0, 3, 8]), lengths=torch.tensor([8, 5, 8, 8]))
    losses, slopes = [], []
    for algorithm in ("single_pass", "two_pass"):
        reading = blocks_of(4, mask_id=mask_of(model))
        objective = BlockDiffusionLoss(reading=reading, masking=masking, algorithm=algorithm)
        loss = objective(model, batch, generator=torch.Generator().manual_seed(3))
        losses.append(loss.nats)
        slopes.append(gradients(model, loss.minimised))
    assert losses[0].sum() > 0
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-10)
    for name, slope in slopes[0].items():
        torch.testing.assert_close(slope, slopes[1][name], rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("length", [3, 6])
def test_each_block_is_told_its_own_noise_level(length):
    """σ = −log α of the block, zero for the clean text; checked block by block."""
    model = tiny_transformer(6, **CONDITIONINGS["time"])
    texts = random_texts(3, length)
    objective = BlockDiffusionLoss(reading=blocks_of(3), masking=Times())
    draws = objective.draw(3, length, generator=torch.Generator().manual_seed(0), device="cpu")
    batch = TokenBatch.of(texts, score_first=True)
    masks = objective.masking(draws, batch.scored)
    noise = -torch.log(1 - draws.levels).repeat_interleave(3, 1)  # the linear schedule: α = 1 − t
    expected = block_by_block(model, texts, masks.masked, 3, False, noise) * masks.weight
    torch.testing.assert_close(
        objective.loss(model, batch, draws).nats, expected.sum(1), rtol=1e-5, atol=1e-5
    )


def test_the_noise_level_stays_finite_at_full_masking():
    rates = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(conditioning_noise(rates), torch.tensor([0.0, math.log(2), math.log(1000)]))


def test_absent_tokens_are_masked_whatever_stands_there():
    model, masked = tiny_transformer(7), torch.ones(2, 1, 6, dtype=torch.bool)
    lengths = torch.tensor([4, 5])
    masked[:, 0] = torch.arange(6) < lengths.unsqueeze(1)
    nats = []
    for filler in (0, 1, 3, MASK):
        texts = random_texts(2, 6).masked_fill(~masked[:, 0], filler)
        for algorithm in ("single_pass", "two_pass"):
            batch = TokenBatch.of(texts, score_first=True, lengths=lengths)
            denoiser = BlockDenoiser(model, batch, blocks_of(3), algorithm=algorithm)
            nats.append(denoiser.nats(masked))
    for other in nats[1:]:
        torch.testing.assert_close(other, nats[0], rtol=0, atol=1e-12)


def test_a_network_is_asked_for_logits_at_hidden_tokens_only():
    model, texts = tiny_transformer(8), random_texts(2, 6)
    asked = []
    model.output.register_forward_hook(lambda _module, inputs, _out: asked.append(inputs[0].shape))
    masked = torch.zeros(2, 1, 6, dtype=torch.bool)
    masked[0, 0, 2:5] = True
    batch = TokenBatch.of(texts)
    nats = BlockDenoiser(model, batch, blocks_of(3)).nats(masked)
    assert asked == [(3, 16)]
    assert nats[~masked].sum() == 0
    nothing = BlockDenoiser(model, batch, blocks_of(3)).nats(torch.zeros_like(masked))
    assert nothing.sum() == 0


def test_bad_input_is_refused():
    model, batch = tiny_transformer(0), TokenBatch.of(random_texts(2, 6))
    with pytest.raises(ValueError, match=r"length must be a positive multiple .* length 6 and block_size 4"):
        BlockDenoiser(model, batch, blocks_of(4))


# --- the auxiliary next-token loss of the causal clean text ---


@pytest.mark.parametrize("algorithm", ["single_pass", "two_pass"])
@pytest.mark.parametrize(("length", "block_size"), SHAPES)
def test_the_next_token_loss_is_autoregression_and_leaves_the_rest_alone(length, block_size, algorithm):
    model, batch = tiny_transformer(9), TokenBatch.of(random_texts(3, length))
    plain, with_next = (
        BlockDiffusionLoss(
            reading=blocks_of(block_size, causal_clean=True),
            algorithm=algorithm,
            next_token=weight,
        )(model, batch, generator=torch.Generator().manual_seed(0))
        for weight in (0.0, 0.3)
    )
    torch.testing.assert_close(with_next.nats, plain.nats, rtol=0, atol=1e-10)
    expected = 0.3 * Autoregressive(mask_id=MASK)(model, batch).nats
    torch.testing.assert_close(with_next.auxiliary, expected, rtol=0, atol=1e-10)
    assert plain.auxiliary is None


def test_the_gradient_of_the_next_token_loss_is_the_same_in_both_algorithms():
    model, batch = tiny_transformer(9), TokenBatch.of(random_texts(3, 6))
    slopes = []
    for algorithm in ("single_pass", "two_pass"):
        objective = BlockDiffusionLoss(
            reading=blocks_of(2, causal_clean=True),
            algorithm=algorithm,
            next_token=0.3,
        )
        loss = objective(model, batch, generator=torch.Generator().manual_seed(0))
        slopes.append(gradients(model, loss.minimised))
    for name, slope in slopes[0].items():
        torch.testing.assert_close(slope, slopes[1][name], rtol=1e-8, atol=1e-10, msg=name)


def test_absent_tokens_have_no_next_token_loss_whatever_stands_there():
    texts, lengths = random_texts(2, 6), torch.tensor([4, 5])
    padded = texts.masked_fill(torch.arange(6) >= lengths.unsqueeze(1), MASK)
    objective = BlockDiffusionLoss(reading=blocks_of(3, causal_clean=True), next_token=0.3)
    losses = [
        objective(
            tiny_transformer(9),
            TokenBatch.of(t, lengths=lengths),
            generator=torch.Generator().manual_seed(0),
        ).auxiliary
        for t in (texts, padded)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-10)


def test_the_next_token_loss_needs_a_causal_clean_text():
    with pytest.raises(ValueError, match="next_token needs causal_clean=True"):
        BlockDiffusionLoss(reading=blocks_of(2), next_token=0.3)
    with pytest.raises(ValueError, match=r"next_token must be finite and not negative, got -0\.1"):
        BlockDiffusionLoss(reading=blocks_of(2, causal_clean=True), next_token=-0.1)


def test_given_masks_are_no_hidden_tokens():
    """A mask in the clean text is shown as it is, also where masked tokens are shown with the one before."""
    model, texts = tiny_transformer(4), random_texts(3, 6)
    texts[:, 1] = MASK
    batch = TokenBatch.of(texts, prompts=torch.tensor([2, 2, 2]))
    masked = torch.zeros(3, 1, 6, dtype=torch.bool)
    masked[..., 2:] = torch.rand(3, 1, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    single, double = (
        BlockDenoiser(model, batch, blocks_of(2, previous_token=True), algorithm=algorithm).nats(masked)
        for algorithm in ("single_pass", "two_pass")
    )
    torch.testing.assert_close(single, double, rtol=0, atol=1e-10)
