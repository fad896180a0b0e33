"""Writes a safetensors file piece by piece, with one tensor in memory at a time.

The library's own writer needs all tensors at once, cannot compute a digest while writing, and reports a full
disk with an error class of its own.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 1 << 22  # bytes per write
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
}


@dataclass(frozen=True)
class Later:
    """A tensor that is fetched when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    fetch: Callable[[], "Tensor"]

    @classmethod
    def of(cls, tensor: "Tensor | Later") -> "Later":
        if isinstance(tensor, Later):
            return tensor
        return cls(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def type_name(dtype: Any) -> str:
    """The name of a torch type in safetensors files; KeyError for an unsupported one."""
    return _NAMES[str(dtype).removeprefix("torch.")]


def in_file_order(tensors: Mapping[str, "Tensor | Later"]) -> list[str]:
    """Names in the order of the library's own files: by type, wide types first, then by name."""
    ranks = {name: rank for rank, name in enumerate(_NAMES.values())}
    return sorted(tensors, key=lambda name: (-ranks[type_name(tensors[name].dtype)], name))


def file_pieces(
    tensors: Mapping[str, "Tensor | Later"], order: Sequence[str]
) -> Iterator[bytes | memoryview]:
    """The length of the JSON header, the header, and the tensors' bytes in this order. Wide types must come
    before narrow ones, so that all are aligned."""
    import torch

    later = {name: Later.of(tensors[name]) for name in order}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, each in later.items():
        numbers = 1
        for size in each.shape:
            numbers *= size
        start, end = end, end + numbers * each.dtype.itemsize
        header[name] = {
            "dtype": type_name(each.dtype),
            "shape": list(each.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for each in later.values():
        tensor = each.fetch().detach().cpu().contiguous()
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]
