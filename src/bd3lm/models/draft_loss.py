"""The loss of a draft's distribution q against the distribution p that will verify it, chunk by chunk.

Both come from one head: p from given hidden states, q from the states that learn. As in `cross_entropy`, the
full logits never exist: we take some positions at a time and keep the gradient itself for the backward pass.

- `hard`: −log q of the token that follows in the text.
- `soft`: the cross-entropy −Σ p log q, smallest where q is p.
- `overlap`: 1 − Σ min(p, q), which is how often p rejects a draft of q. If q cannot equal p, its optimum
  differs from the cross-entropy's: all mass goes where p is large enough to accept it.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bd3lm.models.cross_entropy import add_product, check_targets, chunks, padded_head

Aim = Literal["hard", "soft", "overlap"]
AIMS: tuple[Aim, ...] = get_args(Aim)
_CHUNK = 4096  # positions in a chunk, about: two distributions and a gradient of each


class DraftLoss(NamedTuple):
    """The loss of drafts. Only `total` carries a gradient; the others have one value per position."""

    total: Tensor
    """Σ weight·loss."""
    nats: Tensor
    """−log q of the tokens that follow."""
    overlaps: Tensor
    """Σ min(p, q)."""


def weighted_draft_loss(
    states: Tensor,
    verifying: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    position_weights: Tensor,
    *,
    aim: Aim,
    excluded: int,
) -> DraftLoss:
    """The loss of drafts at some positions, summed with `position_weights`.

    q_i is the softmax of states_i · weightᵀ + bias over all tokens except the `excluded` one. p_i is the same
    for verifying_i, which gets no gradient. Shapes: states and verifying (n, d), weight (V, d), bias (V,),
    targets and position_weights (n,).
    """
    if aim not in AIMS:
        raise ValueError(f"aim must be one of {', '.join(AIMS)}, got {aim!r}")
    if verifying.shape != states.shape:
        raise ValueError(
            f"verifying must have the shape of states, {tuple(states.shape)}, got {tuple(verifying.shape)}"
        )
    check_targets(targets, weight.shape[0])
    device = states.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    with torch.autocast(device, enabled=False):
        return DraftLoss(
            *_WeightedDraftLoss.apply(
                states, verifying.detach(), weight, bias, targets, position_weights, aim, excluded, compute
            )
        )


def plain_draft_loss(
    drafting: Tensor, verifying: Tensor, targets: Tensor, weights: Tensor, *, aim: Aim, excluded: int
) -> DraftLoss:
    """The same loss from the full logits (n, V), by autograd."""
    is_excluded = torch.arange(drafting.shape[-1], device=drafting.device) == excluded
    log_q, log_p = (
        logits.to(torch.promote_types(logits.dtype, torch.float32))
        .masked_fill(is_excluded, -torch.inf)
        .log_softmax(-1)
        for logits in (drafting, verifying.detach())
    )
    nats = -log_q.gather(1, targets.unsqueeze(1)).squeeze(1)
    overlaps = torch.minimum(log_p.exp(), log_q.exp()).sum(1)
    soft = -(log_p.exp() * log_q.masked_fill(is_excluded, 0.0)).sum(1)
    terms = {"hard": nats, "soft": soft, "overlap": 1.0 - overlaps}[aim]
    total = torch.where(weights == 0, 0.0, terms).mul(weights).sum()
    return DraftLoss(total, nats.detach(), overlaps.detach())


class _WeightedDraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        verifying: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        position_weights: Tensor,
        aim: Aim,
        excluded: int,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        vocabulary, positions = weight.shape[0], states.shape[0]
        precise = torch.promote_types(weight.dtype, torch.float32)
        matrix, offset = padded_head(weight, bias, excluded, compute)
        of_states, _, of_weight, of_bias = ctx.needs_input_grad[:4]
        grad_states = torch.empty_like(states, dtype=compute) if of_states else None
        grad_weight = torch.zeros_like(matrix, dtype=precise) if of_weight else None
        grad_bias = torch.zeros_like(offset, dtype=precise) if of_bias else None
        terms, nats, overlaps = torch.empty(3, positions, dtype=precise, device=states.device)
        for rows in chunks(positions, _CHUNK):
            some = states[rows].to(compute)
            log_q = torch.addmm(offset, some, matrix.T).to(precise).log_softmax(1)
            log_p = torch.addmm(offset, verifying[rows].to(compute), matrix.T).to(precise).log_softmax(1)
            q, p = log_q.exp(), log_p.exp()
            some_targets = targets[rows].unsqueeze(1)
            nats[rows] = -log_q.gather(1, some_targets).squeeze(1)
            overlaps[rows] = torch.minimum(p, q).sum(1)
            if aim == "overlap":
                terms[rows] = 1.0 - overlaps[rows]
            elif aim == "hard":
                terms[rows] = nats[rows]
            else:  # where log q is −∞ no token is allowed, and p is 0
                terms[rows] = -(p * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(1)
            if grad_states is None and grad_weight is None and grad_bias is None:
                continue
            if aim == "soft":
                grad = q - p
            elif aim == "hard":
                grad = q.scatter_add(1, some_targets, torch.full_like(q[:, :1], -1.0))
            else:  # of −Σ q over the tokens where q < p, the part of the overlap that depends on q
                below = (q < p).to(precise)
                grad = q * ((q * below).sum(1, keepdim=True) - below)
            grad *= position_weights[rows].to(precise).unsqueeze(1)
            grad_logits = grad.to(compute)
            if grad_states is not None:
                torch.mm(grad_logits, matrix, out=grad_states[rows])
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.T, some)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        ctx.save_for_backward(
            grad_states,
            None if grad_weight is None else grad_weight[:vocabulary],
            None if grad_bias is None else grad_bias[:vocabulary],
        )
        ctx.dtypes = states.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        ctx.mark_non_differentiable(nats, overlaps)
        # A position of weight zero may have an impossible target, and 0·∞ is NaN.
        return torch.where(position_weights == 0, 0.0, terms * position_weights).sum(), nats, overlaps

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weight, of_bias = (
            None if grad is None else (grad * grad_total.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return of_states, None, of_weight, of_bias, None, None, None, None, None
