"""Score entropy, which trains scores, and the Tweedie step, which samples with them.

Equations are from Lou et al. 2024. A score s_y estimates q_t(y)/q_t(x_t), where y replaces one token of x_t.
With r_y = q(y | x_0)/q(x_t | x_0), its denoising score entropy for a token x_0 is

    Σ_{y ≠ x_t} Q(y → x_t) · (s_y − r_y log s_y + K(r_y)),   K(r) = r (log r − 1)   (Theorem 3.6),

where Q are the forward rates. Every summand is non-negative, and zero at s_y = r_y.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def score_entropy_at_masks(log_s: Tensor, x0: Tensor) -> Tensor:
    """Σ_y ŝ_y − log ŝ_{x_0} − 1 at a mask of the absorbing process, for log ŝ (..., V) from `sedd_at_masks`.

    Only clean tokens y lead to a mask, all at the rate −α'/α, and r is α/(1 − α) at x_0 and 0 elsewhere. With
    s = ŝ·α/(1 − α) the noise becomes a factor −α'/(1 − α), the weight of the NELBO (eq. 8 of the block
    diffusion paper). For Z = Σ ŝ this is −log(ŝ_{x_0}/Z) + (Z − 1 − log Z), a cross-entropy and a remainder
    that is never negative: SEDD has an extra loss for scores that do not sum to one, and MDLM has none.
    """
    return log_s.exp().sum(-1) - log_s.gather(-1, x0.unsqueeze(-1)).squeeze(-1) - 1.0


def uniform_score_entropy(log_score: Tensor, x_t: Tensor, x0: Tensor, mask_rate: Tensor) -> Tensor:
    """(1/V) Σ_{y ≠ x_t} (s_y − r_y log s_y + K(r_y)) of the uniform process, to be weighted by −α'/α.

    log s is (..., V) and 0 at x_t. x_t, x_0 and the mask rate 1 − α, in (0, 1), are (...).
    """
    v = log_score.shape[-1]
    mask_rate = mask_rate.double()
    log_other = torch.log(mask_rate / v)  # of q(y | x_0) for y ≠ x_0
    log_kept = torch.log1p(-mask_rate * (v - 1) / v)  # of q(x_0 | x_0)
    same = x_t == x0
    # All y except x_0 have one ratio: 1, or if x_t = x_0 this one. (Double sums: V terms of order 1 cancel.)
    log_r = torch.where(same, log_other - log_kept, 0.0)
    scores = log_score.exp().sum(-1, dtype=torch.float64) - 1.0
    logs = log_score.sum(-1, dtype=torch.float64)
    total = scores - log_r.exp() * logs + (v - 1) * log_r.exp() * (log_r - 1.0)
    # If x_t ≠ x_0, correct the term of x_0: s − r log s + K(r) = r (e^d − 1 − d), d = log s − log r.
    log_s = log_score.gather(-1, x0.unsqueeze(-1)).squeeze(-1).double()
    d = log_s - (log_kept - log_other)
    at_x0 = (log_kept - log_other).exp() * (torch.expm1(d) - d) - (torch.expm1(log_s) - log_s)
    return ((total + torch.where(same, 0.0, at_x0)) / v).to(log_score.dtype)


def tweedie_at_masks(log_s: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> tuple[Tensor, Tensor]:
    """The Tweedie step (Theorem 4.2) at masks, as (P(revealed), log p(token | revealed)).

    exp(−Δσ Q) s · exp(Δσ Q) gives token y the probability (α_s − α_t)/(1 − α_t) · ŝ_y and the mask the rest.
    This is the ancestral step of SUBS except for Z = Σ ŝ, which speeds reveals up or slows them down. If Z
    would make the mask's share negative, that share is 0.
    """
    log_z = torch.logsumexp(log_s, -1, keepdim=True)
    chance = (alpha_s - alpha_t) / (1.0 - alpha_t) * log_z.squeeze(-1).double().exp()
    return chance.clamp_max(1.0), log_s - log_z


def uniform_tweedie(log_score: Tensor, x_t: Tensor, alpha_s: Tensor, alpha_t: Tensor) -> Tensor:
    """p(x_s | x_t) (..., V) of the Tweedie step (Theorem 4.2) under the uniform process, in double precision.

    ∝ (exp(−Δσ Q) s)_y · exp(Δσ Q)(y → x_t), with Δσ = log α_s/α_t. The first factor estimates
    q_s(y)/q_t(x_t). Scores that belong to no distribution can make it negative, which counts as 0. Its
    largest entry is above the mean score, so they never all vanish.
    """
    v = log_score.shape[-1]
    score = log_score.double().exp()
    ratio = (alpha_s / alpha_t).unsqueeze(-1)
    before = (ratio * score + (1.0 - ratio) * score.mean(-1, keepdim=True)).clamp_min(0.0)
    step = F.one_hot(x_t, v) / ratio + (1.0 - 1.0 / ratio) / v
    p: Tensor = before * step
    return p / p.sum(-1, keepdim=True)
