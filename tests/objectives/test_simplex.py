"""SSD-LM's loss: one pass over all blocks is one pass a block, and it learns what the noise has left."""

import math

import pytest
import torch
from torch import Tensor

from bd3lm.diffusion import Draws, LevelSampler, SquaredCosine, derive_seed
from bd3lm.objectives import SimplexDiffusionLoss, TokenBatch
from tests.oracles.networks import CLEAN, MASK, tiny_transformer
from tests.oracles.simplex import OpenNetwork, alpha_bar, simplex_nats

CONDITIONINGS = {"plain": {}, "adaln": {"adaln": True}, "time": {"adaln": True, "time_conditioning": True}}
SHAPES = [(6, 1), (6, 2), (7, 3), (5, 4), (4, 4), (3, 4)]  # whole blocks or not; the last two are one block
V = 4


def random_texts(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(CLEAN)[torch.randint(0, len(CLEAN), (rows, length), generator=generator)]


def drawn(objective: SimplexDiffusionLoss, rows: int, length: int, seed: int = 0) -> Draws:
    return objective.draw(rows, length, generator=torch.Generator().manual_seed(seed), device="cpu")


def at_time(draws: Draws, t: int, steps: int) -> Draws:
    """The same noise, with every block at step t."""
    return Draws(torch.full_like(draws.levels, t / steps), draws.spare, draws.tokens)


def row_noise(draws: Draws, row: int) -> Tensor:
    """A generator for each row, seeded by the bits of a number drawn for it, as the objective says."""
    bits = int(draws.spare[row, 0].view(torch.int64))
    generator = torch.Generator().manual_seed(derive_seed("simplex", bits))
    return torch.randn(draws.tokens.shape[1], V, generator=generator)


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize(("length", "block_size"), SHAPES)
def test_one_pass_is_one_pass_a_block_number_by_number(length, block_size, conditioning):
    """Given tokens keep their almost one-hot, absent ones and the missing end of the last block are masks."""
    model = tiny_transformer(4, **CONDITIONINGS[conditioning])
    texts = random_texts(4, length)
    batch = TokenBatch.of(
        texts,
        prompts=torch.tensor([0, 1, 2, 0]),
        lengths=torch.tensor([length, length, length - 1, max(length - 2, 1)]),
    )
    objective = SimplexDiffusionLoss(block_size=block_size, mask_id=MASK, steps=20, simplex_scale=2.0)
    draws = drawn(objective, 4, length)
    loss = objective.loss(model, batch, draws)
    for row in range(4):
        expected = simplex_nats(
            model,
            texts[row].tolist(),
            batch.scored[row].tolist(),
            batch.absent[row].tolist(),
            times=[math.ceil(level * 20) for level in draws.levels[row].tolist()],
            steps=20,
            normal=row_noise(draws, row),
            block_size=block_size,
            mask_id=MASK,
            scale=2.0,
        )
        # Noise and simplex are float32, and so are the levels that the network is told.
        torch.testing.assert_close(loss.nats[row].detach(), expected.detach(), rtol=2e-5, atol=2e-5)
    assert loss.weight.equal(batch.scored.double())
    assert (loss.nats > 0).equal(batch.scored)


def test_a_rank_or_micro_batch_has_the_noise_of_its_rows():
    model, batch = tiny_transformer(4), TokenBatch.of(random_texts(6, 7))
    objective = SimplexDiffusionLoss(block_size=3, mask_id=MASK)
    draws = drawn(objective, 6, 7)
    whole = objective.loss(model, batch, draws).nats
    parts = [
        objective.loss(model, batch[rows], draws[rows]).nats
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)
    again = objective.loss(model, batch, draws).nats
    assert torch.equal(again, whole)
    other = objective.loss(model, batch, drawn(objective, 6, 7, seed=1)).nats
    assert (other - whole).abs().sum() > 0.1


def test_rows_and_blocks_have_noise_and_times_of_their_own():
    objective = SimplexDiffusionLoss(block_size=2, mask_id=MASK, steps=1000)
    seen = []

    def answer(inputs: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        seen.append((inputs, noise))
        return inputs

    texts = torch.zeros(3, 6, dtype=torch.long)
    draws = drawn(objective, 3, 6)
    objective.loss(OpenNetwork(V, answer, uses_noise=True), TokenBatch.of(texts, score_first=True), draws)
    inputs, noise = seen[0]
    assert len(inputs.flatten(0, 1).unique(dim=0)) == 18
    told = [[-math.log(max(alpha_bar(math.ceil(u * 1000), 1000), 1e-3)) for u in row] for row in draws.levels]
    torch.testing.assert_close(noise, torch.tensor(told).repeat_interleave(2, 1), rtol=1e-5, atol=1e-6)


def test_every_step_is_drawn_equally_often():
    objective = SimplexDiffusionLoss(block_size=1, mask_id=MASK, steps=10, levels=LevelSampler())
    times = (drawn(objective, 100, 10).levels * 10).ceil()
    assert times.unique().tolist() == list(range(1, 11))
    assert (torch.stack([(times == t).sum() for t in range(1, 11)]) == 100).all()  # strata leave no chance


# --- what the noise leaves ---


def test_a_network_that_knows_nothing_pays_log_v():
    """V without the mask, which is never predicted."""
    network = OpenNetwork(V, lambda inputs, positions, noise: torch.zeros_like(inputs))
    objective = SimplexDiffusionLoss(block_size=3, mask_id=MASK)
    loss = objective(network, TokenBatch.of(random_texts(5, 6)))
    assert loss.mean() == pytest.approx(math.log(V - 1))
    assert not objective.is_bound
    assert not objective.bounds(network)


@pytest.mark.parametrize("block_size", [2, 6])
def test_at_the_last_step_nothing_can_be_copied(block_size):
    """The outputs stop depending on the text of their own block as ᾱ → 0, and do not at T."""
    steps, a = 8, random_texts(4, 6)
    b = torch.tensor([1, 3, 0, 0])[a]  # every token another
    objective = SimplexDiffusionLoss(block_size=block_size, mask_id=MASK, steps=steps)
    draws = drawn(objective, 4, 6)
    states: list[Tensor] = []
    model = tiny_transformer(4)
    model.output.register_forward_hook(lambda _module, inputs, _out: states.append(inputs[0]))
    apart = []
    for t in range(1, steps + 1):
        for text in (a, b):
            objective.loss(model, TokenBatch.of(text, score_first=True), at_time(draws, t, steps))
        first, second = (s.unflatten(0, (4, 6))[:, :block_size] for s in states[-2:])
        apart.append(float((first - second).detach().abs().mean()))
    assert apart[0] > 0.1
    assert apart[-1] < 1e-12
    assert apart[-2] < 0.5 * apart[0]
    loss = objective.loss(model, TokenBatch.of(a, score_first=True), at_time(draws, steps, steps))
    assert loss.mean() > 0.5


def bayes(scale: float, sharper: float = 1.0) -> OpenNetwork:
    """p(x | w̃_t) of a uniformly random token: N(√ᾱ w̃_0, (1 − ᾱ)K²) gives logits 2√ᾱ w̃/((1 − ᾱ)K)."""

    def answer(inputs: Tensor, positions: Tensor, noise: Tensor | None) -> Tensor:
        assert noise is not None
        alpha = (-noise.double()).exp().unsqueeze(-1)
        return sharper * 2 * alpha.sqrt() / ((1 - alpha) * scale) * inputs.log()

    return OpenNetwork(V, answer, uses_noise=True)


def test_the_loss_falls_with_alpha_bar_and_bayes_cannot_be_beaten():
    """A calibrated posterior needs the noise to have exactly the variance and mean it claims."""
    scale, steps = 2.0, 10
    texts = random_texts(300, 20)
    batch = TokenBatch.of(texts, score_first=True)
    objective = SimplexDiffusionLoss(block_size=20, mask_id=MASK, steps=steps, simplex_scale=scale)
    draws = drawn(objective, 300, 20)
    losses = []
    for t in range(1, steps):
        at = at_time(draws, t, steps)
        loss = float(objective.loss(bayes(scale), batch, at).mean())
        losses.append(loss)
        expected = bayes_nats(alpha_bar(t, steps), scale)
        assert loss == pytest.approx(expected, abs=0.03)
        if 0.05 < loss < 1.0:
            for wrong in (0.7, 1.4):
                assert float(objective.loss(bayes(scale, wrong), batch, at).mean()) > loss + 1e-3
    assert losses == sorted(losses)
    assert losses[0] < 0.05
    assert losses[-1] > 0.9 * math.log(V - 1)


def bayes_nats(alpha: float, scale: float) -> float:
    """E[−log p(x | w̃_t)], drawn afresh with plain arithmetic; without the mask's coordinate."""
    generator = torch.Generator().manual_seed(5)
    w = math.sqrt(1 - alpha) * scale * torch.randn(40_000, V - 1, generator=generator, dtype=torch.float64)
    w -= math.sqrt(alpha) * scale
    w[:, 0] += 2 * math.sqrt(alpha) * scale
    log_likelihood = torch.stack(
        [
            -sum((w[:, i] - math.sqrt(alpha) * scale * (1 if i == token else -1)) ** 2 for i in range(V - 1))
            / (2 * (1 - alpha) * scale**2)
            for token in range(V - 1)
        ],
        dim=1,
    )
    return float(-log_likelihood.log_softmax(-1)[:, 0].mean())


def test_absent_tokens_are_masks_whatever_stands_there():
    model, lengths = tiny_transformer(7), torch.tensor([4, 5])
    objective = SimplexDiffusionLoss(block_size=3, mask_id=MASK)
    draws = drawn(objective, 2, 7)
    nats = []
    for filler in (0, 1, 3, MASK):
        texts = random_texts(2, 7).masked_fill(torch.arange(7) >= lengths.unsqueeze(1), filler)
        nats.append(objective.loss(model, TokenBatch.of(texts, lengths=lengths), draws).nats)
    for other in nats[1:]:
        torch.testing.assert_close(other, nats[0], rtol=0, atol=1e-12)


def test_a_text_is_the_same_cut_off_or_with_absent_tokens():
    """A last block that is short, and one whose end is absent, are one and the same."""
    model, texts = tiny_transformer(7), random_texts(3, 6)
    objective = SimplexDiffusionLoss(block_size=3, mask_id=MASK)
    draws = drawn(objective, 3, 6)
    short = objective.loss(model, TokenBatch.of(texts[:, :5]), draws).nats
    filled = objective.loss(model, TokenBatch.of(texts, lengths=torch.full((3,), 5)), draws).nats
    torch.testing.assert_close(filled[:, :5], short, rtol=0, atol=1e-12)
    assert (filled[:, 5] == 0).all()


def test_the_embedding_learns_from_noisy_and_clean_tokens():
    model, batch = tiny_transformer(7), TokenBatch.of(random_texts(3, 6))
    SimplexDiffusionLoss(block_size=2, mask_id=MASK)(model, batch).mean().backward()
    assert (model.embedding.weight.grad[list(CLEAN)].abs().sum(1) > 0).all()


# --- errors ---


def test_bad_settings_are_refused():
    for name, value in (("block_size", 0), ("steps", 0)):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            SimplexDiffusionLoss(**({"block_size": 2, "mask_id": MASK} | {name: value}))
    with pytest.raises(ValueError, match="mask_id must be a token id, got -1"):
        SimplexDiffusionLoss(block_size=2, mask_id=-1)
    for scale in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match=f"simplex_scale must be positive and finite, got {scale}"):
            SimplexDiffusionLoss(block_size=2, mask_id=MASK, simplex_scale=scale)


def test_bad_input_is_refused():
    model, batch = tiny_transformer(0), TokenBatch.of(random_texts(2, 5))
    objective = SimplexDiffusionLoss(block_size=2, mask_id=MASK, schedule=SquaredCosine(0.0))
    with pytest.raises(ValueError, match="draws must be given"):
        objective.loss(model, batch, None)
    with pytest.raises(
        ValueError, match="draws must be for 6 positions in blocks of 2, got 4 in blocks of 2"
    ):
        objective.loss(model, batch, drawn(objective, 2, 4))
    other = SimplexDiffusionLoss(block_size=3, mask_id=MASK)
    with pytest.raises(
        ValueError, match="draws must be for 6 positions in blocks of 2, got 6 in blocks of 3"
    ):
        objective.loss(model, batch, drawn(other, 2, 5))
    with pytest.raises(ValueError, match=f"tokens to be predicted must not be the mask {MASK}"):
        objective(model, TokenBatch.of(torch.full((2, 5), MASK)))
