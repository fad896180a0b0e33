"""A tiny random GPT-2 that reads bytes, in a folder, as transformers saves it."""

from pathlib import Path
from typing import Any

import torch

from bd3lm.data import byte_tokenizer

CONTEXT = 32


def save_judge(folder: Path, *, tokenizer: bool = True, **config: Any) -> Path:
    """A judge of bytes with large weights, so that its probabilities are far from uniform."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": CONTEXT, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=byte_tokenizer().vocab_size, **{**sizes, **config}))
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save(folder)
    return folder
