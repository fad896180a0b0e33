"""The order in which the tokens of a block are revealed: uniformly random, or leaning to the left.

Each masked token has an exponential clock, and is revealed when it rings. With equal rates the order is
uniformly random, as in the paper. With rates w_i = e^{lean·(n − 1 − i)} for the places i of a block of n, the
next token of a masked set M is the one at i with probability w_i / Σ_{j in M} w_j (the Plackett–Luce
distribution). So a place is e^lean times as likely to come next as the one to its right, and a large lean is
left to right. In terms of noise schedules, place i is masked with probability t^{w_i} at time t, which is
linear at the last place. The network only has to ignore time: any order of reveal gives a sampler with its
own likelihood and bound.
"""

import torch
from torch import Tensor

from bd3lm.limits import check_lean

_SOONEST = -64.0  # replaces log 0 at u = 1; the next number below 1 gives −36.7


def log_reveal_rates(block_size: int, lean: float, *, device: torch.device | str = "cpu") -> Tensor:
    """log w_i for the places of a block, float64, zero at the last place."""
    check_lean(lean)
    return lean * torch.arange(block_size - 1, -1, -1, dtype=torch.float64, device=device)


def log_reveal_times(uniform: Tensor, lean: float) -> Tensor:
    """The log of the time −log(u)/w_i at which each clock rings, for uniform numbers (…, block_size) in (0,
    1].

    A smaller u rings later: with lean 0 the order of reveal is that of u, the largest first.
    """
    rates = log_reveal_rates(uniform.shape[-1], lean, device=uniform.device)
    return torch.log(-torch.log(uniform)).clamp_min(_SOONEST) - rates
