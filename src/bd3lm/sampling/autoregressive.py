"""Token after token: autoregressive sampling (eq. 1) with the KV cache."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import subs_at_masks
from bd3lm.models import Causal, Denoiser
from bd3lm.sampling.denoising import Reveal
from bd3lm.sampling.drawing import Sharpening
from bd3lm.sampling.rows import Request, Rows, Writer, fill_cache, read_at

_FILL_CHUNK = 128


class AutoregressiveWriter(Writer):
    """The next token from the last one and the cache; the mask is never predicted, as in training.

    With `score_first` the mask stands before the text and the first token is drawn too; otherwise the first
    token must be given. A token sees the `context − 1` inputs before its predecessor; past the context the
    cache slides, and without `cache` what it sees is computed afresh (see `KVCache`).
    """

    def __init__(
        self,
        model: Denoiser,
        *,
        mask_id: int,
        context: int,
        score_first: bool = False,
        sharpening: Sharpening | None = None,
        cache: bool = True,
    ) -> None:
        super().__init__(model, mask_id)
        if model.uses_noise:
            raise ValueError("model must not be conditioned on the noise level: autoregression has none")
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
        self.window, self.score_first, self.cached = context - 1, score_first, cache and context > 1
        self.sharpening = sharpening or Sharpening()

    def first_start(self, given: int) -> int:
        return given

    def piece_end(self, start: int) -> int:
        return start + 1

    def width(self, length: int) -> int:
        return length

    def check(self, request: Request) -> None:
        if not self.score_first and (not len(request.given) or request.given[0] == self.mask_id):
            raise ValueError(
                "given must begin with a token, which this model was not trained to predict, got "
                f"{request.given.tolist()[:1] or 'none'}"
            )

    def remember(self, rows: Rows) -> None:
        """Read all inputs but the last, which the first pass reads."""
        if not self.cached:
            return
        window = min(self.window, rows.text.shape[1])  # short texts need no more memory than they have tokens
        chunk = min(_FILL_CHUNK, window)
        rows.cache = self.model.new_cache(len(rows.start), segment=chunk, window=window)
        rows.fill_passes += fill_cache(
            self.model,
            rows.cache,
            self._inputs(rows),
            rows.start - 1 + self.score_first,
            chunk=chunk,
            layout=lambda length: Causal(length, keys_only=True),
        )

    def write(self, rows: Rows) -> Iterator[Reveal]:
        token, positions = read_at(rows.text, rows.start, 1)
        hidden = (token == self.mask_id) & (positions < rows.stop.unsqueeze(1))
        state = self._last_state(rows)
        log_p = subs_at_masks(self.model.head(state), self.mask_id)
        drawn = self.sharpening.draw(log_p, rows.seeds, positions)
        rows.text.scatter_(1, positions, torch.where(hidden, drawn, token))
        rows.evaluations += hidden.squeeze(1)
        rows.fill_passes += ~hidden.squeeze(1)
        yield Reveal(positions, drawn, hidden)
        rows.start = rows.start + 1

    def _last_state(self, rows: Rows) -> Tensor:
        """Hidden state (rows, 1, hidden) that predicts the token at `start`."""
        if rows.cache is not None:
            last = rows.text.gather(1, (rows.start - 1).clamp_min(0).unsqueeze(1))
            last = torch.where(rows.start.unsqueeze(1) > 0, last, self.mask_id)
            state = self.model(last, layout=Causal(1), cache=rows.cache)
            rows.cache.advance(1)
            return state
        inputs, states = self._inputs(rows), []
        for row, end in enumerate((rows.start + self.score_first).tolist()):
            seen = inputs[row : row + 1, max(end - self.window - 1, 0) : end]
            states.append(self.model(seen, layout=Causal(seen.shape[1]))[:, -1:])
        return torch.cat(states)

    def _inputs(self, rows: Rows) -> Tensor:
        """What the network reads: the text, after the mask where the first token is predicted from it."""
        return F.pad(rows.text, (1, 0), value=self.mask_id) if self.score_first else rows.text
