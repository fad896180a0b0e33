"""Batches say which tokens are scored; losses say how they add up."""

import pytest
import torch

from bd3lm.objectives import TokenBatch, TokenLoss

TOKENS = torch.arange(8).view(2, 4)


def flags(*rows: str) -> torch.Tensor:
    return torch.tensor([[cell == "#" for cell in row] for row in rows])


def test_the_first_token_is_given_unless_it_is_scored():
    assert torch.equal(TokenBatch.of(TOKENS).scored, flags(".###", ".###"))
    assert torch.equal(TokenBatch.of(TOKENS, score_first=True).scored, flags("####", "####"))
    assert TokenBatch.of(TOKENS).absent is None


def test_prompts_are_given_and_what_is_past_a_text_is_absent():
    batch = TokenBatch.of(TOKENS, prompts=torch.tensor([0, 3]), lengths=torch.tensor([3, 4]))
    assert torch.equal(batch.scored, flags("###.", "...#"))
    assert torch.equal(batch.absent, flags("...#", "...."))
    batch = TokenBatch.of(TOKENS, lengths=torch.tensor([0, 2]))
    assert torch.equal(batch.scored, flags("....", ".#.."))
    assert torch.equal(batch.absent, flags("####", "..##"))


def test_a_slice_of_a_batch_keeps_everything():
    batch = TokenBatch.of(TOKENS, prompts=torch.tensor([0, 3]), lengths=torch.tensor([3, 4]))[1:]
    assert torch.equal(batch.tokens, TOKENS[1:])
    assert torch.equal(batch.scored, flags("...#"))
    assert torch.equal(batch.absent, flags("...."))
    assert TokenBatch.of(TOKENS)[:1].absent is None


def test_a_batch_goes_to_a_device_by_its_name():
    for lengths in (None, torch.tensor([3, 4])):
        batch = TokenBatch.of(TOKENS, lengths=lengths)
        for device in ("cpu", torch.device("cpu")):
            moved = batch.to(device)
            assert torch.equal(moved.tokens, batch.tokens)
            assert torch.equal(moved.scored, batch.scored)
            assert (moved.absent is None) == (lengths is None)


def test_the_mean_is_over_the_tokens_that_count():
    nats, weight = torch.tensor([[0.0, 6.0], [0.0, 3.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert TokenLoss(nats=nats, weight=weight).mean() == 3.0
    nothing = torch.zeros(2, 2)
    assert TokenLoss(nats=nothing, weight=nothing).mean() == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": torch.tensor([1, 5])}, "prompts must hold one number in 0..4 for each of 2 rows"),
        ({"prompts": torch.tensor([-1, 1])}, "prompts must hold one number in 0..4"),
        ({"lengths": torch.tensor([4])}, "lengths must hold one number in 0..4 for each of 2 rows"),
    ],
)
def test_impossible_prompts_and_lengths_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenBatch.of(TOKENS, **arguments)


def test_misshapen_batches_are_refused():
    with pytest.raises(ValueError, match=r"tokens must be \(rows, length\) and not empty, got \(0, 4\)"):
        TokenBatch.of(TOKENS[:0])
    with pytest.raises(ValueError, match=r"tokens must be .* got \(4,\)"):
        TokenBatch(tokens=TOKENS[0], scored=flags("####")[0])
    with pytest.raises(ValueError, match=r"scored must be a bool tensor of shape \(2, 4\), got torch.int64"):
        TokenBatch(tokens=TOKENS, scored=TOKENS)
    with pytest.raises(ValueError, match=r"absent must be a bool tensor of shape \(2, 4\)"):
        TokenBatch(tokens=TOKENS, scored=TOKENS > 0, absent=flags("####"))
