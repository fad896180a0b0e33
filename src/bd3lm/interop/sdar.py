"""Block diffusion models in SDAR's layout, which SGLang, LMDeploy and JetEngine load, in both directions.

The layout is Qwen3's, with a block size and the mask's id. The mask is a row of the embedding. Engines expect
the head to have the same number of rows, so the mask also has a column in the logits. bd3lm never predicts
the mask, whatever its column says, but engines do not exclude it. So we write the head's row of the mask as
the mean of all other rows: its logit is then the mean of the others, which is never the highest, and its
probability is at most 1 / vocabulary.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bd3lm.data import Tokenizer
from bd3lm.data.checkpoints import SDAR_MASK, SDAR_TYPE
from bd3lm.interop.families import MASK_VECTOR, QWEN3, config_of, misfits, network_of, pieces
from bd3lm.interop.huggingface import check_written, read_weights
from bd3lm.interop.remote_code import code_of
from bd3lm.interop.sources import CONFIG_NAME, WEIGHTS_NAME, read_config
from bd3lm.interop.weights import check_config, make_folder, write_tensors
from bd3lm.io.files import write_atomically
from bd3lm.methods import BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import Network, TransformerConfig
from bd3lm.parsing import shown

SDAR = replace(QWEN3, model_type=SDAR_TYPE, architecture="SDARForCausalLM")
QWEN_MASK, QWEN_BLOCK = SDAR_MASK, 4
"""The mask id that SGLang and LMDeploy use whatever config.json says, and their default block size."""

CONFIGURATION = "configuration_sdar"
_EMBEDDING, _HEAD = "embedding.weight", "output.weight"
_MEAN_ROWS = 8192  # of a head at a time, in double precision


@dataclass(frozen=True)
class Fit:
    """A model in SDAR's layout."""

    network: TransformerConfig
    """Its network, with the mask in the vocabulary."""
    block_size: int
    mask_id: int

    @property
    def note(self) -> str | None:
        """A warning for users whose mask is not the one that engines use."""
        if self.mask_id == QWEN_MASK:
            return None
        return (
            f"the mask of this model is {self.mask_id}, but SGLang and LMDeploy always use {QWEN_MASK}, "
            "whatever config.json says, so their output would be wrong: use an engine with a setting for it, "
            f"such as JetEngine (mask_token_id={self.mask_id})"
        )


def fit(config: LanguageModelConfig, tokenizer: Tokenizer | None = None) -> Fit:
    """How to write a model in SDAR's layout. The error lists everything that does not fit."""
    reading, network = config.method.unmasking(config.frame), config.network
    if reading is None:
        raise ValueError(f"method.kind must be block_diffusion for SDAR's layout, got {config.method.kind}")
    if not isinstance(network, TransformerConfig):
        raise ValueError(f"network.kind must be transformer for SDAR's layout, got {network.kind!r}")
    wrong = []
    if reading.causal_clean:
        wrong.append("method.causal_clean must be false (engines cache finished blocks block-causally)")
    if reading.previous_token:
        wrong.append("method.previous_token must be false (engines embed a mask as the mask alone)")
    if config.method.order_lean:
        wrong.append(
            "method.lean must be 0 (engines reveal the likeliest tokens first; "
            f"with_lean(0) is the same network), got {config.method.order_lean:g}"
        )
    if reading.block_size == network.context:
        wrong.append(f"method.block_size must be below the context {network.context}, got a single block")
    # Not `attention_bias`: Qwen3 has it, but engines do not agree on it.
    biases = [name for name in ("qkv_bias", "attention_bias") if getattr(network, name)]
    wrong += [f"network.{name} must be false, got true" for name in biases]
    wrong += [f"network.{each}" for each in misfits(SDAR, network) if "attention_bias" not in each]
    if wrong:
        raise ValueError(f"SDAR's layout cannot hold this model: {'; '.join(wrong)}")
    mask_id = config.mask_id
    if mask_id == network.vocab_size:  # an extra vector after the vocabulary
        own = network.vocab_size if tokenizer is None else tokenizer.own_ids
        mask_id = _free_row(network.vocab_size, own)
    vocabulary = max(network.vocab_size, mask_id + 1)
    # Untied: otherwise the mask's column would be its own vector. And SGLang does not load tied weights.
    written = replace(network, vocab_size=vocabulary, tied=False, mask_vector=False, dropout=0.0)
    return Fit(written, reading.block_size, mask_id)


def _free_row(vocabulary: int, own: int) -> int:
    """The embedding row for a mask that has none: the row that engines use, if no token has it."""
    if own <= QWEN_MASK < vocabulary:
        return QWEN_MASK
    return min(own, vocabulary)


def to_sdar_config(fitted: Fit, *, eos_id: int | None = None, bos_id: int | None = None) -> dict[str, Any]:
    """The config.json of a model that fits."""
    return {
        **config_of(SDAR, fitted.network),
        # Engines do not load a config of a type unknown to transformers without its class.
        "auto_map": {"AutoConfig": f"{CONFIGURATION}.SDARConfig"},
        "block_size": fitted.block_size,
        "mask_token_id": fitted.mask_id,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": fitted.network.layers,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
    }


def save(
    network: Network,
    config: LanguageModelConfig,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
) -> Fit:
    """Write a model in SDAR's layout."""
    check_config(network, config)
    fitted = fit(config, tokenizer)
    ids = {} if tokenizer is None else {"eos_id": tokenizer.eos_id, "bos_id": tokenizer.bos_id}
    data = to_sdar_config(fitted, **ids)
    data["torch_dtype"] = str(network.dtype).removeprefix("torch.")
    code = code_of(CONFIGURATION)
    state = to_sdar_state(network, config, fitted)
    path = make_folder(folder)
    write_tensors(path / WEIGHTS_NAME, state)
    write_atomically(path / f"{CONFIGURATION}.py", code.encode())
    if tokenizer is not None:
        begun = tokenizer if config.method.score_first else tokenizer.with_begin()
        begun.with_mask(fitted.mask_id).save(path)
    write_atomically(path / CONFIG_NAME, (json.dumps(data, indent=2) + "\n").encode())
    return fitted


def to_sdar_state(network: Network, config: LanguageModelConfig, fitted: Fit) -> dict[str, Tensor]:
    """A network's weights by Qwen3's names, with rows for the mask."""
    ours = {name: parameter.detach() for name, parameter in network.named_parameters()}
    mask = fitted.mask_id
    embedding = _with_rows(ours[_EMBEDDING], fitted.network.vocab_size)
    if config.mask_id == config.network.vocab_size:
        embedding[mask] = ours[MASK_VECTOR]
    head = _with_rows(ours.get(_HEAD, ours[_EMBEDDING]), fitted.network.vocab_size)  # the same matrix if tied
    head[mask] = _mean_without(head, mask)
    ours |= {_EMBEDDING: embedding, _HEAD: head}
    return {piece.name: ours[piece.ours][piece.start : piece.stop] for piece in pieces(fitted.network)}


def _with_rows(weight: Tensor, rows: int) -> Tensor:
    """A copy, with rows of zeros appended if it has fewer rows."""
    copy = weight.new_zeros(rows, weight.shape[1])
    copy[: weight.shape[0]] = weight
    return copy


def _mean_without(weight: Tensor, row: int) -> Tensor:
    """The mean of all rows except one."""
    total = -weight[row].double()
    for part in weight.split(_MEAN_ROWS):
        total = total + part.double().sum(0)
    return (total / max(weight.shape[0] - 1, 1)).to(weight.dtype)


# --- Loading ---


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether this config.json is SDAR's."""
    return "format" not in data and data.get("model_type") == SDAR.model_type


def load(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Network, LanguageModelConfig]:
    """Load a block diffusion model in SDAR's layout; no code in its folder is run."""
    shape, config = from_sdar_config(read_config(folder), where=str(folder / CONFIG_NAME))
    return read_weights(folder, shape, device=device, dtype=dtype), config


def read(folder: Path) -> LanguageModelConfig:
    """The config that `load` returns next to the network."""
    return from_sdar_config(read_config(folder), where=str(folder / CONFIG_NAME))[1]


def from_sdar_config(data: Mapping[str, Any], *, where: str) -> tuple[TransformerConfig, LanguageModelConfig]:
    """Our configs for theirs. Released models may give neither block size nor mask; then the engines'
    apply."""
    check_written(SDAR, data, where=where)
    shape = replace(network_of(SDAR, data, where=where), mask_vector=False)
    for name in ("block_size", "mask_token_id"):
        value = data.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"{name} in {where} must be a whole number, got {shown(value)}")
    block_size, mask_id = data.get("block_size"), data.get("mask_token_id")
    if block_size is None:
        block_size = QWEN_BLOCK
        warnings.warn(
            f"{where} has no block_size: using {QWEN_BLOCK}, as engines do. A model with larger blocks "
            "(-b16, -b32, -b64) needs block_size there",
            stacklevel=2,
        )
    try:
        return shape, LanguageModelConfig(
            network=shape,
            method=BlockDiffusionMethod(block_size=block_size),
            mask_id=QWEN_MASK if mask_id is None else mask_id,
        )
    except ValueError as error:
        raise ValueError(f"{where} must describe a possible model: {error}") from error
