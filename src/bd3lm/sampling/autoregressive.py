"""Autoregressive sampling (eq. 1), token by token with the KV cache."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.models import Causal, Denoiser, KVCache, send
from bd3lm.sampling.chances import Chances
from bd3lm.sampling.request import Request
from bd3lm.sampling.rows import Reveal, Rows
from bd3lm.sampling.writer import FILL_CHUNK, Writer, fill_cache

_BIAS = "bias"  # a biased writer's extra (rows, vocabulary), which is added to logits


class AutoregressiveWriter(Writer):
    """Draws the next token from the last one and the cache. The mask is never drawn, as in training.

    With `score_first` the mask stands before the text and the first token is drawn too; otherwise the first
    token must be given. With `biased` requests may have a `logit_bias`. A token sees the `context − 1` inputs
    before its predecessor. Past the context the cache slides (see `KVCache`). Without `cache`, or for a
    network that keeps no keys and values, each pass computes the context again.
    """

    knows_chances = True

    def __init__(
        self,
        model: Denoiser,
        *,
        mask_id: int,
        context: int,
        score_first: bool = False,
        cache: bool = True,
        biased: bool = False,
    ) -> None:
        super().__init__(model, mask_id)
        if model.uses_noise:
            raise ValueError("model must not be conditioned on the noise level: autoregression has none")
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        self.window, self.score_first, self.biased = context - 1, score_first, biased
        self.cached = cache and context > 1 and model.cache_shape is not None

    @property
    def longest_pass(self) -> int:
        """The number of positions in a writing pass."""
        return 1

    def first_start(self, given: int) -> int:
        return given

    def piece_end(self, start: int) -> int:
        return start + 1

    def check(self, request: Request) -> None:
        if not self.score_first and (not len(request.given) or request.given[0] == self.mask_id):
            raise ValueError(
                "given must begin with a token, since this model was not trained to predict the first one, "
                f"got {request.given.tolist()[:1] or 'none'}"
            )
        if request.logit_bias and not self.biased:
            raise ValueError(
                f"logit_bias must be empty for a writer without biased=True, got {request.logit_bias}"
            )
        for token, _ in request.logit_bias:
            if token >= self.model.vocab_size or token == self.mask_id:
                raise ValueError(
                    f"logit_bias must hold token ids below {self.model.vocab_size} other than the mask, "
                    f"which is never written, got {token}"
                )

    def begin(self, requests: Sequence[Request], *, width: int) -> Rows:
        rows = super().begin(requests, width=width)
        if self.biased:
            added = torch.zeros(len(requests), self.model.vocab_size)
            for row, request in enumerate(requests):
                for token, number in request.logit_bias:
                    added[row, token] = number
            rows.extras[_BIAS] = added.to(rows.device)
        return rows

    def unread(self, request: Request) -> int:
        return request.prompt_length(self.mask_id) if self.cached else 0

    def remember(self, rows: Rows) -> Iterator[None]:
        """Read all inputs except the last, which the first pass reads."""
        if not self.cached:
            return
        window = min(self.window, rows.text.shape[1])  # short texts need no more memory than they have tokens
        chunk = min(FILL_CHUNK, window)
        rows.cache = self.model.new_cache(
            len(rows.start), segment=max(chunk, self.longest_pass), window=window
        )
        counts = rows.start - 1 + self.score_first
        rows.fill_passes += -(-counts // chunk)
        yield from fill_cache(
            self.model,
            rows.cache,
            self._inputs(rows),
            counts,
            chunk=chunk,
            layout=lambda length: Causal(length, keys_only=True),
        )

    def write(self, rows: Rows) -> Iterator[Reveal]:
        masked, positions = rows.masked(rows.start, 1)
        if rows.cache is None:
            tokens, chances = self._draw(
                rows, self._recomputed(rows), *(send(t, rows.device) for t in (positions, masked))
            )
        else:
            tokens, chances = rows.replay("token", partial(self._next, rows, rows.cache), positions, masked)
        rows.evaluations += masked.squeeze(1)
        rows.fill_passes += ~masked.squeeze(1)
        yield Reveal(positions, tokens, masked, chances=chances)
        rows.start += 1

    def _next(
        self, rows: Rows, cache: KVCache, positions: Tensor, masked: Tensor
    ) -> tuple[Tensor, Chances | None]:
        """Read the tokens before these positions (rows, 1), and write the masked ones."""
        state = self.model(self._last(rows, positions), layout=Causal(1), cache=cache)
        cache.advance(1)
        return self._draw(rows, state, positions, masked)

    def _last(self, rows: Rows, positions: Tensor) -> Tensor:
        """The tokens before these positions, or the mask at the start."""
        last = rows.text.gather(1, (positions - 1).clamp_min(0))
        return torch.where(positions > 0, last, self.mask_id)

    def _draw(
        self, rows: Rows, state: Tensor, positions: Tensor, masked: Tensor
    ) -> tuple[Tensor, Chances | None]:
        logits = self.model.head(state)
        biased = self.with_bias(rows, logits)
        tokens = rows.sharpening.draw_logits(biased, self.mask_id, rows.noise_seeds, positions, repeat=0)
        rows.write(positions, tokens, where=masked)
        return tokens, Chances.of_logits(logits, self.mask_id, tokens, self.alternatives)

    def with_bias(self, rows: Rows, logits: Tensor) -> Tensor:
        """The logits (rows, n, vocabulary) to draw from, with the bias added."""
        return logits + rows.extras[_BIAS].unsqueeze(1).to(logits.dtype) if self.biased else logits

    def _recomputed(self, rows: Rows) -> Tensor:
        """Hidden states (rows, 1, width) that predict the tokens at `start`, computed row by row."""
        inputs, states = self._inputs(rows), []
        ends = (rows.start + self.score_first).clamp_max(inputs.shape[1])  # an idle row stays at its end
        for row, end in enumerate(ends.tolist()):
            seen = inputs[row : row + 1, max(end - self.window - 1, 0) : end]
            states.append(self.model(seen, layout=Causal(seen.shape[1]))[:, -1:])
        return torch.cat(states)

    def _inputs(self, rows: Rows) -> Tensor:
        """The network's inputs: the text, after a mask if the first token is predicted."""
        return F.pad(rows.text, (1, 0), value=self.mask_id) if self.score_first else rows.text
