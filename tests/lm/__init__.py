"""Small models as users hold them: of text by bytes, and of four tokens, whose every text can be listed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from bd3lm.data import Tokenizer, byte_tokenizer
from bd3lm.lm import Generation, LanguageModel
from bd3lm.methods import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    D3PMMethod,
    LanguageModelConfig,
    Method,
    ScoreEntropyMethod,
    SimplexMethod,
)
from bd3lm.sampling import BlockFinished, BlockStarted, Event, Started, TokenHidden, TokenRevealed
from tests.oracles.networks import MASK, tiny_transformer

BYTES = byte_tokenizer()
END = BYTES.eos_id  # also the token that texts begin with
CONTEXT = 16
METHODS = {"autoregressive": None, "blocks of 1": 1, "blocks of 4": 4, "one block": CONTEXT}
PROMPTS = ["", "a", "hello", "naïve ☂", "the cat sat on"]
every_method = pytest.mark.parametrize("block_size", METHODS.values(), ids=METHODS)

# The baselines, by the names of their papers: kinds of noise, and few steps.
SEDD = ScoreEntropyMethod()
SEDD_UNIFORM = ScoreEntropyMethod(process="uniform")
D3PM = D3PMMethod(steps=6)
D3PM_UNIFORM = D3PMMethod(steps=6, process="uniform")
SEDD_BLOCKS = ScoreEntropyMethod(process="uniform", block_size=4)
D3PM_BLOCKS = D3PMMethod(steps=6, process="uniform", block_size=4)
SSD = SimplexMethod(block_size=4)
BASELINES: dict[str, Method] = {
    "SEDD": SEDD,
    "SEDD uniform": SEDD_UNIFORM,
    "D3PM": D3PM,
    "D3PM uniform": D3PM_UNIFORM,
    "SEDD uniform, blocks": SEDD_BLOCKS,
    "D3PM uniform, blocks": D3PM_BLOCKS,
    "SSD-LM": SSD,
}
every_baseline = pytest.mark.parametrize("method", BASELINES.values(), ids=BASELINES)


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
    method = _method(block_size, score_first, causal_clean)
    return of_method(method, end_logit=end_logit, tokenizer=tokenizer, seed=seed, **network)


def baseline(method: Method, **options: Any) -> LanguageModel:
    """A model of text whose network is told the noise level, as those of the baselines are."""
    return of_method(method, **{"adaln": True, "time_conditioning": True, "gain": 0.7, **options})


def that_drafts() -> LanguageModel:
    """A joint model of four signs that writes by the causal law: of what it drafts, much is right."""
    method = BlockDiffusionMethod(block_size=4, causal_clean=True, joint=True, law="causal")
    model = of_method(method, end_logit=-1e3)
    with torch.no_grad():
        model.network.output.bias[[byte for byte in range(256) if chr(byte) not in "abc "]] = -1e3
    return model


def of_method(
    method: Method,
    *,
    end_logit: float = 0.0,
    tokenizer: Tokenizer | None = BYTES,
    mask_id: int | None = None,
    seed: int = 0,
    **network: Any,
) -> LanguageModel:
    """A model of text whose mask is the tokenizer's, or that of bytes."""
    if mask_id is None:
        mask_id = (tokenizer or BYTES).mask_id
    model = _small(method, mask_id, seed, {"vocab_size": BYTES.vocab_size, "context": CONTEXT, **network})
    if end_logit:
        with torch.no_grad():
            model.network.output.bias[END] += end_logit
    return LanguageModel(model.network, model.record, tokenizer)


def of_four_tokens(
    block_size: int | None = 2,
    *,
    context: int = 4,
    score_first: bool = False,
    causal_clean: bool = False,
    previous_token: bool = False,
    mask_id: int = MASK,
    seed: int = 0,
    **network: Any,
) -> LanguageModel:
    """A model of the tokens 0, 1 and 3, the mask being 2, without a tokenizer."""
    shape = {"vocab_size": 4, "context": context, **network}
    return _small(_method(block_size, score_first, causal_clean, previous_token), mask_id, seed, shape)


def _method(
    block_size: int | None, score_first: bool, causal_clean: bool, previous_token: bool = False
) -> Method:
    if block_size is None:
        return AutoregressiveMethod(score_first=score_first)
    return BlockDiffusionMethod(
        block_size=block_size,
        score_first=score_first,
        causal_clean=causal_clean,
        previous_token=previous_token,
    )


def _small(method: Method, mask_id: int, seed: int, shape: dict[str, Any]) -> LanguageModel:
    network = tiny_transformer(seed, **shape)
    return LanguageModel(network, LanguageModelConfig(network=network.config, method=method, mask_id=mask_id))


def tokens_of(generations: Iterable[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


def entropy_by_hand(tokens: Sequence[int]) -> float:
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in Counter(tokens).values())


def replay(texts: dict[int, list[int]], event: Event) -> None:
    """Do to the texts what an event says, and check that it can be done."""
    mask = BYTES.mask_id
    match event:
        case Started(index=index, request=request):
            texts[index] = request.given.tolist()
        case BlockStarted(index=index, start=start, stop=stop):
            assert start < stop
            texts[index] += [mask] * (stop - len(texts[index]))
        case TokenRevealed(index=index, position=position, token=token):
            assert texts[index][position] == mask
            assert token != mask
            texts[index][position] = token
        case TokenHidden(index=index, position=position):
            assert texts[index][position] != mask
            texts[index][position] = mask
        case BlockFinished(index=index, start=start, stop=stop):
            assert mask not in texts[index][start:stop]
