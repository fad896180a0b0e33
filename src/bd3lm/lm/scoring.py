"""How likely texts are under a model: the exact likelihood where it can be computed, else a bound."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bd3lm.diffusion import Draws, is_whole
from bd3lm.evaluation import Estimator, Figure, perplexity
from bd3lm.methods import LanguageModelConfig
from bd3lm.models import Denoiser, require_evaluation_mode
from bd3lm.objectives import TokenBatch
from bd3lm.parsing import did_you_mean

PAPER = "paper"
_NAMES = ("auto", PAPER, "exact", "nelbo", "nelbo:ordered", "nelbo:reference", "counts")
ESTIMATORS = f"{', '.join(_NAMES)} or iw:K"

_MOST_ORDERS = 1000  # each takes one pass for every token of a block, and all are drawn beforehand


@dataclass(frozen=True)
class TextLikelihood:
    """log p of a text in nats over `tokens` tokens, or an estimate of it.

    `error` is one standard error of log_p, from the spread of the draws. It is 0 if nothing is drawn, and
    None after a single draw, which shows no spread (as with iw:K unless you ask for more `samples`).

    The error covers the noise only. A bound holds in expectation, so a drawn one may lie above log p by its
    noise, and no error tells how far the expectation lies below log p. For nelbo and counts, which spread
    their noise levels evenly over the draws, the error is on average too large rather than too small; nelbo
    has no finite variance, so its errors are sometimes too small.

    `blocks` splits an exact log_p by block: the log p of each block that has scored tokens, given all before
    it (for an autoregressive model, of each token). It is None if log_p is not exact.
    """

    log_p: float
    tokens: int
    figure: Figure
    error: float | None = None
    blocks: tuple[float, ...] | None = field(default=None, repr=False)

    @property
    def is_exact(self) -> bool:
        """Otherwise log_p is a lower bound in expectation, or not even that: see `figure.meaning`."""
        return self.figure.meaning == "exact"

    @property
    def perplexity(self) -> float:
        """Perplexity per token: an upper bound if log_p is a lower bound."""
        return perplexity(-self.log_p / self.tokens)


def build_estimator(config: LanguageModelConfig, name: str) -> Estimator:
    """The estimator of this name. Refuses one that does not suit the model, with the reason.

    "paper" is the estimator whose figure the paper prints for the method."""
    method = config.method
    _check_name(name, method.own_estimators)
    return method.estimator(method.paper_estimator if name == PAPER else name, config.frame)


@torch.no_grad()
def score(
    network: Denoiser,
    config: LanguageModelConfig,
    texts: Sequence[Sequence[int]],
    *,
    given: Sequence[int] | None,
    estimator: str,
    samples: int | None,
    seed: int,
    batch_size: int,
) -> list[TextLikelihood]:
    """The likelihood of each text. The first token is given, unless the model predicts it, or `given`
    tokens."""
    _check_numbers(samples, batch_size, seed)
    require_evaluation_mode(network)
    chosen = build_estimator(config, estimator)
    if samples is not None and not chosen.is_random:
        raise ValueError(
            f"samples is for an estimate that draws, and {chosen.name!r} draws nothing, got {samples}"
        )
    _check(texts, config)
    prompts = _prompts(texts, given, config)
    device = network.device
    figure, scores = chosen.figures(network)[0], []
    found: list[tuple[float, float | None, tuple[float, ...] | None]]
    # A text's draws must not depend on its neighbors, so estimates that draw take one text at a time.
    rows = 1 if chosen.is_random else batch_size
    for start in range(0, len(texts), rows):
        batch = _padded(texts[start : start + rows], prompts[start : start + rows], config, device)
        if chosen.is_random:
            draws = samples or chosen.usual_draws
            drawn = _each_draw(network, chosen, batch, draws, seed, batch_size)
            found = [(drawn.mean().item(), _standard_error(drawn), None)]
        else:
            parts = chosen.parts(network, batch, ())[0]
            found = [
                (nll, 0.0, blocks)
                for nll, blocks in zip(parts.sum(1).tolist(), _of_blocks(parts, batch.scored), strict=True)
            ]
        if any(math.isnan(nll) for nll, *_ in found):
            raise FloatingPointError("the model's probabilities are not finite; its weights may hold NaN")
        scores += [
            TextLikelihood(-nll, tokens, figure, error, blocks)
            for (nll, error, blocks), tokens in zip(found, batch.scored.sum(1).tolist(), strict=True)
        ]
    return scores


def _check_numbers(samples: int | None, batch_size: int, seed: int) -> None:
    if samples is not None and (not is_whole(samples) or samples < 1):
        raise ValueError(f"samples must be a whole number, at least 1, or None, got {samples!r}")
    if not is_whole(batch_size) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number, at least 1, got {batch_size!r}")
    if not is_whole(seed) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number, at least 0 and below 2^63, got {seed!r}")


def _each_draw(
    network: Denoiser, estimator: Estimator, batch: TokenBatch, draws: int, seed: int, batch_size: int
) -> Tensor:
    """An estimate for the one text from each draw. All draws share a batch, which spreads their noise
    levels."""
    copies = TokenBatch(
        tokens=batch.tokens.expand(draws, -1),
        scored=batch.scored.expand(draws, -1),
        absent=None if batch.absent is None else batch.absent.expand(draws, -1),
        documents=None if batch.documents is None else batch.documents.expand(draws, -1),
    )
    device = batch.tokens.device
    generator = torch.Generator(device).manual_seed(int(seed))
    drawn: tuple[Draws, ...] = estimator.draw(*copies.tokens.shape, generator=generator, device=device)
    found = []
    for start in range(0, draws, batch_size):
        rows = slice(start, start + batch_size)
        found.append(estimator.nats(network, copies[rows], tuple(each[rows] for each in drawn))[0])
    return torch.cat(found)


def _standard_error(drawn: Tensor) -> float | None:
    """The standard error of the mean of some draws; None if they cannot tell."""
    if len(drawn) < 2 or not drawn.isfinite().all():
        return None
    return drawn.std().item() / math.sqrt(len(drawn))


def _of_blocks(parts: Tensor, scored: Tensor) -> list[tuple[float, ...]]:
    """log p of each row's blocks that have scored tokens."""
    has = scored.unflatten(1, (parts.shape[1], -1)).any(2)
    return [tuple((-row[own]).tolist()) for row, own in zip(parts, has, strict=True)]


def _check_name(name: str, own: Collection[str]) -> None:
    """Refuse a name that no method knows. A method itself refuses the estimators that it does not have."""
    if not isinstance(name, str):
        raise ValueError(f"estimator must be {ESTIMATORS}, got {name!r}")
    found = re.fullmatch(r"iw:(\d{1,9})", name)
    if name in (*_NAMES, *own) or (found and 1 <= int(found[1]) <= _MOST_ORDERS):
        return
    hint = did_you_mean(name, _NAMES)
    raise ValueError(f"estimator must be {ESTIMATORS} with K from 1 to {_MOST_ORDERS:,}, got {name!r}{hint}")


def _prompts(
    texts: Sequence[Sequence[int]], given: Sequence[int] | None, config: LanguageModelConfig
) -> list[int]:
    least = int(not config.method.score_first)
    if given is None:
        return [least] * len(texts)
    if hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise ValueError(f"given must hold a number for each of {len(texts)} texts, got {given!r}")
    if len(given) != len(texts):
        raise ValueError(f"given must hold a number for each of {len(texts)} texts, got {len(given)}")
    for index, (number, text) in enumerate(zip(given, texts, strict=True)):
        if not is_whole(number):
            raise ValueError(f"given[{index}] must be a whole number of tokens, got {number!r}")
        if not least <= number < len(text):
            raise ValueError(
                f"given[{index}] must leave something to score, {least} to {len(text) - 1}, got {number}"
            )
    return [int(number) for number in given]


def _check(texts: Sequence[Sequence[int]], config: LanguageModelConfig) -> None:
    given = int(not config.method.score_first)
    context = config.network.context
    if not len(texts):
        raise ValueError("texts must hold at least one text, got none")
    for index, text in enumerate(texts):
        if not given < len(text) <= context:
            raise ValueError(
                f"text {index} must have {given + 1} to {context} tokens (the network's context, including "
                f"the start token), got {len(text)}"
            )
        if config.mask_id in text:
            raise ValueError(f"text {index} must have no gaps")
    multiple = config.method.scored_multiple(context)
    for index, text in enumerate(texts):
        if len(text) % multiple:
            wanted = f"{context} tokens, the whole context" if multiple == context else ""
            raise ValueError(
                f"text {index} must have {wanted or f'a multiple of {multiple} tokens, whole blocks'}, under "
                f"uniform noise, which cannot mark the end of a text, got {len(text)}"
            )


def _padded(
    texts: Sequence[Sequence[int]], prompts: Sequence[int], config: LanguageModelConfig, device: torch.device
) -> TokenBatch:
    """Rows padded to whole blocks. Nothing reads the padding."""
    block = config.method.scoring_unit(config.network.context)
    lengths = torch.tensor([len(text) for text in texts])
    filler = 0 if config.mask_id else 1
    tokens = torch.full((len(texts), -(-int(lengths.max()) // block) * block), filler)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    given = torch.tensor(prompts, device=device)
    whole = bool((lengths == tokens.shape[1]).all())
    return TokenBatch.of(tokens.to(device), prompts=given, lengths=None if whole else lengths.to(device))
