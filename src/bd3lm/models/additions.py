"""Low-rank additions (as in LoRA) to linear layers, for some or all positions of a pass.

The layout of a pass says which positions get them, by role and never by token id. All other positions are
computed exactly as if there were no additions, to the last bit. With `additions_at="all"` they apply to every
position of every pass, whatever its layout, and can be merged into the weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bd3lm.models.layouts import Span


class Addition(nn.Module):
    """B·A·x for each part of a linear layer's output: A projects x down to `rank` numbers, B back up.

    Each part, such as queries, keys or values, has its own A. B starts at zero, so nothing is added at first.
    """

    def __init__(self, linear: nn.Linear, rank: int, parts: Sequence[int] = ()) -> None:
        super().__init__()
        self.parts = tuple(parts) or (linear.out_features,)
        self.rank = rank
        self.down = nn.Parameter(torch.empty(len(self.parts) * rank, linear.in_features))
        self.up = nn.Parameter(torch.empty(linear.out_features, rank))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """What to add to the features of parts first..last − 1, by default of all parts."""
        last = len(self.parts) if last is None else last
        down = self.down[first * self.rank : last * self.rank]
        begin = sum(self.parts[:first])
        ups = self.up[begin : begin + sum(self.parts[first:last])].split(self.parts[first:last])
        low = F.linear(x, down).split(self.rank, dim=-1)
        return torch.cat([F.linear(each, up) for each, up in zip(low, ups, strict=True)], dim=-1)

    def merged(self, weight: Tensor) -> Tensor:
        """The linear layer's weight plus the addition, rounded once."""
        precise = torch.promote_types(weight.dtype, torch.float32)
        downs, ups = self.down.to(precise).split(self.rank), self.up.to(precise).split(self.parts)
        added = torch.cat([up @ down for up, down in zip(ups, downs, strict=True)])
        return (weight + added).to(weight.dtype)


def added(y: Tensor, x: Tensor, addition: Addition | None, span: Span, *parts: int) -> Tensor:
    """y (rows, positions, features) plus the addition to the positions of x in `span`."""
    start, stop = span
    if addition is None or start >= stop:
        return y
    if (start, stop) == (0, x.shape[1]):
        return y + addition(x, *parts)
    more = y[:, start:stop] + addition(x[:, start:stop], *parts)
    return torch.cat((y[:, :start], more, y[:, stop:]), dim=1)
