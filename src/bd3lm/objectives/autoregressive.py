"""The autoregressive negative log-likelihood (eq. 1)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bd3lm.diffusion import Draws, LevelSampler
from bd3lm.models import Causal, Denoiser
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss, check_scored, token_nats


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Objective):
    """−log p(x^ℓ | x^{<ℓ}), by next-token prediction.

    The mask token, which autoregression has no use for, is never predicted, so that likelihoods are over
    the same vocabulary as block diffusion's. With `score_first` it stands before the text and the first
    token is predicted from it; otherwise the first token is given.

    `random_batch` is the paper's case study (section 4.2): each sequence draws t ~ U(0, 1] and keeps the loss
    of each of its tokens with probability t, so that a batch trains on as few tokens as diffusion would.
    """

    mask_id: int
    score_first: bool = False
    random_batch: bool = False

    def __post_init__(self) -> None:
        if self.mask_id < 0:
            raise ValueError(f"mask_id must be a token id, got {self.mask_id}")

    @property
    def is_bound(self) -> bool:
        """With `random_batch` only the ratio of expected sums is the likelihood, not a batch's mean."""
        return not self.random_batch

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws | None:
        if not self.random_batch:
            return None
        return LevelSampler().draw(rows, length, length, generator=generator, device=device)

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None = None) -> TokenLoss:
        check_scored(batch, self.mask_id)
        tokens, scored = batch.tokens, batch.scored
        if self.score_first:
            inputs = F.pad(tokens[:, :-1], (1, 0), value=self.mask_id)
            nats = self._nats(model, inputs, tokens)
        else:
            if scored[:, 0].any():
                raise ValueError("the first token can be scored only with score_first=True")
            nats = F.pad(self._nats(model, tokens[:, :-1], tokens[:, 1:]), (1, 0))
        if self.random_batch:
            if draws is None:
                raise ValueError("draws must be given: random_batch keeps tokens at random")
            scored = scored & (draws.tokens <= draws.levels)
        return TokenLoss(nats=nats.masked_fill(~scored, 0.0), weight=scored.to(nats.dtype))

    def _nats(self, model: Denoiser, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = model(inputs, layout=Causal(inputs.shape[1]))
        return token_nats(model.head(hidden), targets, self.mask_id)
