"""Forward corruption processes: marginals, transitions and posteriors in closed form (Suppl. B.1 and B.2).

Both processes keep a token with probability α_t and otherwise replace it by a draw from a noise distribution
π: q(x_t | x) = α_t x + (1 − α_t) π, with π a point mass on the mask (absorbing) or uniform. A transition from
s to t has the same form with α_{t|s} = α_t/α_s.

Training and sampling use `corrupt_at` and `posterior`. `transition_matrix` and `marginal` compute the same
distributions in full, for reading, for experiments on small vocabularies, and to test the former.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion.schedules import Floored, Linear, NoiseSchedule


@dataclass(frozen=True)
class ForwardProcess(ABC):
    """A Markov corruption process over tokens 0..vocab_size − 1, independent between positions."""

    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise ValueError(f"vocab_size must be at least 2, got {self.vocab_size}")

    @property
    @abstractmethod
    def log_linear(self) -> NoiseSchedule:
        """SEDD's log-linear noise, with a floor if α must not reach 0."""

    @abstractmethod
    def noise(self, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
        """π (vocab_size,): the distribution of a corrupted token, and of every token at t = 1."""

    @abstractmethod
    def posterior(self, p_x0: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
        """Σ_x q(x_s | x_t, x) p(x), for p_x0 (..., vocab_size) and x_t, α_s, α_t (...) (eq. 2)."""

    def transition_matrix(self, alpha: float | Tensor) -> Tensor:
        """Q with Q[i, j] = q(x_t = j | x_s = i), rows summing to 1, for keep probability α (or α_{t|s})."""
        noise = self.noise()
        eye = torch.eye(self.vocab_size, dtype=noise.dtype)
        return alpha * eye + (1.0 - alpha) * noise.expand_as(eye)

    def marginal(self, x0: Tensor, alpha: Tensor) -> Tensor:
        """q(x_t | x_0) as probabilities (..., vocab_size)."""
        self.check_ids(x0)
        alpha = alpha.unsqueeze(-1)
        noise = self.noise(device=x0.device, dtype=alpha.dtype)
        return alpha * F.one_hot(x0, self.vocab_size) + (1.0 - alpha) * noise

    @abstractmethod
    def corrupt_at(self, x0: Tensor, mask_rate: Tensor, uniform: Tensor) -> Tensor:
        """x_t ~ q(x_t | x_0) from uniform numbers in (0, 1], one for each token; 1 − α broadcasts.

        A token is corrupted if its number is at most 1 − α, which stays precise as α → 1. At a mask rate of 1
        the result is a draw from π, whatever the text is.
        """

    @abstractmethod
    def prior_divergence(self, alpha: float) -> float:
        """KL(q(x_1 | x_0) ‖ π) of one token, in nats, for α = α(1): the prior term of a bound."""

    def check_ids(self, tokens: Tensor) -> None:
        """Refuse token ids outside the vocabulary."""
        if tokens.numel() and not (0 <= int(tokens.min()) and int(tokens.max()) < self.vocab_size):
            raise ValueError(
                f"token ids must lie in 0..{self.vocab_size - 1}, got values from {int(tokens.min())} "
                f"to {int(tokens.max())}"
            )


@dataclass(frozen=True)
class Absorbing(ForwardProcess):
    """Tokens turn into the mask and stay there (section 4.1)."""

    mask_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_id < self.vocab_size:
            raise ValueError(f"mask_id must lie in 0..{self.vocab_size - 1}, got {self.mask_id}")

    @property
    def log_linear(self) -> NoiseSchedule:
        return Linear()

    def noise(self, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
        return F.one_hot(torch.tensor(self.mask_id, device=device), self.vocab_size).to(dtype)

    def corrupt_at(self, x0: Tensor, mask_rate: Tensor, uniform: Tensor) -> Tensor:
        return torch.where(uniform <= mask_rate, self.mask_id, x0)

    def prior_divergence(self, alpha: float) -> float:
        """Infinite if a token can stay clean, since the prior is all masks."""
        return math.inf if alpha > 0.0 else 0.0

    def posterior(self, p_x0: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
        """A clean token stays; a mask is revealed with probability (α_s − α_t)/(1 − α_t), with a token from
        p_x0.

        If x_t is clean, q(x_s | x_t, x) is defined only for x = x_t. The result is that token, whatever p_x0
        gives others (SUBS gives them nothing).
        """
        mask = F.one_hot(torch.tensor(self.mask_id, device=x_t.device), self.vocab_size).to(p_x0.dtype)
        stay = ((1.0 - alpha_s) / (1.0 - alpha_t)).unsqueeze(-1)
        revealed = (1.0 - stay) * p_x0 + stay * mask
        kept = F.one_hot(x_t, self.vocab_size).to(p_x0.dtype)
        return torch.where((x_t == self.mask_id).unsqueeze(-1), revealed, kept)


@dataclass(frozen=True)
class Uniform(ForwardProcess):
    """Tokens are replaced by uniformly random ones (D3PM's and SEDD's uniform matrices)."""

    @property
    def log_linear(self) -> NoiseSchedule:
        return Floored(Linear())

    def noise(self, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((self.vocab_size,), 1.0 / self.vocab_size, device=device, dtype=dtype)

    def corrupt_at(self, x0: Tensor, mask_rate: Tensor, uniform: Tensor) -> Tensor:
        """A number u <= 1 − α is uniform on (0, 1 − α], so it also chooses the new token."""
        share = (uniform / mask_rate).clamp_max(1.0)
        token = (share * self.vocab_size).ceil().clamp(1, self.vocab_size).long() - 1
        return torch.where(uniform <= mask_rate, token, x0)

    def prior_divergence(self, alpha: float) -> float:
        v = self.vocab_size
        kept, other = (1.0 + (v - 1) * alpha) / v, (1.0 - alpha) / v
        if alpha == 1.0:
            return math.log(v)
        return kept * math.log1p((v - 1) * alpha) + (v - 1) * other * math.log1p(-alpha)

    def posterior(self, p_x0: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
        """Bayes' rule in O(V): Σ_x p(x) q(x_t | x_s) q(x_s | x) / q(x_t | x)."""
        v = self.vocab_size
        seen = F.one_hot(x_t, v).to(p_x0.dtype)
        alpha_s, alpha_t = alpha_s.unsqueeze(-1), alpha_t.unsqueeze(-1)
        alpha_ts = alpha_t / alpha_s
        evidence = alpha_t * seen + (1.0 - alpha_t) / v  # q(x_t | x), as a function of x
        weighted = torch.where(p_x0 == 0, 0.0, p_x0 / evidence)  # keeps NaN
        forward = alpha_ts * seen + (1.0 - alpha_ts) / v  # q(x_t | x_s), as a function of x_s
        return forward * (alpha_s * weighted + (1.0 - alpha_s) / v * weighted.sum(-1, keepdim=True))


def named_process(name: Literal["absorbing", "uniform"], *, vocab_size: int, mask_id: int) -> ForwardProcess:
    """The process with the name that recipes and saved models use."""
    return Absorbing(vocab_size, mask_id) if name == "absorbing" else Uniform(vocab_size)
