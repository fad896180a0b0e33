"""Turns prompts as users give them (texts, token ids, templates with gaps) into requests for a sampler."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bd3lm.data import Tokenizer
from bd3lm.diffusion import derive_seed, is_whole
from bd3lm.lm.grammars import guide_of
from bd3lm.methods import LanguageModelConfig, Settings
from bd3lm.sampling import Fills, Request, Stopping, followed_to


@dataclass(frozen=True)
class Gap:
    """Tokens to fill in a template: ["The ", Gap(2), " sat down."]."""

    tokens: int

    def __post_init__(self) -> None:
        if not is_whole(self.tokens) or self.tokens < 1:
            raise ValueError(f"a Gap must have at least 1 token, got {self.tokens!r}")


Part = str | int | Gap
Prompt = str | Tensor | Sequence[Part]
"""Text, token ids, or a template: texts or ids with gaps."""
Prompts = str | Tensor | Sequence[Part | Prompt]
"""One prompt or several. The two share one sequence type, since mypy cannot tell a union of two apart."""


def listed(prompts: Any, *, argument: str = "prompts") -> Sequence[Prompt]:
    """A list of prompts; a single prompt of any kind becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a tensor or an array
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise ValueError(
            f"{argument} must be a text, token ids, a template, or a list of these, got {prompts!r}"
        )
    if any(isinstance(part, Gap) or is_whole(part) for part in prompts):
        return [prompts]
    return prompts


def repeated(prompts: Sequence[Prompt], count: int) -> Sequence[Prompt]:
    """Each prompt `count` times, one after another."""
    if not is_whole(count) or count < 1:
        raise ValueError(f"count must be a whole number from 1 on, got {count!r}")
    return [prompt for prompt in prompts for _ in range(count)]


def text_seeds(seed: int, count: int) -> list[int]:
    """A seed for each of `count` texts, derived from one seed."""
    return [derive_seed(seed, "text", index) for index in range(count)]


def build_requests(
    prompts: Sequence[Prompt],
    seeds: Sequence[int] | None,
    config: LanguageModelConfig,
    tokenizer: Tokenizer | None,
    settings: Settings,
    stopping: Stopping,
    *,
    max_new_tokens: int | None = None,
) -> list[Request]:
    """A request for each prompt. All prompts are checked before anything is written."""
    if max_new_tokens is not None and (not is_whole(max_new_tokens) or max_new_tokens < 1):
        raise ValueError(f"max_new_tokens must be a whole number from 1 on, got {max_new_tokens!r}")
    if max_new_tokens is not None and settings.length is not None:
        raise ValueError(
            f"give either length or max_new_tokens, not both, got {settings.length} and {max_new_tokens}"
        )
    if not len(prompts):
        raise ValueError('prompts must hold at least one prompt ("" starts from nothing), got none')
    if seeds is not None and hasattr(seeds, "tolist"):
        seeds = seeds.tolist()
    if seeds is None:
        seeds = text_seeds(settings.seed, len(prompts))
    if not isinstance(seeds, Sequence) or len(seeds) != len(prompts):
        raise ValueError(f"seeds must hold one seed for each of {len(prompts)} texts, got {seeds!r:.80}")
    if not all(is_whole(seed) and 0 <= seed < 2**63 for seed in seeds):
        raise ValueError(f"seeds must be whole numbers from 0 to 2^63 − 1, got {seeds!r:.80}")
    if settings.eos_id is not None and settings.eos_id >= config.network.vocab_size:
        raise ValueError(f"eos_id must be below {config.network.vocab_size}, got {settings.eos_id}")
    settled = config.method.settled(settings)
    sharpening, fills = settled.sharpening(), config.method.fills(settled, config.frame)
    guide = guide_of(settings, tokenizer, config.network.vocab_size)
    requests = []
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        try:
            request = _request(prompt, int(seed), config, tokenizer, settings, max_new_tokens)
            weighed = _fills(request, fills, config, settings)
            requests.append(
                replace(
                    request,
                    sharpening=sharpening,
                    stopping=stopping,
                    fills=weighed,
                    guide=guide,
                    logit_bias=settings.logit_bias or (),
                )
            )
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    return requests


def _request(
    prompt: Prompt,
    seed: int,
    config: LanguageModelConfig,
    tokenizer: Tokenizer | None,
    settings: Settings,
    max_new_tokens: int | None,
) -> Request:
    given = given_tokens(prompt, config, tokenizer)
    mask_id, length = config.mask_id, settings.length
    if max_new_tokens is not None:
        length = len(given) + max_new_tokens
    if length is None:
        length = len(given) if mask_id in given else config.network.context
    if len(given) > length:
        begun = "" if not _begins(prompt, config, tokenizer) else ", including the start token"
        got = f"got {length}"
        if settings.length is None:  # nor max_new_tokens, with which every prompt fits
            got += ", the default of one context; give a length"
        raise ValueError(f"length must be at least the prompt's {len(given)} tokens{begun}, {got}")
    if settings.entropy_floor is not None and length < settings.entropy_window:
        raise ValueError(
            f"entropy_window must be at most the length {length}, or entropy_floor has no effect, got "
            f"{settings.entropy_window}"
        )
    if not config.method.score_first and (not given or given[0] == mask_id):
        raise ValueError("the first token of a text must be given: this model was not trained to predict it")
    return Request(torch.tensor(given, dtype=torch.long), seed, int(length))


def _fills(
    request: Request, fills: Fills | None, config: LanguageModelConfig, settings: Settings
) -> Fills | None:
    """The fills of a template with text after its gaps. Nothing can weigh text past the context."""
    end, context = followed_to(request.given.tolist(), config.mask_id), config.network.context
    if not end or fills is None:
        return None
    if end <= context and fills.weights.weighs(request.given[:end] == config.mask_id):
        return fills
    if end <= context and (settings.fills or 1) > 1:
        raise ValueError(
            "fills must be 1 for a template that ends in the block of its first gap, in blocks of more than "
            f"8, since nothing after the gap could weigh the fills, got {settings.fills}"
        )
    if end <= context:
        return None
    if settings.fills is not None:
        raise ValueError(
            f"fills must be 1 for a template whose given text reaches past the context of {context} tokens, "
            f"since only texts within it have a likelihood, got {settings.fills} with {end} tokens"
        )
    return None


def given_tokens(
    prompt: Any, config: LanguageModelConfig, tokenizer: Tokenizer | None, *, begins: bool = True
) -> list[int]:
    """The tokens of a text, of token ids, or of a template with masks in its gaps.

    The start token comes first, unless the network predicts first tokens itself or the text only continues
    another (`begins` is False).
    """
    mask_id, vocab_size = config.mask_id, config.network.input_vocab_size
    parts = _parts(prompt)
    if not isinstance(parts, Sequence) or isinstance(parts, bytes | bytearray):
        raise ValueError(f"it must be a text, token ids, or a list of texts and Gaps, got {prompt!r}")
    tokens = _begins(prompt, config, tokenizer) if begins else []
    for part in parts:
        if isinstance(part, Gap):
            tokens += [mask_id] * part.tokens
        elif isinstance(part, str):
            if tokenizer is None:
                raise ValueError("text needs a tokenizer, and this model was saved without one; give ids")
            try:
                tokens += tokenizer.encode(part)
            except TypeError:  # half of a surrogate pair, as in a broken command-line argument
                raise ValueError(f"text must be valid Unicode, got {part!r}") from None
        elif not is_whole(part):
            raise ValueError(f"it must be a text, token ids, or a list of texts and Gaps, got {part!r}")
        elif not 0 <= part < vocab_size:
            raise ValueError(f"token ids must lie in 0..{vocab_size - 1}, got {part}")
        elif part == mask_id:
            raise ValueError(f"it must not hold the mask token {mask_id}; a Gap leaves tokens to be written")
        else:
            tokens.append(int(part))
    return tokens


def continued_tokens(
    prompts: Any, texts: Sequence[Prompt], config: LanguageModelConfig, tokenizer: Tokenizer | None
) -> tuple[list[list[int]], list[int]]:
    """Each prompt joined with the text that continues it, and the number of the prompt's tokens.

    The two are tokenized separately, as in generation, so no token spans the place where they meet.
    """
    prompts = listed(prompts)
    if len(prompts) != len(texts):
        raise ValueError(f"prompts must hold one prompt for each of {len(texts)} texts, got {len(prompts)}")
    rows, given = [], []
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        before = _named(f"prompt {index}", prompt, config, tokenizer)
        if not before and not config.method.score_first:
            raise ValueError(
                f"prompt {index} must have at least 1 token, since this model was not trained to predict the "
                f"first token of a text, got {prompt!r}"
            )
        after = _named(f"text {index}", text, config, tokenizer, begins=False)
        if not after:
            raise ValueError(f"text {index} must have at least 1 token to score, got {text!r}")
        rows.append(before + after)
        given.append(len(before))
    return rows, given


def _named(name: str, *words: Any, **options: Any) -> list[int]:
    """`given_tokens`, with errors that name the prompt or text."""
    try:
        return given_tokens(*words, **options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def text_tokens(
    texts: Sequence[Prompt], config: LanguageModelConfig, tokenizer: Tokenizer | None
) -> list[list[int]]:
    """The tokens of whole texts."""
    return [_named(f"text {index}", text, config, tokenizer) for index, text in enumerate(texts)]


def _parts(prompt: Any) -> Any:
    """The parts of a prompt; an array or a tensor becomes a list."""
    if isinstance(prompt, str):
        return [prompt]
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def _begins(prompt: Any, config: LanguageModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """The start token, if this prompt gets one."""
    parts = _parts(prompt)
    if not isinstance(parts, Sequence) or not parts:
        return []
    has_text = any(isinstance(part, str) for part in parts)
    is_text = has_text or all(isinstance(part, Gap) for part in parts)
    if not is_text or config.method.score_first or tokenizer is None or tokenizer.bos_id is None:
        return []
    return [tokenizer.bos_id]
