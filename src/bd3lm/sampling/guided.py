"""Token by token with a guide that says which tokens may come next: texts that follow a grammar.

The next allowed tokens depend on the token before, which the host must know. So the host reads each token
from the device after its pass, and tells the next pass what each row may write.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from bd3lm.models import Causal, Denoiser, KVCache
from bd3lm.sampling.autoregressive import AutoregressiveWriter
from bd3lm.sampling.chances import Chances
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import Reveal, Rows

_NUMBER = "guide"  # (rows,) the number of each row's guide state


class GuideState(Protocol):
    """The state of a text in its grammar."""

    def allowed(self) -> Tensor:
        """Which tokens may come next, (vocabulary,) on the host. The end token is one where the text may
        end."""

    def take(self, token: int) -> None:
        """Advance by a written token."""


class Guide(Protocol):
    """A grammar over the tokens of a vocabulary."""

    def begin(self) -> GuideState:
        """The state at the start of a text."""


class GuidedWriter(AutoregressiveWriter):
    """Draws each token from the network's distribution over the tokens that the request's guide allows.

    Sharpening applies after that: a nucleus holds only allowed tokens.
    """

    def __init__(
        self,
        model: Denoiser,
        *,
        mask_id: int,
        context: int,
        score_first: bool = False,
        biased: bool = False,
    ) -> None:
        super().__init__(model, mask_id=mask_id, context=context, score_first=score_first, biased=biased)
        if not self.cached:
            raise ValueError("a guided text needs a network that keeps keys and values")
        self._numbers = count(1)
        self._states: dict[int, GuideState] = {}

    def check(self, request: Request) -> None:
        super().check(request)
        if request.guide is None:
            raise ValueError("guide must be given")
        if bool((request.given == self.mask_id).any()):
            raise ValueError("a template must not be guided: a grammar is of what follows a prompt")

    def begin(self, requests: Sequence[Request], *, width: int) -> Rows:
        rows = super().begin(requests, width=width)
        numbers = []
        for request in requests:
            if request.guide is None:
                raise ValueError("guide must be given")
            numbers.append(next(self._numbers))
            self._states[numbers[-1]] = request.guide.begin()
        rows.extras[_NUMBER] = torch.tensor(numbers, device=rows.device)
        return rows

    def ended(self, rows: Rows, places: Sequence[int]) -> None:
        for number in rows.extras[_NUMBER][list(places)].tolist():
            self._states.pop(number, None)

    def write(self, rows: Rows) -> Iterator[Reveal]:
        if rows.cache is None:
            raise RuntimeError("remember comes before write")
        masked, positions = rows.masked(rows.start, 1)
        states = [self._states.get(number) for number in rows.extras[_NUMBER].tolist()]
        free = torch.ones(self.model.vocab_size, dtype=torch.bool)
        allowed = torch.stack([free if state is None else state.allowed() for state in states]).unsqueeze(1)
        guided = partial(self._guided, rows, rows.cache)
        tokens, chances = rows.replay("guided", guided, positions, masked, allowed)
        rows.evaluations += masked.squeeze(1)
        rows.fill_passes += ~masked.squeeze(1)
        yield Reveal(positions, tokens, masked, chances=chances)
        written = zip(states, masked.squeeze(1).tolist(), tokens.squeeze(1).tolist(), strict=True)
        for state, is_written, token in written:
            if state is not None and is_written and token != self.mask_id:  # the mask signals NaN
                state.take(token)
        rows.start += 1

    def _guided(
        self, rows: Rows, cache: KVCache, positions: Tensor, masked: Tensor, allowed: Tensor
    ) -> tuple[Tensor, Chances | None]:
        state = self.model(self._last(rows, positions), layout=Causal(1), cache=cache)
        cache.advance(1)
        logits = self.model.head(state)
        # If nothing is allowed, every probability is NaN, and the text fails.
        kept = self.with_bias(rows, logits).masked_fill(~allowed, -torch.inf)
        kept = kept.masked_fill(~allowed.any(-1, keepdim=True), torch.nan)
        tokens = rows.sharpening.draw_logits(kept, self.mask_id, rows.noise_seeds, positions, repeat=0)
        rows.write(positions, tokens, where=masked)
        # The chances are the model's own, without the grammar.
        return tokens, Chances.of_logits(logits, self.mask_id, tokens, self.alternatives)
