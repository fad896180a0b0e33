"""The oracle of what W&B has of a run: its offline file, read record by record.

W&B has no public reader. The file is LevelDB's log: blocks of 32 KiB, in which a record is one chunk or
several, each with a checksum, a length and a type; the first block begins with seven bytes of W&B's own.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class Offline:
    """What one session left."""

    run: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    @classmethod
    def read(cls, file: Path) -> "Offline":
        from wandb.proto import wandb_internal_pb2

        found = cls()
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run" and not found.run:
                found.run = record.run.run_id
                found.config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
            elif kind == "history":
                items = record.history.item
                found.history.append(
                    {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}
                )
            elif kind == "exit":
                found.exit_code = record.exit.exit_code
        return found


def sessions(folder: Path) -> list[Offline]:
    """Those of a run's folder, in their order."""
    return [Offline.read(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        chunk = data[at + _HEADER : at + _HEADER + length]
        if not kind or len(chunk) < length:  # where the writer was when it was killed
            return
        assert checksum == crc32(bytes([kind]) + chunk), f"a damaged record at byte {at}"
        parts += chunk
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
        at += _HEADER + length
