"""The training objective of drafters: masks behind a text guess the tokens that its causal pass will
verify."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.diffusion import Draws
from bd3lm.models import AIMS, Aim, BlockDiffusion, Causal, Denoiser, KVTape, packed, send
from bd3lm.objectives.base import Objective, TokenBatch, TokenLoss, check_scored


@dataclass(frozen=True, kw_only=True)
class Drafting(Objective):
    """Loss of the drafts q from groups of masks, against the causal law p of a frozen network.

    In a group of n masks at positions s..s + n − 1, each mask sees the text before s and its own group, and
    the mask at position i predicts token i + 1. The text before already predicts the token at s exactly. The
    network's additions apply to the masks alone. p comes from a causal pass over the text. Nothing is trained
    in that pass, so it needs neither gradients nor activations.
    """

    mask_id: int
    masks: int
    aim: Aim = "soft"

    def __post_init__(self) -> None:
        if self.masks < 1:
            raise ValueError(f"masks must be at least 1, got {self.masks}")
        if self.aim not in AIMS:
            raise ValueError(f"aim must be one of {', '.join(AIMS)}, got {self.aim!r}")

    @property
    def is_bound(self) -> bool:
        """The loss of drafts bounds nothing."""
        return False

    @property
    def is_random(self) -> bool:
        return False

    def block_of(self, context: int) -> int:
        return self.masks

    def draw(
        self, rows: int, length: int, *, generator: torch.Generator | None, device: torch.device | str
    ) -> Draws | None:
        return None

    def loss(self, model: Denoiser, batch: TokenBatch, draws: Draws | None = None) -> TokenLoss:
        check_scored(batch, self.mask_id)
        tokens, scored = (send(each, model.device) for each in (batch.tokens, batch.scored & ~batch.begins))
        length = tokens.shape[1]
        if model.cache_shape is None:
            raise ValueError("drafts need a network that stores keys and values, got one that keeps none")
        if length % self.masks:
            raise ValueError(f"tokens must be a multiple of {self.masks}, the masks of a group, got {length}")
        tape = KVTape()
        with torch.no_grad():
            causal = packed(Causal(length), batch.documents, model.device)
            verifying = model(tokens, layout=causal, cache=tape)
        drafting = BlockDiffusion(length, self.masks, causal_clean=True, adds=True)
        layout = packed(drafting, batch.documents, model.device)
        masks = torch.full_like(tokens, self.mask_id)
        states = model(masks, layout=layout, cache=tape.replay())
        # The target of a text's last mask is outside of the text; it is computed too, as whole tiles are
        # faster.
        targets, follows = tokens.roll(-1, 1), scored.roll(-1, 1)
        weight = follows.to(torch.promote_types(states.dtype, torch.float32))
        found = model.draft_loss(
            states.flatten(0, 1),
            verifying.flatten(0, 1),
            targets.flatten(),
            weight.flatten(),
            aim=self.aim,
            excluded=self.mask_id,
        )
        nats = (found.nats.view_as(weight) * weight).masked_fill(weight == 0, 0.0)
        accepted = found.overlaps.view_as(weight) * weight
        return TokenLoss(
            nats=nats.roll(1, 1),
            weight=weight.roll(1, 1),
            total=found.total,
            statistics=self._by_place(accepted, weight),
        )

    def _by_place(self, accepted: Tensor, weight: Tensor) -> Mapping[str, Tensor]:
        """Sums of acceptance and numbers of drafts for each place of a group."""
        places = {_accepted(place): accepted[:, place :: self.masks].sum() for place in range(self.masks)}
        numbers = {_drafts(place): weight[:, place :: self.masks].sum() for place in range(self.masks)}
        return places | numbers

    def figures(self, statistics: Mapping[str, float]) -> Mapping[str, float]:
        """The probability that the draft at each place is accepted, if all before it were."""
        found = {}
        for place in range(self.masks):
            if drafts := statistics[_drafts(place)]:
                found[_accepted(place)] = statistics[_accepted(place)] / drafts
        return found


def _accepted(place: int) -> str:
    """The statistic's name. Places are counted from the token after the text, which needs no draft."""
    return f"accepted_{place + 2}"


def _drafts(place: int) -> str:
    return f"drafts_{place + 2}"
