"""What a draft's distribution q loses against the distribution p that will verify it, without whole logits.

Both come from one head: p of hidden states that are given, q of those that learn. As in `cross_entropy`, some
positions are taken at a time, and what is kept for the backward pass is the gradient itself.

- `soft`: the cross-entropy −Σ p log q, smallest where q is p.
- `overlap`: 1 − Σ min(p, q), which is how often a draft of q is rejected by p. Where q cannot be p, its best
  choice is another than that of the cross-entropy: all its mass where p is large enough to take it.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from bd3lm.models.cross_entropy import add_product, chunks, padded_head

Aim = Literal["soft", "overlap"]
_CHUNK = 4096  # positions at a time, about: two distributions and a gradient of each


def weighted_draft_loss(
    states: Tensor,
    verifying: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    position_weights: Tensor,
    *,
    aim: Aim,
    excluded: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ w_i·loss_i, the loss_i, and the overlaps Σ min(p_i, q_i); only the first carries a gradient.

    q_i is the softmax of states_i · weightᵀ + bias over all tokens but the `excluded` one, and p_i that of
    verifying_i, which learns nothing. Shapes: states and verifying (n, d), weight (V, d), bias (V,),
    position_weights (n,).
    """
    if aim not in ("soft", "overlap"):
        raise ValueError(f"aim must be 'soft' or 'overlap', got {aim!r}")
    if verifying.shape != states.shape:
        raise ValueError(
            f"verifying must have the shape of states, {tuple(states.shape)}, got {tuple(verifying.shape)}"
        )
    device = states.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    with torch.autocast(device, enabled=False):
        total, terms, overlaps = _WeightedDraftLoss.apply(
            states, verifying.detach(), weight, bias, position_weights, aim, excluded, compute
        )
    return total, terms, overlaps


class _WeightedDraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        verifying: Tensor,
        weight: Tensor,
        bias: Tensor | None,
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
        terms, overlaps = torch.empty(2, positions, dtype=precise, device=states.device)
        for rows in chunks(positions, _CHUNK):
            some = states[rows].to(compute)
            log_q = torch.addmm(offset, some, matrix.T).to(precise).log_softmax(1)
            log_p = torch.addmm(offset, verifying[rows].to(compute), matrix.T).to(precise).log_softmax(1)
            q, p = log_q.exp(), log_p.exp()
            overlaps[rows] = torch.minimum(p, q).sum(1)
            if aim == "overlap":
                terms[rows] = 1.0 - overlaps[rows]
            else:  # where log q is −∞ no token is allowed, and p is 0
                terms[rows] = -(p * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(1)
            if grad_states is None and grad_weight is None and grad_bias is None:
                continue
            if aim == "soft":
                grad = q - p
            else:  # of the sum of q where it is below p, which is all of the overlap that q can change
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
        ctx.mark_non_differentiable(terms, overlaps)
        return (terms * position_weights).sum(), terms, overlaps

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weight, of_bias = (
            None if grad is None else (grad * grad_total.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return of_states, None, of_weight, of_bias, None, None, None, None
