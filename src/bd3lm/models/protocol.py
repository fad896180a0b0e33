"""What objectives, samplers and evaluations ask of a network; `Transformer` is one."""

from typing import Protocol

from torch import Tensor

from bd3lm.models.cache import KVCache, KVStore
from bd3lm.models.layouts import Layout


class Denoiser(Protocol):
    """A network under a layout: hidden states first, logits where they are wanted."""

    @property
    def uses_noise(self) -> bool:
        """Whether the output depends on the noise level given."""

    def __call__(
        self, tokens: Tensor, *, layout: Layout, noise: Tensor | None = None, cache: KVStore | None = None
    ) -> Tensor:
        """Hidden states (rows, read positions, hidden)."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., vocabulary) of hidden states (..., hidden)."""

    def new_cache(self, rows: int, *, segment: int, window: int | None = None) -> KVCache:
        """A cache for passes of up to `segment` tokens."""
