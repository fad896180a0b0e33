"""From what a user asks for to what the samplers take: settings, prompts, templates, and the writer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from bd3lm.config import AutoregressiveMethod, LanguageModelConfig, did_you_mean
from bd3lm.data import Tokenizer
from bd3lm.diffusion import derive_seed
from bd3lm.diffusion.categorical import NucleusRule
from bd3lm.models import Transformer
from bd3lm.sampling import (
    AutoregressiveWriter,
    BlockWriter,
    FirstHitting,
    Request,
    Sample,
    Sharpening,
    SlidingWriter,
    Stopping,
    Unmasking,
    Writer,
    token_entropy,
)


@dataclass(frozen=True)
class Gap:
    """Tokens to be written in a template: ["The ", Gap(2), " sat down."]."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a Gap must have at least 1 token, got {self.tokens}")


Prompt = str | Sequence[int] | Sequence[str | Gap] | Tensor
"""Text, token ids, or a template of texts and gaps."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How texts are written. The defaults are the paper's sampler, one context long."""

    length: int | None = None
    """Tokens a text may reach, what was given included; by default the network's context."""
    seed: int = 0
    batch_size: int = 32
    """Texts written side by side. It changes speed and memory, not the texts."""
    temperature: float = 1.0
    top_k: int | None = None
    nucleus_p: float = 0.9
    """Draw from the likeliest tokens that hold this much probability; 1 draws from the model itself."""
    nucleus_rule: NucleusRule = "inclusive"
    """Whether the token that crosses nucleus_p is kept; the reference implementation leaves it out."""
    unmasking: Unmasking = field(default_factory=FirstHitting)
    """Which tokens of a block a pass reveals."""
    stop_at_eos: bool = True
    """End a text at the end token."""
    entropy_floor: float | None = None
    """End a text whose last tokens have less entropy, in nats; 4 in the paper."""
    entropy_window: int = 256
    redraws: int = 0
    """How often a text below the floor is drawn again, rather than ended."""
    stride: int | None = None
    """For a network of one block, past its context: tokens written at a time; by default half the context."""
    cache: bool = True
    """Keep keys and values between passes; without, the context is computed afresh each time."""

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ValueError(f"length must be at least 1, got {self.length}")
        self.sharpening()  # these two say what is wrong with their parts
        self.stopping(None)

    @classmethod
    def of(cls, settings: "Settings | None", changes: dict[str, Any]) -> "Settings":
        """Settings with some fields changed, by name."""
        names = [each.name for each in fields(cls)]
        for name in changes:
            if name not in names:
                hint = did_you_mean(name, names) or ","
                raise ValueError(f"{name} is no setting{hint} allowed are {', '.join(names)}")
        return replace(settings or cls(), **changes)

    def sharpening(self) -> Sharpening:
        return Sharpening(
            temperature=self.temperature,
            top_k=self.top_k,
            nucleus_p=self.nucleus_p,
            nucleus_rule=self.nucleus_rule,
        )

    def stopping(self, tokenizer: Tokenizer | None) -> Stopping:
        eos = tokenizer.eos_id if tokenizer is not None and self.stop_at_eos else None
        return Stopping(
            eos_id=eos,
            entropy_floor=self.entropy_floor,
            entropy_window=self.entropy_window,
            redraws=self.redraws,
        )


@dataclass(frozen=True)
class Generation:
    """A text that was written, and what it cost. `text` is None for a model without a tokenizer."""

    text: str | None
    sample: Sample

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = self.sample.tokens.tolist()
        return tokens

    @property
    def entropy(self) -> float:
        """Of the frequencies of its tokens, in nats: texts that repeat themselves have little."""
        return token_entropy(self.sample.tokens).item()


def build_writer(network: Transformer, config: LanguageModelConfig, settings: Settings) -> Writer:
    """What writes a model's texts."""
    method, context = config.method, config.network.context
    if isinstance(method, AutoregressiveMethod):
        _refuse(settings, "unmasking", "stride", why="an autoregressive model writes token after token")
        return AutoregressiveWriter(
            network,
            mask_id=method.mask_id,
            context=context,
            score_first=method.score_first,
            sharpening=settings.sharpening(),
            cache=settings.cache,
        )
    if method.block_size == context:
        _refuse(settings, "cache", why="a network of one block has nothing to cache")
        return SlidingWriter(
            network,
            mask_id=method.mask_id,
            context=context,
            stride=settings.stride,
            unmasking=settings.unmasking,
            sharpening=settings.sharpening(),
        )
    _refuse(settings, "stride", why=f"this model writes blocks of {method.block_size}")
    return BlockWriter(
        network,
        block_size=method.block_size,
        mask_id=method.mask_id,
        context=context,
        causal_clean=method.causal_clean,
        unmasking=settings.unmasking,
        sharpening=settings.sharpening(),
        cache=settings.cache,
    )


def build_requests(
    prompts: Sequence[Prompt],
    seeds: Sequence[int] | None,
    config: LanguageModelConfig,
    tokenizer: Tokenizer | None,
    settings: Settings,
) -> list[Request]:
    """A request for each prompt; all that is wrong with one is said before anything is written."""
    if not len(prompts):
        raise ValueError('prompts must hold at least one prompt ("" starts from nothing), got none')
    if seeds is None:
        seeds = [derive_seed(settings.seed, "text", index) for index in range(len(prompts))]
    if len(seeds) != len(prompts):
        raise ValueError(f"seeds must be one for each of {len(prompts)} prompts, got {len(seeds)}")
    length = config.network.context if settings.length is None else settings.length
    requests = []
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        try:
            given = torch.tensor(list(_given(prompt, config, tokenizer)), dtype=torch.long)
            if len(given) > length:
                raise ValueError(f"length must hold its {len(given)} tokens, got {length}")
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        requests.append(Request(given, seed, length))
    return requests


def encode_text(text: str, config: LanguageModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """A text's tokens, after the one a text begins with unless the network predicts first tokens itself."""
    if tokenizer is None:
        raise ValueError("text needs a tokenizer, and this model was saved without one; give token ids")
    first = [] if config.method.score_first or tokenizer.bos_id is None else [tokenizer.bos_id]
    return first + tokenizer.encode(text)


def _given(prompt: Prompt, config: LanguageModelConfig, tokenizer: Tokenizer | None) -> Iterator[int]:
    """The tokens of a prompt, the mask in the gaps of a template."""
    mask_id, vocab_size = config.method.mask_id, config.network.vocab_size
    if isinstance(prompt, str):
        prompt = [prompt]
    parts: list[Any] = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if parts and all(isinstance(part, str | Gap) for part in parts):
        yield from encode_text("", config, tokenizer)
        for part in parts:
            if isinstance(part, Gap):
                yield from [mask_id] * part.tokens
            elif tokenizer is not None:
                yield from tokenizer.encode(part)
        return
    for token in parts:
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"it must be a text, token ids, or a list of texts and Gaps, got {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"token ids must lie in 0..{vocab_size - 1}, got {token}")
        if token == mask_id:
            raise ValueError(f"it must not hold the mask token {mask_id}; a Gap leaves tokens to be written")
        yield token


def _refuse(settings: Settings, *names: str, why: str) -> None:
    """An option that would do nothing is an error."""
    for name in names:
        if getattr(settings, name) != getattr(Settings(), name):
            raise ValueError(f"{name} must be left at its default, got {getattr(settings, name)}: {why}")
