"""The oracle of what trackers have of a run: TensorBoard's own reader, and W&B's file record by record.

W&B has no public reader of its offline file, which is LevelDB's log: blocks of 32 KiB, in which a record is
one chunk or several, each with a checksum, a length and a type; the first block begins with seven bytes of
W&B's own.
"""

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any
from zlib import crc32

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class Offline:
    """What one session left behind."""

    run: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    @classmethod
    def read(cls, file: Path) -> "Offline":
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
    """The sessions of a run's folder, in order."""
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
        if not kind or len(chunk) < length:  # the writer was here when it was killed
            return
        assert checksum == crc32(bytes([kind]) + chunk), f"a damaged record at byte {at}"
        parts += chunk
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
        at += _HEADER + length


def left(folder: Path) -> list[Offline]:
    """W&B's record of a folder when the process ends, after its own writes."""
    wandb.teardown()
    return sessions(folder)


def events(folder: Path) -> Any:
    """What TensorBoard itself shows for a folder."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """W&B without a login, with every network address replaced by a port that counts connections."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        is_done = False

        def count() -> None:
            while not is_done:
                try:
                    connection, who = server.accept()
                except TimeoutError:
                    continue
                came.append(who)
                connection.close()

        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, address)
        for name in ("NO_PROXY", "no_proxy", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        listener = Thread(target=count, daemon=True)
        listener.start()
        wandb.teardown()  # it reads the environment once per process
        try:
            yield came
        finally:
            wandb.teardown()
            is_done = True
            listener.join()
