"""What tests that compare kernels with each other need."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def exact_float32_and_nothing_but_compiled_kernels() -> Iterator[None]:
    """No TF32, and an error rather than a silent eager run once a function was compiled too often."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.set_float32_matmul_precision(precision)
