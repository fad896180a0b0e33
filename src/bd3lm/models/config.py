"""The shape of our decoder, as a list of fields that cover GPT-like, Llama-type and Qwen-type networks."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bd3lm.models.network import CacheShape, NetworkConfig
from bd3lm.models.rotary import Llama3Scaling, RotaryScaling
from bd3lm.parsing import raise_problems

if TYPE_CHECKING:
    from bd3lm.models.transformer import Transformer

# Limits far above any real network. A mistyped recipe or a hostile config.json is refused before anything is
# computed from it, and no product of these sizes overflows.
_MOST = {
    "vocab_size": 2**26,
    "layers": 10_000,
    "hidden": 2**20,
    "heads": 2**20,
    "kv_heads": 2**20,
    "head_dim": 2**20,
    "mlp_width": 2**24,
    "context": 2**24,
    "conditioning_dim": 2**20,
}


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp_width: int, **more: Any
) -> Mapping[str, Any]:
    """One size of the Llama type: RMS norms, SwiGLU, no biases, tied embeddings."""
    fields = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "mlp_width": mlp_width,
        "mlp": "swiglu",
        "mlp_bias": False,
        "head_bias": False,
        "norm": "rms",
        "tied": True,
    }
    return MappingProxyType(fields | more)


def _qwen3(layers: int, hidden: int, heads: int, mlp_width: int, **more: Any) -> Mapping[str, Any]:
    """One size of the Qwen3 type: like Llama, with 8 key/value heads and norms on queries and keys."""
    fields: dict[str, Any] = {"head_dim": 128, "qk_norm": True, "norm_eps": 1e-6, "rotary_base": 1_000_000.0}
    return _llama(layers, hidden, heads, 8, mlp_width, **fields, **more)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(NetworkConfig):
    """The shape of a decoder. The defaults are the paper's small model.

    With `mask_vector` the network reads one more token id than its vocabulary has.
    """

    kind = "transformer"
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "tiny": MappingProxyType({"layers": 8, "hidden": 256, "heads": 8}),
            "small": MappingProxyType({"layers": 12, "hidden": 768, "heads": 12}),  # the paper's 110M
            "medium": MappingProxyType({"layers": 24, "hidden": 1024, "heads": 16}),
            "smollm2-135m": _llama(30, 576, 9, 3, 1536, rotary_base=100_000.0),
            "llama3.2-1b": _llama(
                16,
                2048,
                32,
                8,
                8192,
                rotary_base=500_000.0,
                rotary_scaling=Llama3Scaling(factor=32.0, original_context=8192),
            ),
            "qwen3-0.6b": _qwen3(28, 1024, 16, 3072),
            "qwen3-1.7b": _qwen3(28, 2048, 16, 6144),
            "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
        }
    )
    default_size = "small"
    may_differ = frozenset({"dropout", "additions", "additions_at"})
    unsaid = frozenset({"additions_at"})
    initialisations = ("gpt2", "identity")

    layers: int = 12
    hidden: int = 768
    """Width of the residual stream."""
    heads: int = 12
    """Number of query heads."""
    kv_heads: int = 0
    """Number of key/value heads. Each serves an equal group of query heads; 0 means as many as `heads`."""
    head_dim: int = 0
    """Width of a head; 0 means hidden / heads."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """The MLP's activation: GELU in its tanh form, or SwiGLU."""
    mlp_width: int = 0
    """Width of the MLP between its projections; 0 means 4 · hidden."""
    norm: Literal["layer", "rms"] = "layer"
    """LayerNorm (without biases) or RMSNorm."""
    norm_eps: float = 1e-5
    qk_norm: bool = False
    """Apply an RMS norm to the queries and keys of each head, as Qwen3 does."""
    qkv_bias: bool = False
    """Give the projection to queries, keys and values a bias."""
    attention_bias: bool = False
    """Give the output projection of attention a bias."""
    mlp_bias: bool = True
    head_bias: bool = True
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    """How the rotary angles are slowed down for a longer context; None leaves them as they are."""
    dropout: float = 0.1
    tied: bool = False
    """Share the embedding with the output head."""
    mask_vector: bool = False
    """Read one more token id, after the vocabulary: a mask with its own vector. The head cannot predict it,
    so the predictions of an autoregressive checkpoint stay the same."""
    additions: int = 0
    """Rank of the low-rank additions (as in LoRA) to all linear layers; 0 means none."""
    additions_at: Literal["masks", "all"] = "masks"
    """Where the additions apply. "masks": at the mask positions that the layout of a pass names, which leaves
    the distribution of the text unchanged. "all": at every position of every pass, as in LoRA."""
    adaln: bool = False
    """Use adaptive layer norms. Without `time_conditioning` they see a constant, as in the published
    weights."""
    time_conditioning: bool = False
    """Feed the noise level to the adaptive layer norms."""
    conditioning_dim: int = 128
    """Width of the conditioning vector of the adaptive norms."""

    def __post_init__(self) -> None:
        defaults = {
            "kv_heads": self.heads,
            "head_dim": self.hidden // max(self.heads, 1),
            "mlp_width": 4 * self.hidden,
        }
        if self.head_dim == 0 and self.heads >= 1 and self.hidden % self.heads:
            raise ValueError(
                "hidden must be a multiple of heads where head_dim is not given, got hidden "
                f"{self.hidden} and heads {self.heads}"
            )
        for name, value in defaults.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        raise_problems(self._problems())

    def _problems(self) -> Iterator[str]:
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                bound = "at least 1" if getattr(self, name) < 1 else f"at most {most:,}"
                yield f"{name} must be {bound}, got {getattr(self, name)}"
                return  # the checks below divide by these
        if not 0 <= self.additions <= self.hidden:
            yield f"additions must be a rank up to hidden {self.hidden}, or 0 for none, got {self.additions}"
        if self.additions_at not in ("masks", "all"):
            yield f"additions_at must be 'masks' or 'all', got {self.additions_at!r}"
        elif self.additions_at == "all" and not self.additions:
            yield "additions_at must be 'masks' where there are no additions, got 'all' and additions 0"
        if self.head_dim % 2:
            yield f"head_dim must be even (rotary positions rotate pairs), got {self.head_dim}"
        if self.heads % self.kv_heads:
            yield f"heads must be a multiple of kv_heads, got heads {self.heads} and kv_heads {self.kv_heads}"
        if not 0.0 < self.rotary_base < math.inf:
            yield f"rotary_base must be positive and finite, got {self.rotary_base}"
        if not 0.0 < self.norm_eps < 1.0:
            yield f"norm_eps must lie in (0, 1), got {self.norm_eps}"
        if not 0.0 <= self.dropout < 1.0:
            yield f"dropout must lie in [0, 1), got {self.dropout}"
        if self.time_conditioning and not self.adaln:
            yield "time_conditioning needs adaln=True: the noise level enters through the adaptive norms"

    def build(self) -> "Transformer":
        from bd3lm.models.transformer import Transformer

        return Transformer(self)

    @property
    def told_noise(self) -> bool:
        return self.time_conditioning

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.layers, self.kv_heads, self.head_dim)

    def with_mask_apart(self) -> "TransformerConfig":
        return replace(self, mask_vector=True)

    @property
    def depth(self) -> int:
        return self.layers

    @property
    def summary(self) -> str:
        return f"{self.layers} x {self.hidden}"

    @property
    def input_vocab_size(self) -> int:
        return self.vocab_size + self.mask_vector

    @property
    def learns_beside(self) -> bool:
        return self.additions > 0

    @property
    def adds_everywhere(self) -> bool:
        return self.additions > 0 and self.additions_at == "all"

    @property
    def merged(self) -> "TransformerConfig":
        return replace(self, additions=0, additions_at="masks") if self.adds_everywhere else self

    @property
    def groups(self) -> int:
        """How many query heads share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def mlp_in_width(self) -> int:
        """Output width of the MLP's first projection, which is twice as wide for SwiGLU."""
        return self.mlp_width * (2 if self.mlp == "swiglu" else 1)

    @property
    def parameters(self) -> int:
        """The number of weights, without vectors (biases, norms) and without the noise embedding."""
        inside = (self.qkv_width, self.attention_width, self.mlp_in_width, self.mlp_width)
        layer = sum(inside) * self.hidden
        # Additions read the stream for queries, keys, values and each input of the MLP,
        reads = (5 if self.mlp == "swiglu" else 4) + 2  # and two of them write to it
        layer += self.additions * (reads * self.hidden + sum(inside))
        modulations = (6 * self.layers + 2) * self.hidden * self.conditioning_dim if self.adaln else 0
        return self.layers * layer + modulations + (1 if self.tied else 2) * self.vocab_size * self.hidden
