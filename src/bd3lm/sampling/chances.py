"""Log-probabilities of drawn tokens, and the likeliest alternatives, for requests that ask for them.

They come from the model's own distribution in the pass that revealed the token, before temperature, top-k and
nucleus. The mask does not count as a token.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from bd3lm.diffusion import subs_at_masks
from bd3lm.sampling.events import Event, Failed, Started, Stopped, TokenHidden, TokenRevealed


class Chances(NamedTuple):
    """Log-probabilities of tokens (rows, k), and the likeliest tokens at each place (rows, k, m)."""

    log_p: Tensor
    ids: Tensor
    log_p_of_ids: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, mask_id: int, tokens: Tensor, number: int | None) -> "Chances | None":
        """Like `of`, but computes no softmax if no alternatives are asked for."""
        return None if number is None else cls.of(subs_at_masks(logits, mask_id), mask_id, tokens, number)

    @classmethod
    def of(cls, log_p: Tensor, mask_id: int, tokens: Tensor, number: int | None) -> "Chances | None":
        """For tokens (rows, k) under log_p (rows, k, vocabulary), with this number of alternatives; None
        without one. Never waits for the device."""
        if number is None:
            return None
        vocabulary = log_p.shape[-1]
        # Where nothing is written, there may be a mask outside of the vocabulary.
        at = tokens.clamp_max(vocabulary - 1).unsqueeze(-1)
        likeliest = log_p.topk(min(number, vocabulary - int(mask_id < vocabulary)), dim=-1)
        return cls(log_p.gather(-1, at).squeeze(-1), likeliest.indices, likeliest.values)

    def joined(self, other: "Chances") -> "Chances":
        """These and the chances of more places of the same rows."""
        return Chances(*(torch.cat(both, dim=1) for both in zip(self, other, strict=True)))

    def told(self, where: Tensor) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
        """The log-probability and the alternatives of each token where (rows, k) is True, on the host, row by
        row."""
        there = where.to(self.log_p.device)
        found = (each[there].tolist() for each in self)
        return [
            (log_p, tuple(zip(ids, others, strict=True))) for log_p, ids, others in zip(*found, strict=True)
        ]


class ChanceNotes:
    """Collects the chances in events, for the sample of each text."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, TokenRevealed]] = {}

    def noted(self, event: Event) -> Event:
        """The event. One that ends a text gets the chances of all its tokens."""
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
