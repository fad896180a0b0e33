"""Unmasking rules: which masked tokens a pass reveals.

Under masked diffusion the time at which a token is revealed does not depend on the network. It is the time at
which the mask rate falls below a uniform number, drawn for each token (Suppl. C.5). So a block's plan is
drawn before its first pass, and there is a pass only where something is revealed. First-hitting and ancestral
steps differ only in whether one pass may reveal two tokens.

The parallel rules below trade the model's distribution for fewer passes, and their docstrings say so.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from bd3lm.diffusion import (
    Linear,
    NoiseSchedule,
    Purpose,
    check_lean,
    counter_uniform,
    is_number,
    is_whole,
    log_reveal_times,
)
from bd3lm.kinds import Kinded


@dataclass(frozen=True)
class Pass:
    """What one pass over a block reveals in each row: its own number of tokens, at its own noise level."""

    places: Tensor  # (rows, k) places in the block, distinct within a row
    active: Tensor  # (rows, k) whether the place is revealed; rows with fewer are padded
    mask_rate: Tensor  # (rows,) the network's mask rate, 1 − α
    masked_again: Tensor | None = None  # (rows, n) places to mask again afterwards


class UnmaskingRule(Kinded, ABC, family="unmasking rule"):
    """The rule for which masked tokens of a block each pass reveals: a `Planned` or an `Adaptive` one."""

    can_lean: ClassVar[bool] = False
    """Whether its order can lean to the left, so that it can write for a model with a lean."""


class Planned(UnmaskingRule):
    """A rule that knows what it reveals before the network runs."""

    @property
    def has_noise_level(self) -> bool:
        """Whether the masked places of a pass share one noise level, the pass's `mask_rate`.

        A rule without one can only write for networks that are not told the noise level.
        """
        return True

    @abstractmethod
    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        """The passes that reveal the masked places (rows, n) of blocks at these text positions (rows, n)."""


class Adaptive(UnmaskingRule):
    """A rule that looks at the distributions, so every pass computes them at all masked places."""

    @abstractmethod
    def choose(self, log_p: Tensor, drawn: Tensor, masked: Tensor) -> Tensor:
        """Which places (rows, n) to reveal, at least one in each row that has masks.

        log_p (rows, n, vocabulary) is the network's output; drawn (rows, n) are the tokens drawn there.
        """


@dataclass(frozen=True)
class FirstHitting(Planned):
    """One token a pass, in the order of hitting times (Zheng et al.): exact in continuous time.

    The largest of n uniform numbers is distributed as u^{1/n}, so the sorted numbers are the hitting times
    t_{n−1} = t_n u^{1/n} of eq. 25, and their order is uniformly random. With `tokens_per_pass` above 1, a
    pass reveals that many neighbors in this order as if they were independent, which is no longer exact.

    With a `lean` the order leans to the left (`bd3lm.diffusion.orders`). That samples another distribution,
    again exactly, for networks that are not told the time.
    """

    kind = "first_hitting"

    can_lean = True

    tokens_per_pass: int = 1
    lean: float = 0.0

    def __post_init__(self) -> None:
        _check_count(self, "tokens_per_pass")
        check_lean(self.lean)
        object.__setattr__(self, "lean", float(self.lean))

    @property
    def has_noise_level(self) -> bool:
        return not self.lean

    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        order, left, sorted_rate = first_hitting_order(seeds, positions, masked, self.lean)
        k = self.tokens_per_pass
        for first in range(0, int(masked.sum(1).max()), k):
            together = slice(first, first + k)
            yield Pass(places=order[:, together], active=left[:, together], mask_rate=sorted_rate[:, first])


@dataclass(frozen=True)
class Ancestral(Planned):
    """T steps of the reverse process (eq. 2), each of which may reveal any number of tokens.

    A step from time t to s < t reveals, with a pass at time t, each token that hits its mask rate in between.
    Steps that reveal nothing need no pass (the cached-output rule, which here also holds for networks that
    are told the time), so there are never more passes than masked tokens.
    """

    kind = "ancestral"

    steps: int = 5000
    schedule: NoiseSchedule = field(default_factory=Linear)

    def __post_init__(self) -> None:
        _check_count(self, "steps")

    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        hit = self.schedule.time_of_mask_rate(_hitting_rates(seeds, positions))
        step = (hit * self.steps).ceil().clamp(1, self.steps).masked_fill(~masked, 0.0)
        descending = step.sort(dim=1, descending=True).values
        new = torch.ones_like(descending, dtype=torch.bool)
        new[:, 1:] = descending[:, 1:] != descending[:, :-1]
        groups = (new & (descending > 0.0)).sum(1)
        for number in range(1, int(groups.max()) + 1):
            # The number-th largest step of each row. Rows with fewer steps have none left.
            rank = new.cumsum(1) == number
            now = torch.where(rank & new, descending, 0.0).amax(1, keepdim=True)
            places, active = _gathered(masked & (step == now))
            rate = self.schedule.mask_rate(now.squeeze(1) / self.steps)
            yield Pass(places=places, active=active, mask_rate=rate)


@dataclass(frozen=True, kw_only=True)
class Remasking(Planned):
    """ReMDM (Wang et al.): T ancestral steps that also mask revealed tokens again, to reconsider them.

    A step from t to s masks a revealed token with probability σ = η · min(1, (1 − α_s)/α_t), and reveals a
    masked one with probability (α_s − (1 − σ)α_t)/(1 − α_t), which keeps the marginals of the forward
    process. There are at most T passes, possibly more than tokens. Given tokens are never masked.
    """

    kind = "remasking"

    steps: int
    eta: float = 0.1
    schedule: NoiseSchedule = field(default_factory=Linear)

    def __post_init__(self) -> None:
        _check_count(self, "steps")
        if not is_number(self.eta) or not 0.0 <= self.eta <= 1.0:
            raise ValueError(f"eta must lie in [0, 1], got {self.eta!r}")
        object.__setattr__(self, "eta", float(self.eta))

    def plan(self, seeds: Tensor, positions: Tensor, masked: Tensor) -> Iterator[Pass]:
        times = torch.linspace(1.0, 0.0, self.steps + 1, dtype=torch.float64)
        alpha = self.schedule.alpha(times).clamp(0.0, 1.0)
        alpha[0], alpha[-1] = 0.0, 1.0
        still = masked
        reveals, remasks = [], []
        for j, (alpha_t, alpha_s) in enumerate(pairwise(alpha.tolist())):
            sigma = self.eta * (1.0 if alpha_t == 0.0 else min(1.0, (1.0 - alpha_s) / alpha_t))
            chance = counter_uniform(seeds.unsqueeze(1), positions, Purpose.REMASK, 1, repeat=j).squeeze(-1)
            reveal = still & (chance <= (alpha_s - (1.0 - sigma) * alpha_t) / (1.0 - alpha_t))
            remask = masked & ~still & (chance < sigma)
            still = (still & ~reveal) | remask
            reveals.append(reveal)
            remasks.append(remask)
        reveal, remask = torch.stack(reveals, 1), torch.stack(remasks, 1)  # (rows, steps, n)
        asked = reveal.any(-1)
        passes = int(asked.sum(1).max())
        if not passes:
            return
        # The p-th pass of a row is its p-th step that reveals something. What a step without a pass masks is
        # masked after the pass before; there always is one.
        pass_of_step = (asked.cumsum(1) - 1).clamp_min(0)
        rate = torch.where(asked, 1.0 - alpha[:-1].to(seeds.device), 0.0)
        mask_rate = rate.new_zeros(len(seeds), passes).scatter_add_(1, pass_of_step, rate)
        reveal, remask = (_by_pass(pass_of_step, flags, passes) for flags in (reveal, remask))
        for now in range(passes):
            places, active = _gathered(reveal[:, now])
            yield Pass(places, active, mask_rate[:, now], remask[:, now])


@dataclass(frozen=True, kw_only=True)
class MostConfident(Adaptive):
    """Reveals tokens drawn with a probability of at least `threshold`, and the `tokens_per_pass` likeliest.

    This is not the model's distribution: confident tokens come first, which makes small models repeat
    themselves.
    """

    kind = "most_confident"

    threshold: float | None = None
    tokens_per_pass: int = 1

    def __post_init__(self) -> None:
        threshold = self.threshold
        if threshold is not None and (not is_number(threshold) or not 0.0 < threshold <= 1.0):
            raise ValueError(f"threshold must lie in (0, 1], got {threshold!r}")
        object.__setattr__(self, "threshold", None if threshold is None else float(threshold))
        _check_count(self, "tokens_per_pass")

    def choose(self, log_p: Tensor, drawn: Tensor, masked: Tensor) -> Tensor:
        confidence = log_p.gather(-1, drawn.unsqueeze(-1)).squeeze(-1).exp()
        ranked = _on_grid(confidence).masked_fill(~masked, -1.0)
        likeliest = torch.zeros_like(masked).scatter_(
            1, ranked.argsort(dim=1, descending=True, stable=True)[:, : self.tokens_per_pass], True
        )
        sure = likeliest if self.threshold is None else likeliest | (confidence >= self.threshold)
        return sure & masked


@dataclass(frozen=True)
class EntropyBound(Adaptive):
    """Reveals the tokens with the lowest entropies, with a bound on the joint error (Ben-Hamu et al.,
    2505.24857).

    Sorted by entropy, it takes the longest run in which the sum of entropies minus the largest one is at most
    `bound` nats. This bounds the error of drawing them as if independent. With 0 it reveals one token a pass,
    unless others are certain.
    """

    kind = "entropy_bound"

    bound: float

    def __post_init__(self) -> None:
        if not is_number(self.bound):
            raise ValueError(f"bound must be a number of nats, got {self.bound!r}")
        if not self.bound >= 0.0:
            raise ValueError(f"bound must not be negative, got {self.bound}")
        object.__setattr__(self, "bound", float(self.bound))

    def choose(self, log_p: Tensor, drawn: Tensor, masked: Tensor) -> Tensor:
        terms = torch.where(log_p > -torch.inf, -log_p.exp() * log_p, 0.0)
        entropy = _on_grid(terms.sum(-1)).masked_fill(~masked, torch.inf)
        ascending, order = entropy.sort(dim=1, stable=True)
        before = ascending.cumsum(1) - ascending  # the last of a run is its largest
        within = before.nan_to_num(torch.inf) <= self.bound
        within[:, 0] = True
        return torch.zeros_like(masked).scatter_(1, order, within) & masked


def _check_count(rule: UnmaskingRule, name: str) -> None:
    """Require a whole number from 1 on, and store it as Python's int, so that 2 and numpy's 2 are one
    rule."""
    value = getattr(rule, name)
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    object.__setattr__(rule, name, int(value))


def first_hitting_order(
    seeds: Tensor, positions: Tensor, masked: Tensor, lean: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The places (rows, n) of blocks in the order in which they are hit, masked ones first; whether each is
    masked; and the mask rate at which it is hit, which orders with a lean do not follow."""
    rate = _hitting_rates(seeds, positions)
    sooner = -log_reveal_times(rate, lean) if lean else rate
    order = sooner.masked_fill(~masked, -torch.inf).sort(dim=1, descending=True).indices
    left = masked.gather(1, order)
    return order, left, torch.where(left, rate.gather(1, order), 0.0)


def _hitting_rates(seeds: Tensor, positions: Tensor) -> Tensor:
    """The mask rate at which each position is revealed: one uniform number for each, in float64."""
    return counter_uniform(seeds.unsqueeze(1), positions, Purpose.ORDER, 1).squeeze(-1)


def _on_grid(x: Tensor) -> Tensor:
    """Round to a grid of 2^-20, so that equal values stay equal: the masks of an empty block are all alike,
    and the last bit of a sum must not decide their order."""
    return (x * 2.0**20).round() * 2.0**-20


def _by_pass(pass_of_step: Tensor, flags: Tensor, passes: int) -> Tensor:
    """Merge the flags (rows, steps, n) of the steps of each pass: (rows, passes, n)."""
    rows, _, n = flags.shape
    counts = torch.zeros(rows, passes, n, dtype=torch.int32, device=flags.device)
    return counts.scatter_add_(1, pass_of_step.unsqueeze(-1).expand_as(flags), flags.int()).bool()


def _gathered(reveal: Tensor) -> tuple[Tensor, Tensor]:
    """Places and activity (rows, k) of bools (rows, n), where k is the largest number that a row reveals."""
    k = int(reveal.sum(1).max())
    active, places = reveal.int().sort(dim=1, descending=True, stable=True)
    return places[:, :k], active[:, :k].bool()
