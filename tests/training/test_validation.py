"""Validation during training measures the same as evaluation after it."""

import math
from types import SimpleNamespace

import pytest
import torch

from bd3lm.diffusion import ClippedTimes, Times
from bd3lm.evaluation import gradient_variance, loss_sums
from bd3lm.models import BlockReading
from bd3lm.objectives import BlockDiffusionLoss
from bd3lm.training import Engine, GradientVarianceValidator, LikelihoodValidator
from tests.training.tiny import AR, COUNTS, HELD_OUT, MASK, held_out, network, rows, sentences, tiny_trainer

JUDGE = BlockDiffusionLoss(reading=BlockReading(block_size=4, mask_id=MASK), masking=Times())


def rank(index: int, world: int) -> SimpleNamespace:
    return SimpleNamespace(engine=Engine(rank=index, world=world))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [None, 2, 100])
def test_every_batch_is_dealt_once_and_every_rank_makes_as_many_passes(world, limit):
    shares = [list(HELD_OUT.share(rank(i, world), limit)) for i in range(world)]
    assert len({len(share) for share in shares}) == 1
    scored = sorted(index for share in shares for index, batch in share if batch.scored.any())
    assert scored == list(range(min(limit or 3, 3)))
    for share in shares:
        for index, batch in share:
            if batch.scored.any():
                assert torch.equal(batch.tokens, HELD_OUT.batches[index].tokens)


def test_the_first_token_is_scored_on_request():
    (_, given), (_, scored) = (
        next(iter(held_out(sentences(2, 0), score_first=first).share(rank(0, 1)))) for first in (False, True)
    )
    assert not given.scored[:, 0].any()
    assert given.scored[:, 1:].all()
    assert scored.scored.all()


@pytest.mark.parametrize("judge", [AR, JUDGE])
def test_the_likelihood_is_nats_over_tokens_with_the_averaged_weights(judge, tmp_path):
    """Batches of 6, 6 and 5: not a mean of means."""
    trainer = tiny_trainer(tmp_path, AR, steps=5, validate=False)
    trainer.validators.append(LikelihoodValidator(HELD_OUT, judge, seed=7))
    trainer.run()
    with trainer.ema.swapped_in():
        trainer.network.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for index, batch in enumerate(HELD_OUT.batches):
            draws = judge.seeded_draws(batch, 7, "validation", index)
            sums += loss_sums(trainer.network, judge, batch, draws)
    assert sums[1] == 17 * 7
    found = {name: float(value) for name, value in rows(tmp_path)[-1].items()}
    assert found["valid_nats"] == pytest.approx((sums[0] / sums[1]).item(), rel=1e-8)
    assert found["valid_perplexity"] == pytest.approx(math.exp(found["valid_nats"]), rel=1e-7)


@pytest.mark.parametrize(("nats", "perplexity"), [(0.0, 1.0), (5000.0, math.inf)])
def test_the_perplexity_of_a_training_that_diverged_is_infinite(nats, perplexity, tmp_path, monkeypatch):
    sums = torch.tensor([10 * nats, 10.0], dtype=torch.float64)
    monkeypatch.setattr("bd3lm.training.validation.loss_sums", lambda *_, **__: sums)
    trainer = tiny_trainer(tmp_path, AR)
    found = LikelihoodValidator(HELD_OUT, AR)(trainer)
    assert found == {"valid_nats": nats, "valid_perplexity": perplexity}


def test_a_network_with_noise_input_has_no_perplexity_by_clipped_rates(tmp_path):
    """With one-token blocks they bound the likelihood only for networks that do not receive the noise
    level."""
    judge = BlockDiffusionLoss(
        reading=BlockReading(block_size=1, mask_id=MASK), masking=ClippedTimes(low=0.3, high=0.8)
    )
    trainer = tiny_trainer(tmp_path, COUNTS)
    trainer.network.eval()
    validator = LikelihoodValidator(HELD_OUT, judge)
    assert set(validator(trainer)) == {"valid_nats", "valid_perplexity"}
    told = tiny_trainer(tmp_path, judge, model=network(adaln=True, time_conditioning=True))
    told.network.eval()
    assert set(validator(told)) == {"valid_nats"}


def test_the_masks_of_a_validation_do_not_depend_on_the_step(tmp_path):
    """All figures of a run use the same masks, so they can be compared."""
    trainer = tiny_trainer(tmp_path, COUNTS)
    trainer.network.eval()
    validator = LikelihoodValidator(HELD_OUT, JUDGE, seed=7)
    first = validator(trainer)
    trainer.step = 5
    assert validator(trainer) == first
    assert LikelihoodValidator(HELD_OUT, JUDGE, seed=8)(trainer) != first


def test_the_gradients_variance_is_of_the_training_objective(tmp_path):
    trainer = tiny_trainer(tmp_path, COUNTS, validate=False, steps=3)
    trainer.validators.append(GradientVarianceValidator(HELD_OUT, batches=2))
    trainer.run()
    batches = HELD_OUT.batches[:2]
    with trainer.ema.swapped_in():
        trainer.network.eval()
        expected = gradient_variance(trainer.network, COUNTS, batches, seed=3).variance
    assert float(rows(tmp_path)[-1]["gradient_variance"]) == pytest.approx(expected, rel=1e-8)
    assert all(p.grad is None for p in trainer.network.parameters())
