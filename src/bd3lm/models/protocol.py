"""What objectives, samplers and evaluations need from a network. Every `Network` provides it."""

from typing import Protocol

import torch
from torch import Tensor, nn

from bd3lm.models.cache import KVCache, KVStore
from bd3lm.models.draft_loss import Aim, DraftLoss
from bd3lm.models.dropout import Dropout
from bd3lm.models.layouts import Layout
from bd3lm.models.network import CacheShape


class Denoiser(Protocol):
    """A network as objectives and samplers see it: hidden states for a layout, and logits on request."""

    @property
    def uses_noise(self) -> bool:
        """Whether the output depends on the noise level."""

    @property
    def device(self) -> torch.device:
        """The device of the weights."""

    @property
    def vocab_size(self) -> int:
        """How many tokens the network can predict: the columns of `head`. It may read one more, the mask."""

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
        """Σ weight·(−log p(target)) over hidden states (n, width), and its terms, detached.

        p gives no probability to the `excluded` token, which may lie outside the vocabulary.
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
        """The loss of drafts against the distributions of the `verifying` states; both states are (n,
        width)."""

    @property
    def cache_shape(self) -> CacheShape | None:
        """The shape of the keys and values it puts into a store; None if it has no cache."""

    def new_cache(self, rows: int, *, segment: int, window: int | None = None) -> KVCache:
        """A cache for passes of up to `segment` tokens."""

    def check_room(self, rows: int, positions: int) -> None:
        """Refuse a pass whose activations do not fit in memory."""

    @property
    def recordable(self) -> bool:
        """Whether its passes can be recorded as CUDA graphs."""

    @property
    def graph_key(self) -> object:
        """What recorded passes depend on, apart from their rows; None if they cannot be reused."""


def embed_with_previous(model: Denoiser, tokens: Tensor, before: Tensor, *, blank: int) -> Tensor:
    """Vectors (..., width) of token ids (...). Where a token is `blank`, the vector of the token `before` it
    is added."""
    embedded = model.embed(tokens)
    return torch.where((tokens == blank).unsqueeze(-1), embedded + model.embed(before), embedded)


def require_evaluation_mode(model: Denoiser) -> None:
    """Refuse a network with active dropout: its results would be neither exact nor repeatable."""
    if isinstance(model, nn.Module) and any(
        isinstance(part, Dropout | nn.Dropout) and part.training and part.p > 0.0 for part in model.modules()
    ):
        raise ValueError(
            "model must be in evaluation mode (model.eval()): with dropout its results are not exact"
        )
