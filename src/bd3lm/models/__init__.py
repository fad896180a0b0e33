"""Networks: token ids in, hidden states or logits out; nothing here knows of diffusion."""

from bd3lm.models.attention import AttentionMask, Backend, attend
from bd3lm.models.cache import KVCache, KVReplay, KVStore, KVTape
from bd3lm.models.layouts import Bidirectional, BlockCausal, BlockDiffusion, Causal, Layout
from bd3lm.models.protocol import Denoiser
from bd3lm.models.transformer import Transformer, TransformerConfig

__all__ = [
    "AttentionMask",
    "Backend",
    "Bidirectional",
    "BlockCausal",
    "BlockDiffusion",
    "Causal",
    "Denoiser",
    "KVCache",
    "KVReplay",
    "KVStore",
    "KVTape",
    "Layout",
    "Transformer",
    "TransformerConfig",
    "attend",
]
