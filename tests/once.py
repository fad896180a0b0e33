"""What takes long and is asked for by several tests is made once, also where several workers share them."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON keeps it: made by the first worker that asks, read by the others."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    done = root / f"{name}.json"
    with FileLock(root / f"{name}.lock"):
        if not done.exists():
            done.write_text(json.dumps(make()))
    return json.loads(done.read_text())
