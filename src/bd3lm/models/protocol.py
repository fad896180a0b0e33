"""What objectives, samplers and evaluations ask of a network; every `Network` has it."""

from typing import Protocol

import torch
from torch import Tensor, nn

from bd3lm.models.cache import KVCache, KVStore
from bd3lm.models.draft_loss import Aim, DraftLoss
from bd3lm.models.dropout import Dropout
from bd3lm.models.layouts import Layout
from bd3lm.models.network import CacheShape


class Denoiser(Protocol):
    """A network under a layout: hidden states first, logits where they are wanted."""

    @property
    def uses_noise(self) -> bool:
        """Whether the output depends on the noise level given."""

    @property
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def vocab_size(self) -> int:
        """How many tokens it can predict: the columns of `head`. It may read one more, the mask."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Vectors (..., width) for token ids (...) or for probabilities (..., vocabulary)."""

    def __call__(
        self, tokens: Tensor, *, layout: Layout, noise: Tensor | None = None, cache: KVStore | None = None
    ) -> Tensor:
        """Hidden states (rows, read positions, width) of token ids (rows, positions) or embedded ones."""

    def head(self, states: Tensor) -> Tensor:
        """Logits (..., vocabulary) of hidden states (..., width)."""

    def cross_entropy(
        self, states: Tensor, targets: Tensor, weights: Tensor, *, excluded: int
    ) -> tuple[Tensor, Tensor]:
        """Σ weight·(−log p(target)) over hidden states (n, width), and the terms without their gradients.

        p leaves out the `excluded` token, which may be none of those that can be predicted.
        """

    def draft_loss(
        self,
        states: Tensor,
        verifying: Tensor,
        targets: Tensor,
        weights: Tensor,
        *,
        aim: Aim,
        excluded: int,
    ) -> DraftLoss:
        """What drafts lose against the distributions of `verifying` states, both (n, width)."""

    @property
    def cache_shape(self) -> CacheShape | None:
        """What it hands to the store of a pass; None where it keeps nothing, and has no cache."""

    def new_cache(self, rows: int, *, segment: int, window: int | None = None) -> KVCache:
        """A cache for passes of up to `segment` tokens."""

    def check_room(self, rows: int, positions: int) -> None:
        """Refuse a pass whose activations cannot be held."""

    @property
    def recordable(self) -> bool:
        """Whether its passes may be recorded as CUDA graphs."""

    @property
    def graph_key(self) -> object:
        """What recorded passes depend on but for their rows; None where none may be kept."""


def embed_with_previous(model: Denoiser, tokens: Tensor, before: Tensor, *, blank: int) -> Tensor:
    """Vectors (..., width) of token ids (...); that of the token `before` is added to those of blanks."""
    embedded = model.embed(tokens)
    return torch.where((tokens == blank).unsqueeze(-1), embedded + model.embed(before), embedded)


def require_evaluation_mode(model: Denoiser) -> None:
    """Refuse a network whose dropout is on: nothing about it would be exact, or the same twice."""
    if isinstance(model, nn.Module) and any(
        isinstance(part, Dropout | nn.Dropout) and part.training and part.p > 0.0 for part in model.modules()
    ):
        raise ValueError(
            "model must be in evaluation mode (model.eval()): with dropout nothing about it is exact"
        )
