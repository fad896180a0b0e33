"""Drawing from categorical distributions: 64-bit Gumbel-max, and the usual ways to sharpen one.

Gumbel noise must be drawn in 64 bits (Suppl. C.5, after Zheng et al.): a float32 uniform is a multiple of
2^-24, so its Gumbel variable never exceeds 16.6, and the noise can no longer lift a token whose logit lies
further below; that lowers the temperature without saying so.
"""

import math
from typing import Literal

import torch
from torch import Tensor

NucleusRule = Literal["inclusive", "exclusive"]


def gumbel(uniform: Tensor) -> Tensor:
    """−log(−log u) for uniforms in the open interval (0, 1), in double precision."""
    return -torch.log(-torch.log(uniform.double()))


def gumbel_max(log_p: Tensor, uniform: Tensor) -> Tensor:
    """An exact draw from softmax(log_p) over the last dimension, given one uniform for each entry."""
    return (log_p.double() + gumbel(uniform)).argmax(-1)


def temper(log_p: Tensor, temperature: float) -> Tensor:
    """p^(1/temperature), normalised."""
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    if temperature == 1.0:
        return log_p
    return torch.log_softmax(log_p / temperature, dim=-1)


def top_k(log_p: Tensor, k: int) -> Tensor:
    """Keep the k likeliest entries (ties broken by the lower index), normalised."""
    if k < 1:
        raise ValueError(f"top_k must be at least 1, got {k}")
    if k >= log_p.shape[-1]:
        return log_p
    order = torch.argsort(log_p, dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(log_p, dtype=torch.bool).scatter_(-1, order[..., :k], True)
    return torch.log_softmax(log_p.masked_fill(~keep, -math.inf), dim=-1)


def nucleus(log_p: Tensor, p: float, rule: NucleusRule = "inclusive") -> Tensor:
    """Keep the likeliest entries whose probabilities reach p, normalised.

    ``inclusive`` keeps the entry whose probability crosses p (Holtzman et al.: the smallest set that holds
    at least p). ``exclusive`` is the reference implementation's rule: the entries whose running total stays
    within p, and the first in any case. Ties are broken by the lower index. p = 1 keeps everything.
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"nucleus must lie in (0, 1], got {p}")
    if rule not in ("inclusive", "exclusive"):
        raise ValueError(f"rule must be 'inclusive' or 'exclusive', got {rule!r}")
    if p == 1.0:
        return log_p
    sorted_log_p, order = log_p.sort(dim=-1, descending=True, stable=True)
    mass = sorted_log_p.double().exp()
    total = mass.cumsum(-1)
    within = total - mass < p if rule == "inclusive" else total <= p
    within[..., 0] = True
    keep = torch.zeros_like(within).scatter_(-1, order, within)
    return torch.log_softmax(log_p.masked_fill(~keep, -math.inf), dim=-1)
