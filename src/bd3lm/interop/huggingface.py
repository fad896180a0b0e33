"""Llama-, Mistral- and Qwen-type checkpoints in Hugging Face's layout as autoregressive models, in both
directions.

Weights are read tensor by tensor into a network that is already allocated, so loading takes little more
memory than the weights. `transformers` is not needed, no code of a repository runs (`auto_map` is ignored),
and pickles are not read. The mask is an extra vector after the vocabulary that only the input uses: the
checkpoint's predictions stay the same.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from bd3lm.interop.families import (
    FAMILIES,
    Family,
    Piece,
    config_of,
    family_for,
    network_of,
    pieces,
)
from bd3lm.interop.sources import (
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    read_config,
    read_index,
    weights_files,
)
from bd3lm.interop.weights import (
    Stored,
    allocate,
    check_config,
    check_layers,
    check_shapes,
    make_folder,
    one_dtype,
    read_header,
    write_tensors,
)
from bd3lm.io.files import write_atomically
from bd3lm.methods import AutoregressiveMethod, LanguageModelConfig
from bd3lm.models import Network, Transformer, TransformerConfig
from bd3lm.parsing import shown

GENERATION_NAME = "generation_config.json"
HEAD = "lm_head.weight"
_BUFFER = ".rotary_emb.inv_freq"  # stored for each layer by old checkpoints; it follows from the config
_MEAN_ROWS = 8192  # of an embedding at a time, in double precision
_LISTED = 5


def recognises(data: Mapping[str, Any]) -> bool:
    """Whether this config.json belongs to a family that is loaded here."""
    kind = data.get("model_type")
    return "format" not in data and isinstance(kind, str) and kind in FAMILIES


def load(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Network, LanguageModelConfig]:
    """Load the checkpoint in a folder; by default in the dtype it is stored in."""
    shape = read_network(read_config(folder), where=str(folder / CONFIG_NAME))
    network = read_weights(folder, shape, device=device, dtype=dtype)
    set_mask_vector(network)
    return network, model_config(shape)


def read_weights(
    folder: Path, shape: TransformerConfig, *, device: torch.device | str, dtype: torch.dtype | None
) -> Transformer:
    """The network of this shape with the weights in a folder. The vector of an extra mask is not set."""
    where = str(folder)
    checkpoint = Checkpoint(folder, shape)
    wanted, stored = checkpoint.pieces, checkpoint.stored
    dtype = one_dtype(checkpoint.types, dtype, where=where)
    network = cast("Transformer", allocate(shape, device=device, dtype=dtype, where=where))
    by_file: dict[Path, list[Piece]] = {}
    for piece in wanted:
        by_file.setdefault(stored[piece.name][0], []).append(piece)
    for path, some in by_file.items():
        with safe_open(path, framework="pt") as file:
            fill(network, some, file.get_tensor)
    if checkpoint.told_twice:
        with safe_open(stored[HEAD][0], framework="pt") as file:
            check_tied(file.get_tensor(HEAD), network.embedding.weight, where=where)
    return network


class Checkpoint:
    """The tensors in a folder, checked against a network shape, but not read yet."""

    def __init__(self, folder: Path, shape: TransformerConfig) -> None:
        where = str(folder)
        self.stored = _stored(folder)
        found = {name: each.shape for name, (_, each) in self.stored.items() if not name.endswith(_BUFFER)}
        check_layers(found, shape, where=where)
        self.pieces = pieces(shape)
        self.told_twice = shape.tied and HEAD in found
        if self.told_twice:
            found.pop(HEAD)
        check_shapes(found, {piece.name: piece.shape for piece in self.pieces}, where=where)
        self.types = [self.stored[name][1].dtype for name in found]


def read(folder: Path) -> LanguageModelConfig:
    """The config that `load` returns next to the network."""
    return model_config(read_network(read_config(folder), where=str(folder / CONFIG_NAME)))


def read_network(data: Mapping[str, Any], *, where: str) -> TransformerConfig:
    """The network that a config.json of a known family describes."""
    family = FAMILIES[data["model_type"]]
    check_written(family, data, where=where)
    return network_of(family, data, where=where)


def check_written(family: Family, data: Mapping[str, Any], *, where: str) -> None:
    """Refuse a config.json with another class, or with quantized weights."""
    classes = data.get("architectures")
    if classes is not None and classes != [family.architecture]:
        raise ValueError(
            f"architectures in {where} must be [{family.architecture!r}] for model_type "
            f"{family.model_type!r}, got {shown(classes)}"
        )
    if data.get("quantization_config") is not None:
        quantized = data["quantization_config"]
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ValueError(
            f"quantization_config in {where} must be absent: weights quantized by {shown(method)} are not "
            "supported; load the checkpoint from before the quantization, or a GGUF file"
        )


def model_config(network: TransformerConfig) -> LanguageModelConfig:
    """The model config of this network. Its mask follows the vocabulary."""
    return LanguageModelConfig(network=network, method=AutoregressiveMethod(), mask_id=network.vocab_size)


def fill(network: Transformer, some: Iterable[Piece], read: Callable[[str], Tensor]) -> None:
    """Write tensors, which `read` gives one by one, into their rows of the network's parameters."""
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for piece in some:
            parameters[piece.ours][piece.start : piece.stop].copy_(read(piece.name))


def set_mask_vector(network: Transformer) -> None:
    """Set the mask's vector to the mean of all tokens, as a start for training."""
    weight = network.embedding.weight.detach()
    if network.mask_vector is not None:
        with torch.no_grad():
            network.mask_vector.copy_(mean_token(weight.__getitem__, weight.shape[0]))


def mean_token(rows: Callable[[slice], Tensor], number: int) -> Tensor:
    """The mean row of an embedding, computed in double precision, part by part."""
    parts = (rows(slice(*part)).double().sum(0) for part in in_parts(number))
    return sum(parts, torch.zeros(())) / number


def in_parts(rows: int) -> list[tuple[int, int]]:
    """First row and row after the last, for some rows at a time."""
    return [(start, min(start + _MEAN_ROWS, rows)) for start in range(0, rows, _MEAN_ROWS)]


def check_tied(head: Tensor, weight: Tensor, *, where: str) -> None:
    if head.shape != weight.shape or not torch.equal(head.to(weight), weight):
        raise ValueError(
            f"{HEAD} in {where} must equal model.embed_tokens.weight, since tie_word_embeddings is true, got "
            "another matrix"
        )


def _stored(folder: Path) -> dict[str, tuple[Path, Stored]]:
    """All tensors of a checkpoint: the file that holds each, and that file's header entry for it."""
    files = weights_files(folder)
    headers = {path: read_header(path) for path in files}
    if [path.name for path in files] != [WEIGHTS_NAME]:
        listed = read_index(folder)
        for path, header in headers.items():
            here = {name for name, file in listed.items() if file == path.name}
            if odd := sorted(here ^ header.keys()):
                more = f" and {len(odd) - _LISTED} more" if len(odd) > _LISTED else ""
                raise ValueError(
                    f"{path} must hold the tensors that {INDEX_NAME} lists for it; different: "
                    f"{', '.join(f'{name:.200}' for name in odd[:_LISTED])}{more}"
                )
    return {name: (path, stored) for path, header in headers.items() for name, stored in header.items()}


# --- Saving ---


def to_huggingface_config(config: LanguageModelConfig) -> tuple[TransformerConfig, dict[str, Any]]:
    """The network of a model, and the config.json of the family it fits. What does not fit is refused by
    name. Of a model with several laws, the causal one is written."""
    causal = config.under("causal") if "causal" in config.method.laws else config
    if not causal.method.is_causal_lm:
        raise ValueError(
            "a checkpoint for transformers' own classes must be an autoregressive model that does not "
            f"predict first tokens, got {config.title} (method.kind {config.method.kind!r}, score_first "
            f"{config.method.score_first})"
        )
    shape = config.network
    if not isinstance(shape, TransformerConfig):
        raise ValueError(
            f"network.kind must be transformer, to be saved for transformers, got {shape.kind!r}"
        )
    return shape, config_of(family_for(shape), shape)


def save(
    network: Network,
    config: LanguageModelConfig,
    folder: str | Path,
    *,
    eos_id: int | None = None,
    bos_id: int | None = None,
) -> None:
    """Write a checkpoint that transformers can load. An extra mask vector is left out."""
    check_config(network, config)
    shape, data = to_huggingface_config(config)
    ids = {"bos_token_id": bos_id, "eos_token_id": eos_id, "pad_token_id": None}
    data |= ids | {"torch_dtype": str(network.dtype).removeprefix("torch.")}
    generation: dict[str, Any] = dict(ids)
    if config.mask_id < config.network.vocab_size:  # we never write this, but others might
        generation["suppress_tokens"] = [config.mask_id]
    path = make_folder(folder)
    parameters = dict(network.named_parameters())
    state = {piece.name: parameters[piece.ours].detach()[piece.start : piece.stop] for piece in pieces(shape)}
    write_tensors(path / WEIGHTS_NAME, state)
    write_atomically(path / GENERATION_NAME, (json.dumps(generation, indent=2) + "\n").encode())
    write_atomically(path / CONFIG_NAME, (json.dumps(data, indent=2) + "\n").encode())
