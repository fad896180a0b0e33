"""Filling the masked tokens of one piece: network passes in the order of an unmasking rule."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bd3lm.diffusion import subs_at_masks
from bd3lm.models import BlockReading, Denoiser, embed_with_previous, send
from bd3lm.sampling.chances import Chances
from bd3lm.sampling.drawing import or_mask
from bd3lm.sampling.rows import Reveal, Rows
from bd3lm.sampling.unmasking import Adaptive, Pass, Planned, UnmaskingRule

Evaluate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes hidden states (rows, n, width) of pieces from positions (rows, n), tokens (rows, n) or their
embeddings, and mask rates (rows,)."""


@dataclass(frozen=True)
class Denoising:
    """SAMPLE of Algorithm 2, for pieces of one block's length."""

    model: Denoiser
    reading: BlockReading
    unmasking: UnmaskingRule

    def __post_init__(self) -> None:
        rule = self.unmasking
        if self.model.uses_noise and isinstance(rule, Planned) and not rule.has_noise_level:
            raise ValueError(
                "unmasking must have a noise level that all masked tokens share (lean 0) for a network that "
                f"is told it, got {rule}"
            )

    def fill(
        self,
        rows: Rows,
        begin: Tensor,
        evaluators: Sequence[Evaluate],
        *,
        replay: bool = True,
        alternatives: int | None = None,
    ) -> Iterator[Reveal]:
        """Write the masked tokens of the pieces that begin at `begin`, one pass at a time.

        The first pass uses the first evaluator, the second the second, and later ones the last. With `replay`
        evaluators may only work on tensors that stay at the same address: see `Replayed`. With `alternatives`
        passes report chances: see `Writer`.
        """
        masked, positions = rows.masked(begin, self.reading.block_size)
        launch = _Launcher(rows, evaluators, replay)
        rule = self.unmasking
        if isinstance(rule, Planned):
            plan = rule.plan(rows.seeds, positions, masked)
            reveals = self._planned(plan, positions, launch, alternatives)
        elif isinstance(rule, Adaptive):
            reveals = self._adaptive(rule, masked, positions, launch, alternatives)
        else:
            raise ValueError(f"unmasking must be a Planned or an Adaptive rule, got {rule!r}")
        for reveal in reveals:
            rows.evaluations += reveal.active.any(1)
            yield reveal

    def _planned(
        self, plan: Iterable[Pass], positions: Tensor, launch: "_Launcher", alternatives: int | None
    ) -> Iterator[Reveal]:
        """Follow a plan that was made on the host. The device only reveals."""
        for index, step in enumerate(plan):
            revealed = positions.gather(1, step.places)
            # A token that may be masked again gets fresh noise in each pass.
            again = () if step.masked_again is None else (step.masked_again, torch.tensor([index]))
            tokens, chances = launch(
                index,
                partial(self._reveal_planned, alternatives),
                positions,
                step.places,
                revealed,
                step.active,
                step.mask_rate,
                *again,
            )
            masked_again = None if step.masked_again is None else (positions, step.masked_again)
            yield Reveal(revealed, tokens, step.active, masked_again, chances=chances)

    def _reveal_planned(
        self,
        alternatives: int | None,
        rows: Rows,
        evaluate: Evaluate,
        positions: Tensor,
        places: Tensor,
        revealed: Tensor,
        active: Tensor,
        mask_rate: Tensor,
        masked_again: Tensor | None = None,
        index: Tensor | None = None,
    ) -> tuple[Tensor, Chances | None]:
        """One pass: draw tokens (rows, k) at these places, write the active ones, and return their
        chances."""
        piece = rows.text.gather(1, positions)
        states = evaluate(positions, self._shown(piece, rows, positions), mask_rate)
        asked = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        logits = self.model.head(asked)
        tokens = rows.sharpening.draw_logits(
            logits,
            self.reading.mask_id,
            rows.noise_seeds,
            revealed,
            repeat=0 if index is None else index,
        )
        rows.write(revealed, tokens, where=active)
        if masked_again is not None:
            rows.write(positions, torch.full_like(positions, self.reading.mask_id), where=masked_again)
        return tokens, Chances.of_logits(logits, self.reading.mask_id, tokens, alternatives)

    def _adaptive(
        self,
        rule: Adaptive,
        masked: Tensor,
        positions: Tensor,
        launch: "_Launcher",
        alternatives: int | None,
    ) -> Iterator[Reveal]:
        """Let the rule choose after each pass, which the host then has to read from the device."""
        index = 0
        while masked.any():
            reveal = partial(self._reveal_chosen, rule, alternatives)
            tokens, chosen, chances = launch(index, reveal, positions, masked, torch.tensor([index]))
            chosen = chosen.cpu()
            masked = masked & ~chosen
            index += 1
            yield Reveal(positions, tokens, chosen, chances=chances)

    def _reveal_chosen(
        self,
        rule: Adaptive,
        alternatives: int | None,
        rows: Rows,
        evaluate: Evaluate,
        positions: Tensor,
        masked: Tensor,
        index: Tensor,
    ) -> tuple[Tensor, Tensor, Chances | None]:
        """One pass: draw tokens everywhere (rows, n), write the places that the rule chose, and return
        tokens, places and chances."""
        piece = rows.text.gather(1, positions)
        rate = (piece == self.reading.mask_id).double().mean(1)  # the share of masks that the network sees
        states = evaluate(positions, self._shown(piece, rows, positions), rate)
        log_p = subs_at_masks(self.model.head(states), self.reading.mask_id)
        tokens = rows.sharpening.draw(log_p, rows.noise_seeds, positions, repeat=index)
        tokens = or_mask(tokens, log_p, self.reading.mask_id)
        chosen = rule.choose(log_p, tokens, masked)
        rows.write(positions, tokens, where=chosen)
        return tokens, chosen, Chances.of(log_p, self.reading.mask_id, tokens, alternatives)

    def _shown(self, piece: Tensor, rows: Rows, positions: Tensor) -> Tensor:
        """The tokens (rows, n) of these positions as the network's input: ids, or embedding vectors."""
        if not self.reading.previous_token:
            return piece
        # If the first token of a text is masked, there is no token before it: use the mask itself.
        before = rows.text.gather(1, (positions - 1).clamp_min(0))
        return embed_with_previous(self.model, piece, before, blank=self.reading.mask_id)


@dataclass(frozen=True)
class _Launcher:
    """Runs a pass over rows with its evaluator, as a replay if possible."""

    rows: Rows
    evaluators: Sequence[Evaluate]
    replay: bool

    def __call__(self, index: int, reveal: Callable[..., Any], *inputs: Tensor) -> Any:
        which = min(index, len(self.evaluators) - 1)
        run = partial(reveal, self.rows, self.evaluators[which])
        if not self.replay:
            return run(*(send(each, self.rows.device) for each in inputs))
        shapes = tuple(each.shape for each in inputs)
        return self.rows.replay((which, shapes), run, *inputs)
