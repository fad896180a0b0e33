"""The folder of one checkpoint: safetensors files with rows of named tensors, and their index.

A sharded tensor is cut by rows, as in FSDP2. Each process writes its rows to a file of its own. The index,
state.json, says which rows are where, so any number of processes can read what any other number wrote, each
reading only its own rows. Nothing is pickled, so reading a file runs no code.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from bd3lm.io.files import sync_folder
from bd3lm.io.tensors import file_pieces, type_name
from bd3lm.parsing import shown
from bd3lm.training.distributed import Engine, held_rows, local
from bd3lm.training.index import FORMAT, INDEX, Damaged, File, Index, Stored, digest

DTYPES = {
    dtype: type_name(dtype)
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


class Part(TypedDict):
    """What one process wrote, as JSON."""

    files: dict[str, dict[str, Any]]
    pieces: dict[str, tuple[str, int, int]]


# --- Writing -----------------------------------------------------------------------------------------


def write_tensors(folder: Path, named: Mapping[str, Tensor], engine: Engine) -> Part:
    """Write this process's rows of sharded tensors. The main process also writes the whole tensors."""
    sharded = {key for key, tensor in named.items() if isinstance(tensor, DTensor)}
    rows = {key: held_rows(tensor) for key, tensor in named.items() if key in sharded or engine.is_main}
    mine = {key: local(named[key]) for key, (start, stop) in sorted(rows.items()) if start < stop}
    if not mine:
        return Part(files={}, pieces={})
    name = f"tensors-{engine.rank:05d}-of-{engine.world:05d}" if sharded else "tensors"
    file = f"{name}.safetensors"
    order = sorted(mine, key=lambda key: -mine[key].element_size())
    written = _write(folder / file, file_pieces(mine, order))
    return Part(files={file: asdict(written)}, pieces={key: (file, *rows[key]) for key in mine})


def write_index(
    folder: Path,
    named: Mapping[str, Tensor],
    parts: Iterable[Part],
    *,
    step: int,
    score: float | None,
    state: dict[str, Any],
) -> None:
    """Write state.json from the reports of all processes, and force the folder to disk."""
    parts = list(parts)
    index = Index(
        format=FORMAT,
        step=step,
        score=score,
        state=state,
        files={name: File(**file) for part in parts for name, file in part["files"].items()},
        tensors={
            key: Stored(
                dtype=DTYPES[tensor.dtype],
                shape=tuple(tensor.shape),
                pieces=tuple(part["pieces"][key] for part in parts if key in part["pieces"]),
            )
            for key, tensor in named.items()
        },
    )
    data = asdict(index)
    text = json.dumps({**data, "sha256": digest(data)}, indent=1)
    _write(folder / INDEX, [text.encode()])
    sync_folder(folder)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> File:
    """Write a new file, and force it to disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return File(size=size, sha256=digest.hexdigest())


# --- Reading -----------------------------------------------------------------------------------------


def check_file(path: Path, index: Index) -> None:
    """Raise `Damaged` unless a file is what was written, and holds what the index says."""
    expected = index.files[path.name]
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would be read without end
            raise Damaged(f"{path.name} is not a regular file")
        size = path.stat().st_size
        if size != expected.size:
            raise Damaged(f"{path.name} has {size} bytes instead of {expected.size}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    if found != expected.sha256:
        raise Damaged(f"{path.name} is not what was written: its SHA-256 differs")
    try:
        with safe_open(path, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            held = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        raise Damaged(f"{path.name} is not a safetensors file: {error}") from None
    for name, piece in index.in_file(path.name).items():
        if held.get(name) != piece:
            raise Damaged(f"{path.name} does not hold the piece of {shown(name)} that {INDEX} lists")


def check_match(named: Mapping[str, Tensor], index: Index, folder: Path) -> None:
    """Refuse tensors of another network, with one message that lists the differences.

    Stored groups that are not requested do not matter. Requested groups must match name by name.
    """
    groups = {key.partition("/")[0] for key in named}
    stored = {key: entry for key, entry in index.tensors.items() if key.partition("/")[0] in groups}
    differing = [f"{key} is not stored" for key in named.keys() - stored.keys()]
    differing += [f"{key} is stored but not expected" for key in stored.keys() - named.keys()]
    for key in named.keys() & stored.keys():
        dtype, shape = DTYPES[named[key].dtype], list(named[key].shape)
        there = stored[key]
        if (there.dtype, list(there.shape)) != (dtype, shape):
            differing.append(f"{key} is {there.dtype} {list(there.shape)} instead of {dtype} {shape}")
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ValueError(f"{folder} does not fit: {'; '.join(sorted(differing)[:5])}{more}")


@torch.no_grad()
def read_tensors(folder: Path, named: Mapping[str, Tensor], index: Index) -> None:
    """Fill the rows that this process holds, and read no others."""
    wanted: dict[str, list[tuple[str, int, int]]] = {}
    for key, tensor in named.items():
        first, last = held_rows(tensor)
        for file, start, stop in index.tensors[key].pieces:
            if max(first, start) < min(last, stop):
                wanted.setdefault(file, []).append((key, start, stop))
    for file, pieces in wanted.items():
        with safe_open(folder / file, framework="pt") as stored:
            for key, start, stop in pieces:
                target, (first, last) = local(named[key]), held_rows(named[key])
                low, high = max(first, start), min(last, stop)
                if (
                    (low, high) == (first, last) == (start, stop)
                ):  # also for a scalar, which has no rows to cut
                    target.copy_(stored.get_tensor(key))
                else:
                    rows = stored.get_slice(key)[low - start : high - start]
                    target[low - first : high - first].copy_(rows)
