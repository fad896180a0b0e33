"""What the house asks of a network and of its config; a network of one's own is a member of both.

A config is plain values: it is saved beside the weights, it builds the network, and a recipe has its fields.
What a network does not say has a plain default, which is slower or left out, and computes the same.
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
    """What a network hands to a store of keys and values."""

    layers: int
    heads: int
    """Of keys and values."""
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class NetworkConfig(Kinded, ABC, family="network"):
    """The shape of a network: a frozen dataclass with a `kind` of its own, a field for all that can be
    chosen, and `build`."""

    vocab_size: int
    """Tokens that it can predict."""
    context: int = 1024
    """Positions the network is trained on; a cache shows it at most this many."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """Values of some fields, by a name that recipes may give in their place."""
    default_size: ClassVar[str | None] = None
    """The size of a recipe that names none."""
    may_differ: ClassVar[frozenset[str]] = frozenset()
    """Fields that may be other than a checkpoint's in a network that starts from it."""
    initialisations: ClassVar[tuple[str, ...]] = ()
    """Ways to draw the first weights, the one of `build` first; see `Network.start_as`."""

    @abstractmethod
    def build(self) -> "Network":
        """A network of this shape, with fresh weights. It may be asked for on torch's device "meta", where
        weights have shapes and no values."""

    @property
    def input_vocab_size(self) -> int:
        """How many token ids it reads: one more where the mask is a vector of its own, which it cannot
        predict and whose id comes after the vocabulary."""
        return self.vocab_size

    @property
    def told_noise(self) -> bool:
        """Whether it is told the noise level."""
        return False

    @property
    def cache_shape(self) -> CacheShape | None:
        """What it hands to the store that `forward` is given. None: it ignores the store, and everything is
        computed afresh in each pass."""
        return None

    @property
    def learns_beside(self) -> bool:
        """Whether it has additions that learn while its weights stay as they are."""
        return False

    @property
    def adds_everywhere(self) -> bool:
        """Whether its additions apply at every position: then any method can train them, and `merged` puts
        them into the weights."""
        return False

    @property
    def merged(self) -> "NetworkConfig":
        """The config of `Network.merged`."""
        return self

    def with_mask_apart(self) -> "NetworkConfig":
        """The same network with a vector of its own for a mask whose id comes after its vocabulary."""
        raise ValueError(
            f"a network of kind {self.kind} has no vector for a mask beside its {self.vocab_size:,} tokens"
        )

    @property
    def depth(self) -> int:
        """How many layers it has, each with a tensor at least: a config that lies is refused before so many
        are built. 0 where it does not say."""
        return 0

    @property
    def parameters(self) -> int:
        """How many numbers the weights are, about."""
        with torch.device("meta"):
            return sum(each.numel() for each in self.build().parameters())

    @property
    def summary(self) -> str:
        """The shape in a few words."""
        return self.kind


class Network(nn.Module, ABC):
    """Token ids in, hidden states or logits out: what is trained, saved and loaded. It is a `Denoiser`."""

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

        `tokens` are ids (rows, positions), or what `embed` made of some, (rows, positions, width). A position
        may depend on those that `layout` allows, and on nothing else. `noise` is (rows,) or (rows,
        positions), for a network that `uses_noise`; `cache` is for one whose config has a `cache_shape`.
        """

    @abstractmethod
    def head(self, states: Tensor) -> Tensor:
        """Logits (..., vocabulary) of hidden states (..., width)."""

    def cross_entropy(
        self, states: Tensor, targets: Tensor, weights: Tensor, *, excluded: int
    ) -> tuple[Tensor, Tensor]:
        """Σ weight·(−log p(target)) over hidden states (n, width), and the terms without their gradients.

        p leaves out the `excluded` token, which may be none of those that can be predicted. All logits exist
        at once; a head that is one matrix has `weighted_cross_entropy`, which needs less memory.
        """
        check_targets(targets, self.vocab_size)
        logits = self.head(states)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        is_excluded = torch.arange(logits.shape[-1], device=logits.device) == excluded
        logits = logits.masked_fill(is_excluded, -torch.inf)
        nats = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        # A position that weighs nothing may have an impossible target, and 0·∞ is no number.
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
        """What drafts lose against the distributions of `verifying` states, both (n, width). All logits exist
        at once; a head that is one matrix has `weighted_draft_loss`."""
        check_targets(targets, self.vocab_size)
        return plain_draft_loss(
            self.head(states), self.head(verifying), targets, weights, aim=aim, excluded=excluded
        )

    # --- what it is ---

    @property
    def uses_noise(self) -> bool:
        """Whether the output depends on the noise level given."""
        return self.config.told_noise

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(self.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """How many tokens it can predict."""
        return self.config.vocab_size

    # --- keys and values kept between passes ---

    @property
    def cache_shape(self) -> CacheShape | None:
        """What it hands to a store; None where it keeps nothing."""
        return self.config.cache_shape

    def new_cache(self, rows: int, *, segment: int, window: int | None = None) -> KVCache:
        """A cache for passes of up to `segment` tokens that shows the last `window` positions of the text.

        The default window leaves room for the segment inside the trained context.
        """
        shape, context = self.cache_shape, self.config.context
        if shape is None:
            raise ValueError(
                f"a network of kind {self.config.kind} keeps no keys and values: without a cache all of the "
                "text is read in each pass (cache=False)"
            )
        if window is None and segment >= context:
            raise ValueError(
                f"segment must be below the context {context}, to leave room for the text before it, got "
                f"{segment}; give a window to go past the context"
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
        """Refuse a pass whose activations cannot be held."""
        return None

    @property
    def recordable(self) -> bool:
        """Whether its passes may be recorded as CUDA graphs: they never wait for the device, and read weights
        and caches in place."""
        return False

    @property
    def graph_key(self) -> object:
        """What recorded passes depend on but for the rows they are over: as long as it stays equal, they are
        kept from one batch of texts to the next. None keeps none."""
        return None

    @property
    def can_compile(self) -> bool:
        """Whether the two methods below do anything."""
        return False

    def compile_layers(self) -> None:
        """Compile each of `sharded_layers` in place, which keeps the names of the parameters."""
        return None

    def compile_trunk(self) -> None:
        """Compile all of `forward` that can be."""
        return None

    @property
    def can_recompute(self) -> bool:
        """Whether the method below does anything."""
        return False

    def recompute_layers(self) -> None:
        """Keep for the backward pass what goes into each layer, and compute the rest of it again there: less
        memory, about a third more time, the same gradients."""
        return None

    @property
    def sharded_layers(self) -> Sequence[nn.Module]:
        """The parts that FSDP gathers one at a time, in their order; what is left is gathered as one."""
        return ()

    @property
    def idle_parameters(self) -> int:
        """How many parameters a token meets in no product, such as embeddings that are looked up."""
        return 0

    # --- what learns ---

    def learn_beside(self) -> None:
        """Freeze all but what the network has beside its weights."""
        raise ValueError(f"a network of kind {self.config.kind} has no additions that could learn alone")

    def merged(self) -> "Network":
        """The same network with additions that apply everywhere put into its weights: one that only has
        weights, which computes the same and is as fast as any. A network without such additions is itself."""
        return self

    # --- first weights ---

    def start_as(self, initialisation: str) -> None:
        """Draw the first weights in one of the ways of `config.initialisations`."""
        if initialisation not in self.config.initialisations[:1]:
            raise NotImplementedError(f"{type(self).__qualname__} lacks the initialisation {initialisation}")

    @property
    def may_lack(self) -> frozenset[str]:
        """Parameters that weights to start from may lack; `fill_in` makes them of the others."""
        return frozenset()

    def fill_in(self, names: Collection[str]) -> None:
        """Set some of `may_lack`, all other parameters being set."""
        return None
