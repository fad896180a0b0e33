"""Some tokens of a batch: found on the host, and read and written on a device without waiting for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bd3lm.models import send


@dataclass(frozen=True)
class Places:
    """The flagged tokens of a (rows, length) batch, in order.

    Their number decides shapes. With a bool tensor on a GPU as an index, the host would have to wait for that
    number; flags on the host are counted there.
    """

    index: Tensor  # (k,) into the flattened batch
    shape: torch.Size

    @classmethod
    def of(cls, flags: Tensor, device: torch.device) -> "Places":
        """The places where the flags (rows, length) are set, for use on a device."""
        return cls(index=send(flags.flatten().nonzero().squeeze(1), device), shape=flags.shape)

    def pick(self, values: Tensor) -> Tensor:
        """The entries of values (rows, length, ...) at these tokens, on the device: (k, ...)."""
        return send(values, self.index.device).flatten(0, 1).index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """Values (k,) put at these tokens in (rows, length), zero elsewhere."""
        nowhere = values.new_zeros(self.shape.numel())
        return nowhere.index_copy(0, self.index, values).view(self.shape)
