"""Our own format: a folder with config.json (network, method, format and version) and model.safetensors."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bd3lm.interop import beside
from bd3lm.interop.sources import CONFIG_NAME, WEIGHTS_NAME, read_config, weights_file
from bd3lm.interop.weights import (
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
from bd3lm.io.tensors import Later
from bd3lm.methods import LanguageModelConfig, config_from_dict, config_to_dict
from bd3lm.models import Network
from bd3lm.parsing import shown

FORMAT, VERSION = "bd3lm", 1
_OURS = {field.name for field in fields(LanguageModelConfig)} | {"plugins"}


def save(network: Network, config: LanguageModelConfig, folder: str | Path) -> None:
    """Save a model. The config is written last, so a new folder with a config is complete."""
    check_config(network, config)
    save_tensors(dict(network.named_parameters()), config, folder)  # a tied matrix occurs once


def save_tensors(
    tensors: Mapping[str, Tensor | Later], config: LanguageModelConfig, folder: str | Path
) -> None:
    """Save a model from its parameters by name; for a model that only adds to another, the added ones."""
    adds = config.trains_beside
    needed = beside.parameter_names(config) if adds else None
    expected = parameter_shapes(config.network)
    check_shapes(
        {name: tuple(tensor.shape) for name, tensor in tensors.items() if needed is None or name in needed},
        {name: shape for name, shape in expected.items() if needed is None or name in needed},
        where=f"the model to save in {folder}",
    )
    data = describe(config)
    text = json.dumps(data, indent=2) + "\n"  # fails before any file is written
    path = make_folder(folder)
    if adds:
        beside.save(tensors, config, path)
    else:
        write_tensors(path / WEIGHTS_NAME, tensors)
    write_atomically(path / CONFIG_NAME, text.encode())


def describe(config: LanguageModelConfig) -> dict[str, Any]:
    """The contents of config.json for a model."""
    return {"format": FORMAT, "version": VERSION, **config_to_dict(config)}


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether this config.json is in our format."""
    return data.get("format") == FORMAT


def load(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    load_base: beside.Loader | None = None,
    load_tuned: beside.Loader | None = None,
) -> tuple[Network, LanguageModelConfig]:
    """Load what `save` saved, on a device; by default in the dtype it was saved in. `load_base` loads the
    base of a model that only adds to another. `load_tuned` does so for additions at every position, which are
    merged."""
    config = _as_saved(folder)
    if config.method.trains_beside:
        return beside.load(folder, config, load_base, device=device, dtype=dtype), config
    if config.trains_beside:
        tuned = beside.load(folder, config, load_tuned, device=device, dtype=dtype)
        return tuned.merged(), _merged(config)
    path = weights_file(folder)
    found = read_shapes(path)
    check_layers(found, config.network, where=str(path))
    expected = parameter_shapes(config.network)
    check_shapes(found, expected, where=str(path))
    state = read_tensors(path, expected)
    return build(config.network, state, device=device, dtype=dtype, where=str(path)), config


def read(folder: Path) -> LanguageModelConfig:
    """The config of a model that `save` saved, as it is loaded."""
    return _merged(_as_saved(folder))


def is_tuned(folder: Path) -> bool:
    """Whether a folder holds additions at every position and no other weights."""
    return _as_saved(folder).network.adds_everywhere


def _merged(config: LanguageModelConfig) -> LanguageModelConfig:
    """The config after merging additions at every position into their base."""
    if not config.network.adds_everywhere:
        return config
    return replace(config, network=config.network.merged, base=None)


def _as_saved(folder: Path) -> LanguageModelConfig:
    data, where = read_config(folder), str(folder / CONFIG_NAME)
    if not recognises(data):
        raise ValueError(f"format in {where} must be {FORMAT!r}, got {shown(data.get('format'))}")
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(
            f"version in {where} must be a whole number from 1 to {VERSION}, got {shown(version)}"
        )
    if version > VERSION:
        raise ValueError(
            f"version in {where} must be at most {VERSION}, got {shown(version)}: a newer bd3lm wrote it; "
            "upgrade bd3lm"
        )
    values = {key: value for key, value in data.items() if key not in ("format", "version")}
    if "auto_map" in values:  # a folder for transformers has extra entries there
        values = {key: value for key, value in values.items() if key in _OURS}
    return config_from_dict(values, where=where)
