"""Drawing from categorical distributions: 64-bit Gumbel-max, and the usual ways to sharpen a distribution.

Gumbel noise must be drawn in 64 bits (Suppl. C.5, after Zheng et al.). A float32 uniform is a multiple of
2^-24, so its Gumbel variable never exceeds 16.6, and the noise cannot lift a token with a logit further
below. That silently lowers the temperature.
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


def temper(log_p: Tensor, temperature: float | Tensor) -> Tensor:
    """p^(1/temperature), normalized, for one temperature or a tensor that broadcasts with log_p."""
    if isinstance(temperature, Tensor):
        return torch.where(temperature == 1.0, log_p, _tempered(log_p, temperature.to(log_p.dtype)))
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    return log_p if temperature == 1.0 else _tempered(log_p, temperature)


def _tempered(log_p: Tensor, temperature: float | Tensor) -> Tensor:
    return torch.log_softmax(log_p / temperature, dim=-1)


def top_k(log_p: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k likeliest entries (ties broken by the lower index), normalized.

    k is a number, or an int64 tensor that broadcasts with log_p.
    """
    if not isinstance(k, Tensor):
        if k < 1:
            raise ValueError(f"top_k must be at least 1, got {k}")
        if k >= log_p.shape[-1]:
            return log_p
    order = torch.argsort(log_p, dim=-1, descending=True, stable=True)
    first = torch.arange(log_p.shape[-1], device=log_p.device) < k
    kept = _kept(log_p, order, first.expand_as(log_p))
    return torch.where(k >= log_p.shape[-1], log_p, kept) if isinstance(k, Tensor) else kept


def nucleus(
    log_p: Tensor, p: float | Tensor, rule: NucleusRule = "inclusive", *, inclusive: Tensor | None = None
) -> Tensor:
    """Keep the likeliest entries until their probabilities reach p, normalized.

    ``inclusive`` keeps the entry that crosses p (Holtzman et al.: the smallest set with at least p).
    ``exclusive`` is the reference implementation's rule: the entries with a running total within p, and
    always the first. Ties are broken by the lower index. p = 1 keeps everything.

    p may be a tensor that broadcasts with log_p. `inclusive` is a bool tensor that replaces `rule`.
    """
    if rule not in ("inclusive", "exclusive"):
        raise ValueError(f"rule must be 'inclusive' or 'exclusive', got {rule!r}")
    if not isinstance(p, Tensor):
        if not 0.0 < p <= 1.0:
            raise ValueError(f"nucleus must lie in (0, 1], got {p}")
        if p == 1.0:
            return log_p
    sorted_log_p, order = log_p.sort(dim=-1, descending=True, stable=True)
    mass = sorted_log_p.double().exp()
    total = mass.cumsum(-1)
    if inclusive is not None:
        within = torch.where(inclusive, total - mass < p, total <= p)
    else:
        within = total - mass < p if rule == "inclusive" else total <= p
    within[..., 0] = True
    kept = _kept(log_p, order, within)
    return torch.where(p == 1.0, log_p, kept) if isinstance(p, Tensor) else kept


def _kept(log_p: Tensor, order: Tensor, first: Tensor) -> Tensor:
    """The flagged entries in this order, normalized."""
    keep = torch.zeros_like(first).scatter_(-1, order, first)
    return torch.log_softmax(log_p.masked_fill(~keep, -math.inf), dim=-1)
