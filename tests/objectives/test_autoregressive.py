"""The autoregressive loss is the chain rule, over the vocabulary without the mask."""

import pytest
import torch

from bd3lm.models import Causal, Transformer
from bd3lm.objectives import Autoregressive, TokenBatch
from tests.oracles.likelihood import every_text
from tests.oracles.networks import (
    CLEAN,
    FAMILIES,
    MASK,
    clean_of,
    log_probabilities,
    logits_of,
    mask_of,
    network_of,
    tiny_transformer,
)

MODEL = tiny_transformer(11)


def next_token_nats(texts: torch.Tensor, *, score_first: bool, model: Transformer = MODEL) -> torch.Tensor:
    """One network call a position, on its prefix alone."""
    nats, mask = torch.zeros(texts.shape, dtype=torch.float64), mask_of(model)
    rows = torch.arange(len(texts))
    start = torch.full((len(texts), 1), mask)
    with torch.no_grad():
        for i in range(0 if score_first else 1, texts.shape[1]):
            prefix = torch.cat((start, texts[:, :i]), 1) if score_first else texts[:, :i]
            log_p = log_probabilities(logits_of(model, prefix, Causal(prefix.shape[1]))[:, -1], mask)
            nats[:, i] = -log_p[rows, texts[:, i]]
    return nats


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("score_first", [False, True])
def test_loss_is_the_plain_loop_and_sums_to_one_over_all_texts(score_first, family):
    model = network_of(family, 11)
    texts = every_text(clean_of(model), 4)
    objective = Autoregressive(mask_id=mask_of(model), score_first=score_first)
    loss = objective(model, TokenBatch.of(texts, score_first=score_first))
    expected = next_token_nats(texts, score_first=score_first, model=model)
    torch.testing.assert_close(loss.nats, expected, rtol=0, atol=1e-12)
    assert torch.equal(loss.weight[0].bool(), torch.tensor([score_first, True, True, True]))
    per_first_token = torch.exp(-loss.nats.sum(1)).view(3, -1).sum(1)
    total = per_first_token.sum() if score_first else per_first_token
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)


def test_prompts_and_absent_tokens_are_not_scored():
    texts = every_text(CLEAN, 4)[[5, 40, 77]]
    batch = TokenBatch.of(texts, prompts=torch.tensor([1, 2, 3]), lengths=torch.tensor([4, 3, 4]))
    loss = Autoregressive(mask_id=MASK)(MODEL, batch)
    expected = next_token_nats(texts, score_first=False) * batch.scored
    torch.testing.assert_close(loss.nats, expected, rtol=0, atol=1e-12)
    assert loss.weight.sum() == batch.scored.sum() == 5


def test_what_stands_in_absent_positions_does_not_matter():
    texts, lengths = every_text(CLEAN, 4)[[5, 40]], torch.tensor([2, 3])
    padded = texts.masked_fill(torch.arange(4) >= lengths.unsqueeze(1), MASK)
    losses = [
        Autoregressive(mask_id=MASK)(MODEL, TokenBatch.of(t, lengths=lengths)).nats for t in (texts, padded)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-12)


def test_it_is_a_bound_and_draws_nothing():
    objective = Autoregressive(mask_id=MASK)
    assert objective.is_bound
    assert objective.draw(2, 4, generator=None, device="cpu") is None


def test_scoring_the_first_token_must_be_asked_for():
    with pytest.raises(ValueError, match="first token can be scored only with score_first=True"):
        Autoregressive(mask_id=MASK)(MODEL, TokenBatch.of(every_text(CLEAN, 3), score_first=True))


@pytest.mark.parametrize("text", [[0, 9, 1], [0, 1, 9], [0, 1, -1]])
def test_token_ids_out_of_range_are_refused(text):
    """Also at the end, where a token is predicted but never an input."""
    with pytest.raises(ValueError, match=r"token ids must lie in 0\.\.3"):
        Autoregressive(mask_id=MASK)(MODEL, TokenBatch.of(torch.tensor([text])))


def test_a_random_batch_keeps_each_token_at_its_sequences_rate():
    """Section 4.2's case study: as few tokens as diffusion would train on, each at its own loss."""
    texts = every_text(CLEAN, 4)
    objective = Autoregressive(mask_id=MASK, random_batch=True)
    draws = objective.draw(81, 4, generator=torch.Generator().manual_seed(0), device="cpu")
    loss = objective.loss(MODEL, TokenBatch.of(texts), draws)
    kept = draws.tokens <= draws.levels.expand(81, 4)
    kept[:, 0] = False
    assert torch.equal(loss.weight.bool(), kept)
    torch.testing.assert_close(
        loss.nats, next_token_nats(texts, score_first=False) * kept, rtol=0, atol=1e-12
    )
    assert 0.4 < kept[:, 1:].double().mean() < 0.6
    with pytest.raises(ValueError, match="draws must be given"):
        objective.loss(MODEL, TokenBatch.of(texts), None)
