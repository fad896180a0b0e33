"""Gaussian diffusion on the vocabulary's simplex: SSD-LM (Han et al., arXiv 2210.17432).

A token is a vector of logits that is almost one-hot. Noise is added to these logits, and the network sees the
softmax of the result, a point of the simplex. To go back, the network's logits are projected onto almost
one-hot vectors again (`Projection`).

Symbols are SSD-LM's (sections 3.1 and 3.2): w̃ are the logits of a token, K is the scale of the simplex, ᾱ_t
is the share of w̃_0's variance that is left at step t of T, and ε and z are standard normal numbers times K.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bd3lm.diffusion.categorical import gumbel_max, nucleus
from bd3lm.kinds import Kinded


@dataclass(frozen=True)
class SquaredCosine:
    """ᾱ(t/T) = f(t/T) / f(0), f(u) = cos²((u + s)/(1 + s) · π/2) (Nichol & Dhariwal, eq. 17).

    It falls from 1 to 0, where nothing of the token is left. `offset` is s, 10⁻⁴ in SSD-LM's code. Without it
    the first steps would add almost no noise.
    """

    offset: float = 1e-4

    def __post_init__(self) -> None:
        if not 0.0 <= self.offset < math.inf:
            raise ValueError(f"offset must be finite and not negative, got {self.offset}")

    def alpha_bar(self, progress: Tensor) -> Tensor:
        """ᾱ at progress t/T in [0, 1], float64."""
        angle = (progress.double() + self.offset) / (1.0 + self.offset) * (math.pi / 2)
        start = self.offset / (1.0 + self.offset) * (math.pi / 2)
        return (torch.cos(angle) / math.cos(start)).square().clamp_max(1.0)


def almost_one_hot(
    tokens: Tensor, vocab_size: int, scale: float, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """w̃_0 (..., vocabulary): +K at the token, −K at all others, including the mask."""
    w = torch.full((*tokens.shape, vocab_size), -scale, dtype=dtype, device=tokens.device)
    return w.scatter_(-1, tokens.unsqueeze(-1), scale)


def add_noise(w: Tensor, alpha_bar: Tensor, normal: Tensor, scale: float) -> Tensor:
    """w̃_t = √ᾱ_t · w̃ + √(1 − ᾱ_t) · K · ε, given standard normal ε (section 3.1).

    w and normal are (..., vocabulary), ᾱ is (...). For w̃_0 this is the forward process. For a projection ŵ
    it is the step back to w̃_{t−1} (section 3.2), which adds fresh noise instead of keeping any of w̃_t.
    """
    kept, added = alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt() * scale
    return kept.to(w.dtype).unsqueeze(-1) * w + added.to(w.dtype).unsqueeze(-1) * normal.to(w.dtype)


class Projection(Kinded, ABC, family="projection"):
    """From a network's distribution back to almost one-hot: decides which entries of ŵ are +K; the rest are
    −K."""

    draws: ClassVar[bool] = False
    """Whether it is random."""

    @abstractmethod
    def raised(self, log_p: Tensor, uniform: Tensor | None = None) -> Tensor:
        """A bool (..., vocabulary). `uniform` has a number for each entry, if the projection is random."""

    def __call__(self, log_p: Tensor, scale: float, uniform: Tensor | None = None) -> Tensor:
        """ŵ (..., vocabulary)."""
        up = torch.tensor(scale, dtype=log_p.dtype, device=log_p.device)
        return torch.where(self.raised(log_p, uniform), up, -up)


@dataclass(frozen=True)
class GreedyProjection(Projection):
    """The likeliest token."""

    kind = "greedy"

    def raised(self, log_p: Tensor, uniform: Tensor | None = None) -> Tensor:
        return _one_hot(log_p.argmax(-1), log_p.shape[-1])


@dataclass(frozen=True)
class SamplingProjection(Projection):
    """A token drawn from the nucleus, the smallest set of tokens with at least `top_p`."""

    kind = "sampling"

    top_p: float = 0.95
    draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_nucleus(self.top_p)

    def raised(self, log_p: Tensor, uniform: Tensor | None = None) -> Tensor:
        if uniform is None:
            raise ValueError("uniform must be given: the sampling projection draws a token")
        return _one_hot(gumbel_max(nucleus(log_p, self.top_p), uniform), log_p.shape[-1])


@dataclass(frozen=True)
class MultiHotProjection(Projection):
    """All tokens of the nucleus at once."""

    kind = "multi_hot"

    top_p: float = 0.95

    def __post_init__(self) -> None:
        _check_nucleus(self.top_p)

    def raised(self, log_p: Tensor, uniform: Tensor | None = None) -> Tensor:
        return nucleus(log_p, self.top_p) > -math.inf


def _one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    return torch.arange(vocab_size, device=tokens.device) == tokens.unsqueeze(-1)


def _check_nucleus(p: float) -> None:
    if not 0.0 < p <= 1.0:
        raise ValueError(f"top_p must lie in (0, 1], got {p}")
