import os

import pytest

from tests.conftest import FSYNC


@pytest.fixture(autouse=True)
def _files_are_forced_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", FSYNC)
