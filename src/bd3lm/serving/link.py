"""Lines of JSON between two processes. Nothing else crosses the connection, so nothing in it can run as
code."""

import json
from multiprocessing.connection import Connection
from typing import Any

Line = dict[str, Any]


def send(connection: Connection, lines: list[Line]) -> None:
    """Several lines at once, since one step of the engine reports on many texts."""
    connection.send_bytes(json.dumps(lines, ensure_ascii=True).encode())


def receive(connection: Connection) -> list[Line]:
    found: list[Line] = json.loads(connection.recv_bytes())
    return found
