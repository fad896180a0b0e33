"""First weights made one tensor at a time, against a network built whole."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bd3lm.models import TransformerConfig
from bd3lm.models.deferred import CannotDefer, DeferredWeights, Recording
from tests.oracles.networks import FAMILIES

SHAPES: dict[str, dict[str, Any]] = {
    "GPT": {},
    "GPT, tied": {"tied": True},
    "adaptive norms": {"adaln": True, "time_conditioning": True},
    "Llama": FAMILIES["Llama"],
    "Qwen3, additions": FAMILIES["Qwen3"] | {"additions": 2},
}


def config_of(name: str) -> TransformerConfig:
    shape = {"vocab_size": 37, "layers": 3, "hidden": 16, "heads": 2, "context": 32} | SHAPES[name]
    return TransformerConfig(**shape)


@pytest.mark.parametrize("way", ["gpt2", "identity"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_equals_that_of_the_network_built_whole(name: str, way: str) -> None:
    """In another order, and in parts; the generator ends in the same state."""
    config = config_of(name)
    torch.manual_seed(5)
    whole = config.build()
    whole.start_as(way)
    after = torch.default_generator.get_state()
    torch.manual_seed(5)
    recording = Recording()
    with recording:
        network = config.build()
        network.start_as(way)
    assert torch.equal(torch.default_generator.get_state(), after)
    assert all(each.is_meta for each in network.parameters())
    weights = DeferredWeights(network, recording)
    assert list(weights.names()) == [name for name, _ in whole.named_parameters()]
    for name, parameter in reversed(list(whole.named_parameters())):
        rows = parameter.shape[0]
        for start, stop in ((0, rows), (rows // 3, rows // 2 + 1), (rows - 1, rows)):
            assert torch.equal(weights.rows(name, start, stop), parameter[start:stop]), name
    assert torch.equal(torch.default_generator.get_state(), after)


class Odd(nn.Module):
    """What other networks do when they are built: results of results, buffers, slices, numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(6, 4) * 0.1)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 5)))
        self.mean = nn.Parameter(self.drawn.detach().mean(0) + 1.0)
        self.register_buffer("frequencies", 1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8))
        self.number = nn.Parameter(torch.full((), 2.0))
        self.linear = nn.Linear(6, 6)
        with torch.no_grad():
            self.linear.weight[2:4].mul_(3.0)
            self.linear.weight[:, 1].zero_()
            self.drawn.add_(1.0)  # after its mean was taken


def test_what_other_networks_do_is_repeated_too() -> None:
    torch.manual_seed(1)
    whole = Odd()
    torch.manual_seed(1)
    recording = Recording()
    with recording:
        network = Odd()
    weights = DeferredWeights(network, recording)
    for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
        rows = tensor.shape[0] if tensor.ndim else 1
        assert torch.equal(weights.rows(name, 0, rows), tensor), name


def test_a_given_tensor_is_read_by_rows_and_may_feed_others() -> None:
    asked: list[tuple[int, int]] = []
    stored = torch.arange(12.0).view(6, 2)

    def rows(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return stored[start:stop].bfloat16()

    recording = Recording()
    with recording:
        module = nn.Module()
        module.given, module.mean = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2))
    recording.give(module.given, rows)
    with recording, torch.no_grad():
        module.mean.copy_(module.given.mean(0))
    weights = DeferredWeights(module, recording)
    assert weights.rows("given", 2, 4).tolist() == stored[2:4].tolist()
    assert asked == [(2, 4)]
    assert torch.equal(weights.rows("mean", 0, 2), stored.mean(0))
    assert asked == [(2, 4), (0, 6)]


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        if float(self.weight.detach().sum()) > 0:
            self.weight.data.mul_(2.0)


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))
        self.weight.data[[2, 5]] = 1.0  # the list becomes a tensor whose values nobody sees


class Truncated(nn.Module):
    """`torch.nn.init` skips a tensor without storage, silently."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.init.trunc_normal_(nn.Parameter(torch.zeros(7, 3)), std=0.5)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3).normal_(generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", [Decides, Indexed, OwnGenerator, Truncated])
def test_what_cannot_be_repeated_is_refused(kind: type[nn.Module]) -> None:
    recording = Recording()
    with pytest.raises(CannotDefer):  # noqa: PT012 - at either of the two
        with recording:
            network = kind()
        DeferredWeights(network, recording)


@pytest.mark.slow
def test_no_more_than_a_tensor_is_in_memory() -> None:
    """A network of 400 MB with a largest tensor of 16 MB: the process grows by less than 100 MB."""
    code = """
import resource, torch
from bd3lm.models import TransformerConfig
from bd3lm.models.deferred import DeferredWeights, Recording
small = TransformerConfig(vocab_size=64, layers=1, hidden=64, heads=2)
large = TransformerConfig(vocab_size=64, layers=32, hidden=512, heads=8)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for config in (small, large):
    before = peak()
    with Recording() as recording:
        network = config.build()
    weights = DeferredWeights(network, recording)
    for name, each in network.named_parameters():
        weights.rows(name, 0, each.shape[0])
print(peak() - before, 4 * sum(each.numel() for each in network.parameters()) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, whole = map(int, done.stdout.split())
    assert whole > 390_000
    assert grown < 100_000
