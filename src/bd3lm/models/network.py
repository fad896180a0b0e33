"""The interface of a network and its config. A custom network subclasses both.

A config holds plain values. It is saved next to the weights, it builds the network, and its fields are fields
of recipes. Optional members have a default that computes the same result, more slowly, or turns a feature
off.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from bd3lm.kinds import Kinded
from bd3lm.models.cache import KVCache, KVStore
from bd3lm.models.cross_entropy import check_targets
from bd3lm.models.draft_loss import Aim, DraftLoss, plain_draft_loss
from bd3lm.models.layouts import Layout


class CacheShape(NamedTuple):
    """The shape of the keys and values that a network puts into its store."""

    layers: int
    heads: int
    """Key/value heads."""
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Kinded, ABC, family="network"):
    """The shape of a network. Subclass it as a frozen dataclass with a `kind` of its own, a field for each
    choice, and `build`."""

    vocab_size: int
    """How many tokens the network can predict."""
    context: int = 1024
    """Positions the network is trained on. A cache shows it at most this many."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """Named sizes: field values that a recipe can select by name."""
    default_size: ClassVar[str | None] = None
    """The size of a recipe that names none."""
    may_differ: ClassVar[frozenset[str]] = frozenset()
    """Fields in which a network may differ from the checkpoint it starts from."""
    initialisations: ClassVar[tuple[str, ...]] = ()
    """Ways to draw the first weights. `build` uses the first one; see `Network.start_as`."""

    @abstractmethod
    def build(self) -> "Network":
        """Build a network of this shape with fresh weights. It may be called on torch's device "meta", where
        weights have shapes but no values."""

    @property
    def input_vocab_size(self) -> int:
        """How many token ids the network reads. This is one more than it predicts if the mask has its own
        vector: the mask's id comes after the vocabulary."""
        return self.vocab_size

    @property
    def told_noise(self) -> bool:
        """Whether the network receives the noise level."""
        return False

    @property
    def cache_shape(self) -> CacheShape | None:
        """The shape of the keys and values that `forward` puts into its store. None: the network ignores the
        store and computes everything in each pass."""
        return None

    @property
    def learns_beside(self) -> bool:
        """Whether the network has additions that learn while its weights stay frozen."""
        return False

    @property
    def adds_everywhere(self) -> bool:
        """Whether the additions apply at every position. If so, any method can train them, and `merged` folds
        them into the weights."""
        return False

    @property
    def merged(self) -> "NetworkConfig":
        """The config of `Network.merged`."""
        return self

    def with_mask_apart(self) -> "NetworkConfig":
        """The config of the same network with a separate vector for the mask, whose id comes after the
        vocabulary."""
        raise ValueError(
            f"a network of kind {self.kind} has no vector for a mask besides its {self.vocab_size:,} tokens"
        )

    @property
    def depth(self) -> int:
        """How many layers the network has, each with at least one tensor, or 0 if unknown. A config whose
        depth cannot match the weights is refused before the layers are built."""
        return 0

    @property
    def parameters(self) -> int:
        """The approximate number of weights."""
        with torch.device("meta"):
            return sum(each.numel() for each in self.build().parameters())

    @property
    def summary(self) -> str:
        """The shape in a few words."""
        return self.kind


class Network(nn.Module, ABC):
    """Token ids in, hidden states or logits out. This is what is trained, saved and loaded; it satisfies
    `Denoiser`."""

    config: NetworkConfig

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config

    # --- what it computes ---

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Vectors (..., width) for token ids (...) or for probabilities (..., vocabulary)."""

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        *,
        layout: Layout,
        noise: Tensor | None = None,
        cache: KVStore | None = None,
    ) -> Tensor:
        """Hidden states (rows, read positions, width) of the positions that `layout` reads.

        `tokens` are ids (rows, positions) or vectors (rows, positions, width) from `embed`. A position
        depends only on positions that `layout` allows it to see. `noise` is (rows,) or (rows, positions), for
        a network with `uses_noise`. `cache` is for a network whose config has a `cache_shape`.
        """

    @abstractmethod
    def head(self, states: Tensor) -> Tensor:
        """Logits (..., vocabulary) of hidden states (..., width)."""

    def cross_entropy(
        self, states: Tensor, targets: Tensor, weights: Tensor, *, excluded: int
    ) -> tuple[Tensor, Tensor]:
        """Σ weight·(−log p(target)) over hidden states (n, width), and its terms, detached.

        p gives no probability to the `excluded` token, which may lie outside the vocabulary. This version
        computes all logits at once. A head that is a single matrix can use `weighted_cross_entropy`, which
        needs less memory.
        """
        check_targets(targets, self.vocab_size)
        logits = self.head(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        is_excluded = torch.arange(logits.shape[-1], device=logits.device) == excluded
        logits = logits.masked_fill(is_excluded, -torch.inf)
        nats = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        # A position of weight zero may have an impossible target, and 0·∞ is NaN.
        total = torch.where(weights == 0, 0.0, nats).mul(weights).sum()
        return total, nats.detach()

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
        """The loss of drafts against the distributions of the `verifying` states; both states are (n, width).
        This version computes all logits at once. A head that is a single matrix can use
        `weighted_draft_loss`."""
        check_targets(targets, self.vocab_size)
        return plain_draft_loss(
            self.head(states), self.head(verifying), targets, weights, aim=aim, excluded=excluded
        )

    # --- what it is ---

    @property
    def uses_noise(self) -> bool:
        """Whether the output depends on the noise level."""
        return self.config.told_noise

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        return next(self.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """How many tokens the network can predict."""
        return self.config.vocab_size

    # --- keys and values kept between passes ---

    @property
    def cache_shape(self) -> CacheShape | None:
        """The shape of the keys and values it puts into a store; None if it keeps none."""
        return self.config.cache_shape

    def new_cache(self, rows: int, *, segment: int, window: int | None = None) -> KVCache:
        """A cache for passes of up to `segment` tokens. It shows the last `window` positions of the text.

        The default window leaves room for the segment within the trained context.
        """
        shape, context = self.cache_shape, self.config.context
        if shape is None:
            raise ValueError(
                f"a network of kind {self.config.kind} has no cache of keys and values: it reads the whole "
                "text in each pass (cache=False)"
            )
        if window is None and segment >= context:
            raise ValueError(
                f"segment must be below the context {context}, to leave room for the text before it, got "
                f"{segment}; set window to go past the context"
            )
        return KVCache(
            layers=shape.layers,
            rows=rows,
            heads=shape.heads,
            head_dim=shape.head_dim,
            window=context - segment if window is None else window,
            segment=segment,
            device=self.device,
            dtype=self.dtype,
        )

    # --- what makes it faster, where it can ---

    def check_room(self, rows: int, positions: int) -> None:
        """Refuse a pass whose activations do not fit in memory."""
        return None

    @property
    def recordable(self) -> bool:
        """Whether its passes can be recorded as CUDA graphs: they never wait for the device, and they read
        weights and caches in place."""
        return False

    @property
    def graph_key(self) -> object:
        """What recorded passes depend on, apart from their rows. While it stays equal, recorded passes are
        reused for the next batch of texts. None: they are not reused."""
        return None

    @property
    def can_compile(self) -> bool:
        """Whether `compile_layers` and `compile_trunk` do anything."""
        return False

    def compile_layers(self) -> None:
        """Compile each of `sharded_layers` in place. Parameter names stay the same."""
        return None

    def compile_trunk(self) -> None:
        """Compile as much of `forward` as possible."""
        return None

    @property
    def can_recompute(self) -> bool:
        """Whether `recompute_layers` does anything."""
        return False

    def recompute_layers(self) -> None:
        """Activation checkpointing: keep only the input of each layer and recompute the rest in the backward
        pass. It needs less memory and about a third more time; the gradients are the same."""
        return None

    @property
    def sharded_layers(self) -> Sequence[nn.Module]:
        """The parts that FSDP gathers one at a time, in order. It gathers everything else as one unit."""
        return ()

    @property
    def idle_parameters(self) -> int:
        """How many parameters take part in no matrix product, such as embeddings that are looked up."""
        return 0

    # --- what learns ---

    def learn_beside(self) -> None:
        """Freeze everything except the parts that learn next to frozen weights."""
        raise ValueError(f"a network of kind {self.config.kind} has no additions to train on frozen weights")

    def merged(self) -> "Network":
        """The same network with its additions folded into the weights, if they apply at every position. The
        result computes the same and is as fast as a network without additions. A network without additions of
        this kind returns itself."""
        return self

    # --- first weights ---

    def start_as(self, initialisation: str) -> None:
        """Draw the first weights in one of the ways that `config.initialisations` lists."""
        if initialisation not in self.config.initialisations[:1]:
            raise NotImplementedError(f"{type(self).__qualname__} lacks the initialisation {initialisation}")

    @property
    def may_lack(self) -> frozenset[str]:
        """Parameters that a checkpoint may lack. `fill_in` makes them from the others."""
        return frozenset()

    def fill_in(self, names: Collection[str]) -> None:
        """Set some parameters of `may_lack`, after all others are set."""
        return None
