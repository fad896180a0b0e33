"""The meaning of a network's logits: log p(x_0 | x_t) (SUBS, D3PM) or log scores (SEDD)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def subs(logits: Tensor, x_t: Tensor, mask_id: int) -> Tensor:
    """log p(x_0 | x_t) under the two substitutions of Suppl. B.3.

    Zero masking probability: the mask is never predicted. Carry-over unmasking: a token that is already clean
    is copied with probability one.
    """
    log_p = subs_at_masks(logits, mask_id)
    copied = torch.full_like(log_p, -math.inf).scatter_(-1, x_t.unsqueeze(-1), 0.0)
    return torch.where((x_t == mask_id).unsqueeze(-1), log_p, copied)


def subs_at_masks(logits: Tensor, mask_id: int) -> Tensor:
    """SUBS at positions known to be masked, where the carry-over rule never applies.

    It computes in float32 or more: a bfloat16 log-softmax over a large vocabulary has errors of percents.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    mask = torch.arange(logits.shape[-1], device=logits.device) == mask_id
    return F.log_softmax(logits.masked_fill(mask, -math.inf), dim=-1)


def d3pm(logits: Tensor, mask_id: int | None = None) -> Tensor:
    """log p(x_0 | x_t) without carry-over: D3PM's x_0-parameterization.

    `mask_id` excludes the mask from the predicted tokens (absorbing process). None keeps every token.
    """
    if mask_id is not None:
        return subs_at_masks(logits, mask_id)
    return F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def sedd(logits: Tensor, x_t: Tensor, alpha: Tensor, *, scale_by_noise: bool = True) -> Tensor:
    """log s(x_t → y) ≈ log q_t(y)/q_t(x_t), SEDD's score parameterization; 0 at y = x_t.

    At a mask of the absorbing process the true score is α/(1 − α)·p(y | rest). `scale_by_noise` applies that
    factor, so the network need not learn it, and a constant 1/(V − 1), so that zero logits are a uniform
    guess. The uniform process's scores stay finite as α → 1, and are left unscaled.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if scale_by_noise:
        odds = torch.log(alpha) - torch.log1p(-alpha)
        logits = logits + odds.to(logits.dtype).unsqueeze(-1) - math.log(logits.shape[-1] - 1)
    return logits.scatter(-1, x_t.unsqueeze(-1), 0.0)


def sedd_at_masks(logits: Tensor, mask_id: int) -> Tensor:
    """log ŝ(y), SEDD's scores at masks without the noise factor α/(1 − α); −inf at the mask itself.

    The true ŝ is p(y | rest) at every noise level, so it stays finite at α = 0 and α = 1.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    mask = torch.arange(logits.shape[-1], device=logits.device) == mask_id
    return logits.masked_fill(mask, -math.inf) - math.log(logits.shape[-1] - 1)
