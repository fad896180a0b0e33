"""Choosing a device, and sending tensors to it."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bd3lm.models import pick_device, send


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("device", ["nonsense", "meta", "mps", torch.device("meta"), 1.5, ["cpu"]])
def test_only_cpus_and_gpus_are_devices(device):
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:N, got "):
        pick_device(device)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu():
    assert pick_device(None) == pick_device("cpu") == pick_device(torch.device("cpu")) == torch.device("cpu")
    for asked in ("cuda", "cuda:0"):
        with pytest.raises(
            ValueError, match=f"device must be cpu, because torch finds no GPU .*, got '{asked}'"
        ):
            pick_device(asked)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_without_a_number_is_that_of_the_rank_or_the_current_one():
    assert pick_device(None) == pick_device("cuda") == torch.device("cuda:1")
    assert pick_device("cuda", 0) == torch.device("cuda:0")
    assert pick_device("cuda:0", 1) == torch.device("cuda:0")
    assert pick_device("cpu", 1) == torch.device("cpu")
    with pytest.raises(ValueError, match="there are 2, and LOCAL_RANK is 2"):
        pick_device("cuda", 2)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_with_a_number_must_be_there():
    with pytest.raises(ValueError, match="device must be one of the GPUs cuda:0 to cuda:1, got cuda:2"):
        pick_device("cuda:2")


class Copies(TorchFunctionMode):
    """Records where tensors are sent and whether the copy waits; copies nothing."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.noted.append((str(args[1]), (kwargs or {}).get("non_blocking", False)))
            return args[0]
        return func(*args, **(kwargs or {}))


def test_only_a_copy_to_the_host_waits():
    """Otherwise the host would read it before it has arrived."""
    there, here = torch.zeros(2, device="meta"), torch.zeros(2)
    with Copies() as copies:
        send(there, torch.device("cpu"))
        send(there, "cpu")
        send(here, "meta")
    assert copies.noted == [("cpu", False), ("cpu", False), ("meta", True)]


def test_a_device_may_be_named():
    tensor = torch.arange(3)
    assert torch.equal(send(tensor, "cpu"), tensor)
    assert send(tensor, "meta").device.type == "meta"
