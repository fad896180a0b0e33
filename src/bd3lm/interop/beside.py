"""Additions trained on a model with frozen weights, in PEFT's layout, with that base model's name and hash.

`adapter_config.json` and `adapter_model.safetensors` are as PEFT writes low-rank additions; the mask's vector
is among the tensors. Our config.json says which base they belong to and where they apply: a drafter's
additions only at masks, those of tuning at every position. PEFT itself would apply both at every position.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bd3lm.interop.weights import (
    Shape,
    build,
    check_shapes,
    make_folder,
    parameter_shapes,
    read_shapes,
    read_tensors,
    write_tensors,
)
from bd3lm.io.files import local_path, write_atomically
from bd3lm.io.tensors import Later
from bd3lm.methods import Base, LanguageModelConfig
from bd3lm.models import Network, TransformerConfig

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

Loader = Callable[[str | Path], tuple[Path, Network, LanguageModelConfig]]
"""Loads a source: returns its path, and the model there."""

Piece = tuple[str, int, Shape]
"""A PEFT tensor: its name, its first row in our parameter, and its shape."""

_PREFIX = "base_model.model."
_MASK = "mask_vector"


def digest(path: Path) -> str:
    """sha256 of a model's weights, in one file or in a folder with one or more files."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} must hold weights (.safetensors), got none")
    found = []
    for file in files:
        with file.open("rb") as opened:
            found.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def save(tensors: Mapping[str, Tensor | Later], config: LanguageModelConfig, folder: str | Path) -> None:
    """Write the tensors that the network learned next to its base; `tensors` may hold others too, by our
    names."""
    base = config.base
    if base is None:
        raise ValueError(f"a model of method {config.method.kind} must name its base model to be saved")
    layout, rank = _layout(config), _shape(config).additions
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.source,
        "r": rank,
        "lora_alpha": rank,  # so that PEFT multiplies by 1
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(_modules(config)),
    }
    written: dict[str, Tensor] = {}
    for name, pieces in layout.items():  # few numbers compared with the weights
        whole = Later.of(tensors[name]).fetch().detach()
        written |= {theirs: whole[begin : begin + shape[0]].clone() for theirs, begin, shape in pieces}
    path = make_folder(folder)
    write_tensors(path / ADAPTER_WEIGHTS, written)
    write_atomically(path / ADAPTER_CONFIG, (json.dumps(said, indent=2) + "\n").encode())


def load(
    folder: Path,
    config: LanguageModelConfig,
    load_base: Loader | None,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> Network:
    """Load the network of a folder that `save` wrote: the weights of its base, plus these tensors."""
    layout, path = check_files(folder, config)
    where, base = open_base(folder, config, load_base)
    frozen = {name: parameter.detach() for name, parameter in base.named_parameters() if name not in layout}
    check_base({name: tuple(tensor.shape) for name, tensor in frozen.items()}, folder, config, where)
    expected = [theirs for pieces in layout.values() for theirs, _, _ in pieces]
    read = read_tensors(path, expected)
    stored = next(iter(frozen.values())).dtype
    beside = {
        name: torch.cat([read[theirs] for theirs, _, _ in pieces]).to(stored)
        for name, pieces in layout.items()
    }
    state = {name: (frozen | beside)[name] for name in parameter_shapes(config.network)}
    return build(config.network, state, device=device, dtype=dtype, where=str(folder))


def check_files(folder: Path, config: LanguageModelConfig) -> tuple[dict[str, list[Piece]], Path]:
    """The layout of a folder that `save` wrote, and its file. Raises a ValueError if they do not match."""
    if config.base is None:
        raise ValueError(f"config.json in {folder} must name the base of its {ADAPTER_WEIGHTS}, got none")
    layout, path = _layout(config), folder / ADAPTER_WEIGHTS
    expected = {theirs: shape for pieces in layout.values() for theirs, _, shape in pieces}
    check_shapes(read_shapes(path), expected, where=str(path))
    return layout, path


def open_base(
    folder: Path, config: LanguageModelConfig, load_base: "Callable[[str | Path], tuple[Any, ...]] | None"
) -> tuple[Path, Any]:
    """The path of a model's base, and the result of `load_base` for it. Its weights must be those that the
    additions were trained with."""
    if load_base is None or config.base is None:
        source = None if config.base is None else config.base.source
        raise ValueError(
            f"{folder} cannot be the base of another model, because it has only additions to the "
            f"weights of {source}"
        )
    where, base, *_ = load_base(_near(config.base.source, folder))
    found = digest(where)
    if found != config.base.sha256:
        raise ValueError(
            f"{folder} was trained with other weights than those in {where}: the sha256 must be "
            f"{config.base.sha256[:12]}…, got {found[:12]}…"
        )
    return where, base


def check_base(found: Mapping[str, Shape], folder: Path, config: LanguageModelConfig, where: Path) -> None:
    """Refuse a base with a shape other than that of the model that adds to it."""
    own = parameter_names(config)
    check_shapes(
        {name: shape for name, shape in found.items() if name not in own},
        {name: shape for name, shape in parameter_shapes(config.network).items() if name not in own},
        where=f"{where}, the base of {folder}",
    )


def parameter_names(config: LanguageModelConfig) -> frozenset[str]:
    """The parameters of a network that are saved apart from its base's weights."""
    return frozenset(_layout(config))


def base_of(source: str, path: Path, config: LanguageModelConfig) -> Base:
    """The base of a model that starts from this one: this model itself, or its own base if it has one."""
    return config.base or Base(source=source, sha256=digest(path))


def _near(source: str, folder: Path) -> str | Path:
    """A base by its path from the working folder or, if there is nothing, from the folder of the model that
    adds to it."""
    beside = folder / source
    return beside if not local_path(source).exists() and beside.exists() else source


def _shape(config: LanguageModelConfig) -> TransformerConfig:
    if not isinstance(config.network, TransformerConfig):
        raise ValueError(f"a network of kind {config.network.kind} has no additions that fit PEFT's layout")
    return config.network


def _modules(config: LanguageModelConfig) -> set[str]:
    """The last parts of the names of the layers with additions."""
    names = (theirs for pieces in _layout(config).values() for theirs, _, _ in pieces)
    return {name.split(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}


def _layout(config: LanguageModelConfig) -> dict[str, list[Piece]]:
    """For each parameter apart from the base's weights, its PEFT tensors. Each is some of its rows: name,
    first row and shape."""
    network = _shape(config)
    rank, kv_width = network.additions, network.kv_heads * network.head_dim
    mlp = ("gate_proj", "up_proj") if network.mlp == "swiglu" else ("up_proj",)
    linears = {
        "qkv": (
            "self_attn",
            {"q_proj": network.attention_width, "k_proj": kv_width, "v_proj": kv_width},
            network.hidden,
        ),
        "attention_out": ("self_attn", {"o_proj": network.hidden}, network.attention_width),
        "mlp_in": ("mlp", dict.fromkeys(mlp, network.mlp_width), network.hidden),
        "mlp_out": ("mlp", {"down_proj": network.hidden}, network.mlp_width),
    }
    found: dict[str, list[Piece]] = {}
    if network.mask_vector:
        found[_MASK] = [(f"{_PREFIX}{_MASK}", 0, (network.hidden,))]
    for index in range(network.layers):
        for linear, (group, parts, width) in linears.items():
            ours, theirs = f"layers.{index}.additions.{linear}", f"{_PREFIX}model.layers.{index}.{group}"
            found[f"{ours}.down"] = [
                (f"{theirs}.{part}.lora_A.weight", place * rank, (rank, width))
                for place, part in enumerate(parts)
            ]
            ends = list(accumulate(parts.values()))
            found[f"{ours}.up"] = [
                (f"{theirs}.{part}.lora_B.weight", end - rows, (rows, rank))
                for (part, rows), end in zip(parts.items(), ends, strict=True)
            ]
    return found
