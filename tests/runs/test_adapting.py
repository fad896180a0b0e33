"""The recipes of an adaptation, what they are refused for, and the memory that they need."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bd3lm.methods import (
    AutoregressiveMethod,
    Base,
    BlockDiffusionMethod,
    BlockDiffusionTraining,
    DrafterMethod,
    LanguageModelConfig,
    ScoreEntropyMethod,
)
from bd3lm.models import AIMS, TransformerConfig
from bd3lm.runs import adapting
from bd3lm.runs.adapting import Choices, check_can_become
from bd3lm.runs.memory import training_memory
from bd3lm.runs.presets import preset
from bd3lm.runs.recipe import Recipe, recipe_from_dict
from bd3lm.training.optim import learning_rate

TINY = TransformerConfig(vocab_size=20, layers=1, hidden=8, heads=2, context=16, dropout=0.0)
PAGE = Path(__file__).parents[2] / "docs" / "adapting.md"


def recipes(**chosen: object) -> dict[str, Recipe]:
    return {name: recipe_from_dict(each, where=name) for name, each in Choices(**chosen).stages().items()}


def test_the_aims_are_those_of_the_losses():
    assert adapting.AIMS == AIMS


@pytest.mark.parametrize("outcome", adapting.OUTCOMES)
def test_the_presets_are_the_usual_choices(outcome):
    found = {stage.name: stage.recipe for stage in preset(f"adapt-{outcome}").stages}
    assert found == Choices(to=outcome).stages()


def test_a_drafter_has_soft_targets_for_two_fifths_and_then_the_overlap():
    found = recipes(to="drafter", steps=10, rank=8, masks=5)
    assert [(name, each.objective.aim, each.train.steps) for name, each in found.items()] == [
        ("soft", "soft", 4),
        ("overlap", "overlap", 6),
    ]
    for each in found.values():
        assert each.method == DrafterMethod(masks=5)
        assert each.network.shape == {"dropout": 0.0, "additions": 8}
        assert each.data.context % 5 == 0
    assert list(recipes(to="drafter", aim="hard")) == ["run"]


def test_a_joint_model_has_both_laws_and_writes_token_after_token():
    (only,) = recipes(to="joint", block_size=8).values()
    assert only.method == BlockDiffusionMethod(block_size=8, causal_clean=True, joint=True, law="causal")
    assert isinstance(only.objective, BlockDiffusionTraining)
    assert only.objective.next_token == 4.0
    assert only.objective.masking.copies(8) == 2


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(1, [1]), (2, [2]), (3, [2, 3]), (4, [2, 4]), (16, [2, 4, 8, 16]), (12, [2, 4, 8, 12])],
)
def test_blocks_grow(size, sizes):
    found = recipes(to="block", block_size=size, steps=100)
    assert [each.method.block_size for each in found.values()] == sizes
    assert list(found) == ([f"blocks{each}" for each in sizes] if len(sizes) > 1 else ["run"])
    steps = [each.train.steps for each in found.values()]
    assert sum(steps) == 100
    assert steps[-1] >= 50
    assert all(each.objective.next_token == 0 and not each.method.joint for each in found.values())


@pytest.mark.parametrize("outcome", adapting.OUTCOMES)
@pytest.mark.parametrize("steps", [2, 7, 1000])
def test_the_rate_falls_to_zero_in_the_last_stage_alone(outcome, steps):
    *first, last = recipes(to=outcome, steps=steps).values()
    assert learning_rate(last.optimizer, last.train.steps, last.train.steps) == 0.0
    assert all(learning_rate(each.optimizer, 10**6, each.train.steps) == each.optimizer.lr for each in first)
    assert sum(each.train.steps for each in [*first, last]) == steps


@pytest.mark.parametrize("masks", range(1, 17))
@pytest.mark.parametrize("most", [16, 100, 256, 4096])
def test_a_context_holds_whole_groups_and_as_many_as_the_model_reads(masks, most):
    context = Choices(to="drafter", masks=masks, most_context=most).context
    assert context % masks == 0
    assert 7 / 8 * (min(most, 512) - masks) < context <= min(most, 512)
    assert most < 32 or context % 8 == 0 or math.lcm(masks, 8) > min(most, 512) / 8


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"to": "chat"}, "--to must be one of drafter, joint, block, got 'chat'"),
        ({"to": "drafter", "rank": 0}, "--rank must be at least 1, got 0"),
        ({"to": "drafter", "masks": 0}, "--masks must be at least 1, got 0"),
        ({"to": "drafter", "steps": 1}, "--steps must be at least 2, one per stage, got 1"),
        ({"to": "drafter", "block_size": 4}, "--block-size needs --to joint or block, got 4"),
        ({"to": "drafter", "aim": "best"}, "--aim must be one of hard, soft, overlap, got 'best'"),
        ({"to": "joint", "rank": 8}, "--rank needs --to drafter, got 8 with --to joint"),
        ({"to": "block", "masks": 8}, "--masks needs --to drafter, got 8 with --to block"),
        ({"to": "joint", "block_size": 32, "most_context": 16}, "--block-size must be at most the 16 tokens"),
    ],
)
def test_choices_that_make_no_sense(chosen, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Choices(**chosen).stages()


def config(method, **network: object) -> LanguageModelConfig:
    shape = replace(TINY, **network)
    base = Base(source="the/base", sha256="0" * 64) if shape.additions else None
    return LanguageModelConfig(network=shape, method=method, mask_id=19, base=base)


AR, BLOCKS = AutoregressiveMethod(), BlockDiffusionMethod(block_size=4, causal_clean=True)
JOINT = replace(BLOCKS, joint=True)


@pytest.mark.parametrize(
    ("model", "to", "said"),
    [
        (
            config(BLOCKS),
            "drafter",
            "m is block diffusion, blocks of 4; first make a joint model with --to joint",
        ),
        (
            config(DrafterMethod(), additions=4),
            "joint",
            "only additions to the weights of the/base: adapt that",
        ),
        (
            config(DrafterMethod(), additions=4),
            "drafter",
            "--rank must be 4, the rank of the additions that m already has",
        ),
        (
            config(ScoreEntropyMethod(), adaln=True, time_conditioning=True),
            "block",
            "need an autoregressive or masked diffusion model, and m is SEDD",
        ),
    ],
)
def test_what_a_checkpoint_cannot_become(model, to, said):
    (recipe, *_) = recipes(to=to).values()
    with pytest.raises(ValueError, match=re.escape(said)):
        check_can_become(model, "m", recipe)


@pytest.mark.parametrize(
    ("method", "to"),
    [(AR, "drafter"), (JOINT, "drafter"), (AR, "joint"), (BLOCKS, "joint"), (JOINT, "block")],
)
def test_what_a_checkpoint_can_become(method, to):
    (recipe, *_) = recipes(to=to).values()
    check_can_become(config(method), "m", recipe)


# --- memory ---


def test_memory_is_counted_by_the_parameters_of_the_network():
    plain = config(AR)
    numbers = sum(each.numel() for each in plain.network.build().parameters())
    memory = training_memory(plain)
    assert (memory.frozen, memory.learned) == (0, numbers)
    assert (memory.weights, memory.gradients, memory.moments) == (4 * numbers, 4 * numbers, 8 * numbers)
    assert memory.total == 16 * numbers


def test_beside_a_frozen_model_only_the_additions_have_gradients():
    found = config(DrafterMethod(), additions=2)
    network = found.network.build()
    network.learn_beside()
    learned = sum(each.numel() for each in network.parameters() if each.requires_grad)
    frozen = sum(each.numel() for each in network.parameters() if not each.requires_grad)
    memory = training_memory(found)
    assert (memory.frozen, memory.learned) == (frozen, learned)
    assert memory.total == 4 * frozen + 16 * learned


def published(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, **more: object):
    return TransformerConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        mlp_width=mlp,
        vocab_size=vocabulary,
        context=512,
        mlp="swiglu",
        norm="rms",
        mlp_bias=False,
        head_bias=False,
        mask_vector=True,
        dropout=0.0,
        **{"tied": True, **more},
    )


_QWEN3 = {"head_dim": 128, "qk_norm": True}
SIZES = {
    "SmolLM2-135M": published(30, 576, 9, 3, 1536, 49_152),
    "Qwen3-0.6B": published(28, 1024, 16, 8, 3072, 151_936, **_QWEN3),
    "Qwen3-1.7B": published(28, 2048, 16, 8, 6144, 151_936, **_QWEN3),
    "Qwen3-4B": published(36, 2560, 32, 8, 9728, 151_936, **_QWEN3),
    "Qwen3-8B": published(36, 4096, 32, 8, 12_288, 151_936, tied=False, **_QWEN3),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_table_of_memory_is_what_is_computed(name):
    network = SIZES[name]
    whole, beside = (
        training_memory(LanguageModelConfig(network=each, method=method, mask_id=network.vocab_size))
        for each, method in ((network, BLOCKS), (replace(network, additions=64), DrafterMethod()))
    )
    gib = [f"{each.total / 2**30:.1f}" for each in (beside, whole)]
    row = f"| {name} | {whole.learned:,} | {beside.learned:,} | {' | '.join(gib)} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()
