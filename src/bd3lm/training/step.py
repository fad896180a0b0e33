"""The module that a distributed engine wraps. Every use of a parameter happens inside its `forward`.

The work is passed in as a function, so training, validation and the clip search all use the same wrapper. Its
hooks gather and free sharded parameters.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from bd3lm.diffusion import Draws
from bd3lm.models import Network
from bd3lm.objectives import Objective, TokenBatch

T = TypeVar("T")


class NetworkRunner(nn.Module):
    """Runs work on a network, in mixed precision if requested."""

    def __init__(self, network: Network, *, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.network = network
        self.autocast = autocast

    def forward(self, work: Callable[[Network], T]) -> T:
        device = self.network.device.type
        with torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None):
            return work(self.network)


class StepSums(NamedTuple):
    """Sums over a micro-batch, to be divided by the global sum of `weight`.

    A tuple of tensors, because wrappers look for tensors in the output of `forward`.
    """

    loss: Tensor  # minimized: nats and auxiliary nats
    nats: Tensor  # reported, detached
    auxiliary: Tensor  # detached
    weight: Tensor
    statistics: Mapping[str, Tensor]


def training_sums(network: Network, objective: Objective, batch: TokenBatch, draws: Draws | None) -> StepSums:
    """An objective's loss on a micro-batch."""
    loss = objective.loss(network, batch, draws)
    nats = loss.nats.sum()
    auxiliary = torch.zeros_like(nats) if loss.auxiliary is None else loss.auxiliary.sum()
    return StepSums(
        loss=loss.minimised,
        nats=nats.detach(),
        auxiliary=auxiliary.detach(),
        weight=loss.weight.sum().detach(),
        statistics=loss.statistics,
    )
