"""What the model gave the tokens that were drawn, and which others were likely: told on request.

A chance is of the model's own distribution at the pass that revealed the token, whatever temperature, top-k
and nucleus made of it; the mask is no token.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bd3lm.diffusion import subs_at_masks
from bd3lm.sampling.events import Event, Failed, Started, Stopped, TokenHidden, TokenRevealed


class Chances(NamedTuple):
    """Of tokens (rows, k) their log-probabilities, and of each place the likeliest tokens (rows, k, m)."""

    log_p: Tensor
    ids: Tensor
    log_p_of_ids: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, mask_id: int, tokens: Tensor, number: int | None) -> "Chances | None":
        """As `of`; who does not ask pays for no softmax."""
        return None if number is None else cls.of(subs_at_masks(logits, mask_id), mask_id, tokens, number)

    @classmethod
    def of(cls, log_p: Tensor, mask_id: int, tokens: Tensor, number: int | None) -> "Chances | None":
        """Of tokens (rows, k) under log_p (rows, k, vocabulary), with so many alternatives; None if nobody
        asks. Nothing here waits for the device."""
        if number is None:
            return None
        vocabulary = log_p.shape[-1]
        # A mask that is no token of the vocabulary may stand where nothing is written.
        at = tokens.clamp_max(vocabulary - 1).unsqueeze(-1)
        likeliest = log_p.topk(min(number, vocabulary - int(mask_id < vocabulary)), dim=-1)
        return cls(log_p.gather(-1, at).squeeze(-1), likeliest.indices, likeliest.values)

    def joined(self, other: "Chances") -> "Chances":
        """Those of more places of the same rows."""
        return Chances(*(torch.cat(both, dim=1) for both in zip(self, other, strict=True)))

    def told(self, where: Tensor) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """On the host, of the tokens where (rows, k) says so, row by row: the log-probability of each, and
        its alternatives with theirs."""
        there = where.to(self.log_p.device)
        found = (each[there].tolist() for each in self)
        return [
            (log_p, tuple(zip(ids, others, strict=True))) for log_p, ids, others in zip(*found, strict=True)
        ]


class ChanceNotes:
    """Keeps what events tell of chances, for the samples of the texts that they are of."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, TokenRevealed]] = {}

    def noted(self, event: Event) -> Event:
        """The event; a text that stops has the chances of all its tokens."""
        match event:
            case TokenRevealed(index=index, position=position) if event.log_p is not None:
                self._of.setdefault(index, {})[position] = event
            case TokenHidden(index=index, position=position) if index in self._of:
                self._of[index].pop(position, None)
            case Started(index=index) | Failed(index=index):
                self._of.pop(index, None)
            case Stopped(index=index, sample=sample) if index in self._of:
                found = self._of.pop(index)
                told = [found.get(place) for place in range(len(sample.tokens))]
                log_p = tuple(None if each is None else each.log_p for each in told)
                alternatives = tuple(() if each is None else each.alternatives for each in told)
                return replace(event, sample=replace(sample, log_p=log_p, alternatives=alternatives))
        return event

    def drop(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._of.pop(index, None)

    def clear(self) -> None:
        self._of.clear()
