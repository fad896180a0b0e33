"""What every test shares: the options --slow and --gpu, one thread a process, hypothesis without chance."""

import os

import pytest
import torch
from hypothesis import settings

OPTIONAL = {
    "slow": "takes more than a few seconds",
    "gpu": "needs a CUDA device",
}

settings.register_profile("bd3lm", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("bd3lm")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, reason in OPTIONAL.items():
        parser.addoption(
            f"--{name}", action="store_true", help=f"also run the tests marked {name} ({reason})"
        )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # two xdist workers on two cores must not fight
    if "PYTEST_XDIST_WORKER" in os.environ:  # else each would start a compiler for every core of the machine
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name, reason in OPTIONAL.items():
        if config.getoption(f"--{name}"):
            continue
        skip = pytest.mark.skip(reason=f"{reason}; run with --{name}")
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(skip)
