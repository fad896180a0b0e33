"""Noise schedules: how the mask rate 1 − α(t) grows from 0 at t = 0 to 1 at t = 1.

A schedule is defined by its mask rate, because this is the small quantity where precision matters: near t = 0
the ELBO weight is the ratio of two vanishing numbers, and computing `1 - alpha` from a rounded alpha would
lose them. The base class derives everything else (α, the ELBO weight).

The NELBO does not depend on the schedule (paper, Suppl. B.3); the variance of its Monte-Carlo estimate does.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.kinds import Kinded

_LEAST_ALPHA = 1e-3  # the reference's networks never saw a noise level above −log 1e-3


class NoiseSchedule(Kinded, ABC, family="noise schedule"):
    """A strictly decreasing α with α(0) = 1 and α(1) = 0 (above 0 only in `Floored`)."""

    @property
    def last_alpha(self) -> float:
        """α(1), without the rounding of `alpha`."""
        return 0.0

    @abstractmethod
    def mask_rate(self, t: Tensor) -> Tensor:
        """1 − α(t), the probability that a token is masked at time t."""

    @abstractmethod
    def mask_rate_prime(self, t: Tensor) -> Tensor:
        """−α'(t), the speed at which tokens are masked at time t."""

    @abstractmethod
    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        """The time t at which the mask rate is reached."""

    def alpha(self, t: Tensor) -> Tensor:
        """α(t), the probability that a token is still clean at time t."""
        return 1.0 - self.mask_rate(t)

    def elbo_weight(self, t: Tensor) -> Tensor:
        """−α'(t) / (1 − α(t)), the weight of the cross-entropy in the continuous-time NELBO (eq. 8).

        It grows without bound toward t = 0, which the half-open interval (0, 1] excludes.
        """
        return self.mask_rate_prime(t) / self.mask_rate(t)


@dataclass(frozen=True)
class Linear(NoiseSchedule):
    """Mask rate t: the paper's base schedule, weight 1/t."""

    kind = "linear"

    def mask_rate(self, t: Tensor) -> Tensor:
        return t

    def mask_rate_prime(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        return mask_rate


@dataclass(frozen=True)
class Square(NoiseSchedule):
    """Mask rate t²: light masking."""

    kind = "square"

    def mask_rate(self, t: Tensor) -> Tensor:
        return t * t

    def mask_rate_prime(self, t: Tensor) -> Tensor:
        return 2.0 * t

    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        return mask_rate.sqrt()


@dataclass(frozen=True)
class SquareRoot(NoiseSchedule):
    """Mask rate √t: heavy masking."""

    kind = "square_root"

    def mask_rate(self, t: Tensor) -> Tensor:
        return t.sqrt()

    def mask_rate_prime(self, t: Tensor) -> Tensor:
        return 0.5 / t.sqrt()

    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        return mask_rate * mask_rate


@dataclass(frozen=True)
class Logarithmic(NoiseSchedule):
    """Mask rate log2(1 + t): slightly heavier masking than linear."""

    kind = "logarithmic"

    def mask_rate(self, t: Tensor) -> Tensor:
        return torch.log1p(t) / math.log(2.0)

    def mask_rate_prime(self, t: Tensor) -> Tensor:
        return 1.0 / ((1.0 + t) * math.log(2.0))

    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        return torch.expm1(mask_rate * math.log(2.0))


@dataclass(frozen=True)
class Cosine(NoiseSchedule):
    """Mask rate 1 − cos(πt/2): light masking.

    It is computed as 2 sin²(πt/4), which keeps full precision near t = 0, where 1 − cos would cancel.
    """

    kind = "cosine"

    def mask_rate(self, t: Tensor) -> Tensor:
        return 2.0 * torch.sin(t * (math.pi / 4)).square()

    def mask_rate_prime(self, t: Tensor) -> Tensor:
        return (math.pi / 2) * torch.sin(t * (math.pi / 2))

    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        return (4 / math.pi) * torch.asin((mask_rate / 2).sqrt())


@dataclass(frozen=True)
class Floored(NoiseSchedule):
    """Another schedule's mask rates times 1 − ε, so that α(1) = ε stays above 0.

    Over `Linear` this is SEDD's log-linear noise, σ(t) = −log(1 − (1 − ε)t). The uniform process needs it in
    continuous time, where its rate −α'/α diverges as α → 0. The text that is left at t = 1 adds a term to the
    bound (`ForwardProcess.prior_divergence`), so nothing falls below the likelihood.
    """

    kind = "floored"

    schedule: NoiseSchedule
    least_alpha: float = _LEAST_ALPHA

    def __post_init__(self) -> None:
        if not 0.0 < self.least_alpha < 1.0:
            raise ValueError(f"least_alpha must lie in (0, 1), got {self.least_alpha}")
        if self.schedule.last_alpha:
            raise ValueError(f"schedule must not have a floor of its own, got {self.schedule}")

    @property
    def last_alpha(self) -> float:
        return self.least_alpha

    def mask_rate(self, t: Tensor) -> Tensor:
        return (1.0 - self.least_alpha) * self.schedule.mask_rate(t)

    def mask_rate_prime(self, t: Tensor) -> Tensor:
        return (1.0 - self.least_alpha) * self.schedule.mask_rate_prime(t)

    def time_of_mask_rate(self, mask_rate: Tensor) -> Tensor:
        return self.schedule.time_of_mask_rate(mask_rate / (1.0 - self.least_alpha))


def conditioning_noise(mask_rate: Tensor) -> Tensor:
    """σ = −log α, the noise input of time-conditioned networks, kept finite at full masking."""
    return -torch.log((1.0 - mask_rate).clamp_min(_LEAST_ALPHA)).float()
