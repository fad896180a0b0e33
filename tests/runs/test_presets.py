from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bd3lm import interop
from bd3lm.diffusion import Counts
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    BlockDiffusionTraining,
    LanguageModelConfig,
)
from bd3lm.models import Transformer, TransformerConfig
from bd3lm.runs.presets import network_config, preset
from bd3lm.runs.recipe import (
    Recipe,
    recipe_from_dict,
)
from bd3lm.training.optim import learning_rate


@pytest.mark.parametrize(
    ("size", "shape"), [("tiny", (8, 256, 8)), ("small", (12, 768, 12)), ("medium", (24, 1024, 16))]
)
def test_sizes(size: str, shape: tuple[int, int, int]) -> None:
    config = network_config(size, vocab_size=50258, context=1024)
    assert (config.layers, config.hidden, config.heads) == shape
    assert (config.vocab_size, config.context) == (50258, 1024)


@pytest.mark.parametrize(
    ("size", "vocabulary", "published"),
    [
        ("smollm2-135m", 49_152, 134_515_008),
        ("llama3.2-1b", 128_256, 1_235_814_400),
        ("qwen3-0.6b", 151_936, 596_049_920),
        ("qwen3-1.7b", 151_936, 1_720_574_976),
        ("qwen3-8b", 151_936, 8_190_735_360),
    ],
)
def test_sizes_of_others_have_the_parameters_that_are_published(size, vocabulary, published) -> None:
    with torch.device("meta"):
        network = network_config(size, vocab_size=vocabulary, context=64).build()
    assert sum(parameter.numel() for parameter in network.parameters()) == published


def test_small_is_the_papers() -> None:
    """GPT-2 small: 124M parameters without the output head; and the defaults of TransformerConfig."""
    config = network_config("small", vocab_size=50258, context=1024)
    assert config == TransformerConfig(vocab_size=50258)
    with torch.device("meta"):
        network = Transformer(config)
    counted = sum(p.numel() for p in network.parameters()) - sum(
        p.numel() for p in network.output.parameters()
    )
    assert counted == pytest.approx(124e6, rel=0.01)


def test_overrides() -> None:
    config = network_config("tiny", vocab_size=11, context=16, layers=2, tied=True, dropout=0.0)
    assert (config.layers, config.hidden, config.tied, config.dropout) == (2, 256, True, 0.0)


def test_unknown_sizes() -> None:
    message = "size must be one of tiny, small, medium, .*, got 'smal', did you mean 'small'"
    with pytest.raises(ValueError, match=message):
        network_config("smal", vocab_size=11, context=16)
    with pytest.raises(ValueError, match=r"size must be one of tiny, small, medium, .*, got 'xxl'$"):
        network_config("xxl", vocab_size=11, context=16)


def test_unknown_and_impossible_overrides() -> None:
    with pytest.raises(ValueError, match="droput: unknown key, did you mean 'dropout'"):
        network_config("small", vocab_size=11, context=16, droput=0.1)
    with pytest.raises(ValueError, match="got hidden 768 and heads 5"):
        network_config("small", vocab_size=11, context=16, heads=5)


def test_sizes_cannot_be_changed_by_accident() -> None:
    with pytest.raises(TypeError):
        TransformerConfig.sizes["small"]["layers"] = 3  # type: ignore[index]


# --- the model in the box ---


def _box() -> tuple[Recipe, Recipe]:
    first, second = (recipe_from_dict(stage.recipe, where="box") for stage in preset("box").stages)
    return first, second


def test_the_model_in_the_box_is_16_megabytes(tmp_path: Path) -> None:
    """With the vocabulary that research/box.sh trains, and all that is in the file."""
    recipe = _box()[1]
    network = recipe.network
    config = network_config(network.size, vocab_size=6144, context=recipe.data.context, **network.shape)
    method = BlockDiffusionMethod(block_size=4, causal_clean=True)
    interop.save(
        Transformer(config).to(torch.bfloat16),
        LanguageModelConfig(network=config, method=method, mask_id=6143),
        tmp_path,
    )
    assert 15_500_000 < (tmp_path / interop.WEIGHTS_NAME).stat().st_size <= 16_000_000


def test_the_box_is_trained_in_two_stages_that_fit_together() -> None:
    first, second = _box()
    assert first.method == AutoregressiveMethod()
    assert second.method == BlockDiffusionMethod(
        block_size=4, causal_clean=True, previous_token=True, lean=2.0
    )
    assert second.objective == BlockDiffusionTraining(masking=Counts(), next_token=1.0)
    assert (first.network, first.data) == (second.network, second.data)
    ends = [learning_rate(each.optimizer, each.train.steps, each.train.steps) for each in (first, second)]
    assert ends == [first.optimizer.lr, 0.0]


# --- the recommended recipe ---


@pytest.mark.parametrize("corpus", ["lm1b", "owt", "wikipedia"])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_recommended_recipe(corpus: str, size: int) -> None:
    """The best of docs/results.md: a quarter of the steps AR, then blocks from there."""
    stages = preset(f"{corpus}-block-{size}").stages
    assert [stage.name for stage in stages] == ["ar", "block"]
    first, second = (recipe_from_dict(stage.recipe, where=corpus) for stage in stages)
    paper = preset(f"{corpus}-bd3lm-{size}").stages
    steps = sum(recipe_from_dict(stage.recipe, where=corpus).train.steps for stage in paper)
    assert 4 * first.train.steps == first.train.steps + second.train.steps == steps
    assert first.network.tied
    assert second.network.tied
    assert first.method.kind == "autoregressive"
    assert first.optimizer.decay == "constant"
    masking = Counts(complementary=True, weight="flat")
    assert second.objective == BlockDiffusionTraining(masking=masking, next_token=4.0)
    assert replace(second.method, score_first=False) == BlockDiffusionMethod(
        block_size=size, causal_clean=True, previous_token=True, lean=4.0
    )
