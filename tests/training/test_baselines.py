"""SEDD, D3PM and SSD-LM learn: at the demo's size, from random weights, past the frequencies of tokens."""

import math
from pathlib import Path
from typing import Any

import pytest

from bd3lm.build import Run, build_run
from bd3lm.demo import unigram_perplexity
from bd3lm.presets import preset
from bd3lm.recipe import merge, recipe_from_dict
from bd3lm.training import Engine
from tests.training.tiny import rows

pytestmark = pytest.mark.slow

# The demo's first stage with another method and fewer steps; networks are told the time, as in the presets.
STEPS = {"score_entropy": 150, "d3pm": 150, "simplex": 350}


def run_of(method: str, out: Path) -> Run:
    changes: dict[str, Any] = {
        "method": {"kind": method},
        "network": {"adaln": True, "time_conditioning": True},
        "data": {"validation_sequences": 64},
        "train": {"steps": STEPS[method]},
    }
    recipe = recipe_from_dict(merge(preset("demo").stages[0].recipe, changes), where="the test's recipe")
    return build_run(recipe, out, engine=Engine())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", STEPS)
def test_a_baseline_learns_more_than_the_frequencies_of_tokens(method: str, tmp_path: Path) -> None:
    """By its bound; SSD-LM, which has none, by its cross-entropy on pure noise: there is nothing to copy."""
    run = run_of(method, tmp_path)
    run.trainer.run()
    found = float(rows(tmp_path)[-1]["valid_nats"])
    unigram = math.log(unigram_perplexity(run))
    print(f"{method}: {found:.3f} nats after {STEPS[method]} steps, unigram {unigram:.3f}")
    assert found < unigram - 0.03
