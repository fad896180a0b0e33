"""Tiny random checkpoints of every family, made by `transformers`, as the oracle for loading."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, CONTEXT = 50, 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# By name: the family, and how its config differs from `tiny`'s.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama, llama3 scaling": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear scaling": ("llama", {"rope_parameters": LINEAR, "rms_norm_eps": 1e-3}),
    "llama, wide heads": ("llama", {"head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3, biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
}


def tiny(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model of transformers with every parameter random, including norms and biases."""
    import transformers

    kind, special = CASES[name]
    config = transformers.AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **special,
            **changes,
        },
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
            parameter.add_(float(parameter.ndim == 1 and parameter.mean().abs() < 1))  # norms near 1
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def some_tokens(rows: int = 2, length: int = 40, *, seed: int = 1, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return Tensor(model(tokens).logits)
