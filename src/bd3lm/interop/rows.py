"""A model's weights in files, by our names; each process reads only the rows that it holds.

`interop.load` builds a network with all its weights. Nothing is built here: the rows fill a network with
sharded parameters. The result is the same as from `load`, to the bit.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from bd3lm.interop import beside, gguf, huggingface
from bd3lm.interop.families import MASK_VECTOR, Piece
from bd3lm.interop.gguf_file import GGUFFile
from bd3lm.interop.sources import weights_file
from bd3lm.interop.weights import (
    RowReader,
    Shape,
    check_layers,
    check_shapes,
    one_dtype,
    parameter_shapes,
)
from bd3lm.methods import LanguageModelConfig
from bd3lm.models import Network, TransformerConfig

_EMBEDDING = "embedding.weight"

Loader = Callable[[str | Path], tuple[Path, "StoredWeights"]]
"""Loads a source: returns its path, and the weights there."""


class StoredWeights:
    """The weights of a model, checked but not in memory."""

    def __init__(self, config: LanguageModelConfig) -> None:
        self.config = config

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """The parameters that exist; a tied matrix occurs once."""
        return parameter_shapes(self.config.network)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype they are stored in."""
        raise NotImplementedError

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop − 1 of a parameter; a scalar counts as one row."""
        raise NotImplementedError


class NativeRows(StoredWeights):
    """One file in our format."""

    def __init__(self, folder: Path, config: LanguageModelConfig) -> None:
        super().__init__(config)
        path = weights_file(folder)
        self._file = RowReader(path)
        found = {name: each.shape for name, each in self._file.header.items()}
        check_layers(found, config.network, where=str(path))
        check_shapes(found, self.shapes, where=str(path))
        self._dtype = one_dtype((each.dtype for each in self._file.header.values()), None, where=str(path))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._file.rows(name, start, stop)


class BesideRows(StoredWeights):
    """The weights of a base model, and the additions to it."""

    def __init__(self, folder: Path, config: LanguageModelConfig, load_base: Loader | None) -> None:
        super().__init__(config)
        self._layout, path = beside.check_files(folder, config)
        self._file = RowReader(path)
        where, self._base = beside.open_base(folder, config, load_base)
        beside.check_base(self._base.shapes, folder, config, where)

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._layout:
            return self._base.rows(name, start, stop)
        parts = [self._file.rows(theirs, 0, shape[0]) for theirs, _, shape in self._layout[name]]
        return torch.cat(parts).to(self.dtype)[start:stop]


class HuggingFaceRows(StoredWeights):
    """A folder in Hugging Face's layout. An extra mask vector is the mean of all tokens."""

    def __init__(self, folder: Path, config: LanguageModelConfig) -> None:
        super().__init__(config)
        shape, where = cast("TransformerConfig", config.network), str(folder)
        checkpoint = huggingface.Checkpoint(folder, shape)
        self._dtype = one_dtype(checkpoint.types, None, where=where)
        files = {path: RowReader(path) for path in {path for path, _ in checkpoint.stored.values()}}
        self._parts: dict[str, list[tuple[Piece, RowReader]]] = {}
        for piece in checkpoint.pieces:
            self._parts.setdefault(piece.ours, []).append((piece, files[checkpoint.stored[piece.name][0]]))
        if checkpoint.told_twice:
            path, head = checkpoint.stored[huggingface.HEAD]
            same_size = head.shape == self.shapes[_EMBEDDING]
            for part in huggingface.in_parts(head.shape[0] if same_size else 1):
                rows = files[path].rows(huggingface.HEAD, *part) if same_size else torch.zeros(0)
                huggingface.check_tied(rows, self.rows(_EMBEDDING, *part), where=where)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name == MASK_VECTOR:
            return self._mask[start:stop]
        found = []
        for piece, file in self._parts[name]:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                found.append(file.rows(piece.name, first - piece.start, last - piece.start))
        return torch.cat(found) if found else self._parts[name][0][1].rows(self._parts[name][0][0].name, 0, 0)

    @cached_property
    def _mask(self) -> Tensor:
        number = self.shapes[_EMBEDDING][0]
        mean = huggingface.mean_token(lambda part: self.rows(_EMBEDDING, part.start, part.stop), number)
        return mean.to(self.dtype)


class GGUFRows(StoredWeights):
    """A GGUF file, dequantized to float32 some rows at a time."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        shape, wanted = gguf.checked(self._file)
        super().__init__(huggingface.model_config(shape))
        self._head_dim = shape.head_dim
        self._parts: dict[str, list[Piece]] = {}
        for piece in wanted:
            self._parts.setdefault(piece.ours, []).append(piece)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name == MASK_VECTOR:
            return self._mask[start:stop]
        found = [torch.zeros(0, *self.shapes[name][1:])]
        for piece in self._parts[name]:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                here = first - piece.start, last - piece.start
                found.append(gguf.piece_rows(self._file, piece, self._head_dim, *here))
        return torch.cat(found)

    @cached_property
    def _mask(self) -> Tensor:
        number = self.shapes[_EMBEDDING][0]
        return huggingface.mean_token(
            lambda part: self.rows(_EMBEDDING, part.start, part.stop), number
        ).float()


class WholeRows(StoredWeights):
    """A network that was loaded whole, in its stored dtype: for layouts that only small models use (the
    reference's published weights, Lightning's files), and for models tuned with additions."""

    def __init__(self, network: Network, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self._parameters = dict(network.named_parameters())

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._parameters.values())).dtype

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        parameter = self._parameters[name].detach()
        return parameter[start:stop] if parameter.ndim else parameter
