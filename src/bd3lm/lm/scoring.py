"""How likely texts are under a model: exactly where that can be computed, bounded where it cannot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bd3lm.config import (
    AutoregressiveMethod,
    BlockDiffusionMethod,
    D3PMMethod,
    LanguageModelConfig,
    ScoreEntropyMethod,
    SimplexMethod,
)
from bd3lm.diffusion import SCHEDULES, Counts, Times, named_process
from bd3lm.evaluation import exact_likelihood, importance_weighted_nll
from bd3lm.evaluation.exact import MAX_EXACT_BLOCK
from bd3lm.models import Transformer, require_evaluation_mode
from bd3lm.objectives import D3PM, Autoregressive, BlockDiffusionLoss, Objective, ScoreEntropy, TokenBatch

Estimator = Literal["auto", "exact", "nelbo", "importance"]

_LARGEST_EXACT = 8  # where "auto" still computes exactly: 255 passes


@dataclass(frozen=True)
class TextLikelihood:
    """log p of a text in nats, or a lower bound of it, over `tokens` tokens."""

    log_p: float
    tokens: int
    estimator: str
    is_exact: bool

    @property
    def perplexity(self) -> float:
        """Per token; an upper bound where log_p is a lower one."""
        nats = -self.log_p / self.tokens
        return math.exp(nats) if nats < 700 else math.inf


@torch.no_grad()
def score(
    network: Transformer,
    config: LanguageModelConfig,
    texts: Sequence[Sequence[int]],
    *,
    estimator: Estimator,
    samples: int,
    seed: int,
    batch_size: int,
) -> list[TextLikelihood]:
    """The likelihood of each text, given its first token unless the model predicts that too."""
    for name, value, least in (("samples", samples, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be at least {least}, got {value!r}")
    require_evaluation_mode(network)
    estimator = _resolve(network, config, estimator)
    _check(texts, config)
    device = network.embedding.weight.device
    scores: list[TextLikelihood] = []
    # What is drawn for a text must not depend on its neighbours, so sampled estimates take one at a time.
    rows = batch_size if estimator == "exact" else 1
    for start in range(0, len(texts), rows):
        batch = _padded(texts[start : start + rows], config, device)
        if estimator == "exact":
            nats = _exact(network, config, batch)
        else:
            generator = torch.Generator(device).manual_seed(seed)
            nats = _sampled(network, config, batch, estimator, samples, batch_size, generator)
        scores += [
            TextLikelihood(-nll, tokens, estimator, is_exact=estimator == "exact")
            for nll, tokens in zip(nats.tolist(), batch.scored.sum(1).tolist(), strict=True)
        ]
    return scores


def _resolve(network: Transformer, config: LanguageModelConfig, estimator: Estimator) -> Estimator:
    if estimator not in ("auto", "exact", "nelbo", "importance"):
        raise ValueError(f"estimator must be 'auto', 'exact', 'nelbo' or 'importance', got {estimator!r}")
    method = config.method
    if isinstance(method, AutoregressiveMethod):
        if estimator not in ("auto", "exact"):
            raise ValueError(
                f"estimator must be 'exact' for an autoregressive model, whose likelihood needs no bound, "
                f"got {estimator!r}"
            )
        return "exact"
    if isinstance(method, SimplexMethod):
        raise ValueError(
            "SSD-LM (method kind simplex) has no likelihood, nor a bound on one, to be asked for"
        )
    if isinstance(method, ScoreEntropyMethod | D3PMMethod):
        if estimator not in ("auto", "nelbo"):
            raise ValueError(
                f"estimator must be 'nelbo' for method kind {method.kind}, whose likelihood is only bounded, "
                f"got {estimator!r}"
            )
        return "nelbo"
    if estimator == "auto":
        return "exact" if method.block_size <= _LARGEST_EXACT and not network.uses_noise else "nelbo"
    if estimator == "exact" and method.block_size > MAX_EXACT_BLOCK:
        raise ValueError(
            f"estimator 'exact' is for blocks of at most {MAX_EXACT_BLOCK}, got blocks of "
            f"{method.block_size}; use 'importance' or 'nelbo'"
        )
    if network.uses_noise and estimator != "nelbo":
        raise ValueError(
            f"estimator must be 'nelbo' for a network that is told the noise level, got {estimator!r}"
        )
    return estimator


def _exact(network: Transformer, config: LanguageModelConfig, batch: TokenBatch) -> Tensor:
    """−log p of each row."""
    method = config.method
    if isinstance(method, AutoregressiveMethod):
        judge = Autoregressive(mask_id=method.mask_id, score_first=method.score_first)
        return judge.loss(network, batch).nats.double().sum(1)
    if not isinstance(method, BlockDiffusionMethod):
        raise RuntimeError(f"no exact likelihood is known for {method.kind}")
    exact = exact_likelihood(
        network,
        batch,
        block_size=method.block_size,
        mask_id=method.mask_id,
        causal_clean=method.causal_clean,
    )
    return exact.nll.sum(1)


def _sampled(
    network: Transformer,
    config: LanguageModelConfig,
    batch: TokenBatch,
    estimator: Estimator,
    samples: int,
    batch_size: int,
    generator: torch.Generator,
) -> Tensor:
    """An upper bound, in expectation, of −log p of the one row."""
    method = config.method
    if estimator == "importance" and isinstance(method, BlockDiffusionMethod):
        return importance_weighted_nll(
            network,
            batch,
            block_size=method.block_size,
            mask_id=method.mask_id,
            orders=samples,
            causal_clean=method.causal_clean,
            generator=generator,
        ).sum(1)
    bound = _bound(network, config)
    # The same text in every row: noise levels are spread evenly over all of its draws.
    copies = TokenBatch(
        tokens=batch.tokens.expand(samples, -1),
        scored=batch.scored.expand(samples, -1),
        absent=None if batch.absent is None else batch.absent.expand(samples, -1),
    )
    draws = bound.draw(*copies.tokens.shape, generator=generator, device=batch.tokens.device)
    if draws is None:
        raise RuntimeError("a sampled bound draws something")
    total = torch.zeros(1, dtype=torch.float64, device=batch.tokens.device)
    for start in range(0, samples, batch_size):
        rows = slice(start, start + batch_size)
        total += bound.loss(network, copies[rows], draws[rows]).nats.double().sum()
    return total / samples


def _bound(network: Transformer, config: LanguageModelConfig) -> Objective:
    """The objective whose mean is the bound of a method."""
    method, vocab_size = config.method, config.network.vocab_size
    match method:
        case BlockDiffusionMethod():
            return BlockDiffusionLoss(
                block_size=method.block_size,
                mask_id=method.mask_id,
                masking=Times() if network.uses_noise else Counts(),
                causal_clean=method.causal_clean,
            )
        case ScoreEntropyMethod():
            process = named_process(method.process, vocab_size=vocab_size, mask_id=method.mask_id)
            return ScoreEntropy(process=process, mask_id=method.mask_id, schedule=process.log_linear)
        case D3PMMethod():
            process = named_process(method.process, vocab_size=vocab_size, mask_id=method.mask_id)
            return D3PM(
                process=process,
                mask_id=method.mask_id,
                steps=method.steps,
                schedule=SCHEDULES[method.schedule],
            )
        case _:
            raise RuntimeError(f"method kind {method.kind} has no sampled bound")


def _check(texts: Sequence[Sequence[int]], config: LanguageModelConfig) -> None:
    given = int(not config.method.score_first)
    context = config.network.context
    if not len(texts):
        raise ValueError("texts must hold at least one text, got none")
    for index, text in enumerate(texts):
        if not given < len(text) <= context:
            raise ValueError(
                f"text {index} must have {given + 1} to {context} tokens (the network's context; the token "
                f"that texts begin with counts), got {len(text)}"
            )
        if config.method.mask_id in text:
            raise ValueError(f"text {index} must have no gaps")
    method = config.method
    if isinstance(method, ScoreEntropyMethod | D3PMMethod) and method.process == "uniform":
        for index, text in enumerate(texts):  # the sampler writes whole contexts, and so must be asked
            if len(text) != context:
                raise ValueError(
                    f"text {index} must have {context} tokens, the whole context, under uniform noise, which "
                    f"knows no end of a text, got {len(text)}"
                )


def _padded(texts: Sequence[Sequence[int]], config: LanguageModelConfig, device: torch.device) -> TokenBatch:
    """Rows padded to whole blocks; what lies past a text's end is never seen."""
    method = config.method
    block = method.block_size if isinstance(method, BlockDiffusionMethod) else 1
    if isinstance(method, ScoreEntropyMethod | D3PMMethod) and method.process == "absorbing":
        block = config.network.context
    lengths = torch.tensor([len(text) for text in texts])
    filler = 0 if method.mask_id else 1
    tokens = torch.full((len(texts), -(-int(lengths.max()) // block) * block), filler)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    given = torch.full((len(texts),), int(not method.score_first), device=device)
    whole = bool((lengths == tokens.shape[1]).all())
    return TokenBatch.of(tokens.to(device), prompts=given, lengths=None if whole else lengths.to(device))
