"""SEDD, D3PM and SSD-LM learn: at demo size, from random weights, they beat token frequencies."""

import math
from pathlib import Path

import pytest

from bd3lm.commands.demo.results import unigram_perplexity
from bd3lm.evaluation import Sampled, corpus_likelihood
from bd3lm.lm import load
from bd3lm.runs.merging import merge
from bd3lm.runs.plan import Run, plan_run
from bd3lm.runs.presets import preset
from bd3lm.runs.recipe import recipe_from_dict

pytestmark = pytest.mark.slow

DRAWS = 16  # a single draw of the noise level says little: its standard deviation is about 0.2 nats

# One layer of 64 gets past the frequencies in as many steps as the presets' networks, each a third as long.
SMALLER = {"data": {"validation_sequences": 64}, "network": {"layers": 1, "hidden": 64}}
CHANGES = {
    "demo-sedd": {"optimizer": {"lr": 4e-3}, "train": {"steps": 240}},
    "demo-d3pm": {"optimizer": {"lr": 4e-3}, "train": {"steps": 240}},
    "demo-d3pm-uniform-4": {"network": {"layers": 2, "hidden": 128}, "train": {"steps": 640}},
    "demo-ssd-lm": {"optimizer": {"lr": 8e-3}, "train": {"steps": 400}},
}


def run_of(name: str, out: Path) -> Run:
    recipe = merge(preset(name).stages[0].recipe, SMALLER, CHANGES[name])
    return plan_run(recipe_from_dict(recipe, where=name), out).build()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHANGES)
def test_a_baseline_learns_more_than_the_frequencies_of_tokens(name: str, tmp_path: Path) -> None:
    """Measured by its bound. SSD-LM has none, so by its cross-entropy on pure noise, which leaves nothing to
    copy."""
    run = run_of(name, tmp_path)
    run.trainer.run()
    network = load(run.export(), device="cpu").network
    batches = list(run.trainer.validators[0].held_out.batches)
    judge = run.trainer.validators[0].objective
    (found,) = corpus_likelihood(network, Sampled(name, judge), batches, replicates=DRAWS)
    mean, error = found.nats, found.monte_carlo_error
    perplexity, _ = unigram_perplexity(run)
    unigram = math.log(perplexity)
    print(f"{name}: {mean:.3f} ± {error:.3f} nats after {run.trainer.step} steps, unigram {unigram:.3f}")
    assert mean + 3 * error < unigram
