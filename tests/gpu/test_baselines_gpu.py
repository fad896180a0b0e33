"""SEDD, D3PM and SSD-LM on a GPU: the losses and texts of a CPU, and training in bfloat16."""

from pathlib import Path

import pytest
import torch

from bd3lm.diffusion import Absorbing, Floored, Linear, Uniform
from bd3lm.objectives import D3PM, Objective, ScoreEntropy, SimplexDiffusionLoss, TokenBatch
from bd3lm.sampling import AnalyticWriter, PosteriorWriter, Request, SimplexWriter, Writer, sample
from bd3lm.training import Engine
from tests.oracles.networks import MASK, tiny_transformer
from tests.training.tiny import MASK as TINY_MASK
from tests.training.tiny import VOCABULARY, network, rows, tiny_trainer

pytestmark = pytest.mark.gpu
LENGTH = 12
TIMED = {"adaln": True, "time_conditioning": True}


def objectives(vocabulary: int, mask_id: int) -> dict[str, Objective]:
    absorbing, uniform = Absorbing(vocabulary, mask_id), Uniform(vocabulary)
    return {
        "SEDD": ScoreEntropy(process=absorbing, mask_id=mask_id),
        "uniform SEDD": ScoreEntropy(process=uniform, mask_id=mask_id, schedule=Floored(Linear())),
        "D3PM": D3PM(process=absorbing, mask_id=mask_id, steps=9),
        "uniform D3PM": D3PM(process=uniform, mask_id=mask_id, steps=9, auxiliary=0.1),
        "SSD-LM": SimplexDiffusionLoss(block_size=5, mask_id=mask_id, steps=50),
    }


@pytest.mark.parametrize("name", ["SEDD", "uniform SEDD", "D3PM", "uniform D3PM"])
def test_the_loss_is_that_of_a_cpu(name):
    """In double precision, but for the noise level, which networks are told in single precision.

    SSD-LM's noise comes from the device's own generator, so it has no such equal.
    """
    objective = objectives(4, MASK)[name]
    model = tiny_transformer(3, context=LENGTH, **TIMED)
    tokens = torch.tensor([0, 1, 3])[
        torch.randint(3, (6, LENGTH), generator=torch.Generator().manual_seed(1))
    ]
    batch = TokenBatch.of(tokens)
    draws = objective.seeded_draws(batch, 7)
    expected = objective.loss(model, batch, draws)
    there = TokenBatch(tokens=batch.tokens.cuda(), scored=batch.scored.cuda())
    found = objective.loss(model.cuda(), there, draws.to("cuda"))
    torch.testing.assert_close(found.nats.cpu(), expected.nats, rtol=1e-5, atol=1e-6)


def writers(model) -> dict[str, Writer]:
    absorbing, uniform = Absorbing(4, MASK), Uniform(4)
    common = {"mask_id": MASK, "context": LENGTH}
    return {
        "SEDD": AnalyticWriter(model, process=absorbing, steps=20, **common),
        "uniform SEDD": AnalyticWriter(
            model, process=uniform, steps=20, schedule=Floored(Linear()), **common
        ),
        "uniform D3PM": PosteriorWriter(model, process=uniform, steps=20, **common),
        "SSD-LM": SimplexWriter(model, block_size=5, steps=6, **common),
    }


def test_the_texts_are_those_of_a_cpu_in_double_precision():
    here = tiny_transformer(3, context=LENGTH, **TIMED)
    there = tiny_transformer(3, context=LENGTH, **TIMED).cuda()
    requests = [Request(torch.tensor(given), seed, 11) for seed, given in enumerate(([0], [1, 3], [3, 0, 1]))]
    for (name, on_cpu), on_gpu in zip(writers(here).items(), writers(there).values(), strict=True):
        for mine, theirs in zip(
            sample(on_gpu, requests, batch_size=2), sample(on_cpu, requests), strict=True
        ):
            assert torch.equal(mine.tokens, theirs.tokens), name
            assert mine.evaluations == theirs.evaluations, name


@pytest.mark.parametrize("name", ["SEDD", "uniform SEDD", "D3PM", "uniform D3PM", "SSD-LM"])
def test_training_in_bfloat16_goes_on_after_a_checkpoint(name, tmp_path: Path):
    objective = objectives(VOCABULARY, TINY_MASK)[name]
    engine = Engine(device=torch.device("cuda"))

    def trainer(**settings):
        model = network()
        model.attention_backend = "dense"  # compiled attention takes no heads as small as these
        return tiny_trainer(tmp_path, objective, model=model, engine=engine, precision="bf16", **settings)

    trainer(steps=6).run()
    longer = trainer()
    assert longer.resume()
    longer.run()
    losses = [float(row["train_nats"]) for row in rows(tmp_path)]
    assert len(losses) == 10
    assert all(0.0 < loss < 100.0 for loss in losses)
