"""SSD-LM number by number: schedule, noise, network inputs, projections, and the whole sampler."""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import Purpose, conditioning_noise, counter_uniform
from bd3lm.models import CacheShape, KVCache, KVStore, Layout, Transformer
from tests.oracles.networks import Plain, block_after_clean, log_probabilities, logits_of


def alpha_bar(t: int, steps: int, offset: float = 1e-4) -> float:
    def f(u: float) -> float:
        return math.cos((u + offset) / (1 + offset) * math.pi / 2) ** 2

    return f(t / steps) / f(0.0)


def logits_of_token(token: int, vocab_size: int, scale: float) -> list[float]:
    return [scale if v == token else -scale for v in range(vocab_size)]


def noised(w: Sequence[float], alpha: float, normal: Sequence[float], scale: float) -> list[float]:
    return [math.sqrt(alpha) * x + math.sqrt(1 - alpha) * scale * z for x, z in zip(w, normal, strict=True)]


def softmax(w: Sequence[float]) -> list[float]:
    top = max(w)
    weights = [math.exp(x - top) for x in w]
    return [x / sum(weights) for x in weights]


def mean_vector(weight: Tensor, probabilities: Sequence[float]) -> Tensor:
    return sum((p * weight[v] for v, p in enumerate(probabilities)), torch.zeros_like(weight[0]))


def nucleus_of(p: Sequence[float], share: float) -> list[int]:
    """The likeliest tokens, until they hold the share."""
    kept: list[int] = []
    for token in sorted(range(len(p)), key=lambda v: -p[v]):
        if kept and sum(p[v] for v in kept) >= share:
            break
        if p[token] > 0:
            kept.append(token)
    return kept


def block_logits(model: Transformer, clean: Tensor, block: Tensor, block_size: int, rate: float) -> Tensor:
    """Logits (n, vocabulary) of one embedded block (n, width) after clean ids, in a pass of its own."""
    past = len(clean)
    inputs = torch.cat((model.embedding.weight[clean], block)).unsqueeze(0)
    noise = None
    if model.uses_noise:
        told = conditioning_noise(torch.tensor(rate, dtype=torch.float64)).item()
        noise = torch.tensor([[0.0] * past + [told] * block_size])
    return logits_of(model, inputs, block_after_clean(past, block_size), noise=noise)[0, past:]


def simplex_nats(
    model: Transformer,
    text: Sequence[int],
    scored: Sequence[bool],
    absent: Sequence[bool],
    *,
    times: Sequence[int],
    steps: int,
    normal: Tensor,
    block_size: int,
    mask_id: int,
    scale: float,
) -> Tensor:
    """−log p(x_i | w̃_t^b, x^{<b}) of one text, a network call for each block; 0 where nothing is scored.

    `times` has a t for each block; `normal` is (whole blocks, vocabulary).
    """
    weight, size = model.embedding.weight, model.config.vocab_size
    nats = torch.zeros(len(text), dtype=torch.float64)
    for b, t in enumerate(times):
        start, alpha = b * block_size, alpha_bar(t, steps)
        vectors = []
        for i in range(start, start + block_size):
            if i >= len(text) or absent[i]:
                vectors.append(weight[mask_id])
                continue
            w = logits_of_token(text[i], size, scale)
            if scored[i]:
                w = noised(w, alpha, normal[i].tolist(), scale)
            vectors.append(mean_vector(weight, softmax(w)))
        clean = torch.tensor(text[:start], dtype=torch.long)
        log_p = log_probabilities(
            block_logits(model, clean, torch.stack(vectors), block_size, 1 - alpha), mask_id
        )
        for i in range(start, min(start + block_size, len(text))):
            if scored[i]:
                nats[i] = -log_p[i - start, text[i]]
    return nats


def sample_text(
    model: Transformer,
    given: Sequence[int],
    *,
    seed: int,
    length: int,
    block_size: int,
    steps: int,
    mask_id: int,
    scale: float,
    projection: str,
    share: float = 0.95,
) -> list[int]:
    """One text within the window, number by number; `given` holds the mask where something is written."""
    weight, size = model.embedding.weight, model.config.vocab_size
    text = list(given) + [mask_id] * (length - len(given))

    def uniforms(position: int, purpose: Purpose, turn: int) -> list[float]:
        return counter_uniform(
            torch.tensor(seed), torch.tensor(position), purpose, size, repeat=turn
        ).tolist()

    def normals(position: int, turn: int) -> list[float]:
        return [NormalDist().inv_cdf(u) for u in uniforms(position, Purpose.NOISE, turn)]

    def raised(p: list[float], position: int, turn: int) -> list[int]:
        if projection == "greedy":
            return [max(range(size), key=lambda v: p[v])]
        kept = nucleus_of(p, share)
        if projection == "multi-hot":
            return kept
        u = uniforms(position, Purpose.TOKEN, turn)
        return [max(kept, key=lambda v: math.log(p[v]) - math.log(-math.log(u[v])))]

    for start in range(0, length, block_size):
        places = [i for i in range(start, min(start + block_size, length)) if text[i] == mask_id]
        if not places:
            continue
        w = {i: [scale * z for z in normals(i, 0)] for i in places}
        for turn in range(1, steps + 1):
            t = steps + 1 - turn
            vectors = []
            for i in range(start, start + block_size):
                if i >= length:
                    vectors.append(weight[mask_id])
                elif i in w:
                    vectors.append(mean_vector(weight, softmax(w[i])))
                else:
                    vectors.append(mean_vector(weight, softmax(logits_of_token(text[i], size, scale))))
            clean = torch.tensor(text[:start], dtype=torch.long)
            logits = block_logits(model, clean, torch.stack(vectors), block_size, 1 - alpha_bar(t, steps))
            p = log_probabilities(logits, mask_id).exp().tolist()
            for i in places:
                up = raised(p[i - start], i, turn)
                w_hat = [scale if v in up else -scale for v in range(size)]
                w[i] = noised(w_hat, alpha_bar(t - 1, steps), normals(i, turn), scale)
        for i in places:
            text[i] = max(range(size), key=lambda v, i=i: p[i - start][v])
    return text


class OpenNetwork(Plain):
    """A network that anyone can look into: tokens are embedded as the probabilities themselves.

    `answer` gets inputs (rows, read, vocabulary), text positions and noise levels (rows, read), and gives
    logits. Calls are counted.
    """

    device = torch.device("cpu")
    cache_shape = CacheShape(layers=1, heads=1, head_dim=2)

    def __init__(
        self,
        vocab_size: int,
        answer: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        *,
        uses_noise: bool = False,
    ) -> None:
        self.vocab_size, self.answer, self.uses_noise, self.calls = vocab_size, answer, uses_noise, 0

    def embed(self, tokens: Tensor) -> Tensor:
        return (tokens if tokens.is_floating_point() else F.one_hot(tokens, self.vocab_size)).double()

    def __call__(
        self, tokens: Tensor, *, layout: Layout, noise: Tensor | None = None, cache: KVStore | None = None
    ) -> Tensor:
        self.calls += 1
        inputs = tokens if tokens.is_floating_point() else self.embed(tokens)
        positions = layout.text_positions() if cache is None else cache.text_positions(layout, tokens)
        read = slice(*layout.read)
        return self.answer(
            inputs[:, read],
            positions.expand(inputs.shape[:2])[:, read],
            None if noise is None else noise[:, read],
        )

    def head(self, states: Tensor) -> Tensor:
        return states

    def new_cache(self, rows: int, **options: Any) -> KVCache:
        return KVCache(layers=1, rows=rows, heads=1, head_dim=2, **options)
