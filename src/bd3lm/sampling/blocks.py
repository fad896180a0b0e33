"""The block loop (the paper's Algorithm 2) with first-hitting steps and a KV cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform, gumbel_max, nucleus, subs_at_masks, temper
from bd3lm.models import Bidirectional, BlockCausal, Causal, Denoiser, KVCache


@dataclass(frozen=True)
class Samples:
    """Sampled texts and what they cost."""

    tokens: Tensor  # (rows, length)
    evaluations: Tensor  # (rows,) passes that denoised a block of the row
    cache_passes: Tensor  # (rows,) passes that wrote a finished block, or one of the prompt, into the cache


@torch.no_grad()
def sample_blocks(
    model: Denoiser,
    prompts: Tensor,
    *,
    seeds: Tensor,
    length: int,
    block_size: int,
    mask_id: int,
    causal_clean: bool = False,
    temperature: float = 1.0,
    nucleus_p: float = 1.0,
) -> Samples:
    """Continue each prompt (rows, prompt length) to `length` tokens.

    At temperature 1 with the whole nucleus, and within the network's context, this is the law whose
    likelihood `evaluation.exact` computes. Past the context the cache shows only the last part of the text.

    In the first-hitting sampler the order in which a block's tokens are revealed does not depend on the
    network, for a network that ignores time: it is drawn first, and each pass computes logits only at the
    position each row reveals. All of a row's chance is a function of its seed and of positions.
    """
    _check(model, prompts, seeds, length, block_size, mask_id)
    rows, given = prompts.shape
    tokens = torch.full((rows, length), mask_id, device=prompts.device)
    tokens[:, :given] = prompts
    cache = model.new_cache(rows, segment=block_size) if length > block_size else None
    done = given // block_size * block_size
    for start in range(0, done, block_size):
        _commit(model, cache, tokens[:, start : start + block_size], causal_clean)
    for start in range(done, length, block_size):
        block = tokens[:, start : start + block_size]
        for place, log_p in _reveals(model, cache, block, start, max(given - start, 0), seeds, mask_id):
            sharpened = nucleus(temper(log_p, temperature), nucleus_p)
            uniform = counter_uniform(seeds, start + place, Purpose.TOKEN, log_p.shape[-1])
            block[torch.arange(rows, device=block.device), place] = gumbel_max(sharpened, uniform)
        if start + block_size < length:
            _commit(model, cache, block, causal_clean)
    return Samples(
        tokens=tokens,
        evaluations=torch.full((rows,), length - given, device=prompts.device),
        cache_passes=torch.full((rows,), max(length // block_size - 1, 0), device=prompts.device),
    )


def _reveals(
    model: Denoiser, cache: KVCache | None, block: Tensor, start: int, given: int, seeds: Tensor, mask_id: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The place each row reveals next and log p of its token, until the caller has filled the block."""
    rows, size = block.shape
    positions = torch.arange(start + given, start + size, device=block.device)
    keys = counter_uniform(seeds.unsqueeze(1), positions, Purpose.ORDER, 1).squeeze(-1)
    every_row = torch.arange(rows, device=block.device)
    for offset in keys.argsort(dim=1).unbind(1):
        place = given + offset
        states = model(block, layout=Bidirectional(size), cache=cache)[every_row, place]
        yield place, subs_at_masks(model.head(states), mask_id)


def _commit(model: Denoiser, cache: KVCache | None, block: Tensor, causal_clean: bool) -> None:
    """∅, K^b, V^b ← x_θ(x^b): write a finished block into the cache."""
    if cache is None:
        return
    size = block.shape[1]
    layout = Causal(size, keys_only=True) if causal_clean else BlockCausal(size, size, keys_only=True)
    model(block, layout=layout, cache=cache)
    cache.advance(size)


def _check(
    model: Denoiser, prompts: Tensor, seeds: Tensor, length: int, block_size: int, mask_id: int
) -> None:
    if model.uses_noise:
        raise ValueError("model is conditioned on the noise level, which this sampler does not give it")
    if prompts.ndim != 2 or prompts.shape[0] < 1:
        raise ValueError(
            f"prompts must be (rows, prompt length) with at least one row, got {tuple(prompts.shape)}"
        )
    if seeds.shape != prompts.shape[:1] or seeds.dtype != torch.long:
        raise ValueError(
            f"seeds must be int64, one for each of {prompts.shape[0]} rows, got {seeds.dtype} "
            f"of shape {tuple(seeds.shape)}"
        )
    if block_size < 1 or length % block_size or length < prompts.shape[1]:
        raise ValueError(
            f"length must be a multiple of block_size {block_size} and at least the prompts' "
            f"{prompts.shape[1]}, got {length}"
        )
    if (prompts == mask_id).any():
        raise ValueError(f"prompts must not hold the mask token {mask_id}")
