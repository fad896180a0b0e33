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
    """Save a model; the config is written last, so that a new folder with a config is a whole one."""
    check_config(network, config)
    save_tensors(dict(network.named_parameters()), config, folder)  # a tied matrix comes once


def save_tensors(
    tensors: Mapping[str, Tensor | Later], config: LanguageModelConfig, folder: str | Path
) -> None:
    """The same of its parameters by name; of a model that only adds to another, those that it adds."""
    adds = config.trains_beside
    needed = beside.parameter_names(config) if adds else None
    expected = parameter_shapes(config.network)
    check_shapes(
        {name: tuple(tensor.shape) for name, tensor in tensors.items() if needed is None or name in needed},
        {name: shape for name, shape in expected.items() if needed is None or name in needed},
        where=f"what is to be saved in {folder}",
    )
    data = describe(config)
    text = json.dumps(data, indent=2) + "\n"  # what cannot be said in JSON is known before a file is written
    path = make_folder(folder)
    if adds:
        beside.save(tensors, config, path)
    else:
        write_tensors(path / WEIGHTS_NAME, tensors)
    write_atomically(path / CONFIG_NAME, text.encode())


def describe(config: LanguageModelConfig) -> dict[str, Any]:
    """What config.json says of a model."""
    return {"format": FORMAT, "version": VERSION, **config_to_dict(config)}


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether this config.json is of our format."""
    return data.get("format") == FORMAT


def load(
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    load_base: beside.Loader | None = None,
    load_tuned: beside.Loader | None = None,
) -> tuple[Network, LanguageModelConfig]:
    """What `save` saved, on a device; without a dtype in the one it was saved in. `load_base` is for what
    only adds to another model, and `load_tuned` for what adds to it at every position, and is merged."""
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
    """Whether a folder has additions at every position and no other weights."""
    return _as_saved(folder).network.adds_everywhere


def _merged(config: LanguageModelConfig) -> LanguageModelConfig:
    """That of the model which additions at every position make of their base."""
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
            "upgrade"
        )
    values = {key: value for key, value in data.items() if key not in ("format", "version")}
    if "auto_map" in values:  # of a folder for transformers, which has words of its own there
        values = {key: value for key, value in values.items() if key in _OURS}
    return config_from_dict(values, where=where)
