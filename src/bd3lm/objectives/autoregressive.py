"""The autoregressive negative log-likelihood (eq. 1)."""

from dataclasses import dataclass

import torch

from bd3lm.diffusion import Draws, LevelSampler
from bd3lm.models import Causal, Denoiser, packed, send
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss, check_scored


@dataclass(frozen=True, kw_only=True)
class Autoregressive(Objective):
    """−log p(x^ℓ | x^{<ℓ}), by next-token prediction.

    The mask token is never predicted, so that likelihoods are over the same vocabulary as block diffusion's.
    With `score_first` a mask precedes each text and the first token is predicted from it; otherwise the first
    token is given.

    `random_batch` is the paper's case study (section 4.2): each sequence draws t ~ U(0, 1] and keeps the loss
    of each of its tokens with probability t, so a batch trains on as few tokens as diffusion would.
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

    @property
    def is_random(self) -> bool:
        return self.random_batch

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws | None:
        if not self.random_batch:
            return None
        return LevelSampler().draw(rows, length, length, generator=generator, device=device)

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None = None) -> TokenLoss:
        check_scored(batch, self.mask_id)
        tokens, scored = batch.tokens, batch.scored
        if self.random_batch:
            if draws is None:
                raise ValueError("draws must be given: random_batch keeps tokens at random")
            scored = scored & (draws.tokens <= draws.levels)
        begins = batch.begins
        if not self.score_first and tokens.device.type == "cpu" and (scored & begins).any():
            raise ValueError("the first token can be scored only with score_first=True")
        tokens, scored, begins = (send(each, model.device) for each in (tokens, scored, begins))
        # Without score_first a text's last output is computed too, with weight 0: whole tiles are faster.
        if self.score_first:
            inputs, targets, weights = tokens.roll(1, 1).masked_fill(begins, self.mask_id), tokens, scored
        else:
            inputs, targets, weights = tokens, tokens.roll(-1, 1), (scored & ~begins).roll(-1, 1)
        layout = packed(Causal(inputs.shape[1]), batch.documents, model.device)
        states = model(inputs, layout=layout).flatten(0, 1)
        weight = weights.to(torch.promote_types(states.dtype, torch.float32))
        total, nats = model.cross_entropy(states, targets.flatten(), weight.flatten(), excluded=self.mask_id)
        nats = (nats.view_as(weight) * weight).masked_fill(weight == 0, 0.0)
        if not self.score_first:
            nats, weight = nats.roll(1, 1), weight.roll(1, 1)
        return TokenLoss(nats=nats, weight=weight, total=total)
