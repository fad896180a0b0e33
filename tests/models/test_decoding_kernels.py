"""The decoding kernels in Triton's interpreter; tests/gpu runs the same cases on CUDA."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.once import made_once
from tests.oracles.decoding_cases import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2700),  # the interpreter takes minutes, and many minutes on shared or slow cores
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="Triton is not installed, which comes with torch for CUDA; tests/gpu has the same cases",
    ),
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = made_once(tmp_path_factory, "decoding-kernels", interpret_all)
    return found


def interpret_all() -> dict[str, str]:
    """Run all cases in one process of their own, with Triton's interpreter chosen before the import."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), str(root / "src")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "tests.oracles.decoding_cases"],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_do_what_plain_torch_does(name, failures):
    assert name not in failures, failures[name]
