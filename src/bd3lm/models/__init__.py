"""Networks: token ids in, hidden states or logits out. Nothing here knows about diffusion."""

from bd3lm.models.attention import AttentionMask, Backend, attend, render
from bd3lm.models.cache import KVCache, KVReplay, KVStore, KVTape, NoStore
from bd3lm.models.config import TransformerConfig
from bd3lm.models.cross_entropy import check_targets, weighted_cross_entropy
from bd3lm.models.devices import pick_device, runs_kernels, send
from bd3lm.models.draft_loss import AIMS, Aim, DraftLoss
from bd3lm.models.layouts import (
    Bidirectional,
    BlockCausal,
    BlockCopies,
    BlockDecoding,
    BlockDiffusion,
    Causal,
    Drafting,
    Layout,
)
from bd3lm.models.network import CacheShape, Network, NetworkConfig
from bd3lm.models.packing import Packed, document_begins, packed
from bd3lm.models.protocol import Denoiser, embed_with_previous, require_evaluation_mode
from bd3lm.models.reading import BlockReading, DraftReading
from bd3lm.models.transformer import Transformer

__all__ = [
    "AIMS",
    "Aim",
    "AttentionMask",
    "Backend",
    "Bidirectional",
    "BlockCausal",
    "BlockCopies",
    "BlockDecoding",
    "BlockDiffusion",
    "BlockReading",
    "CacheShape",
    "Causal",
    "Denoiser",
    "DraftLoss",
    "DraftReading",
    "Drafting",
    "KVCache",
    "KVReplay",
    "KVStore",
    "KVTape",
    "Layout",
    "Network",
    "NetworkConfig",
    "NoStore",
    "Packed",
    "Transformer",
    "TransformerConfig",
    "attend",
    "check_targets",
    "document_begins",
    "embed_with_previous",
    "packed",
    "pick_device",
    "render",
    "require_evaluation_mode",
    "runs_kernels",
    "send",
    "weighted_cross_entropy",
]
