"""Load GGUF files (llama.cpp's format) of Llama- and Qwen-type models, dequantized into our network.

The metadata say the same as a config.json, and are read as one. Tensors are dequantized some rows at a time.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from bd3lm.interop.families import FAMILIES, Piece, network_of, pieces, rope_scaling_of
from bd3lm.interop.gguf_file import GGUFFile
from bd3lm.interop.huggingface import model_config, set_mask_vector
from bd3lm.interop.weights import allocate, check_layers, check_shapes
from bd3lm.methods import LanguageModelConfig
from bd3lm.models import Network, Transformer, TransformerConfig
from bd3lm.models.rotary import Llama3Scaling, frequencies
from bd3lm.parsing import shown

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_EMBEDDING, _HEAD, _FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_PERMUTED = ("query", "key")  # in Llama's attention, with rows pair by pair
_LLAMA3 = {"original_context": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # in every Llama 3
_CLOSE = 1e-4


def load(
    path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Network, LanguageModelConfig]:
    """Load the model in a GGUF file, in float32 unless another type is given."""
    file = GGUFFile(path)
    shape, wanted = checked(file)
    room = allocate(shape, device=device, dtype=dtype or torch.float32, where=str(path))
    network = cast("Transformer", room)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for piece in wanted:
            target = parameters[piece.ours][piece.start : piece.stop]
            for start, stop in _in_parts(file, piece):
                target[start:stop].copy_(piece_rows(file, piece, shape.head_dim, start, stop))
    set_mask_vector(network)
    return network, model_config(shape)


def read(path: Path) -> LanguageModelConfig:
    """The config that `load` returns next to the network."""
    return model_config(read_network(GGUFFile(path)))


def checked(file: GGUFFile) -> tuple[TransformerConfig, list[Piece]]:
    """The network in a file, and its tensors, after checking that they fit and can be read."""
    shape, where = read_network(file), str(file.path)
    found = {name: tensor.shape for name, tensor in file.tensors.items() if name != _FACTORS}
    check_layers(found, shape, where=where)
    wanted = pieces(shape, "gguf")
    check_shapes(found, {piece.name: piece.shape for piece in wanted}, where=where)
    file.check_types()
    return shape, wanted


def piece_rows(file: GGUFFile, piece: Piece, head_dim: int, start: int, stop: int) -> Tensor:
    """Rows start..stop − 1 of a tensor, in our order."""
    if len(piece.shape) == 1 and not _by_pairs(file, piece):
        return file.read(piece.name)[start:stop]
    if not _by_pairs(file, piece):
        return file.read(piece.name, start, stop)
    first, last = start - start % head_dim, stop + -stop % head_dim  # each head has its own order
    rows = file.read(piece.name)[first:last] if len(piece.shape) == 1 else file.read(piece.name, first, last)
    return _halves(rows, head_dim)[start - first : stop - first]


def _by_pairs(file: GGUFFile, piece: Piece) -> bool:
    return file.metadata["general.architecture"] == "llama" and piece.part in _PERMUTED


def _in_parts(file: GGUFFile, piece: Piece) -> list[tuple[int, int]]:
    """Row ranges small enough to dequantize at once."""
    rows = piece.stop - piece.start
    step = rows if len(piece.shape) == 1 or _by_pairs(file, piece) else file.rows_at_a_time(piece.name)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _halves(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder rows stored pair by pair into our order, where the two rows of a rotated pair are half a head
    apart."""
    by_pair = rows.unflatten(0, (-1, head_dim // 2, 2))
    return by_pair.transpose(1, 2).flatten(0, 2)


def read_network(file: GGUFFile) -> TransformerConfig:
    """The network that the metadata describe. Unsupported features are refused by name."""
    where, kind = str(file.path), file.get("general.architecture", str, ...)
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture in {where} must be one of {', '.join(ARCHITECTURES)}, got {shown(kind)}"
        )
    if (experts := file.get(f"{kind}.expert_count", int, 0)) > 0:
        raise ValueError(
            f"{kind}.expert_count in {where} must be 0 (mixtures of experts are not supported), got {experts}"
        )
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{where} must hold the matrix {_EMBEDDING}")
    data = _as_config(file, kind) | {"vocab_size": embedding.shape[0]}
    return network_of(FAMILIES[kind], data, where=where)


def _as_config(file: GGUFFile, kind: str) -> dict[str, Any]:
    """The metadata under the names of a config.json."""

    def number(name: str, default: Any = ...) -> Any:
        return file.get(f"{kind}.{name}", int, default)

    hidden, heads = number("embedding_length"), number("attention.head_count")
    rotated = number("rope.dimension_count", None)
    head_dim = number("attention.key_length", rotated or (hidden // heads if heads > 0 else 0))
    if (of_values := number("attention.value_length", head_dim)) != head_dim:
        raise ValueError(
            f"{kind}.attention.value_length in {file.path} must equal the length of keys, {head_dim}, "
            f"got {of_values}"
        )
    context = number("context_length")
    data = {
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": min(context, number("attention.sliding_window", 0) or context),
        "rms_norm_eps": file.get(f"{kind}.attention.layer_norm_rms_epsilon", float, ...),
        "rope_theta": file.get(f"{kind}.rope.freq_base", float, 10000.0),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }
    if rotated is not None and head_dim > 0 and rotated != head_dim:
        data["partial_rotary_factor"] = rotated / head_dim
    return data | {"rope_scaling": _scaling(file, kind, data)}


def _scaling(file: GGUFFile, kind: str, data: dict[str, Any]) -> dict[str, Any] | None:
    """The rotary scaling as in a config.json. GGUF stores Llama 3's scaling as the resulting factors."""
    named = file.get(f"{kind}.rope.scaling.type", str, "none")
    if named not in ("none", ""):
        factor = file.get(f"{kind}.rope.scaling.factor", float, None)
        return {"rope_type": named, "factor": factor}
    if _FACTORS not in file.tensors:
        return None
    file.check_types()
    factors = file.read(_FACTORS).flatten().double()
    plain = _plain_frequencies(data)
    if plain is not None and factors.shape == plain.shape and float(factors[-1]) >= 1.0:
        scaling = Llama3Scaling(factor=float(factors[-1]), **_LLAMA3)  # type: ignore[arg-type]
        if torch.allclose(plain / scaling.scaled(plain), factors, rtol=_CLOSE, atol=0.0):
            return rope_scaling_of(scaling)
    raise ValueError(
        f"{_FACTORS} in {file.path} must be those of Llama 3 (a context of 8,192 stretched), got "
        f"{factors[0]:g} to {factors[-1]:g}"
    )


def _plain_frequencies(data: dict[str, Any]) -> Tensor | None:
    head_dim, base = data["head_dim"], data["rope_theta"]
    if not 2 <= head_dim <= 2**20 or head_dim % 2 or not 0.0 < base < float("inf"):
        return None  # `network_of` refuses it by name
    return frequencies(head_dim, base=base)
