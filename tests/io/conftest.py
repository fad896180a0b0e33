import os
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def _files_are_forced_to_the_disk(monkeypatch: pytest.MonkeyPatch, real_fsync: Callable[[int], None]) -> None:
    monkeypatch.setattr(os, "fsync", real_fsync)
