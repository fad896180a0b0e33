"""A file written tensor by tensor, against the library's own of all at once."""

import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bd3lm.interop.weights import write_tensors
from bd3lm.io.tensors import Later, file_pieces, in_file_order

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
CASES = {
    "one type": {"b": torch.randn(3, 2), "a": torch.randn(5), "layers.10.x": torch.randn(1, 4)},
    "all types": {f"{i}": torch.arange(i + 3).to(dtype) for i, dtype in enumerate(TYPES)},
    "a number, nothing, and a name": {"number": torch.tensor(2.0), 'é "': torch.zeros(0, 3)},
    "not contiguous": {"w": torch.randn(4, 6).t()[1:]},
    "none": {},
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_library(case: str, tmp_path: Path) -> None:
    tensors = CASES[case]
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "theirs", metadata={"format": "pt"})
    write_tensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert load_file(tmp_path / "ours").keys() == tensors.keys()


def test_one_tensor_at_a_time_is_there() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def fetch() -> torch.Tensor:
        nonlocal most
        tensor = torch.ones(1000)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(each() is not None for each in alive))
        return tensor

    tensors = {f"{i}": Later((1000,), torch.float32, fetch) for i in range(8)}
    assert sum(map(len, file_pieces(tensors, in_file_order(tensors)))) > 8 * 4000
    assert len(alive) == 8
    assert most <= 2  # the one before is let go of when the next has come


def test_a_tensor_that_cannot_be_had_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write_tensors(tmp_path / "file", {"a": Later((2,), torch.float32, fail)})
    assert list(tmp_path.iterdir()) == []
