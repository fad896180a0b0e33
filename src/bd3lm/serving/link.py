"""Lines of JSON between two processes. Nothing else goes over the wire, so nothing in it can run."""

import json
from multiprocessing.connection import Connection
from typing import Any

Line = dict[str, Any]


def send(connection: Connection, lines: list[Line]) -> None:
    """Several at once: a step of the engine tells of many texts."""
    connection.send_bytes(json.dumps(lines, ensure_ascii=True).encode())


def receive(connection: Connection) -> list[Line]:
    found: list[Line] = json.loads(connection.recv_bytes())
    return found
