"""SEDD, D3PM and SSD-LM learn: at the demo's size, from random weights, past the frequencies of tokens."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from bd3lm.build import Run, build_run, validation_objective
from bd3lm.demo import unigram_perplexity
from bd3lm.evaluation import monte_carlo_likelihood
from bd3lm.lm import load
from bd3lm.objectives import TokenBatch
from bd3lm.presets import preset
from bd3lm.recipe import merge, recipe_from_dict
from bd3lm.training import Engine

pytestmark = pytest.mark.slow

DRAWS = 16  # one draw of a whole text's noise level says little: its standard deviation is about 0.2 nats

# One noise level a text makes a noisy gradient: at the demo's 8 texts a step SEDD and D3PM stay at the
# frequencies for a thousand steps. A larger batch, no dropout and untied embeddings get them past.
LARGER = {
    "network": {"layers": 2, "tied": False, "dropout": 0.0},
    "optimizer": {"lr": 2e-3, "clip_norm": 1.0},
    "train": {"steps": 300, "global_batch": 64, "ema_decay": 0.95},
}
CHANGES: dict[str, dict[str, Any]] = {
    "score_entropy": LARGER,
    "d3pm": LARGER,
    "simplex": {"train": {"steps": 350}},
}


def run_of(method: str, out: Path) -> Run:
    """The demo's first stage with another method; networks are told the time, as in the presets."""
    changes: dict[str, Any] = {
        "method": {"kind": method},
        "network": {"adaln": True, "time_conditioning": True},
        "data": {"validation_sequences": 64},
    }
    recipe = merge(preset("demo").stages[0].recipe, changes, CHANGES[method])
    return build_run(recipe_from_dict(recipe, where="the test's recipe"), out, engine=Engine())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", CHANGES)
def test_a_baseline_learns_more_than_the_frequencies_of_tokens(method: str, tmp_path: Path) -> None:
    """By its bound; SSD-LM, which has none, by its cross-entropy on pure noise: there is nothing to copy."""
    run = run_of(method, tmp_path)
    run.trainer.run()
    network = load(run.export()).network
    batches = [TokenBatch.of(tokens) for tokens in run.trainer.validators[0].held_out.batches]
    judge = validation_objective(run.trainer.objective)
    figures = [monte_carlo_likelihood(network, judge, batches, seed=seed).nats for seed in range(DRAWS)]
    mean, error = statistics.mean(figures), statistics.stdev(figures) / math.sqrt(DRAWS)
    unigram = math.log(unigram_perplexity(run))
    print(f"{method}: {mean:.3f} ± {error:.3f} nats after {run.trainer.step} steps, unigram {unigram:.3f}")
    assert mean + 3 * error < unigram
