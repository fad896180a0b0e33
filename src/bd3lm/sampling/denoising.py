"""Filling the hidden tokens of one block: passes through the network, as an unmasking rule says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import subs_at_masks
from bd3lm.models import Denoiser
from bd3lm.sampling.drawing import Sharpening
from bd3lm.sampling.unmasking import Planned, Unmasking

Evaluate = Callable[[Tensor, Tensor], Tensor]
"""Hidden states (rows, n, hidden) of blocks (rows, n), or of embedded ones, at mask rates (rows,)."""


@dataclass(frozen=True)
class Reveal:
    """What one pass changed."""

    positions: Tensor  # (rows, k) in the text
    tokens: Tensor  # (rows, k)
    active: Tensor  # (rows, k) whether the token was revealed
    hidden_again: tuple[Tensor, Tensor] | None = (
        None  # positions (rows, n), and whether they were masked again
    )

    @property
    def evaluated(self) -> Tensor:
        """The rows (rows,) for which this pass was an evaluation."""
        return self.active.any(1)


def denoise(
    model: Denoiser,
    block: Tensor,
    hidden: Tensor,
    *,
    positions: Tensor,
    seeds: Tensor,
    mask_id: int,
    unmasking: Unmasking,
    sharpening: Sharpening,
    evaluate: Evaluate,
) -> Iterator[Reveal]:
    """Fill `block` (rows, n) in place at its hidden places, one pass at a time: SAMPLE of Algorithm 2."""
    if isinstance(unmasking, Planned):
        for turn, step in enumerate(unmasking.plan(seeds, positions, hidden)):
            places, active = step.places, step.active
            states = evaluate(block, step.mask_rate)
            asked = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
            log_p = subs_at_masks(model.head(asked), mask_id)
            # A token that may be hidden again is drawn with fresh noise each time.
            repeat = 0 if step.hidden_again is None else turn
            revealed = positions.gather(1, places)
            tokens = sharpening.draw(log_p, seeds, revealed, repeat=repeat)
            block.scatter_(1, places, torch.where(active, tokens, block.gather(1, places)))
            again = None
            if step.hidden_again is not None:
                block.masked_fill_(step.hidden_again, mask_id)
                again = positions, step.hidden_again
            yield Reveal(revealed, tokens, active, again)
    else:
        turn = 0
        while hidden.any():
            rate = (block == mask_id).double().mean(1)  # as many masks as the network sees
            log_p = subs_at_masks(model.head(evaluate(block, rate)), mask_id)
            tokens = sharpening.draw(log_p, seeds, positions, repeat=turn)
            chosen = unmasking.choose(log_p, tokens, hidden)
            block.copy_(torch.where(chosen, tokens, block))
            hidden = hidden & ~chosen
            turn += 1
            yield Reveal(positions, tokens, chosen)
