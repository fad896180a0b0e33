"""Small random models for the tests of files. Every parameter is random, so a lost one is noticed."""

from pathlib import Path
from typing import Any

import torch

from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import Transformer, TransformerConfig

PARITY = Path(__file__).parents[1] / "data" / "parity"
VOCABULARY, CONTEXT, BLOCK = 11, 16, 4


def small_model(
    seed: int = 0, *, causal: bool = False, block_size: int = BLOCK, **network: Any
) -> tuple[Transformer, LanguageModelConfig]:
    shape = {"layers": 2, "hidden": 16, "heads": 2, "conditioning_dim": 8} | network
    config = TransformerConfig(**{"vocab_size": VOCABULARY, "context": CONTEXT, **shape})
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    method = AutoregressiveMethod() if causal else BlockDiffusionMethod(block_size=block_size)
    return model, LanguageModelConfig(network=config, method=method, mask_id=config.vocab_size - 1)


def assert_same(model: Transformer, other: Transformer) -> None:
    """The same parameters, bit for bit."""
    first, second = model.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
