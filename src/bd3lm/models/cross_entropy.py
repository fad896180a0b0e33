"""The output head and its cross-entropy, chunk by chunk: the full logits never exist.

With a vocabulary of V tokens the logits are by far the largest tensor of a training batch, and they only
serve to compute one number per position and one gradient. We compute both while a chunk of logits is in
memory. For the backward pass we keep the gradient itself, which is as small as the hidden states and the
head's weight.

This requires the weight of each position beforehand. So the function returns the weighted sum, and the single
terms for inspection only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.models.devices import runs_kernels

_CHUNK = 12288  # positions in a chunk, about: enough rows for a matrix product to run at full rate
_ALIGNMENT = 64  # matrix products are slow if rows of a matrix do not start at round addresses


def weighted_cross_entropy(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    position_weights: Tensor,
    *,
    excluded: int,
) -> tuple[Tensor, Tensor]:
    """Σ_i w_i·(−log p(target_i)), and −log p(target_i) for each i, detached.

    p is the softmax of states_i · weightᵀ + bias over all tokens except the `excluded` one. Shapes: states
    (n, d), weight (V, d), bias (V,), targets and position_weights (n,).
    """
    check_targets(targets, weight.shape[0])
    device = states.device.type
    if torch.is_autocast_enabled(device):
        compute = torch.get_autocast_dtype(device)
    else:
        compute = states.dtype
    with torch.autocast(device, enabled=False):
        total, nats = _WeightedCrossEntropy.apply(
            states, weight, bias, targets, position_weights, excluded, compute
        )
    return total, nats


def check_targets(targets: Tensor, vocabulary: int) -> None:
    """Refuse token ids outside the vocabulary. Skipped on a GPU, where the check would stall and the kernels
    trap."""
    if targets.device.type == "cpu" and targets.numel() and not torch.compiler.is_compiling():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= vocabulary:
            raise ValueError(f"token ids must lie in 0..{vocabulary - 1}, got values from {low} to {high}")


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        position_weights: Tensor,
        excluded: int,
        compute: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        vocabulary, positions = weight.shape[0], states.shape[0]
        precise = torch.promote_types(weight.dtype, torch.float32)
        matrix, offset = padded_head(weight, bias, excluded, compute)
        wanted = any(ctx.needs_input_grad[:3])
        grad_states = torch.empty_like(states, dtype=compute) if wanted else None
        grad_weight = torch.zeros_like(matrix, dtype=precise) if wanted else None
        grad_bias = torch.zeros_like(offset, dtype=precise) if wanted else None
        nats = torch.empty(positions, dtype=precise, device=states.device)
        by_kernel = runs_kernels(states.device) and compute != torch.float64
        reduce = _kernel() if by_kernel else _Plain
        for rows in chunks(positions, _CHUNK):
            some_states, some = states[rows].to(compute), targets[rows]
            logits = torch.addmm(offset, some_states, matrix.T)
            log_total = reduce.log_totals(logits)
            nats[rows] = log_total - logits.gather(1, some.unsqueeze(1)).squeeze(1)
            if grad_states is not None and grad_weight is not None and grad_bias is not None:
                weighted = position_weights[rows].to(precise)
                grad_logits, summed = reduce.grad_logits(logits, log_total, some, weighted)
                torch.mm(grad_logits, matrix, out=grad_states[rows])
                add_product(grad_weight, grad_logits.T, some_states)
                grad_bias += summed
        if grad_states is not None and grad_weight is not None and grad_bias is not None:
            ctx.save_for_backward(grad_states, grad_weight[:vocabulary], grad_bias[:vocabulary])
        ctx.dtypes = states.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(nats)
        # A position of weight zero may have an impossible target, and 0·∞ is NaN.
        terms = torch.where(position_weights == 0, 0.0, nats * position_weights)
        return terms.sum(), nats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if dtype is None else (grad * grad_total.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None, None, None


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, where total may have a higher precision than a and b. On CUDA it takes the unrounded
    sums."""
    if a.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def padded_head(
    weight: Tensor, bias: Tensor | None, excluded: int, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The head, padded to a round number of rows, and its bias, which is −∞ for tokens that are not
    allowed."""
    vocabulary = weight.shape[0]
    padding = -vocabulary % _ALIGNMENT
    matrix = F.pad(weight.to(compute), (0, 0, 0, padding))
    offset = torch.zeros(vocabulary, device=weight.device) if bias is None else bias.detach()
    offset = F.pad(offset.to(compute), (0, padding), value=-torch.inf)
    offset[excluded : excluded + 1].fill_(-torch.inf)  # a view: indexing would wait for the device
    return matrix, offset


def chunks(positions: int, about: int) -> list[slice]:
    """Slices of about equal size, near `about` positions each."""
    number = -(-positions // about)
    size = -(-positions // max(number, 1))
    return [slice(start, min(start + size, positions)) for start in range(0, positions, max(size, 1))]


class _Plain:
    """The kernel's computation in plain torch operations."""

    @staticmethod
    def log_totals(logits: Tensor) -> Tensor:
        """log Σ exp of each row, in at least single precision."""
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(1)

    @staticmethod
    def grad_logits(
        logits: Tensor, log_totals: Tensor, targets: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradient of Σ weight·(log total − target's logit), in the dtype of logits, and its sum over
        rows."""
        probabilities = (logits - log_totals.unsqueeze(1)).exp()
        is_target = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
        grad = (probabilities - is_target.to(log_totals.dtype)) * weights.unsqueeze(1)
        return grad.to(logits.dtype), grad.sum(0)


def _kernel() -> Any:
    from bd3lm.models.kernels import cross_entropy  # there may be no Triton on other machines

    return cross_entropy
