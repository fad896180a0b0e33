"""A GGUF file as metadata and tensors. Every length is checked before it is used.

We read the header in one pass over a memory map of the file. The `gguf` package decodes quantized blocks.
Tensors are read some rows at a time, so that none is in memory twice.
"""

import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bd3lm.interop.weights import Shape
from bd3lm.io.extras import require
from bd3lm.parsing import shown

EXTRA = "gguf"

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_NUMBERS = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_CHUNK = 2**24  # bytes of a tensor at a time, about


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor is, and in which format."""

    shape: Shape
    type: int
    offset: int
    """From the beginning of the file."""


class GGUFFile:
    """The header of an open file. `metadata` has plain values, `tensors` the places of the tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._kinds = require("gguf.constants", EXTRA, f"the file {path}")
        self._quants = require("gguf.quants", EXTRA, f"the file {path}")
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(_Cursor(data))
        except (ValueError, OSError) as error:  # mmap raises too, if the file is empty
            raise ValueError(f"{path} must be a readable GGUF file: {error}") from None

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of the metadata, which must have the given type. With the default ... the value is
        required."""
        value = self.metadata.get(key, default)
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if value is ... or (value is not default and not is_kind):
            found = "none" if value is ... else shown(value)
            raise ValueError(f"{key} in {self.path} must be of type {kind.__name__}, got {found}")
        return value

    def kind(self, name: str) -> str:
        """The name of a tensor's type, or its number if it is unknown."""
        number = self.tensors[name].type
        try:
            return str(self._kinds.GGMLQuantizationType(number).name)
        except ValueError:
            return f"number {number}"

    def check_types(self) -> None:
        """Refuse types that the package cannot dequantize, before anything is allocated."""
        for name, tensor in self.tensors.items():
            if tensor.type not in self._readable:
                raise ValueError(
                    f"tensor {name:.200} in {self.path} must have a type that the gguf package can "
                    f"dequantize, got {self.kind(name)}"
                )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Some rows of a tensor, in float32; a one-dimensional tensor is read whole."""
        tensor = self.tensors[name]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        stop = rows if stop is None or rows == 1 else stop
        kind, row = self._kinds.GGMLQuantizationType(tensor.type), self._row_bytes(tensor)
        with self.path.open("rb") as file:
            file.seek(tensor.offset + start * row)
            data = np.fromfile(file, np.uint8, (stop - start) * row).reshape(stop - start, row)
        values = torch.from_numpy(self._quants.dequantize(data, kind))
        return values.flatten() if len(tensor.shape) == 1 else values

    def rows_at_a_time(self, name: str) -> int:
        """How many rows of a tensor to read at once."""
        tensor = self.tensors[name]
        return max(1, _CHUNK // (4 * tensor.shape[-1]))

    @cached_property
    def _readable(self) -> frozenset[int]:
        found = set()
        for kind, (_, size) in self._kinds.GGML_QUANT_SIZES.items():
            try:
                self._quants.dequantize(np.zeros((1, size), np.uint8), kind)
            except NotImplementedError:
                continue
            found.add(int(kind))
        return frozenset(found)

    def _row_bytes(self, tensor: GGUFTensor) -> int:
        block, size = self._kinds.GGML_QUANT_SIZES[self._kinds.GGMLQuantizationType(tensor.type)]
        return int(tensor.shape[-1] // block * size)

    def _read(self, cursor: "_Cursor") -> None:
        if cursor.take(4) != _MAGIC:
            raise ValueError("it must begin with GGUF")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version must be 2 or 3, got {version}")
        tensors, keys = cursor.number("Q"), cursor.number("Q")
        for _ in range(keys):
            key = cursor.text()
            if key in self.metadata:
                raise ValueError(f"{key:.200} occurs twice")
            self.metadata[key] = cursor.value(cursor.number("I"))
        for _ in range(tensors):
            name, tensor = self._tensor(cursor)
            if name in self.tensors:
                raise ValueError(f"tensor {name:.200} occurs twice")
            self.tensors[name] = tensor
        self._place(cursor)

    def _tensor(self, cursor: "_Cursor") -> tuple[str, GGUFTensor]:
        name, dimensions = cursor.text(), cursor.number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name:.200} must have 1 to 4 dimensions, got {dimensions}")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))
        if not all(shape):
            raise ValueError(f"tensor {name:.200} must not be empty, got the shape {shape}")
        return name, GGUFTensor(shape[::-1], cursor.number("I"), cursor.number("Q"))

    def _place(self, cursor: "_Cursor") -> None:
        """Convert offsets to count from the beginning of the file, and check that each tensor ends within the
        file."""
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment must be at least 1, got {shown(alignment)}")
        begin = cursor.place + -cursor.place % alignment
        for name, tensor in self.tensors.items():
            here = GGUFTensor(tensor.shape, tensor.type, begin + tensor.offset)
            self.tensors[name] = here
            if here.type not in set(map(int, self._kinds.GGML_QUANT_SIZES)):
                continue  # `check_types` reports it
            block, _ = self._kinds.GGML_QUANT_SIZES[self._kinds.GGMLQuantizationType(here.type)]
            if here.shape[-1] % block:
                raise ValueError(
                    f"rows of tensor {name:.200} must be whole blocks of {block}, got {here.shape[-1]}"
                )
            numbers = 1
            for size in here.shape[:-1]:
                numbers *= size
            end = here.offset + numbers * self._row_bytes(here)
            if end > len(cursor.data):
                raise ValueError(
                    f"tensor {name:.200} must end within its {len(cursor.data):,} bytes, got {end:,}"
                )


class _Cursor:
    """Reads forward from a place, never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, 0

    def take(self, length: int) -> bytes:
        if length > len(self.data) - self.place:
            raise ValueError(
                f"it ends after {len(self.data):,} bytes, but {length:,} more must follow byte {self.place:,}"
            )
        self.place += length
        return self.data[self.place - length : self.place]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"values must be of types 0 to 12, got {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            self._expect(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"arrays must be of numbers or texts, got type {kind}")
        code = _NUMBERS[kind]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))

    def _expect(self, least: int) -> None:
        """Refuse a count that does not fit in the rest of the file."""
        if least > len(self.data) - self.place:
            self.take(least)
