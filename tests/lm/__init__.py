"""Small models as users hold them: of text by bytes, and of four tokens, whose every text can be listed."""

from typing import Any

import torch

from bd3lm.config import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.data import Tokenizer, byte_tokenizer
from bd3lm.lm import LanguageModel
from tests.oracles.networks import MASK, tiny_transformer

BYTES = byte_tokenizer()
END = BYTES.eos_id  # also the token that texts begin with
CONTEXT = 16
METHODS = {"autoregressive": None, "blocks of 1": 1, "blocks of 4": 4, "one block": CONTEXT}


def of_bytes(
    block_size: int | None = 4,
    *,
    end_logit: float = 0.0,
    tokenizer: Tokenizer | None = BYTES,
    score_first: bool = False,
    causal_clean: bool = False,
    seed: int = 0,
    **network: Any,
) -> LanguageModel:
    """A model of text, autoregressive without a block size; `end_logit` makes the end token likelier."""
    shape = {"vocab_size": BYTES.vocab_size, "context": CONTEXT, **network}
    model = _small(block_size, BYTES.mask_id, score_first, causal_clean, seed, shape)
    with torch.no_grad():
        model.network.output.bias[END] += end_logit
    return LanguageModel(model.network, model.config, tokenizer)


def of_four_tokens(
    block_size: int | None = 2,
    *,
    context: int = 4,
    score_first: bool = False,
    causal_clean: bool = False,
    mask_id: int = MASK,
    seed: int = 0,
    **network: Any,
) -> LanguageModel:
    """A model of the tokens 0, 1 and 3, the mask being 2, without a tokenizer."""
    shape = {"vocab_size": 4, "context": context, **network}
    return _small(block_size, mask_id, score_first, causal_clean, seed, shape)


def _small(
    block_size: int | None,
    mask_id: int,
    score_first: bool,
    causal_clean: bool,
    seed: int,
    shape: dict[str, Any],
) -> LanguageModel:
    network = tiny_transformer(seed, **shape)
    method: AutoregressiveMethod | BlockDiffusionMethod
    if block_size is None:
        method = AutoregressiveMethod(mask_id=mask_id, score_first=score_first)
    else:
        method = BlockDiffusionMethod(
            mask_id=mask_id, block_size=block_size, score_first=score_first, causal_clean=causal_clean
        )
    return LanguageModel(network, LanguageModelConfig(network=network.config, method=method))
