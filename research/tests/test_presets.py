"""The presets of Wikipedia are the runs that docs/results.md is about."""

from typing import Any

import pytest

from bd3lm.runs.presets import network_config, preset
from bd3lm.runs.recipe import Recipe, recipe_from_dict, recipe_to_dict
from research.evidence.runs import Run, all_runs
from research.evidence.settings import recipe


@pytest.fixture(scope="module")
def declared() -> dict[str, Run]:
    """The runs of the experiments by their keys."""
    return {run.key: run for run in all_runs()}


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("ar", "ar/0"),
        ("mdlm", "mdlm/0"),
        ("sedd", "sedd/0"),
        ("d3pm", "d3pm/0"),
        ("bd3lm-4", "bd3lm-4/0"),
        ("bd3lm-8", "bd3lm-8/0"),
        ("bd3lm-16", "bd3lm-16/0"),
        ("ar-random-batch", "ar-random-batch/0"),
        ("bd3lm-1", "block-1/0"),
        ("bd3lm-1-full", "block-1-full/0"),
        ("block-4", "from-ar-early-tied-4/0"),
        ("block-16", "from-ar-early-tied-16/0"),
    ],
)
def test_the_presets_of_wikipedia_train_what_the_results_are_of(
    name: str, run: str, declared: dict[str, Run]
) -> None:
    measured = declared[run].lineage
    stages = preset(f"wikipedia-{name}").stages
    assert len(stages) == len(measured)
    for place, (stage, trained) in enumerate(zip(stages, measured, strict=True)):
        ours = _decisive(recipe_from_dict(stage.recipe, where=name), starts_anew=place == 0)
        assert ours == _decisive(recipe(trained.settings, where=run), starts_anew=place == 0)


def _decisive(recipe: Recipe, *, starts_anew: bool) -> dict[str, Any]:
    """What decides the weights that come out, but for the data and where in its order a stage begins."""
    plain = recipe_to_dict(recipe)
    network = recipe.network
    plain["network"] = {
        "config": network_config(network.size, vocab_size=9, context=recipe.data.context, **network.shape),
        "start": network.initialisation if starts_anew else None,
    }
    plain["method"].pop("lean", None)  # of the released model
    masking = plain["objective"].get("masking", {})
    masking = {} if isinstance(masking, str) else masking
    if masking.get("low") == 1.0:
        masking.pop("redraw")  # of masks that hide everything
    if masking.get("search") is None:
        plain["train"].pop("validate_every")  # else it is when the search looks
    for part, names in {"data": ("path", "skip"), "train": ("log_every", "checkpoint_every")}.items():
        for each in names:
            plain[part].pop(each)
    return plain
