"""Diffusion under any noise in blocks: every block has a chain of its own, after the clean text before it.

The network is asked once a block, about every state of it, and sees what an attention rule written out pair
by pair lets it see. Bounds are sums over blocks (eq. 6 of the block diffusion paper), laws are products
(eq. 4).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache, reduce

import numpy as np
import torch

from bd3lm.models import Transformer

from .languages import VOCAB, Array, Text, states
from .networks import MASK, block_after_clean, logits_of

BlockLaw = Callable[[Text, Array, tuple[bool, ...]], Array]
"""The law (V^n,) of a block after a past, from the law it starts with, and which of its places are kept."""

LEAST_ALPHA = 1e-3  # networks are told −log α of at least this α


@cache
@torch.no_grad()
def logits_after(model: Transformer, past: Text, size: int, rate: float) -> Array:
    """Logits (V^n, n, V) of a block in each of its states, after clean text, at a mask rate."""
    blocks = torch.tensor(states(size))
    before = torch.tensor(past, dtype=torch.long).expand(len(blocks), -1)
    noise = None
    if model.uses_noise:
        noise = torch.zeros(len(blocks), len(past) + size)
        noise[:, len(past) :] = -math.log(max(1.0 - rate, LEAST_ALPHA))
    layout = block_after_clean(len(past), size)
    return logits_of(model, torch.cat((before, blocks), 1), layout, noise=noise)[:, len(past) :].numpy()


def guesses_after(model: Transformer, past: Text, size: int, rate: float) -> Array:
    """p(x_0 | x_t^b, x^{<b}) (V^n, n, V): a softmax that leaves the mask out."""
    p = np.exp(logits_after(model, past, size, rate))
    p[..., MASK] = 0.0
    return p / p.sum(-1, keepdims=True)


def blocks_of_text(text: Text, size: int) -> list[tuple[Text, Text]]:
    """Each block with the text before it."""
    return [(text[:begin], text[begin : begin + size]) for begin in range(0, len(text), size)]


def law_in_blocks(
    block_law: BlockLaw,
    noise: Array,
    length: int,
    size: int,
    *,
    given: Text = (),
    writes_past_end: bool = False,
) -> Array:
    """The law (V^length,) of texts written block after block, each beginning as noise where nothing is given.

    Where the last block lacks places to its full size, they are written too and cut, or stay masked.
    """
    texts: dict[Text, float] = {(): 1.0}
    for begin in range(0, length, size):
        places: list[int | None] = []  # what is kept there; None where a token is written
        for place in range(begin, begin + size):
            token = given[place] if place < len(given) else MASK
            if place >= length and not writes_past_end:
                places.append(MASK)
            else:
                places.append(None if token == MASK else token)
        start = reduce(np.kron, [noise if token is None else np.eye(VOCAB)[token] for token in places])
        kept = tuple(token is not None for token in places)
        following: dict[Text, float] = defaultdict(float)
        for past, p in texts.items():
            for block, q in zip(states(size), block_law(past, start, kept), strict=True):
                if q > 1e-15:
                    following[past + block] += p * q
        texts = following
    law = np.zeros(VOCAB**length)
    place_of = {x: row for row, x in enumerate(states(length))}
    for text, p in texts.items():
        law[place_of[text[:length]]] += p
    return law
