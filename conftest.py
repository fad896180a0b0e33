"""What every test shares: options as --slow and --gpu, one thread a process, hypothesis without chance."""

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

OPTIONAL = {
    "slow": "takes more than a few seconds",
    "gpu": "needs a CUDA device",
    "browser": "drives chromium",
}

settings.register_profile("bd3lm", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("bd3lm")


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, reason in OPTIONAL.items():
        parser.addoption(
            f"--{name}", action="store_true", help=f"also run the tests marked {name} ({reason})"
        )


@pytest.fixture(autouse=True, scope="session")
def real_fsync() -> Iterator[Callable[[int], None]]:
    """Nothing waits for the disk: no test is about a power cut, and there are thousands of files. The real
    fsync, for the tests of files themselves."""
    real = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield real


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # two xdist workers on two cores must not fight
    if "PYTEST_XDIST_WORKER" in os.environ:  # else each would start a compiler for every core of the machine
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@pytest.hookimpl(tryfirst=True)  # before `-m slow` looks who is slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _slow_down_sweeps(items)
    for name, reason in OPTIONAL.items():
        if config.getoption(f"--{name}"):
            continue
        skip = pytest.mark.skip(reason=f"{reason}; run with --{name}")
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(skip)


def _slow_down_sweeps(items: list[pytest.Item]) -> None:
    """Of a test marked sweep(n) that has more cases, all but n are slow: the quick ones lie evenly spread."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for sweep in cases.values():
        marker = sweep[0].get_closest_marker("sweep")
        number = marker.args[0] if marker else len(sweep)
        quick = {round(turn * (len(sweep) - 1) / max(number - 1, 1)) for turn in range(number)}
        for turn, item in enumerate(sweep):
            if turn not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, a line a reason: a line a place would be hundreds."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED {number:,}: {reason}")
