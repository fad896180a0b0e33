"""Models in files: our own format, the reference's, Hugging Face's, SDAR's and GGUF. No pickle is ever
trusted.

Finding a model does not need torch: modules that need torch load only when a model is loaded or saved.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from bd3lm.interop.sources import (
    CONFIG_NAME,
    GGUF_SUFFIX,
    LIGHTNING_SUFFIX,
    WEIGHTS_NAME,
    HubOptions,
    check_folder,
    check_source,
    hub_id,
    read_config,
    refuse_file,
    resolve,
)
from bd3lm.io.files import local_path
from bd3lm.io.places import BOX, BOX_FOLDER, RUN_MODEL

if TYPE_CHECKING:
    import torch

    from bd3lm.data import Tokenizer
    from bd3lm.interop.beside import base_of
    from bd3lm.interop.huggingface import save as save_huggingface
    from bd3lm.interop.lightning import LightningFacts
    from bd3lm.interop.native import save, save_tensors
    from bd3lm.interop.reference import save as save_reference
    from bd3lm.interop.remote_code import save as save_with_code
    from bd3lm.interop.rows import StoredWeights
    from bd3lm.interop.sdar import save as save_sdar
    from bd3lm.interop.weights import check_config, floating_dtype
    from bd3lm.methods import LanguageModelConfig
    from bd3lm.models import Network

__all__ = [
    "BOX",
    "BOX_FOLDER",
    "CONFIG_NAME",
    "RUN_MODEL",
    "WEIGHTS_NAME",
    "HubOptions",
    "LightningFacts",
    "StoredWeights",
    "base_of",
    "check_config",
    "check_folder",
    "check_source",
    "config_of",
    "floating_dtype",
    "hub_id",
    "load",
    "load_tokenizer",
    "open_rows",
    "resolve",
    "save",
    "save_huggingface",
    "save_reference",
    "save_sdar",
    "save_tensors",
    "save_with_code",
    "tokenizer_for",
]


_MOST_TUNINGS = 8  # tuned models based on one another, each with additions to the previous one
_IMPORTED_WHEN_USED = {
    "LightningFacts": ("lightning", "LightningFacts"),
    "StoredWeights": ("rows", "StoredWeights"),
    "check_config": ("weights", "check_config"),
    "floating_dtype": ("weights", "floating_dtype"),
    "save": ("native", "save"),
    "base_of": ("beside", "base_of"),
    "save_huggingface": ("huggingface", "save"),
    "save_reference": ("reference", "save"),
    "save_tensors": ("native", "save_tensors"),
    "save_sdar": ("sdar", "save"),
    "save_with_code": ("remote_code", "save"),
}


def __getattr__(name: str) -> Any:
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own_name = _IMPORTED_WHEN_USED[name]
    return getattr(import_module(f"{__name__}.{module}"), own_name)


def load(
    source: str | Path,
    *,
    device: "torch.device | str | None" = "cpu",
    dtype: "torch.dtype | str | None" = None,
    lightning: "LightningFacts | None" = None,
    _depth: int = 0,
    **hub: Unpack[HubOptions],
) -> "tuple[Network, LanguageModelConfig]":
    """Load a network in evaluation mode, and its config, from a folder, a hub id, a GGUF file or a Lightning
    `.ckpt` file.

    The config.json of a folder or hub repository tells its format: ours, the reference's published weights,
    or a Llama-, Mistral-, Qwen- or SDAR-type checkpoint of Hugging Face. `lightning` supplies what a `.ckpt`
    leaves open. Without a dtype, weights keep their own; GGUF weights become float32. Device None means a GPU
    if there is one.
    """
    from bd3lm.interop import gguf, huggingface, native, reference, sdar
    from bd3lm.interop import lightning as _lightning
    from bd3lm.interop.unsupported import unsupported
    from bd3lm.interop.weights import floating_dtype
    from bd3lm.models import pick_device

    device, dtype = pick_device(device), floating_dtype(dtype)

    def load_base(base: str | Path) -> "tuple[Path, Network, LanguageModelConfig]":
        where = resolve(base, **hub)
        return where, *load(where, dtype=dtype, _depth=_depth + 1)

    path = resolve(source, **hub)
    if path.is_file():
        if path.suffix == GGUF_SUFFIX and lightning is None:
            return gguf.load(path, device=device, dtype=dtype)
        if path.suffix != LIGHTNING_SUFFIX:
            raise refuse_file(path)
        return _lightning.load(path, lightning, device=device, dtype=dtype)
    if lightning is not None:
        raise ValueError(
            f"lightning must be None unless the model is a .ckpt file, got {lightning} with the folder {path}"
        )
    data = read_config(path)
    if native.recognises(data):
        may_draft, may_add = _depth == 0, _depth < _MOST_TUNINGS
        return native.load(
            path,
            device=device,
            dtype=dtype,
            load_base=load_base if may_draft else None,
            load_tuned=load_base if may_add else None,
        )
    if reference.recognises(data):
        return reference.load(path, device=device, dtype=dtype)
    if huggingface.recognises(data):
        return huggingface.load(path, device=device, dtype=dtype)
    if sdar.recognises(data):
        return sdar.load(path, device=device, dtype=dtype)
    raise unsupported(path, data)


def open_rows(source: str | Path, *, _may_add: bool = True, **hub: Unpack[HubOptions]) -> "StoredWeights":
    """The weights that `load` would load, to be read some rows at a time, for a network that no single
    process holds whole."""
    from bd3lm.interop import huggingface, native, rows, sdar

    def open_base(base: str | Path) -> "tuple[Path, StoredWeights]":
        where = resolve(base, **hub)
        return where, open_rows(where, _may_add=False)

    path = resolve(source, **hub)
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return rows.GGUFRows(path)
    data = read_config(path) if path.is_dir() else {}
    if native.recognises(data):
        config = native.read(path)
        if config.method.trains_beside:
            return rows.BesideRows(path, config, open_base if _may_add else None)
        if native.is_tuned(path):  # its additions are merged into whole matrices
            return rows.WholeRows(*load(path, _depth=int(not _may_add)))
        return rows.NativeRows(path, config)
    if huggingface.recognises(data):
        return rows.HuggingFaceRows(path, huggingface.read(path))
    if sdar.recognises(data):
        return rows.HuggingFaceRows(path, sdar.read(path))
    return rows.WholeRows(*load(path))


def config_of(source: str | Path, **hub: Unpack[HubOptions]) -> "LanguageModelConfig":
    """The config that `load` returns next to the network. Weights are read only if config.json does not say
    everything."""
    from bd3lm.interop import gguf, huggingface, native, reference, sdar

    path = resolve(source, **hub)
    if path.is_dir():
        data = read_config(path)
        if native.recognises(data):
            return native.read(path)
        if reference.recognises(data):
            return reference.from_reference_config(data, where=str(path / CONFIG_NAME))
        if huggingface.recognises(data):
            return huggingface.read(path)
        if sdar.recognises(data):
            return sdar.read(path)
    elif path.suffix == GGUF_SUFFIX:
        return gguf.read(path)
    return load(path)[1]


def tokenizer_for(
    path: Path, config: "LanguageModelConfig", named: str | Path | None = None
) -> "Tokenizer | None":
    """The tokenizer for the model at a path: the named one, or the one saved with the model, if any."""
    from bd3lm.data import saved_tokenizer

    size = config.network.vocab_size
    if named is not None:
        return load_tokenizer(named, vocabulary=size if config.mask_id == size else None)
    return _in_gguf(path, size) if _is_gguf(path) else saved_tokenizer(path)


def load_tokenizer(source: str | Path, *, vocabulary: int | None = None) -> "Tokenizer":
    """Load a tokenizer by name, like `bd3lm.data.load_tokenizer`, or from a GGUF file.

    `vocabulary` is the vocabulary size of its network, if it differs from the file's own.
    """
    path = local_path(source)
    if not _is_gguf(path):
        from bd3lm import data

        return data.load_tokenizer(source, vocabulary=vocabulary)
    from bd3lm.interop import gguf

    found = _in_gguf(path, gguf.read(path).network.vocab_size if vocabulary is None else vocabulary)
    if found is None:
        raise ValueError(f"tokenizer must be of a kind that bd3lm reads, got the tokenizer of {path}")
    return found


def _is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and path.is_file()


def _in_gguf(path: Path, vocabulary: int) -> "Tokenizer | None":
    from bd3lm.interop.gguf_file import GGUFFile
    from bd3lm.interop.gguf_tokenizer import read_tokenizer

    return read_tokenizer(GGUFFile(path), vocabulary)
