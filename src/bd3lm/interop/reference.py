"""The layout of the reference implementation's published weights, in both directions: config.json and names.

A folder holds a config.json with the fields below and a model.safetensors. The last entry of the vocabulary
is the mask. The reference's network is ours under other names, so tensors are only renamed, never changed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bd3lm.interop.sources import CONFIG_NAME, WEIGHTS_NAME, read_config, weights_file
from bd3lm.interop.weights import (
    Shape,
    build,
    check_config,
    check_layers,
    check_shapes,
    make_folder,
    parameter_shapes,
    read_shapes,
    read_tensors,
    write_tensors,
)
from bd3lm.io.files import write_atomically
from bd3lm.methods import AutoregressiveMethod, BlockDiffusionMethod, LanguageModelConfig
from bd3lm.models import Network, Transformer, TransformerConfig
from bd3lm.parsing import parse

PREFIX = "backbone."
FREQUENCIES = f"{PREFIX}rotary_emb.inv_freq"
BUFFERS = (FREQUENCIES, "sampling_eps_min", "sampling_eps_max")  # stored with the weights

# What its config.json or its weights say about a network. Everything else has our defaults.
_TOLD = (
    "vocab_size",
    "layers",
    "hidden",
    "heads",
    "context",
    "dropout",
    "tied",
    "adaln",
    "time_conditioning",
    "conditioning_dim",
)

# Our names and the reference's, outside the layers and in each layer.
_MODULES = {
    "noise_embedding.first": "sigma_map.mlp.0",
    "noise_embedding.second": "sigma_map.mlp.2",
    "final_norm": "output_layer.norm_final",
    "final_modulation": "output_layer.adaLN_modulation",
    "output": "output_layer.linear",
}
_LAYER_MODULES = {
    "attention_norm": "norm1",
    "qkv": "attn_qkv",
    "attention_out": "attn_out",
    "mlp_norm": "norm2",
    "mlp_in": "mlp.0",
    "mlp_out": "mlp.2",
    "modulation": "adaLN_modulation",
}


def reference_name(name: str) -> str:
    """The reference's name for one of our parameters."""
    if name == "embedding.weight":
        return f"{PREFIX}vocab_embed.embedding"
    module, parameter = name.rsplit(".", 1)
    if module.startswith("layers."):
        _, index, module = module.split(".")
        return f"{PREFIX}blocks.{index}.{_LAYER_MODULES[module]}.{parameter}"
    return f"{PREFIX}{_MODULES[module]}.{parameter}"


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The relevant fields of the reference's config.json. MDLM's end with `time_conditioning`."""

    vocab_size: int
    model_length: int
    hidden_dim: int
    n_blocks: int
    n_heads: int
    cond_dim: int = 128
    dropout: float = 0.1
    time_conditioning: bool = False
    adaln: bool = True
    causal: bool = False
    block_size: int | None = None
    cross_attn: bool | None = None
    """Whether blocks see the clean text before them. If not, a text is one block, whatever block_size is."""

    def __post_init__(self) -> None:
        if self.cross_attn and not self.causal and self.block_size is None:
            raise ValueError("block_size must be given where cross_attn is true, but is missing")


def from_reference_config(data: Mapping[str, Any], *, where: str = CONFIG_NAME) -> LanguageModelConfig:
    """Our config for the reference's. Fields that say nothing about the network or the method are ignored."""
    names = [field.name for field in fields(ReferenceConfig)]
    theirs = parse(ReferenceConfig, {name: data[name] for name in names if name in data}, where=where)
    has_blocks = theirs.block_size is not None if theirs.cross_attn is None else theirs.cross_attn
    method: AutoregressiveMethod | BlockDiffusionMethod = AutoregressiveMethod()
    if not theirs.causal:
        method = BlockDiffusionMethod(block_size=theirs.block_size if has_blocks else None)
    try:
        return LanguageModelConfig(
            network=TransformerConfig(
                vocab_size=theirs.vocab_size,
                layers=theirs.n_blocks,
                hidden=theirs.hidden_dim,
                heads=theirs.n_heads,
                context=theirs.model_length,
                dropout=theirs.dropout,
                adaln=theirs.adaln,
                time_conditioning=theirs.time_conditioning and theirs.adaln,
                conditioning_dim=theirs.cond_dim,
            ),
            method=method,
            mask_id=theirs.vocab_size - 1,
        )
    except ValueError as error:
        raise ValueError(f"{where} must describe a possible network: {error}") from error


def to_reference_config(config: LanguageModelConfig) -> dict[str, Any]:
    """The reference's config.json for ours. What it cannot express is refused."""
    network = transformer_of(config)
    of_method = config.method.in_reference(network.context)
    needed: dict[str, tuple[object, object]] = {"mask_id": (config.mask_id, network.vocab_size - 1)}
    told = {field.name: getattr(network, field.name) for field in fields(network) if field.name in _TOLD}
    possible = TransformerConfig(**told)
    for field in fields(network):
        needed[f"network.{field.name}"] = (getattr(network, field.name), getattr(possible, field.name))
    for field in fields(config.method):
        if field.name in config.method.reference_lacks:
            needed[f"method.{field.name}"] = (getattr(config.method, field.name), field.default)
    wrong = [f"{name} must be {must}, got {got}" for name, (got, must) in needed.items() if got != must]
    if wrong:
        raise ValueError(f"the reference's layout cannot hold this model: {'; '.join(wrong)}")
    return {
        "model_type": "bd3lm",
        **of_method,
        "adaln": network.adaln,
        "attn_backend": "sdpa",
        "vocab_size": network.vocab_size,
        "model_length": network.context,
        "hidden_dim": network.hidden,
        "cond_dim": network.conditioning_dim,
        "n_blocks": network.layers,
        "n_heads": network.heads,
        "dropout": network.dropout,
        "time_conditioning": network.time_conditioning,
        "var_min": False,
    }


def to_reference_state(network: Transformer) -> dict[str, Tensor]:
    """A network's weights by the reference's names, with the rotary buffer it expects; tied weights occur
    twice."""
    state = {reference_name(name): parameter.detach() for name, parameter in network.named_parameters()}
    if network.config.tied:
        state[reference_name("output.weight")] = network.output.weight.detach().clone()
    state[FREQUENCIES] = frequencies(network.config)
    return state


def save(network: Network, config: LanguageModelConfig, folder: str | Path) -> None:
    """Save a model in the layout of the reference's published weights, for the reference's code to load."""
    check_config(network, config)
    text = json.dumps(to_reference_config(config), indent=2) + "\n"
    path = make_folder(folder)
    write_tensors(path / WEIGHTS_NAME, to_reference_state(cast("Transformer", network)))
    write_atomically(path / CONFIG_NAME, text.encode())


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether this config.json is one of the reference's."""
    return "format" not in data and {"hidden_dim", "n_blocks"} <= data.keys()


def load(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Network, LanguageModelConfig]:
    """Load a model in the layout of the reference's published weights."""
    config = from_reference_config(read_config(folder), where=str(folder / CONFIG_NAME))
    path = weights_file(folder)
    found = read_shapes(path)
    network = transformer_of(config)
    check_reference_shapes(found, network, where=str(path))
    state = read_tensors(path, found)
    return build_from_reference(network, state, device=device, dtype=dtype, where=str(path)), config


def transformer_of(config: LanguageModelConfig) -> TransformerConfig:
    """The config of a model's network, which must be our decoder."""
    if not isinstance(config.network, TransformerConfig):
        raise ValueError(
            f"network.kind must be transformer for the reference's layout, got {config.network.kind}"
        )
    return config.network


def check_reference_shapes(found: Mapping[str, Shape], network: TransformerConfig, *, where: str) -> None:
    """Refuse weights, by the reference's names, that do not match the config. Buffers may be absent."""
    check_layers(found, network, where=where)
    expected = {reference_name(name): shape for name, shape in parameter_shapes(network).items()}
    expected |= {FREQUENCIES: (network.head_dim // 2,)} if FREQUENCIES in found else {}
    known = {name: shape for name, shape in found.items() if name == FREQUENCIES or name not in BUFFERS}
    check_shapes(known, expected, where=where)


def build_from_reference(
    network: TransformerConfig,
    state: Mapping[str, Tensor],
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    where: str,
) -> Network:
    """A network from weights by the reference's names. Their shapes have been checked."""
    if FREQUENCIES in state:
        _check_frequencies(state[FREQUENCIES], network, where=where)
    ours = {name: state[reference_name(name)] for name in parameter_shapes(network)}
    return build(network, ours, device=device, dtype=dtype, where=where)


def frequencies(network: TransformerConfig) -> Tensor:
    """The rotary buffer that the reference stores: base^(−2i/head_dim) for i = 0..head_dim/2 − 1."""
    exponents = torch.arange(0, network.head_dim, 2).float() / network.head_dim
    return 1.0 / network.rotary_base**exponents


def _check_frequencies(stored: Tensor, network: TransformerConfig, *, where: str) -> None:
    tolerance = max(1e-5, 4 * torch.finfo(stored.dtype).eps) if stored.is_floating_point() else 0.0
    if not torch.allclose(stored.float(), frequencies(network), rtol=tolerance, atol=0.0):
        raise ValueError(
            f"{FREQUENCIES} in {where} must match rotary_base {network.rotary_base:g}, got {stored.tolist()}"
        )
