"""An exponential moving average of a network's parameters: the weights that are evaluated and released."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bd3lm.training.distributed import local


class EMA:
    """shadow ← d · shadow + (1 − d) · parameter after each step, in float32.

    d = min(decay, (1 + n) / (10 + n)) at update n = 1, 2, ..: in early steps a long average would mostly hold
    the initial weights. Sharded parameters have sharded averages: each process averages its own rows. With
    decay 0 the averages are the parameters, and no copies are kept.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, decay: float = 0.9999) -> None:
        """`parameters` are watched, not copied: take them from the module after wrapping it."""
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        self.decay = decay
        self.updates = 0
        self._parameters = dict(parameters)
        averages = {name: parameter.detach() for name, parameter in parameters.items()}
        if decay:
            averages = {name: average.to(torch.float32, copy=True) for name, average in averages.items()}
        self._shadow = averages

    def tensors(self) -> dict[str, Tensor]:
        """The averages by name. Together with `updates` they are the whole state. They may be written in
        place."""
        return dict(self._shadow)

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current parameters."""
        self.updates += 1
        if not self.decay:
            return
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages = [local(average) for average in self._shadow.values()]
        current = [local(parameter).float() for parameter in self._parameters.values()]
        torch._foreach_lerp_(averages, current, 1.0 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within this context the parameters are the averages. Afterwards they are exactly what they were
        before."""
        if not self.decay:
            yield
            return
        parameters = [local(parameter) for parameter in self._parameters.values()]
        averages = [local(average) for average in self._shadow.values()]
        raw = [parameter.clone() for parameter in parameters]
        torch._foreach_copy_(parameters, averages)
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, raw)
