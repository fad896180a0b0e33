"""Custom networks: what the base class provides, and that the library needs nothing more."""

from dataclasses import fields
from itertools import product
from math import exp
from pathlib import Path

import pytest
import torch

from bd3lm import interop
from bd3lm.lm import LanguageModel
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    BlockDiffusionTraining,
    D3PMMethod,
    LanguageModelConfig,
    Method,
    ScoreEntropyMethod,
    SimplexMethod,
)
from bd3lm.models import Bidirectional, BlockCausal, BlockDiffusion, Causal, KVTape, TransformerConfig
from bd3lm.objectives import BlockDenoiser, TokenBatch
from bd3lm.runs.network import NetworkRecipe, recipe_class
from tests.oracles.networks import MASK, blocks_of, tiny_transformer
from tests.oracles.sampling import chi_square
from tests.oracles.strangers import KeepingConfig, PlainConfig, stranger

PLAIN = PlainConfig(vocab_size=4, context=4, width=6, layers=2, tied=True)
KEEPING = KeepingConfig(vocab_size=4, context=8)
TEXTS = [list(text) for text in product((0, 1, 3), repeat=4)]


def model(config: PlainConfig | KeepingConfig, method: Method, seed: int = 0) -> LanguageModel:
    return LanguageModel(
        stranger(config, seed), LanguageModelConfig(network=config, method=method, mask_id=MASK)
    )


@pytest.mark.parametrize("config", [PLAIN, KEEPING], ids=["plain", "keeping"])
@pytest.mark.parametrize(
    "method",
    [
        AutoregressiveMethod(score_first=True),
        BlockDiffusionMethod(block_size=2, score_first=True),
        BlockDiffusionMethod(
            block_size=2, score_first=True, causal_clean=True, previous_token=True, lean=1.0
        ),
        BlockDiffusionMethod(block_size=4, score_first=True),
    ],
    ids=["autoregressive", "blocks", "joint", "one block"],
)
def test_exact_likelihoods_of_a_custom_network_sum_to_one(
    config: PlainConfig | KeepingConfig, method: Method
) -> None:
    found = model(config, method).log_likelihood(TEXTS, estimator="exact", batch_size=81)
    assert sum(exp(each.log_p) for each in found) == pytest.approx(1.0, abs=1e-9)
    assert max(each.log_p for each in found) > min(each.log_p for each in found) + 2.0


@pytest.mark.parametrize("config", [PLAIN, KEEPING], ids=["plain", "keeping"])
@pytest.mark.parametrize(
    "method",
    [AutoregressiveMethod(score_first=True), BlockDiffusionMethod(block_size=2, score_first=True)],
    ids=["autoregressive", "blocks"],
)
def test_a_custom_network_samples_from_its_likelihood(
    config: PlainConfig | KeepingConfig, method: Method
) -> None:
    lm = model(config, method)
    found = lm.log_likelihood(TEXTS, estimator="exact", batch_size=81)
    law = {tuple(text): exp(each.log_p) for text, each in zip(TEXTS, found, strict=True)}
    texts = lm.generate([[]] * 1500, length=4, top_p=1.0, stop_at_eos=False, batch_size=500)
    assert chi_square([torch.tensor(each.tokens) for each in texts], law) > 1e-4


def test_the_same_texts_come_with_and_without_its_cache() -> None:
    lm = model(KEEPING, BlockDiffusionMethod(block_size=2, score_first=True))
    cached, afresh = (lm.generate([[0, 1, 3]] * 6, length=8, cache=cache) for cache in (True, False))
    assert [each.tokens for each in cached] == [each.tokens for each in afresh]


@pytest.mark.parametrize(
    "method",
    [
        D3PMMethod(steps=4),
        D3PMMethod(steps=4, process="uniform", block_size=2),
        ScoreEntropyMethod(),
        SimplexMethod(block_size=2),
    ],
    ids=str,
)
def test_every_method_trains_it_and_writes_with_it(method: Method) -> None:
    lm = model(PLAIN, method)
    lm.loss(torch.tensor([[0, 1, 3, 0]]), generator=torch.Generator().manual_seed(0)).backward()
    assert all(each.grad is not None for each in lm.network.parameters())
    (text,) = lm.generate([[0]], length=4, steps=3)
    assert len(text.tokens) == 4


@pytest.mark.parametrize(
    "layout", [Causal(4), BlockCausal(4, 2), BlockDiffusion(4, 2), Bidirectional(4)], ids=str
)
def test_a_position_depends_on_what_its_layout_lets_it_see(layout: Causal) -> None:
    """Checks on these test networks, which other tests rely on."""
    for config in (PLAIN, KEEPING):
        network = stranger(config)
        tokens = torch.zeros(1, layout.size, dtype=torch.long)
        before = network(tokens, layout=layout)
        for place in range(layout.size):
            changed = tokens.clone()
            changed[0, place] = 1
            moved = (network(changed, layout=layout) != before).any(-1)[0]
            seen = layout.dense()[:, place][slice(*layout.read)]
            assert torch.equal(moved & ~seen, torch.zeros_like(moved))


def test_its_cross_entropy_is_that_of_ours() -> None:
    ours = tiny_transformer(0)
    states = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets, weights = torch.tensor([0, 1, 3, 0, MASK]), torch.tensor([1.0, 0.5, 2.0, 0.0, 0.0]).double()
    for excluded in (MASK, 4):
        total, nats = ours.cross_entropy(states, targets, weights, excluded=excluded)
        plain, plain_nats = super(type(ours), ours).cross_entropy(states, targets, weights, excluded=excluded)
        gradients = [torch.autograd.grad(each, list(ours.output.parameters())) for each in (total, plain)]
        torch.testing.assert_close((total, nats), (plain, plain_nats))
        torch.testing.assert_close(*gradients)


def test_missing_features_are_refused_with_clear_errors() -> None:
    network = stranger(PLAIN)
    with pytest.raises(
        ValueError, match=r"network of kind plain_stranger has no cache of keys and values.*cache=False"
    ):
        network.new_cache(1, segment=2)
    batch = TokenBatch.of(torch.tensor([[0, 1, 3, 0]]), score_first=True)
    with pytest.raises(
        ValueError, match="algorithm must be single_pass for a network that does not store keys"
    ):
        BlockDenoiser(network, batch, blocks_of(2), algorithm="two_pass")
    lm = model(PLAIN, BlockDiffusionMethod(block_size=2))
    with pytest.raises(ValueError, match="algorithm must be single_pass"):
        lm.loss(batch, BlockDiffusionTraining(algorithm="two_pass"))
    with pytest.raises(ValueError, match=r"network.kind must be transformer for the reference's layout"):
        interop.save_reference(network, lm.config, "nowhere")


def test_two_passes_with_its_own_store_equal_one_pass() -> None:
    network = stranger(KEEPING)
    batch = TokenBatch.of(torch.tensor([[0, 1, 3, 0]]), score_first=True)
    masked = torch.tensor([[[True, False, True, True]]])
    one, two = (
        BlockDenoiser(network, batch, blocks_of(2), algorithm=each).nats(masked)
        for each in ("single_pass", "two_pass")
    )
    torch.testing.assert_close(one, two)
    tape = KVTape()
    network(batch.tokens, layout=Causal(4), cache=tape)
    assert len(tape.layers) == KEEPING.layers


@pytest.mark.parametrize("config", [PLAIN, KEEPING], ids=["plain", "keeping"])
def test_it_is_saved_and_loaded_to_the_bit(config: PlainConfig | KeepingConfig, tmp_path: Path) -> None:
    """Buffers, which are not saved, keep their initial values; tied parameters stay tied."""
    lm = model(config, AutoregressiveMethod(score_first=True))
    lm.save_pretrained(tmp_path)
    before = torch.random.get_rng_state()
    again = LanguageModel.from_pretrained(tmp_path, device="cpu")
    assert torch.equal(before, torch.random.get_rng_state())
    assert again.config == lm.config
    assert torch.equal(
        again.network(torch.tensor([[0, 1]]), layout=Causal(2)),
        lm.network(torch.tensor([[0, 1]]), layout=Causal(2)),
    )
    assert len(list(again.network.parameters())) == len(list(lm.network.parameters()))
    assert interop.config_of(tmp_path) == lm.config
    assert type(lm.network).__name__ not in repr(lm)
    assert config.kind in repr(lm)


def test_its_config_counts_and_names_its_parameters() -> None:
    assert PLAIN.parameters == sum(each.numel() for each in stranger(PLAIN).parameters())
    shapes = interop.weights.parameter_shapes(PLAIN)
    assert "output.weight" not in shapes
    assert shapes["table.weight"] == (4, 6)


# --- a mask outside the vocabulary ---


@pytest.mark.parametrize(
    "method",
    [
        AutoregressiveMethod(score_first=True),
        BlockDiffusionMethod(block_size=2, score_first=True),
        BlockDiffusionMethod(block_size=2, score_first=True, causal_clean=True, previous_token=True),
        BlockDiffusionMethod(block_size=4, score_first=True),
    ],
    ids=["autoregressive", "blocks", "joint", "one block"],
)
def test_likelihoods_sum_to_one_with_a_mask_outside_the_vocabulary(method: Method) -> None:
    network = tiny_transformer(0, vocab_size=3, context=4, mask_vector=True)
    lm = LanguageModel(network, LanguageModelConfig(network=network.config, method=method, mask_id=3))
    texts = [list(text) for text in product(range(3), repeat=4)]
    found = lm.log_likelihood(texts, estimator="exact", batch_size=81)
    assert sum(exp(each.log_p) for each in found) == pytest.approx(1.0, abs=1e-9)
    law = {tuple(text): exp(each.log_p) for text, each in zip(texts, found, strict=True)}
    written = lm.generate([[]] * 1500, length=4, top_p=1.0, stop_at_eos=False, batch_size=500)
    assert chi_square([torch.tensor(each.tokens) for each in written], law) > 1e-4


@pytest.mark.parametrize("mask_id", [2, 4, -1])
def test_a_separate_mask_vector_fixes_the_mask_id(mask_id: int) -> None:
    network = TransformerConfig(vocab_size=3, mask_vector=True)
    with pytest.raises(ValueError, match=r"mask_id must (be 3, the network's extra vector|lie in 0\.\.3)"):
        LanguageModelConfig(network=network, method=AutoregressiveMethod(), mask_id=mask_id)


@pytest.mark.parametrize("method", [D3PMMethod(), ScoreEntropyMethod(), SimplexMethod()], ids=str)
def test_methods_that_predict_the_mask_refuse_one_outside_the_vocabulary(method: Method) -> None:
    network = TransformerConfig(vocab_size=3, context=64, mask_vector=True)
    with pytest.raises(ValueError, match=rf"method\.kind {method.kind} needs a network whose mask is one of"):
        LanguageModelConfig(network=network, method=method, mask_id=3)


def test_the_mask_starts_as_the_mean_of_the_tokens() -> None:
    network = tiny_transformer(0, vocab_size=3, mask_vector=True)
    network.fill_in(network.may_lack)
    torch.testing.assert_close(network.mask_vector.float(), network.embedding.weight.mean(0).float())


# --- the network section of a recipe ---


@pytest.mark.parametrize("config", [TransformerConfig, PlainConfig, KeepingConfig])
def test_a_recipe_has_every_field_of_the_config_but_what_the_data_decides(config: type) -> None:
    section = recipe_class(config)
    assert issubclass(section, NetworkRecipe)
    named = {each.name for each in fields(section)} - {"kind", "size", "initialisation"}
    assert named == {each.name for each in fields(config)} - {"vocab_size", "context"}
